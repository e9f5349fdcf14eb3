"""IGJO and VF-iDCA, the methods for lasso problems: against finite differences, closed forms and a convex solver."""

import io
import itertools

import cvxpy as cp
import numpy as np
import pytest
import torch
from meha_lab.baselines.igjo import IGJO
from meha_lab.baselines.semismooth import QuadraticForm, read_quadratic
from meha_lab.baselines.vfidca import Balls, VFiDCA, minimise, read_weights

import meha
from meha.lower.proximal_gradient import solve_lower
from meha.problem.nonsmooth import L1, ElasticNet, GroupL2, Nuclear, SparseGroup
from meha.problem.oracle import Oracle
from meha.problem.sets import Box, NonNegative
from meha.tensors.variables import Variable


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solved(problem, x, y):
    """The lower solution to twelve digits."""
    first, second = Variable(x, "x"), Variable(y, "y")
    found = solve_lower(Oracle(problem, first, second), first, second, tol=1e-12, max_steps=100_000)
    assert found.converged
    return found.theta.detached()


def reduced(problem, x, y):
    """F(x, y(x))."""
    return float(problem.upper(x, solved(problem, x, y)))


def hypergradient(problem, x, y, **options):
    """The direction of IGJO, from a step so small that it is taken at once."""
    run = IGJO(alpha=1e-4, lower_tol=1e-12, inner_steps=100_000, **options).start(problem, x, y)
    info = run.step()
    assert info["s"] == 1e-4
    return (x - run.x) / 1e-4, info


def numerical(problem, x, y, step=1e-5):
    y = solved(problem, x, y)
    found = torch.zeros_like(x)
    for i in range(x.numel()):
        e = torch.zeros_like(x)
        e.view(-1)[i] = step
        found.view(-1)[i] = (reduced(problem, x + e, y) - reduced(problem, x - e, y)) / (2 * step)
    return found


def regression(nonsmooth, *, samples=20, features=8, seed=0, share=0.0):
    """Training and validation loss on random data; F and f may also use x, by ``share``."""
    a, b = normal(2 * samples, features, seed=seed), normal(2 * samples, seed=seed + 100)
    b = b + a[:, :3] @ torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)
    train, validation = (a[:samples], b[:samples]), (a[samples:], b[samples:])

    def loss(part, y):
        return (part[0] @ y - part[1]).square().sum() / (2 * samples)

    return meha.Problem(
        upper=lambda x, y: loss(validation, y) + (share * x.square().sum() if share else 0),
        lower=lambda x, y: loss(train, y) + (share * x.sum().sin() * y[0] if share else 0),
        nonsmooth=nonsmooth,
        x_set=NonNegative(),
    )


