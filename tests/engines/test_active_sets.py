"""Coupled problems: their statement, refusals, checks, reports, and that they compose with the rest."""

import math

import numpy as np
import pytest
import torch

import meha
from meha import Problem, Status
from meha.engines.active_sets import Branching
from meha.lower.constrained import ConstrainedLower, SampleBox
from meha.methods import Method
from meha.problem.constraints import Bounds, Linear, Smooth
from meha.problem.oracle import Oracle
from meha.problem.sets import Box, Intersection, L1Ball, L2Ball, LinfBall, NonNegative, Polyhedron, Product, Simplex
from meha.reduce.as_constraints import Epigraph
from meha.reduce.nonlinear_program import NonlinearProgram
from meha.tensors.variables import Variable

D = torch.float64


def t(*numbers, dtype=D):
    return torch.tensor(numbers, dtype=dtype)


def capped(dtype=D, **more):
    """y = min(2, x); F = (x - 3)^2 + y^2 / 2 has its minimum at x = 3 with y = 2."""
    return Problem(
        lambda x, y: (x - 3).square().sum() + (y - 0.5).square().sum() / 2,
        lambda x, y: (y - 2).square().sum(),
        lower_constraints=Linear(torch.tensor([[-1.0]], dtype=dtype), torch.tensor([[1.0]], dtype=dtype), [0.0]),
        **more,
    )


def methods():
    found, waiting = [], [Method]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("meha.") and not kind.__abstractmethods__]


# Statement


def test_values_of_constraints():
    linear = Linear([[1.0, 0.0]], [[2.0]], [3.0], A_eq=[[0.0, 1.0]], B_eq=None, b_eq=[4.0])
    inequalities, equations = linear(t(1, 1), t(5))
    assert inequalities.tolist() == [1 + 10 - 3]
    assert equations.tolist() == [1 - 4]
    assert linear.violation(t(1, 1), t(5)) == 8
    smooth = Smooth(lambda x, y: {"a": x - y, "b": [y * y]}, equations=lambda x, y: x.sum())
    assert smooth(t(1, 2), t(3, 1))[0].tolist() == [-2, 1, 9, 1]
    assert smooth(t(1, 2), t(3, 1))[1].tolist() == [3]
    bounds = Bounds(low=torch.tensor([0.0, -math.inf]), high=lambda x: x)
    assert bounds(t(2, 3), t(-1, 4))[0].tolist() == [1, -3, 1]
    nested = {"a": t(1), "b": t(2, 3)}
    assert Bounds(high=lambda x: {"a": x, "b": x})(t(2), nested)[0].tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Linear(), "Linear: is empty"),
        (lambda: Linear([[1.0]], None, None), "belong together"),
        (lambda: Linear([[1.0]], None, [1.0, 2.0]), "one row for each of the 2 entries"),
        (lambda: Linear([[math.nan]], None, [1.0]), "NaN"),
        (lambda: Linear(torch.ones(1, 1, dtype=torch.complex64), None, [1.0]), "Linear: A must be real, got torch.complex64"),
        (lambda: Bounds(math.nan, 1.0), "Bounds: low has entries that are NaN"),
        (lambda: Bounds(0.0, torch.tensor([1.0, math.nan])), "Bounds: high has entries that are NaN"),
        (lambda: Smooth(), "Smooth: is empty"),
        (lambda: Smooth(3.0), "function of"),
        (lambda: Bounds(), "Bounds: is empty"),
        (lambda: Bounds(low=lambda x, y: x), "function of x alone"),
        (lambda: Problem(lambda x, y: x, lambda x, y: y, lower_constraints=Box(0.0, 1.0)), "lower_constraints: expected"),
        (lambda: Problem(lambda x, y: x, lambda x, y: y, upper_constraints=[3]), "upper_constraints: expected"),
    ],
)
def test_wrong_statements_are_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_columns_are_checked_at_the_start():
    problem = Problem(
        lambda x, y: (x * x).sum(), lambda x, y: (y * y).sum(), lower_constraints=Linear([[1.0, 1.0]], [[1.0]], [0.0])
    )
    with pytest.raises(ValueError, match="A has 2 columns, but x has 1"):
        meha.solve(problem, t(0.0), t(0.0))


