"""Models on folds, their upper level, the choice of weights, and cross_validation."""

import numpy as np
import pytest
import torch

import meha
import meha.running.cross_validation as folded
from meha.lower.proximal_gradient import solve_lower
from meha.problem.losses import Huber, LeastSquares, Logistic, Softmax
from meha.problem.nonsmooth import L1, ElasticNet, GroupL2, SparseGroup
from meha.problem.oracle import Oracle
from meha.problem.problem import Problem
from meha.sklearn._models import FAMILIES, DenseSystem, DualSystem, Models
from meha.sklearn._search import IMAGINED, FoldLoss, FoldScore, WeightSearch, choose, evident, layout_of
from meha.tensors.variables import Variable

F64 = torch.float64
GROUPS = np.array([0, 0, 0, 1, 1, 2, 2, 2])
N, P = 40, len(GROUPS)


def data(seed=0, classes=0):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(N, P, generator=generator, dtype=F64)
    score = A @ torch.tensor([2.0, -1.0, 0, 0, 0, 1.0, 0.5, 0], dtype=F64) + 0.5 * torch.randn(
        N, generator=generator, dtype=F64
    )
    A = torch.cat([A, torch.ones(N, 1, dtype=F64)], dim=1)
    if classes:
        return A, torch.bucketize(score, score.quantile(torch.linspace(0, 1, classes + 1, dtype=F64)[1:-1]))
    return A, score + 1


def make(kind):
    A, b = data(classes={"logistic": 2, "softmax": 3}.get(kind, 0))
    return {
        "squared": lambda: LeastSquares(A, b, gram=False),
        "huber": lambda: Huber(A, b, delta=0.8),
        "logistic": lambda: Logistic(A, b),
        "softmax": lambda: Softmax(A, b),
    }[kind]()


def term(name, w, outputs):
    """The penalty as a term of meha.nonsmooth, on a matrix of coefficients without intercepts."""
    groups = [[int(j) * outputs + c for j in np.flatnonzero(g == GROUPS) for c in range(outputs)] for g in range(3)]
    size = torch.tensor([float(len(group)) for group in groups], dtype=F64).sqrt()
    return {
        "ridge": lambda: ElasticNet(0.0, w, part="coef"),
        "lasso": lambda: L1(w, part="coef"),
        "elastic-net": lambda: ElasticNet(0.5 * w, 0.5 * w, part="coef"),
        "group": lambda: GroupL2(groups, w * size, part="coef"),
        "sparse-group": lambda: SparseGroup(groups, 0.5 * w, 0.5 * w * size, part="coef"),
    }[name]()