TERMS = {
    "scalar l1": (L1(lambda x: x[0]), 1, 0.2),
    "l1": (L1(lambda x: x), 8, 0.2),
    "l1 of exp": (L1(lambda x: (x[0] - 2).exp()), 1, 0.2),
    "elastic net": (ElasticNet(lambda x: x[0], lambda x: x[1]), 2, 0.2),
    "group": (GroupL2([2, 1, 3, 2], weight=lambda x: x), 4, 0.3),
    "group, some free": (GroupL2([[0, 1], [3, 4, 6]], weight=lambda x: x), 2, 0.3),
    "sparse group": (SparseGroup([2, 1, 3, 2], l1=lambda x: x[4], group=lambda x: x[:4]), 5, 0.1),
    "none": (None, 3, 0.5),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", TERMS)
def test_igjo_direction_is_the_gradient_of_the_reduced_objective(name, seed):
    term, size, weight = TERMS[name]
    problem = regression(term, seed=seed, share=0.0 if term is not None and seed else 0.1)
    x, y = torch.full((size,), weight, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    found, info = hypergradient(problem, x, y)
    expected = numerical(problem, x, y)
    assert expected.norm() > 1e-3
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7 * float(expected.norm()))
    if "l1" in name or name == "group":
        assert 0 < info["support"] < 8, "some coordinates are zero"


def test_igjo_direction_with_several_leaves_and_an_unpenalised_one():
    """y is a dict; the intercept is not penalised, is small, and counts all the same."""
    a, b = normal(40, 6), normal(40, seed=1)

    def loss(part, y):
        return (a[part] @ y["coef"] + y["intercept"] - b[part]).square().mean()

    problem = meha.Problem(
        upper=lambda x, y: loss(slice(20, 40), y), lower=lambda x, y: loss(slice(20), y), nonsmooth=L1(lambda x: x, part="coef")
    )
    x = torch.full((6,), 0.1, dtype=torch.float64)
    y = {"coef": torch.zeros(6, dtype=torch.float64), "intercept": torch.zeros(1, dtype=torch.float64)}
    b[:20] -= solved(problem, x, y)["intercept"]
    assert float(solved(problem, x, y)["intercept"].abs()) < 1e-10
    found, info = hypergradient(problem, x, y)
    assert info["support"] == 6
    assert torch.allclose(found, numerical(problem, x, y), rtol=1e-5, atol=1e-8)


def test_igjo_direction_is_the_closed_form_on_the_orthogonal_design():
    """y^(j) = max(0, 1 - x_j / |u_j|) u_j and F = ||y - w||^2 / 2 + const, with -u and -w the gradients of f and F at zero."""
    problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    zero = problem.y0.clone().requires_grad_()
    u, w = (-torch.autograd.grad(part(None, zero), zero)[0].reshape(6, 10) for part in (problem.lower, problem.upper))
    size = u.norm(dim=1)
    x = size * torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 1.5], dtype=torch.float64)
    y = (1 - x / size).clamp(min=0)[:, None] * u
    expected = torch.where(x < size, ((w - y) * u).sum(1) / size, 0.0)
    found, info = hypergradient(problem, x, problem.y0)
    assert info["support"] == 50
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10)


class Norms(GroupL2):
    """The same term by torch's norm, whose second derivative at zero is NaN."""

    def value_leaves(self, x, leaves):
        pieces = leaves[0].split(list(self.groups))
        return sum(w * torch.linalg.vector_norm(piece) for w, piece in zip(x, pieces, strict=True))