class Alternating:
    """A constraint with one row and with two, in turn."""

    calls = 0

    def __call__(self, x, y):
        self.calls += 1
        return torch.cat([y - x] * (1 + self.calls % 2))


@pytest.mark.parametrize(
    ("h", "words"),
    [
        (lambda x, y: 1.0, "h cannot be differentiated: autograd sees no x or y"),
        (lambda x, y: (y - x).detach(), "h cannot be differentiated"),
        (Alternating(), "h returns 2 numbers, and 1 when it is called again"),
    ],
    ids=["number", "detached", "lengths"],
)
def test_functions_that_cannot_be_constraints_are_refused_at_the_start(h, words):
    problem = Problem(lambda x, y: (x * x).sum(), lambda x, y: (y * y).sum(), lower_constraints=Smooth(h))
    with pytest.raises(ValueError, match=words):
        meha.solve(problem, t(1.0), t(0.0))


@pytest.mark.parametrize("kind", methods(), ids=lambda kind: kind.__name__)
def test_other_methods_refuse_in_one_sentence(kind):
    if kind.takes_coupling:
        assert kind.__name__ in ("Default", "ActiveSets", "LVHBA", "BiCGAFFA")
        return
    method = object.__new__(kind)
    with pytest.raises(ValueError, match=r"cannot take constraints that couple x and y; use the default, LVHBA\(\)"):
        Method.check(method, capped())


def test_the_default_refuses_terms_that_are_not_polyhedral_with_constraints():
    with pytest.raises(ValueError, match=r"nonsmooth: GroupL2 has no absolute_terms .* together with constraints; define it"):
        meha.solve(capped(nonsmooth=meha.nonsmooth.GroupL2([1], 0.1)), t(0.0), t(0.0))


# Statements


@pytest.mark.parametrize(
    "constraint",
    [
        Linear([[-1.0]], [[1.0]], [0.0]),
        Linear([-1.0], [1.0], 0.0),
        Linear([-1.0, 0.0], [1.0, 1.0], [0.0, 9.0]),
        Smooth(lambda x, y: [y - x, -1.0, []]),
        Smooth(lambda x, y: {"row": y[0] - x[0], "idle": 0}),
        Bounds(high=lambda x: x),
    ],
    ids=["matrix", "row", "columns", "list", "dict", "bounds"],
)
def test_forms_of_a_constraint(constraint):
    """y = min(x, 2), and F has one value for each entry; its minimum (x - 1)^2 + y^2 is at x = 1/2."""
    problem = Problem(
        lambda x, y: (x - 1) ** 2 + y**2, lambda x, y: (y - 2) ** 2, x_set=Box(0.0, 4.0), lower_constraints=constraint
    )
    solution = meha.solve(problem, t(-3.0), t(7.0))
    assert solution.status is Status.CONVERGED
    assert solution.x.item() == pytest.approx(0.5, abs=1e-6)


def test_constraints_of_y_alone_without_x():
    """The nearest point to (2, 2) on y_1 + y_2 = 1 with y_1 <= 0.2."""
    problem = Problem(
        lambda y: (y - 2).square().sum(), lambda y: (y.sum() - 1) ** 2, lower_constraints=Smooth(lambda y: y[0] - 0.2)
    )
    assert torch.allclose(meha.solve(problem, None, t(0.0, 0.0)).y, t(0.2, 0.8), atol=1e-6)