@pytest.mark.parametrize("kind", ["squared", "huber", "logistic", "softmax"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fits_are_those_of_the_terms(kind, name):
    """Every loss with every penalty, against the lower level of a Problem solved by proximal gradients."""
    loss, w = make(kind), 0.08
    outputs = loss.shape[1] if len(loss.shape) > 1 else 1
    layout = layout_of(P, outputs, "one", GROUPS, True)
    train = torch.ones(2, N, dtype=F64)
    train[1, :10] = 0
    models = Models(loss, train)
    start = torch.zeros(2, models.size, dtype=F64)
    x = torch.full((2, 1), np.log(w), dtype=F64)
    fits = models.fit(layout.penalty(x, FAMILIES[name](0.5)), start)
    assert bool(fits.converged.all())

    def lower(_, y):
        both = torch.cat([y["coef"], y["intercept"]])
        return (train[1] * loss.losses(loss.A @ both)).sum() / 30

    y = {
        "coef": torch.zeros(loss.shape[0] - 1, *loss.shape[1:], dtype=F64),
        "intercept": torch.zeros(1, *loss.shape[1:], dtype=F64),
    }
    x, y = Variable(torch.zeros(1, dtype=F64), "x"), Variable(y, "y")
    problem = Problem(upper=lambda x, y: lower(x, y), lower=lower, nonsmooth=term(name, w, outputs))
    by_gradients = solve_lower(Oracle(problem, x, y), x, y, tol=1e-10, max_steps=50_000).theta.value
    got = fits.b[1].view(-1, *loss.shape[1:])
    torch.testing.assert_close(got[:-1], by_gradients["coef"], atol=2e-5, rtol=0)
    assert bool(((got[:-1] == 0) == (by_gradients["coef"].abs() < 1e-7)).all())


@pytest.mark.parametrize("kind", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("name", FAMILIES)
def test_derivatives_in_the_log_weights_agree_with_differences(kind, name):
    loss, family = make(kind), FAMILIES[name](0.5)
    weights = "feature" if name in ("ridge", "lasso") else "group"
    layout = layout_of(P, loss.shape[1] if len(loss.shape) > 1 else 1, weights, GROUPS, True)
    folds = torch.arange(N) % 4
    members = torch.stack([(folds == k).to(F64) for k in range(4)])
    models = Models(loss, 1 - members)
    judge = FoldScore(loss, torch.ones(N, dtype=F64))
    level = FoldLoss(models, judge, layout, family, members, torch.zeros(4, dtype=torch.long))
    x = torch.log(0.05 * torch.linspace(0.7, 1.4, layout.count, dtype=F64))
    start = torch.zeros(4, models.size, dtype=F64)

    def at(x):
        point = level.at(x.expand(4, -1), start)
        fits = models.fit(layout.penalty(x.expand(4, -1), family), point.fits.b, 1e-12)
        return level.at(x.expand(4, -1), fits.b)

    gradient, matrix = level.derivatives(at(x))
    steps = 1e-5 * torch.eye(layout.count, dtype=F64)
    differences = torch.stack([(at(x + step).values - at(x - step).values) / 2e-5 for step in steps])[:, 0]
    torch.testing.assert_close(gradient[0], differences, atol=1e-6, rtol=1e-3)
    assert float(torch.linalg.eigvalsh(matrix[0])[0]) > -1e-10


@pytest.mark.parametrize("kind", ["squared", "logistic", "softmax"])
def test_the_judge_imagines_a_part_of_an_example(kind):
    """With classes: all examples, and in all a fraction of one more, which is of another class; slopes are its derivatives."""
    loss, weights = make(kind), torch.ones(N, dtype=F64)
    judge = FoldScore(loss, weights)
    shape = (2, N, *loss.shape[1:])
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=F64).requires_grad_()
    judged = judge.losses(scores)
    (slopes,) = torch.autograd.grad(judged.sum(), scores)
    torch.testing.assert_close(judge.slopes(scores.detach()), slopes)
    plain = loss.losses(scores)
    if kind == "squared":
        torch.testing.assert_close(judged, plain)
        return
    if kind == "logistic":
        others = Logistic(loss.A, -loss.signs).losses(scores)
    else:
        count = loss.shape[1]
        moved = [Softmax(loss.A, (loss.labels + k) % count, classes=count).losses(scores) for k in range(1, count)]
        others = torch.stack(moved).mean(0)
    share = IMAGINED / (N + IMAGINED)
    torch.testing.assert_close(judged, (1 - share) * plain + share * others)
    torch.testing.assert_close(FoldScore(loss, 7 * weights).losses(scores), judged)


def test_examples_dealt_twice_are_judged_twice():
    """The losses with two ways to deal the examples are the means of those with each."""
    loss = make("squared")
    layout = layout_of(P, 1, "feature", GROUPS, True)
    first, second = torch.arange(N) % 4, torch.arange(N) // 2 % 4
    family, x = FAMILIES["lasso"](0.5), torch.full((1, P), -3.0, dtype=F64)

    def losses(folds):
        search = WeightSearch(loss, layout, folds, torch.ones(N, dtype=F64))
        fits = search.models.fit(layout.penalty(x.expand(search.count + 1, -1), family), search.models.at_zero * 0)
        assert len(search._pairs) == len(folds) * 4 * 3 + len(folds) * 4
        return search._left_out(search.models.scores(fits.b))

    apart = [losses(folds[None]) for folds in (first, second)]
    assert float((apart[0] - apart[1]).abs().max()) > 1e-3
    torch.testing.assert_close(losses(torch.stack([first, second])), (apart[0] + apart[1]) / 2)


def test_the_dual_system_is_the_dense_one():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(6, 20, generator=generator, dtype=F64)
    weights = torch.rand(3, 6, generator=generator, dtype=F64)
    classes = torch.arange(20) // 10
    diagonal = torch.rand(3, 2, generator=generator, dtype=F64)[:, classes] + 0.1
    right = torch.randn(3, 20, 2, generator=generator, dtype=F64)
    H = A.t() @ (weights[:, :, None] * A) + torch.diag_embed(diagonal)
    exact = torch.linalg.solve(H, right)
    kernels = torch.stack([A[:, classes == c] @ A[:, classes == c].t() for c in range(2)])
    torch.testing.assert_close(DenseSystem(H, torch.ones(3, 20, dtype=torch.bool)).solve(right), exact)
    torch.testing.assert_close(DualSystem(A, weights, diagonal).solve(right), exact)
    torch.testing.assert_close(DualSystem(A, weights, diagonal, kernels, torch.tensor([0, 10])).solve(right), exact)


def test_the_prior_by_groups_pulls_to_means():
    prior = layout_of(P, 1, "feature", GROUPS, False).prior
    u = torch.arange(float(P), dtype=F64)
    means = torch.stack([u[torch.from_numpy(g == GROUPS)].mean() for g in range(3)])
    expected = (u - means[torch.from_numpy(GROUPS)]).square().sum() + means.square().sum()
    assert float(u @ prior @ u) == pytest.approx(float(expected))


def searched(A, b, groups=None, families=("ridge", "elastic-net", "lasso")):
    kind = "feature" if groups is None else "group"
    layout = layout_of(A.shape[1], 1, kind, groups, False)
    n = len(b)
    folds = torch.randperm(n, generator=torch.Generator().manual_seed(1))[None] % 5
    search = WeightSearch(LeastSquares(A, b, gram=False), layout, folds, torch.ones(n, dtype=F64))
    return choose(search, [FAMILIES[name](0.5) for name in families], many=True)


def test_without_structure_the_answer_is_a_single_weight():
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        A = torch.randn(80, 30, generator=generator, dtype=F64)
        b = A @ torch.randn(30, generator=generator, dtype=F64) / 5 + torch.randn(80, generator=generator, dtype=F64)
        best, _ = searched(A, b / b.std())
        assert best.exponent == 0
        assert best.strength == float("inf")
        assert float(best.x.max() - best.x.min()) == 0


def test_weights_of_groups_are_learned_where_the_groups_differ():
    generator = torch.Generator().manual_seed(0)
    A, groups = torch.randn(400, 60, generator=generator, dtype=F64), np.repeat([0, 1, 2], 20)
    truth = torch.cat([torch.randn(20, generator=generator, dtype=F64), torch.zeros(40, dtype=F64)])
    b = A @ truth + 4 * torch.randn(400, generator=generator, dtype=F64)
    train, test = slice(0, 100), slice(100, 400)
    best, tried = searched(A[train], b[train] / b[train].std(), groups, families=("ridge",))
    learned = next(candidate for candidate in tried if candidate.strength < float("inf"))
    assert float(learned.x[-1, 0]) < float(learned.x[-1, 1:].min()) - 1

    def error(candidate):
        return float((A[test] @ candidate.fits[-1] * b[train].std() - b[test]).square().mean())

    assert best is not tried[0]
    assert error(learned) < 0.9 * error(tried[0])
    assert error(best) < 0.9 * error(tried[0])


def test_evidence_is_more_than_one_and_a_half_standard_errors():
    before = torch.arange(8, dtype=F64)
    noise = torch.tensor([1.0, -1.0] * 4, dtype=F64)
    error = float((noise / 8).square().sum().sqrt())
    assert evident(before - noise - 1.6 * error, before, torch.ones(8, dtype=F64))
    assert not evident(before - noise - 1.4 * error, before, torch.ones(8, dtype=F64))


def ridge(A, b, **options):
    def loss(y, rows):
        return (A[rows] @ y - b[rows]).square().mean()

    def penalised(x, y, rows):
        return loss(y, rows) / 2 + 0.5 * (x.exp() * y.square()).sum()

    return meha.cross_validation(penalised, lambda x, y, rows: loss(y, rows), examples=len(b), **options)


def test_the_problem_is_the_mean_over_folds():
    A, b = data()
    cv, x = ridge(A, b, folds=4), torch.linspace(-3, 0, P + 1, dtype=F64)
    models = [cv.fit(x, torch.zeros(P + 1, dtype=F64), without=k) for k in range(4)]
    by_hand = []
    for k, model in enumerate(models):
        rows, rest = cv.folds != k, cv.folds == k
        G = A[rows].t() @ A[rows] / rows.sum() + torch.diag(x.exp())
        exact = torch.linalg.solve(G, A[rows].t() @ b[rows] / rows.sum())
        torch.testing.assert_close(model, exact, atol=1e-6, rtol=0)
        by_hand.append((A[rest] @ exact - b[rest]).square().mean())
    assert float(cv.problem().upper(x, models)) == pytest.approx(float(torch.stack(by_hand).mean()), rel=1e-6)
    assert cv.error(x, torch.zeros(P + 1, dtype=F64)) == pytest.approx(float(torch.stack(by_hand).mean()), rel=1e-6)


def test_folds_are_solved_with_a_nonsmooth_term():
    A, b = data()
    cv = meha.cross_validation(
        lambda x, y, rows: (A[rows] @ y["w"] - b[rows]).square().mean() / 2,
        lambda x, y, rows: (A[rows] @ y["w"] - b[rows]).square().mean(),
        examples=N,
        folds=3,
        nonsmooth=L1(lambda x: x.exp(), part="w"),
        x_set=meha.sets.Box(-6.0, 1.0),
    )
    y0 = {"w": torch.zeros(P + 1, dtype=F64)}
    grid = [cv.error(torch.tensor(t, dtype=F64), y0) for t in np.linspace(-5, 0, 6)]
    result = cv.solve(torch.tensor(-2.0, dtype=F64), y0)
    assert result.error <= min(grid) * 1.001
    assert result.y["w"].shape == (P + 1,)
    assert len(result.solution.y) == 3


def test_the_folds_choose_the_strength(monkeypatch):
    monkeypatch.setattr(folded, "STRENGTHS", (0.01,))
    generator = torch.Generator().manual_seed(3)
    A = torch.randn(45, 3, generator=generator, dtype=F64)
    noise = torch.randn(45, generator=generator, dtype=F64)
    x0, y0 = torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64)
    cv = ridge(A, 2 * A[:, 0] + 2 * noise, folds=3, prior="folds", x_set=meha.sets.Box(-7.0, 4.0))
    learned = cv.solve(x0, y0)
    assert learned.strength == 0.01
    assert float(learned.x[0]) < float(learned.x[1:].min())
    assert set(learned.errors) == {torch.inf, 0.01}
    losses = {torch.inf: [1.0, 1.0, 1.0], 0.01: [0.9, 1.2, 0.8]}  # lower on the mean, by less than its standard error
    monkeypatch.setattr(
        folded.CrossValidation, "_nested", lambda self, x0, y0, strength, options: torch.tensor(losses[strength])
    )
    single = cv.solve(x0, y0)
    assert single.strength == torch.inf
    assert float(single.x.max() - single.x.min()) == 0


def test_bad_arguments_are_named():
    A, b = data()
    for options, message in [
        (dict(folds=1), "folds: must be from 2"),
        (dict(folds=[0] * N), "folds: must name a fold"),
        (dict(prior=-1.0), "prior: must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            ridge(A, b, **options)
    with pytest.raises(TypeError, match="x0: a prior chosen by the folds"):
        ridge(A, b, prior="folds").solve(torch.zeros((), dtype=F64), torch.zeros(P + 1, dtype=F64))