def test_igjo_keeps_nan_out_of_the_support():
    x, y = torch.full((4,), 0.6, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    library, rough = (regression(kind([2, 1, 3, 2], weight=lambda x: x)) for kind in (GroupL2, Norms))
    at, point = Variable(x, "x"), Variable(solved(library, x, y), "y")
    assert 0 < int((point.value == 0).sum()) < 8
    oracle = Oracle(rough, at, point)
    product = oracle.hessian([(1.0, oracle.phi, at, point)])([(point.value != 0).double()], point)[0][0]
    assert torch.equal(product.isnan(), point.value == 0), "there is NaN to be kept out"
    found, _ = hypergradient(rough, x, y)
    expected, _ = hypergradient(library, x, y)
    assert torch.allclose(found, expected, rtol=1e-10)
    assert torch.allclose(found, numerical(library, x, y), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("consistent", [True, False])
def test_igjo_solves_singular_systems_in_the_sense_of_least_squares(consistent):
    """Two equal columns: y_0 and y_1 are determined in their sum only, and FISTA keeps them equal."""
    a, b = normal(20, 4), normal(20, seed=1) + 3
    a[:, 1] = a[:, 0]
    c = torch.tensor([1.0, 1.0, 2.0, -1.0] if consistent else [1.0, -0.5, 2.0, -1.0], dtype=torch.float64)
    problem = meha.Problem(
        lambda x, y: 10 + c @ y, lambda x, y: (a @ y - b).square().sum() / 40, nonsmooth=L1(lambda x: x[0]), x_set=NonNegative()
    )
    x, zero = torch.tensor([0.01], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    y = solved(problem, x, zero)
    assert (y.abs() > 1e-3).all()
    v = torch.linalg.pinv(a.T @ a / 20) @ c
    found, info = hypergradient(problem, x, zero)
    assert torch.allclose(found, -(v @ y.sign()).reshape(1), rtol=1e-6)
    assert (info["linear_residual"] < 1e-6) == consistent


def test_igjo_solves_the_orthogonal_group_lasso_to_rounding():
    problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    solution = meha.solve(problem, problem.x0, problem.y0, IGJO())
    assert solution.status is meha.Status.FINISHED
    assert "lower" in solution.message  # the last step lowered F by rounding errors only, or no step lowers it
    assert max(problem.distance(solution.x, solution.y)) < 1e-10
    assert solution.steps == 2  # F is (x - x*)^2 / 2 plus a constant, so that the first step is Newton's


@pytest.mark.parametrize("n", [4, 100])
def test_igjo_solves_the_lasso_toy(n):
    problem = meha.problems.lasso(n)
    solution = meha.solve(problem, problem.x0, problem.y0, IGJO())
    assert max(problem.distance(solution.x, solution.y)) < 1e-12
    assert solution.upper == pytest.approx(-0.5)


def test_igjo_without_g_is_the_exact_implicit_gradient():
    problem = meha.problems.strong_convex(4)
    default = meha.solve(problem, problem.x0, problem.y0, IGJO())
    tight = meha.solve(problem, problem.x0, problem.y0, IGJO(decrease=0.0, iterations=500))
    assert problem.distance(default.x, default.y).x < 0.05
    assert max(problem.distance(tight.x, tight.y)) < 1e-6


def test_igjo_lowers_F_stays_in_X_and_never_enlarges_its_step():
    problem = meha.problems.group_lasso(45, groups=3)
    method = IGJO(iterations=6, decrease=0.0)
    solution = meha.solve(problem, problem.x0, problem.y0, method, callbacks=lambda run, info: bool((run.x < 0).any()))
    assert solution.status is meha.Status.FINISHED
    upper, sizes = solution.history["upper"], solution.history["s"]
    assert all(after <= before for before, after in itertools.pairwise(upper))
    assert all(after <= before for before, after in itertools.pairwise(sizes))
    assert sizes[-1] < 1
    assert upper[-1] < upper[0] < reduced(problem, problem.x0, problem.y0)
    assert upper[-1] == pytest.approx(reduced(problem, solution.x, solution.y), rel=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 2, "decrease": 0.0}, "2 iterations are done."),
        ({"decrease": 100.0}, "< decrease=100, an absolute number."),
        ({"alpha": 1e3, "min_alpha": 999.0}, "No step of at least min_alpha=999 lowers F."),
    ],
)
def test_igjo_says_why_it_is_finished(options, message):
    problem = meha.problems.group_lasso(30, groups=3)
    solution = meha.solve(problem, problem.x0, problem.y0, IGJO(**options))
    assert solution.status is meha.Status.FINISHED
    assert message in solution.message