def test_a_start_outside_of_the_sets_is_moved_there():
    """y = 2 x without constraints; F = (x - y)^2 is least at the x of the box that is nearest to zero."""
    problem = Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (y - 2 * x).square().sum(), x_set=Box(2.0, 3.0))
    assert meha.solve(problem, t(0.0), t(0.0)).x.item() == pytest.approx(2.0, abs=1e-6)
    with pytest.raises(ValueError, match="x0 is not in X"):
        meha.solve(problem, t(0.0), t(0.0), meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0))


def test_a_start_at_a_pole():
    """y = max(1 - x, 1/2); F = x + 1 / (x + y) + y: 2 for x <= 1/2, and less than 2 in no place."""
    problem = Problem(
        lambda x, y: (x + 1 / (x + y) + y).sum() + 0.1 * (x - 0.3).square().sum(),
        lambda x, y: (y - 0.5).square().sum(),
        x_set=Box(0.0, 4.0),
        y_set=Box(0.0, 4.0),
        lower_constraints=Smooth(lambda x, y: 1 - x - y),
    )
    solution = meha.solve(problem, t(0.0), t(0.0))
    assert solution.status is Status.CONVERGED
    assert solution.x.item() == pytest.approx(0.3, abs=1e-5)


def test_functions_that_look_quadratic_near_the_start():
    """|y| is linear near the start, but not at the solution that branch and bound finds with its model."""
    problem = Problem(
        lambda x, y: x.square().sum() + (y + 60).abs().sum(),
        lambda x, y: (y - x).square().sum(),
        x_set=Box(-200.0, 200.0),
        lower_constraints=Linear(None, [[1.0]], [500.0]),
    )
    solution = meha.solve(problem, t(0.0), t(0.0))
    assert float(problem.upper(solution.x, solution.y)) == pytest.approx(59.75, abs=1e-6)  # x = -1/2
    far = Problem(
        lambda x, y: 0.001 * (x + 100).square().sum() + (y + 30).abs().sum(),
        lambda x, y: (y - x).square().sum(),
        x_set=Box(-200.0, 200.0),
        lower_constraints=Linear(None, [[1.0]], [500.0]),
    )
    solution = meha.solve(far, t(0.0), t(0.0))
    assert float(far.upper(solution.x, solution.y)) == pytest.approx(4.9, abs=1e-5)  # at the kink, x = -30


# Non-smooth terms

TERMS = {
    "L1": meha.nonsmooth.L1(lambda x: x[0]),
    "L1, a weight each": meha.nonsmooth.L1(t(0.1, 0.2, 0.3, 0.4)),
    "non-negative": meha.nonsmooth.NonNegativeL1(lambda x: x[0]),
    "elastic net": meha.nonsmooth.ElasticNet(lambda x: x[0], lambda x: x[1]),
    "total variation": meha.nonsmooth.TotalVariation(lambda x: x[0]),
    "fused": meha.nonsmooth.FusedLasso(lambda x: x[0], lambda x: x[1]),
}


@torch.no_grad()
@pytest.mark.parametrize("name", TERMS)
def test_lifted_terms_have_the_value_of_g_at_their_least_bounds(name):
    x = Variable(t(0.7, 0.4), "x")
    y = Variable((t(1.0, -2.0, 0.0, 3.0).abs() if name == "non-negative" else t(1.0, -2.0, 0.0, 3.0)), "y")
    problem = Problem(lambda x, y: y.sum(), lambda x, y: y.sum(), nonsmooth=TERMS[name])
    lifting = Epigraph(problem, y)
    least = lifting.start(y)
    assert float(lifting.value(x, y, least)) == pytest.approx(float(problem.g.value(x.value, y.value)), abs=1e-12)
    assert float(lifting.rows(x, y, least)[0].max()) <= 0
    if lifting.size:
        assert float(lifting.rows(x, y, least - 0.01)[0].max()) > 0
        assert float(lifting.value(x, y, least + 0.01)) > float(lifting.value(x, y, least))


def test_g_with_constraints_in_closed_form():
    """y = min(max(2 - x, 0), 1.2) for f = (y - 2)^2 / 2 and g = x |y|; F = (y - 0.3)^2 + x^2 / 100 is least at 1.7 / 1.01."""
    problem = Problem(
        lambda x, y: (y - 0.3).square().sum() + 0.01 * x.square().sum(),
        lambda x, y: (y - 2).square().sum() / 2,
        nonsmooth=meha.nonsmooth.L1(lambda x: x),
        x_set=NonNegative(),
        lower_constraints=Linear(None, [[1.0]], [1.2]),
    )
    solution = meha.solve(problem, t(0.0), t(0.0))
    assert solution.status is Status.CONVERGED
    assert solution.x.item() == pytest.approx(1.7 / 1.01, abs=1e-6)
    assert solution.y.item() == pytest.approx(2 - 1.7 / 1.01, abs=1e-6)


def test_g_on_one_part_of_a_dict_with_constraints():
    """The lower level at the answer, by a QP solver; no other weight is better."""
    cvxpy = pytest.importorskip("cvxpy")
    generator = np.random.default_rng(0)
    A, b = generator.normal(size=(6, 3)), generator.normal(size=6)
    matrix, right = torch.from_numpy(A), torch.from_numpy(b)

    def respond(w):
        v, s = cvxpy.Variable(3), cvxpy.Variable(1)
        objective = cvxpy.sum_squares(A @ v + s - b) / 2 + w * cvxpy.norm1(v)
        cvxpy.Problem(cvxpy.Minimize(objective), [cvxpy.sum(v) + s[0] <= 0.1]).solve(solver="CLARABEL")
        return np.array(v.value), np.array(s.value)

    def upper(x, y):
        return (y["w"] - 0.4).square().sum() + (y["b"] - 1).square().sum() + 0.01 * x.square().sum()

    problem = Problem(
        upper,
        lambda x, y: (matrix @ y["w"] + y["b"] - right).square().sum() / 2,
        nonsmooth=meha.nonsmooth.L1(lambda x: x, part="w"),
        x_set=Box(0.0, 5.0),
        lower_constraints=Linear(None, [[1.0, 1.0, 1.0, 1.0]], [0.1]),
    )
    solution = meha.solve(problem, t(1.0), {"w": torch.zeros(3, dtype=D), "b": torch.zeros(1, dtype=D)})
    assert solution.status is Status.CONVERGED
    w, s = respond(solution.x.item())
    assert np.abs(solution.y["w"].numpy() - w).max() <= 1e-4
    assert np.abs(solution.y["b"].numpy() - s).max() <= 1e-4
    for weight in np.linspace(0, 5, 26):
        w, s = respond(weight)
        assert float(upper(t(weight), {"w": torch.from_numpy(w), "b": torch.from_numpy(s)})) >= float(solution.upper) - 1e-6


# Solutions