def test_igjo_breaks_down_where_the_lower_level_is_not_solved():
    problem = meha.problems.group_lasso(30, groups=3)
    solution = meha.solve(problem, problem.x0, problem.y0, IGJO(inner_steps=3))
    assert str(solution.status) == "broke down"
    assert "the lower level was not solved" in solution.message
    assert "inner_steps" in solution.message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IGJO(alpha=0.0), "alpha: must be a positive number"),
        (lambda: IGJO(threshold=-1.0), "threshold: must be a number of at least 0"),
        (lambda: IGJO(linear_steps=0), "linear_steps: must be a whole number"),
        (lambda: IGJO(alpha=1e-7), "min_alpha: must not exceed alpha=1e-07, got 1e-06"),
        (lambda: VFiDCA(radii=0.0), "radii: must be a positive number"),
        (lambda: VFiDCA(eps=-1.0), "eps: must be a number of at least 0"),
        (lambda: VFiDCA(iterations=0), "iterations: must be a whole number"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_igjo_refuses_what_it_cannot_take():
    zero = torch.zeros(2, 2, dtype=torch.float64)
    parts = dict(upper=lambda x, y: (y * x).sum(), lower=lambda x, y: (y - x).square().sum())
    with pytest.raises(ValueError, match="nonsmooth: IGJO takes terms that are smooth on the support of y, and Nuclear is not"):
        IGJO().start(meha.Problem(**parts, nonsmooth=Nuclear(1.0)), zero, zero)
    with pytest.raises(ValueError, match="y_set: IGJO cannot take Box"):
        IGJO().start(meha.Problem(**parts, y_set=Box(0.0, 1.0)), zero, zero)


# VF-iDCA


def least(kind, seed):
    """A random quadratic on 9 coordinates, balls of each kind, and radii of which some are large and one is zero."""
    quadratic = QuadraticForm(normal(6, 9, seed=seed), 3 * normal(6, seed=seed + 1), 0.1 * normal(9, seed=seed + 2), 1.0)
    groups = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3])
    balls = {
        "groups": Balls(groups, 4, l1=False),
        "coordinates": Balls(torch.arange(9), 9, l1=False),
        "l1": Balls(torch.zeros(9, dtype=torch.int64), 0, l1=True),
        "groups and l1": Balls(groups, 4, l1=True),
        "tight l1": Balls(groups, 4, l1=True),
    }[kind]
    radii = torch.rand(balls.count + balls.l1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if balls.count:
        radii[0], radii[1] = 0.0, 50.0
    if balls.l1:
        radii[-1] = {"l1": 1.5, "groups and l1": 2.0, "tight l1": 0.2}[kind]
    return quadratic, balls, radii


def conic(objective, w, balls, radii):
    """The same problem for cvxpy, one constraint each: the solution and the dual values."""
    bounds = [cp.norm(w[np.flatnonzero(balls.labels.numpy() == j)], 2) for j in range(balls.count)]
    bounds += [cp.norm1(w)] if balls.l1 else []
    constraints = [bound <= r for bound, r in zip(bounds, radii.numpy(), strict=True)]
    cp.Problem(cp.Minimize(objective), constraints).solve(solver=cp.CLARABEL)
    return torch.from_numpy(w.value), torch.tensor([float(c.dual_value) for c in constraints], dtype=torch.float64)


KINDS = ["groups", "coordinates", "l1", "groups and l1", "tight l1"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_value_function_and_multipliers_are_those_of_a_conic_solver(kind, seed):
    q, balls, radii = least(kind, seed)
    y, multipliers, _, residual = minimise(q, balls, radii, torch.zeros(9, dtype=torch.float64))
    assert residual <= 1
    w = cp.Variable(9)
    square = cp.sum_squares(q.factor.numpy() @ w - q.target.numpy()) / 2
    expected, dual = conic(square + q.linear.numpy() @ w, w, balls, radii)
    assert q(y) == pytest.approx(q(expected), abs=1e-6)
    assert (balls.sizes(y) <= radii + 1e-12).all()
    assert (dual > 0.1).any()
    zero = radii == 0  # there the multiplier is a half line, of which ours is the end
    assert torch.allclose(multipliers[~zero], dual[~zero], rtol=1e-4, atol=1e-4)
    assert (multipliers[zero] <= dual[zero] + 1e-4).all()


@pytest.mark.parametrize("kind", KINDS)
def test_multipliers_are_the_slope_of_the_value_function(kind):
    q, balls, radii = least(kind, seed=3)
    radii = radii.clamp(min=0.1)

    def value(r):
        return q(minimise(q, balls, r, torch.zeros(9, dtype=torch.float64), tol=1e-12)[0])

    multipliers = minimise(q, balls, radii, torch.zeros(9, dtype=torch.float64), tol=1e-12)[1]
    for j in range(len(radii)):
        e = torch.zeros_like(radii)
        e[j] = 1e-5
        assert (value(radii - e) - value(radii + e)) / 2e-5 == pytest.approx(float(multipliers[j]), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_projection_is_optimal(kind):
    """z - y = sum_j m_j y^(j) / |y^(j)| + m_l1 sign(y) where y is not zero, with m = 0 for constraints that do not bind."""
    for seed in range(20):
        _, balls, radii = least(kind, seed)
        z = 2 * normal(9, seed=seed)
        y, m = balls.project(z, radii)
        sizes = balls.sizes(y)
        assert (sizes <= radii * (1 + 1e-12)).all()
        assert (m >= 0).all()
        assert (m[sizes < radii * (1 - 1e-9)] == 0).all()
        norms = torch.cat([sizes[: balls.count], torch.ones(1, dtype=torch.float64)])[balls.labels]
        group = torch.cat([m[: balls.count], torch.zeros(1, dtype=torch.float64)])[balls.labels]
        l1 = m[-1] if balls.l1 else torch.tensor(0.0, dtype=torch.float64)
        on = y != 0
        assert torch.allclose((z - y)[on], (group * y / norms + l1 * y.sign())[on], atol=1e-10)
        assert (z.abs() <= group + l1 + 1e-10)[~on].all() or kind != "coordinates"
        again, _ = balls.project(y, radii)
        assert torch.allclose(again, y, atol=1e-12)


def test_a_step_solves_its_convex_program():
    """Stated anew as in the paper, in w and r, the program has the same solution."""
    problem = regression(SparseGroup([2, 1, 3, 2], l1=lambda x: x[4], group=lambda x: x[:4]))
    method = VFiDCA(radii=0.7, beta=3.0, rho=0.2, eps=0.01)
    run = method.start(problem, torch.ones(5, dtype=torch.float64), normal(8))
    model, before = run.state.model, (normal(8), run.state.radii, run.state.multipliers)
    value = model.lower(run.state.solution)
    info = run.step()
    w, r = cp.Variable(8), cp.Variable(5, nonneg=True)

    def expression(q):
        return cp.sum_squares(q.factor.numpy() @ w - q.target.numpy()) / 2 + q.constant

    sizes = [cp.norm(w[np.flatnonzero(model.balls.labels.numpy() == j)], 2) for j in range(4)] + [cp.norm1(w)]
    w_k, r_k, gamma = (tensor.numpy() for tensor in before)
    unsolved = expression(model.lower) - value + gamma @ (r - r_k) - 0.01
    penalty = 3.0 * cp.maximum(0, unsolved, *(100 * (size - r[j]) for j, size in enumerate(sizes)))
    distance = cp.sum_squares(w - w_k) + cp.sum_squares(r - r_k)
    whole = cp.Problem(cp.Minimize(expression(model.upper) + 0.1 * distance + penalty))
    whole.solve(solver=cp.CLARABEL)
    assert torch.allclose(run.y, torch.from_numpy(w.value), atol=1e-4)
    assert torch.allclose(run.state.radii, torch.from_numpy(r.value), atol=1e-4)
    old = whole.value
    w.value, r.value = run.y.numpy(), run.state.radii.numpy()
    assert whole.objective.value == pytest.approx(old, rel=1e-5)
    assert info["violation"] == pytest.approx(float(penalty.value) / 3.0, rel=1e-6)
    assert info["violation"] > 0.01


def test_vfidca_approaches_the_orthogonal_group_lasso():
    """The penalty leaves an error of about 1 / beta: 2 percent after 70 steps, and 1 after 150."""
    problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    early = meha.solve(problem, problem.x0, problem.y0, VFiDCA(radii=1.0))
    assert early.status is meha.Status.FINISHED
    assert 0.03 < problem.distance(early.x, early.y).y < 0.1
    late = meha.solve(problem, problem.x0, problem.y0, VFiDCA(radii=1.0, tol=1e-5, iterations=70))
    assert max(problem.distance(late.x, late.y)) < 0.025
    assert late.history["beta"][-1] > early.history["beta"][-1]


def test_vfidca_from_radii_that_do_not_bound_y_says_so():
    problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    solution = meha.solve(problem, problem.x0, problem.y0, VFiDCA(tol=1e-2))
    assert "No radius bounds y, so all weights are zero" in solution.message
    assert not solution.x.any()
    assert torch.allclose(solution.y, solved(problem, solution.x, problem.y0), atol=0.05)


def test_vfidca_solves_the_lasso_toy():
    """Each y_i has a radius. The weights are found exactly; y is beyond its lower solution by what the penalty allows."""
    problem = meha.problems.lasso(4)
    solution = meha.solve(problem, problem.x0, problem.y0, VFiDCA(radii=0.1, beta=10.0, tol=1e-5))
    assert problem.distance(solution.x, solution.y).x < 1e-6
    assert problem.distance(solution.x, solution.y).y < 0.1


@pytest.mark.parametrize(
    ("term", "x"),
    [
        (GroupL2([2, 1, 3, 2], weight=lambda x: x), torch.ones(4)),
        (L1(lambda x: x), torch.ones(8)),
        (L1(lambda x: x["w"]), {"w": torch.ones(1)}),
        (
            SparseGroup([[0, 2], [3, 4]], l1=lambda x: x["l1"], group=lambda x: x["g"]),
            {"l1": torch.ones(()), "g": torch.ones(2)},
        ),
        (GroupL2([4, 4], weight=lambda x: x.flip(0)), torch.ones(2)),
    ],
    ids=["group", "l1", "one l1", "sparse group", "other order"],
)
def test_vfidca_weights_are_those_for_which_its_solution_solves_the_lower_level(term, x):
    problem = regression(term)
    x0 = Variable.of(x, "x").like([leaf.double() for leaf in Variable.of(x, "x").leaves])
    run = VFiDCA(radii=0.8, tol=1e-4).start(problem, x0, torch.zeros(8, dtype=torch.float64))
    for _ in range(6):
        run.step()
    weights = torch.cat([leaf.reshape(-1) for leaf in Variable.of(run.x, "x").leaves])
    assert (weights > 1e-3).any()
    assert torch.allclose(solved(problem, run.x, run.y), run.state.solution, atol=1e-5)
    assert torch.allclose(run.y, run.state.solution, atol=0.5)


def test_vfidca_projects_its_weights_on_X():
    problem = regression(GroupL2([4, 4], weight=lambda x: x))
    problem = meha.Problem(problem.upper, problem.lower, nonsmooth=problem.nonsmooth, x_set=Box(0.0, 0.05))
    run = VFiDCA(radii=0.5).start(problem, torch.zeros(2, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))
    run.step()
    assert run.state.multipliers.max() > 0.05
    assert torch.equal(run.x, run.state.multipliers.clamp(max=0.05))


def read(function, y, x=None):
    x, y = Variable(x if x is not None else torch.ones(1, dtype=torch.float64), "x"), Variable(y, "y")
    oracle = Oracle(meha.Problem(function, lambda x, y: y.sum()), x, y)
    with torch.no_grad():
        return read_quadratic(oracle, oracle.upper, x, y), oracle.counts


@pytest.mark.parametrize(("samples", "features"), [(5, 3), (7, 40), (70, 300), (1, 1)])
def test_quadratics_are_read_off_with_few_products(samples, features):
    a, b, c = normal(samples, features), normal(samples, seed=1), 0.0
    y = normal(features, seed=2)
    q, counts = read(lambda x, y: (a @ y - b).square().sum() + 3 + c * y.sum(), y)
    assert q.factor.shape == (min(samples, features), features)
    for seed in range(3):
        at = 3 * normal(features, seed=seed + 5)
        assert q(at) == pytest.approx(float((a @ at - b).square().sum() + 3), rel=1e-9)
        assert torch.allclose(q.gradient(at), 2 * a.T @ (a @ at - b), atol=1e-8)
        assert q.difference(at, y) == pytest.approx(q(at) - q(y), rel=1e-8)
    assert q.smoothness == pytest.approx(2 * float(torch.linalg.matrix_norm(a, 2)) ** 2)
    assert q.linear.norm() <= 1e-8 * samples * features
    assert counts.hvp <= min(3 * features + 1, 4 * samples + 300)


def test_linear_functions_are_quadratic_and_shapes_do_not_matter():
    q, _ = read(lambda x, y: 2 * y.sum() + 1, torch.zeros(3, 2, dtype=torch.float64))
    assert q.factor.shape == (0, 6)
    assert torch.equal(q.linear, torch.full((6,), 2.0, dtype=torch.float64))
    assert q.smoothness == 0
    q, _ = read(lambda x, y: (y[0] - 1).square().sum() / 2 + y[1].sum(), torch.zeros(2, 2, dtype=torch.float32))
    assert q(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)) == pytest.approx(7.5, abs=1e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: (y**4).sum(), "upper: VFiDCA needs a convex quadratic function of y alone, and it is not quadratic"),
        (lambda x, y: (y - 1).abs().sum(), "it is not quadratic"),
        (lambda x, y: y[0] ** 2 - y[1] ** 2, "its Hessian has the eigenvalue -2; use MEHA"),
        (lambda x, y: y.square().sum() + 1e-3 * x.sum(), "its value changes with x"),
        (lambda x, y: x.sum(), "upper: VFiDCA needs .* its value changes with x"),
    ],
)
def test_functions_that_are_no_convex_quadratics_of_y_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        read(function, torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64))