def test_a_kinked_response():
    """F + (min(x, 2) - 1/2)^2 / 2 over x: on the branch y = x the minimum 13/6 lies beyond the kink, and x = 3 is left."""
    solution = meha.solve(capped(), t(0.0), t(5.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.x) == pytest.approx(3.0, abs=1e-7)
    assert float(solution.y) == pytest.approx(2.0, abs=1e-7)
    assert "nothing better" in solution.message
    assert "no constraint" in solution.report["active"]


def test_the_report_names_active_constraints_with_multipliers():
    """With y <= x and F drawn to x = 1: y = x = 1 - 1/6, and the multiplier is 2 (2 - y)."""
    problem = Problem(
        lambda x, y: (x - 1).square().sum() + (y - 0.5).square().sum() / 2,
        lambda x, y: (y - 2).square().sum(),
        lower_constraints=Linear([[-1.0]], [[1.0]], [0.0]),
        upper_constraints=Linear([[0.0]], [[1.0]], [9.0]),
    )
    solution = meha.solve(problem, t(0.0), t(0.0))
    assert float(solution.x) == pytest.approx(5 / 6, abs=1e-7)
    assert f"lower_constraints row 0 (multiplier {2 * (2 - 5 / 6):.3g})" in solution.report["active"]
    assert "upper_constraints" not in solution.report["active"]
    assert "violation" in solution.report


def test_f_chooses_among_the_solutions_of_a_linear_program():
    """f = 0 leaves y free in a moving box; F takes its best corner."""
    problem = Problem(
        lambda x, y: (x - 1).square().sum() + (y - t(3.0, 0.25)).square().sum(),
        lambda x, y: (0.0 * y).sum(),
        lower_constraints=Bounds(0.0, lambda x: x.expand(2)),
    )
    solution = meha.solve(problem, t(0.0), t(0.0, 0.0))
    assert solution.x.tolist() == pytest.approx([2.0], abs=1e-6)
    assert solution.y.tolist() == pytest.approx([2.0, 0.25], abs=1e-6)


def test_a_relaxation_that_is_complementary_already_ends_the_tree():
    """Without complementarity, F has its minimum at x = 3, y = 2, where y <= x is slack and its multiplier is zero."""
    problem = Problem(
        lambda x, y: (x - 3).square().sum() + (y - 5).square().sum() / 2,
        lambda x, y: (y - 2).square().sum(),
        lower_constraints=Linear([[-1.0]], [[1.0]], [0.0]),
    )
    x, y = Variable(t(0.0), "x"), Variable(t(0.0), "y")
    tree = Branching(NonlinearProgram(Oracle(problem, x, y), x, y))
    found = tree.search()
    assert found.z.tolist() == pytest.approx([3.0, 2.0], abs=1e-6)
    assert tree.nodes == 2  # the relaxation, and its piece


def test_x_without_a_feasible_y_are_excluded():
    """y >= x and y <= 1: x beyond 1 has no y, though F draws x there."""
    problem = Problem(
        lambda x, y: (x - 5).square().sum(),
        lambda x, y: y.square().sum(),
        lower_constraints=[Bounds(high=1.0), Linear([[1.0]], [[-1.0]], [0.0])],
    )
    solution = meha.solve(problem, t(3.0), t(0.0))
    assert float(solution.x) == pytest.approx(1.0, abs=1e-7)
    assert solution.status is Status.CONVERGED


def test_no_feasible_point_is_said():
    problem = Problem(
        lambda x, y: x.square().sum(), lambda x, y: (y - x).square().sum(), upper_constraints=Smooth(lambda x, y: 1 + y * y)
    )
    solution = meha.solve(problem, t(0.5), t(0.5))
    assert solution.status is Status.FINISHED
    assert "No point was found" in solution.message


def test_an_unbounded_problem_is_said():
    problem = Problem(
        lambda x, y: -(x + y).sum(), lambda x, y: (y - x).square().sum(), lower_constraints=Linear([[1.0]], [[-1.0]], [1.0])
    )
    assert meha.solve(problem, t(0.5), t(0.5)).status is Status.AT_INFINITY


def test_a_lower_level_that_goes_on_beyond_all_bounds_is_not_solved():
    """With x < 1, y2 = 1 / x is better below than y1 = 1. Descents that were given up at y2 = 1e7 once gave F = -3e9."""
    problem = Problem(
        lambda x, y: -y[0] / x[0],
        lambda x, y: -y[0] - y[1],
        y_set=NonNegative(),
        lower_constraints=Smooth(lambda x, y: x[0] * y[1] + y[0] - 1),
    )
    solution = meha.solve(problem, t(1.0), t(1.0, 1.0))
    assert solution.upper == pytest.approx(-1.0, abs=1e-6)


def test_a_narrow_part_of_the_lower_feasible_set_is_found():
    """Beside a wide part, in which y2 <= 62, there is a triangle near y1 = 10, in which y2 reaches 159."""
    rows = Smooth(
        lambda x, y: torch.stack(
            [
                y[1] - x[0] * (y[0] - 2) ** 2,
                12.5 * x[0] * (y[0] - 5) - y[1],
                y[1] - (5 * y[0] - 5 * x[0] + 20) * (y[0] - x[0] + 8),
            ]
        )
    )
    problem = Problem(
        lambda x, y: 25 * (x[0] - 2.5) ** 2 + (y[1] - 50) ** 2 / 900,
        lambda x, y: -y[1],
        x_set=Box(2.0, 3.0),
        y_set=Box(t(-4.0, -100.0), t(10.0, 200.0)),
        lower_constraints=rows,
    )
    x, y = Variable(t(2.4864865), "x"), Variable(t(7.0, 62.162162), "y")
    program = NonlinearProgram(Oracle(problem, x, y), x, y)
    lower = ConstrainedLower(program, SampleBox.of(program, program.read()))
    assert lower.convex is False
    assert lower.search(np.array([2.4864865]), np.array([7.0, 62.162162])).value == pytest.approx(-159.135, abs=1e-2)


def test_a_local_answer_is_called_local():
    """Only one narrow basin of x leads to the best F, and few starts find it."""
    problem = Problem(
        lambda x, y: (x * x).sum() / 100 - (-400 * (x - 7.3).square()).exp().sum() + 0.1 * y.square().sum(),
        lambda x, y: (y - 1).square().sum(),
        lower_constraints=Linear([[0.0]], [[1.0]], [0.5]),
        x_set=Box(-10.0, 10.0),
    )
    solution = meha.solve(problem, t(7.29), t(0.0))
    assert float(solution.x) == pytest.approx(7.3, abs=0.05)
    assert solution.status is Status.LOCAL
    assert "a better x may exist" in solution.message


# Composition


def test_dicts_sets_and_equations():
    """y["a"] + y["b"] = x with weights 1 and 2: shares 2/3 and 1/3; X and Y are sets of leaves."""
    problem = Problem(
        lambda x, y: (x["w"] - 3).square().sum() + y["a"].square().sum(),
        lambda x, y: y["a"].square().sum() + 2 * y["b"].square().sum(),
        x_set=Product({"w": Box(0.0, 2.0)}),
        y_set=Product({"a": NonNegative()}),
        lower_constraints=Smooth(equations=lambda x, y: y["a"] + y["b"] - x["w"]),
    )
    solution = meha.solve(problem, {"w": t(1.0)}, {"a": t(0.0), "b": t(0.0)})
    assert float(solution.x["w"]) == pytest.approx(2.0, abs=1e-6)
    assert float(solution.y["a"]) == pytest.approx(4 / 3, abs=1e-6)
    assert float(solution.y["b"]) == pytest.approx(2 / 3, abs=1e-6)


def test_float32():
    problem = capped(torch.float32)
    solution = meha.solve(problem, t(0.0, dtype=torch.float32), t(5.0, dtype=torch.float32))
    assert solution.x.dtype is torch.float32
    assert float(solution.x) == pytest.approx(3.0, abs=1e-3)


def nonconvex():
    return Problem(
        lambda x, y: (x - 0.25).square().sum() + y.square().sum(),
        lambda x, y: (y**3 / 3 - x * y).sum(),
        lower_constraints=Bounds(-1.0, 1.0),
        upper_constraints=Linear([[1.0], [-1.0]], None, [1.0, 1.0]),
    )


def test_basins_of_the_lower_level(tmp_path):
    """At x = 1/4 both y = 1/2 and y = -1 are local minima; the first is lower, and F is best there."""
    solution = meha.solve(nonconvex(), t(0.0), t(0.0))
    assert solution.status is Status.CONVERGED
    assert float(solution.x) == pytest.approx(0.25, abs=1e-5)
    assert float(solution.y) == pytest.approx(0.5, abs=1e-5)
    assert solution.counts.lower > 0
    assert solution.counts.hvp > 0


def test_a_run_resumes_from_a_checkpoint(tmp_path):
    whole = meha.solve(nonconvex(), t(0.0), t(0.0))
    part = meha.solve(nonconvex(), t(0.0), t(0.0), max_steps=3, checkpoint=tmp_path / "run")
    assert part.status is Status.MAX_STEPS
    rest = meha.solve(nonconvex(), t(0.0), t(0.0), checkpoint=tmp_path / "run")
    assert rest.steps == whole.steps
    assert torch.equal(rest.x, whole.x)
    assert torch.equal(rest.y, whole.y)
    assert rest.message == whole.message


SETS = {
    "box": (Box(t(0.0, -math.inf), t(1.0, 2.0)), 2),
    "ball": (L2Ball(1.5, t(1.0, 0.0)), 2),
    "cube": (LinfBall(1.5, t(1.0, 0.0)), 2),
    "octahedron": (L1Ball(1.5), 3),
    "simplex": (Simplex(2.0), 3),
    "polyhedron": (Polyhedron([[1.0, 1.0]], [1.0], [[1.0, -1.0]], [0.5]), 2),
    "both": (Intersection(Box(-1.0, 1.0), L2Ball(1.2)), 2),
}


@pytest.mark.parametrize("name", SETS)
def test_sets_become_rows(name):
    """The rows of a set hold exactly at its points."""
    domain, n = SETS[name]
    inside = domain.project(torch.zeros(n, dtype=D))
    x, y = Variable(t(0.0), "x"), Variable(inside, "y")
    problem = Problem(lambda x, y: (x * y.sum()).sum(), lambda x, y: (y * y).sum(), y_set=domain)
    coupling = NonlinearProgram(Oracle(problem, x, y), x, y)
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(60):
        point = 2 * torch.randn(n, generator=generator, dtype=D)
        projected = domain.project(point)
        for value in (point, projected):
            distance = float((value - domain.project(value)).norm())
            violation = coupling.violation(np.concatenate([[0.0], value.numpy()]))
            assert (violation <= 1e-7) == (distance <= 1e-7), (value, violation, distance)
            hits += violation > 1e-7
    assert hits > 10


# The value function and its derivatives


def test_the_gradient_of_the_value_function():
    """v(x) = min_y f(x, y) over coupled constraints: its gradient is that of the Lagrangian."""
    generator = np.random.default_rng(0)
    for seed in range(10):
        A, B = (torch.from_numpy(generator.normal(size=(3, k))) for k in (2, 3))
        problem = Problem(
            lambda x, y: (x * x).sum() + (y * y).sum(),
            lambda x, y: (y - x.sum() * t(1.0, 2.0, -1.0)).square().sum() + (x[0] * y).exp().sum() / 10,
            lower_constraints=[
                Linear(A, B, torch.ones(3, dtype=D) / 2),
                Smooth(lambda x, y: (y * y).sum() - 2 - x[0] ** 2),
            ],
        )
        x, y = Variable(torch.from_numpy(generator.normal(size=2)), "x"), Variable(torch.zeros(3, dtype=D), "y")
        coupling = NonlinearProgram(Oracle(problem, x, y), x, y)
        z = coupling.read()
        level = ConstrainedLower(coupling, SampleBox.of(coupling, z))
        solution = level.solve(z[:2], z[2:])
        slack = -coupling.values(np.concatenate([z[:2], solution.w]))[coupling.rows.lower]
        if solution.violation > 1e-8 or ((slack < 1e-3) & (solution.lam < 1e-3)).any():
            continue  # no y, or a degenerate point
        value = level.cut(solution.w)
        for k in range(2):
            step = np.zeros(5)
            step[k] = 1e-5
            difference = (value(z + step)[0] - value(z - step)[0]) / 2e-5
            assert value(z)[1][k] == pytest.approx(difference, abs=1e-5), (seed, k)


def test_quadratic_functions_are_recognised_and_third_derivatives_are_right():
    problem = Problem(
        lambda x, y: (x * y.sum()).sum() + 3,
        lambda x, y: (x * y**3).sum() + y[0] ** 4,
        lower_constraints=[Linear([[1.0]], [[1.0, 0.0]], [1.0]), Smooth(lambda x, y: x * y[0] * y[1])],
    )
    x, y = Variable(t(0.7), "x"), Variable(t(0.3, -0.4), "y")
    coupling = NonlinearProgram(Oracle(problem, x, y), x, y)
    assert coupling.quadratic.tolist() == [True, False, True, False]
    assert coupling.linear.tolist() == [False, False, True, False]
    z, weights, mu = np.array([0.5, 0.2, -0.7]), np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.6, -0.9])

    def along(z):
        """<mu, grad_y (f + 2 h_0 + 3 h_1)>"""
        x, a, b = z
        gradient = [3 * x * a**2 + 4 * a**3 + 3 * x * b, 3 * x * b**2 + 3 * x * a]
        return mu @ np.array(gradient)

    h, eye = 1e-4, np.eye(3)
    differences = np.array(
        [[(along(z + h * (p + q)) - along(z + h * p) - along(z + h * q) + along(z)) / h**2 for p in eye] for q in eye]
    )
    assert coupling.third(z, weights, mu) == pytest.approx(differences, abs=1e-2)
    assert coupling.values(z) == pytest.approx(coupling.call(z), abs=1e-12)
    assert coupling.many(np.stack([z, 2 * z]))[1] == pytest.approx(coupling.call(2 * z), abs=1e-12)


# check


def test_check_of_a_good_problem():
    report = meha.check(nonconvex(), t(0.5), t(0.0))
    assert report.ok, report
    assert report.violation == 0
    assert report.convexity == "non-convex"
    text = str(report)
    assert "agree with finite differences" in text
    assert "meets all constraints" in text


def test_check_names_what_is_wrong():
    problem = Problem(
        lambda x, y: x.square().sum(),
        lambda x, y: (y - x).square().sum(),
        lower_constraints=[Smooth(lambda x, y: y.square() + x.detach() * 1.0), Linear(None, [[1.0]], [-5.0])],
    )
    report = meha.check(problem, t(-1.0), t(0.0))
    assert any("lower_constraints[0] row 0: its gradient" in warning for warning in report.warnings)
    assert any("no y was found that meets them at x0" in warning for warning in report.warnings)
    assert report.violation == 5
    assert "the start violates lower_constraints[1] row 0" in str(report)


def test_check_sees_where_multipliers_fail():
    problem = Problem(
        lambda x, y: (x - 1).square().sum() + y.square().sum(),
        lambda x, y: (y - x).square().sum(),
        lower_constraints=Smooth(lambda x, y: y.square()),
    )
    report = meha.check(problem, t(1.0), t(0.0))
    assert any("its gradient in y vanishes where it is active" in warning for warning in report.warnings)


def test_compass_search_finds_solutions_without_multipliers(monkeypatch):
    """y = sqrt(x), so F = x + 2 sqrt(x) is least at x = 0, where y^2 <= 0 has no interior, and no multiplier exists."""
    problem = meha.Problem(
        upper=lambda x, y: (x + 2 * y).sum(),
        lower=lambda x, y: -y.sum(),
        x_set=meha.sets.Box(0.0, 2.0),
        lower_constraints=meha.constraints.Smooth(lambda x, y: y * y - x),
    )
    start = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64)
    assert meha.solve(problem, *start).upper == pytest.approx(0.0, abs=1e-2)
    monkeypatch.setattr("meha.engines.active_sets.compass_search", lambda coupling, lower, z, F: (z, F))
    assert meha.solve(problem, *start).upper > 0.5