@pytest.mark.parametrize(
    ("term", "size", "message"),
    [
        (None, 4, "nonsmooth: VFiDCA takes L1, GroupL2 or SparseGroup with the entries of x for weights.*got Zero"),
        (ElasticNet(lambda x: x, 1.0), 8, "got ElasticNet"),
        (GroupL2([4, 4], weight=0.1), 2, "GroupL2 has one for all"),
        (
            GroupL2([4, 4], weight=lambda x: x.exp()),
            2,
            "the 2 weights of GroupL2 are not exactly the 2 entries of x, each once",
        ),
        (GroupL2([4, 4], weight=lambda x: 2 * x), 2, "not exactly the 2 entries"),
        (GroupL2([4, 4], weight=lambda x: x[:2]), 3, "the 2 weights of GroupL2 are not exactly the 3 entries"),
        (GroupL2([4, 4], weight=lambda x: x[0].expand(2)), 2, "not exactly"),
        (GroupL2([4, 4], weight=lambda x: x.sort().values), 2, "change places with x"),
        (L1(torch.ones(8)), 8, "not exactly"),
        (SparseGroup([4, 4], l1=lambda x: x[2:], group=lambda x: x[:2]), 10, "a single l1 weight, got one for each coordinate"),
        (SparseGroup([4, 4], l1=0.1, group=lambda x: x), 2, "the 3 weights of SparseGroup are not exactly the 2 entries"),
    ],
)
def test_weights_that_are_not_the_entries_of_x_are_refused(term, size, message):
    problem = regression(term)
    with pytest.raises(ValueError, match=message):
        VFiDCA().start(problem, torch.full((size,), 0.5, dtype=torch.float64), torch.zeros(8, dtype=torch.float64))


def test_radii_belong_to_the_entries_of_x():
    term = SparseGroup([[0, 2], [3, 4]], l1=lambda x: x["l1"], group=lambda x: x["g"].flip(0))
    x = Variable({"g": torch.ones(2), "l1": torch.ones(())}, "x")
    with torch.no_grad():
        balls, order = read_weights(term, x, Variable(torch.zeros(6), "y"))
    assert balls.labels.tolist() == [0, 2, 0, 1, 1, 2]
    assert (balls.count, balls.l1, order.tolist()) == (2, True, [1, 0, 2])


def test_vfidca_refuses_what_it_cannot_take():
    zero = torch.zeros(2, dtype=torch.float64)
    parts = dict(upper=lambda x, y: y.square().sum(), nonsmooth=L1(lambda x: x))
    problem = meha.Problem(lower=lambda x, y: (y - 1).square().sum(), **parts)
    with pytest.raises(ValueError, match="y_set: VFiDCA cannot take Box"):
        VFiDCA().start(meha.Problem(problem.upper, problem.lower, nonsmooth=L1(lambda x: x), y_set=Box(0.0, 1.0)), zero, zero)
    with pytest.raises(ValueError, match="upper and lower: VFiDCA reads them once, without a batch"):
        VFiDCA().start(meha.Problem(lower=lambda x, y, batch: (y - batch).square().sum(), **parts), zero, zero)
    with pytest.raises(TypeError, match="batches: upper and lower cannot be called with a batch"):
        VFiDCA().start(problem, zero, zero).step(torch.ones(2))
    pair = {"a": zero, "b": zero.clone()}
    many = meha.Problem(lambda x, y: y["a"].sum() + y["b"].sum(), lambda x, y: y["a"].sum(), nonsmooth=L1(lambda x: x[0]))
    with pytest.raises(ValueError, match=r"y: VFiDCA takes a single tensor, got the leaves \['a', 'b'\]; join them"):
        VFiDCA().start(many, zero, pair)
    with pytest.raises(ArithmeticError, match="allow more steps, or a larger inner_tol"):
        VFiDCA(inner_steps=1, radii=0.1).start(regression(L1(lambda x: x)), torch.ones(8).double(), torch.zeros(8).double())


@pytest.mark.parametrize("method", [IGJO(decrease=0.0), VFiDCA(radii=1.0, tol=0.0)], ids=lambda m: m.name)
def test_restored_bit_for_bit(method):
    problem = meha.problems.group_lasso(30, groups=3)

    def start():
        return method.start(problem, problem.x0, problem.y0)

    run = start()
    for _ in range(3):
        run.step()
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    expected = [dict(run.step()) for _ in range(3)]
    buffer.seek(0)
    other = start()
    other.step()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.k == 3
    assert [dict(other.step()) for _ in range(3)] == expected
    assert torch.equal(other.x, run.x)
    assert torch.equal(other.y, run.y)
    assert other.counts == run.counts


@pytest.mark.parametrize("method", [IGJO(iterations=5), VFiDCA(radii=1.0)], ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gaussian_group_lasso_end_to_end(method, dtype):
    problem = meha.problems.group_lasso(30, groups=3, dtype=dtype)
    solution = meha.solve(problem, problem.x0, problem.y0, method)
    assert solution.status is meha.Status.FINISHED
    assert solution.x.dtype == solution.y.dtype == dtype
    assert (solution.x >= 0).all()
    assert problem.metrics["test error"](solution.x, solution.y) < 0.5 * problem.metrics["null error"](solution.x, solution.y)
    assert solution.counts.hvp > 0


def test_igjo_says_that_the_support_is_empty():
    problem = meha.problems.group_lasso(60, groups=6, design="orthogonal")
    solution = meha.solve(problem, problem.x0 * 0 + 50, problem.y0, IGJO())
    assert "The support is empty (y = 0)" in solution.message


def test_igjo_shrinks_faster_where_the_lower_level_breaks_down():
    """f has no value for x > 3, where the first trial goes; 0.1 is too much as well, 0.001 is not."""

    def lower(x, y):
        return (y - x).square().sum() + (3 - x).sqrt().sum() * 0

    problem = meha.Problem(lambda x, y: 100 * (y - 2.5).square().sum(), lower)
    zero = torch.zeros(1, dtype=torch.float64)
    run = IGJO().start(problem, zero, zero)
    assert run.step()["s"] == pytest.approx(1e-3)
