"""Sets and terms beside constraints: by what they can do, whoever wrote them."""

import re
from pathlib import Path

import pytest
import torch

import meha
from meha.problem.nonsmooth import GroupL2, NonSmooth
from meha.problem.problem import Problem
from meha.problem.sets import (
    AffineSet,
    Box,
    ConvexSet,
    HalfSpace,
    Intersection,
    L1Ball,
    NonNegative,
    Polyhedron,
    Product,
    Reals,
)
from meha.reduce.as_constraints import Membership, absorb_constraints_of_x, lacking
from meha.tensors.variables import Variable


def t(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


class Interval(ConvexSet):
    """[0, top] for each coordinate, without rows."""

    coordinatewise = True

    def __init__(self, top):
        self.top = top

    def project_leaves(self, leaves):
        return [leaf.clamp(0.0, self.top) for leaf in leaves]


class WrittenInterval(Interval):
    def as_constraints(self, leaves):
        z = torch.cat([leaf.reshape(-1) for leaf in leaves])
        return torch.cat([-z, z - self.top]), z[:0]


class Absolute(NonSmooth):
    """g(x, y) = x sum_i |y_i|, without an epigraph."""

    def value_leaves(self, x, leaves):
        return x * sum(leaf.abs().sum() for leaf in leaves)

    def prox_leaves(self, x, leaves, step):
        return [leaf.sign() * (leaf.abs() - step * x).clamp(min=0) for leaf in leaves]


class HalfWritten(Absolute):
    def absolute_terms(self, leaves):
        return torch.cat([leaf.reshape(-1) for leaf in leaves])


class WrittenAbsolute(HalfWritten):
    def epigraph(self, x, leaves, t):
        return x * t.sum(), t[:0]


def coupled(**parts):
    """y follows 2 - x where the constraint y_1 + y_2 <= x + 2 and the set allow it."""
    return Problem(
        lambda x, y: (y - t(0.3, 0.4)).square().sum() + 0.01 * (x - 1).square().sum(),
        lambda x, y: (y - 2).square().sum() / 2 + (x * y[0]).sum() / 10,
        lower_constraints=meha.constraints.Linear([[-1.0]], [[1.0, 1.0]], [2.0]),
        **parts,
    )


@pytest.mark.parametrize("level", ["x_set", "y_set"])
def test_a_set_of_the_user_beside_constraints_gives_the_answer_of_a_box(level):
    own, box = (meha.solve(coupled(**{level: s}), t(0.5), t(0.5, 0.5)) for s in (WrittenInterval(0.8), Box(0.0, 0.8)))
    assert own.status is box.status is meha.Status.CONVERGED
    torch.testing.assert_close(own.x, box.x, rtol=0, atol=1e-7)
    torch.testing.assert_close(own.y, box.y, rtol=0, atol=1e-7)


def test_a_term_of_the_user_beside_constraints_gives_the_answer_of_l1():
    terms = WrittenAbsolute(), meha.nonsmooth.L1(lambda x: x)
    own, l1 = (meha.solve(coupled(nonsmooth=g, x_set=Box(0.0, 3.0)), t(0.5), t(0.5, 0.5)) for g in terms)
    assert own.status is l1.status is meha.Status.CONVERGED
    torch.testing.assert_close(own.x, l1.x, rtol=0, atol=1e-7)
    torch.testing.assert_close(own.y, l1.y, rtol=0, atol=1e-7)


def test_the_example_of_the_documentation_runs(capsys):
    text = (Path(meha.__file__).parents[1] / "docs/constraints.md").read_text()
    code, printed = re.search(r"```python\n([^`]*class Disc[^`]*)```\n\n```text\n(.*?)```", text, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == printed


REFUSED = {
    "x-set": ({"x_set": Interval(1.0)}, r"x_set: Interval has no as_constraints for its 1 coordinates, .* define it, or state"),
    "y-set": ({"y_set": Interval(1.0)}, r"y_set: Interval has no as_constraints for its 2 coordinates, .* define it, or state"),
    "member": ({"y_set": Intersection(Box(0.0, 1.0), Interval(1.0))}, r"y_set: Intersection has no as_constraints"),
    "term": ({"nonsmooth": Absolute()}, r"nonsmooth: Absolute has no absolute_terms .* define it and epigraph, or use"),
    "half": ({"nonsmooth": HalfWritten()}, r"nonsmooth: HalfWritten has no epigraph .* define it beside absolute_terms"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_is_named_with_a_remedy(name):
    parts, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        meha.solve(coupled(**parts), t(0.5), t(0.5, 0.5))


ROWS = {
    "half-space": (HalfSpace(t(2.0, 0.0, 1.0), 1.0), [1.0], []),
    "affine": (AffineSet(t(1.0, 1.0, 1.0)[None], t(1.0)), [], [-1.0]),
    "reals": (Reals(), [], []),
    "leaves": (Product({"b": Box(0.25, torch.inf), "a": NonNegative()}), [0.25, -1.0, 1.0], []),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_sets_at_a_point(name):
    domain, inequalities, equations = ROWS[name]
    y = Variable({"a": t(1.0, -1.0), "b": t(0.0)}, "y")
    found = Membership("y", domain.parts(y)).values(y, y)
    assert [part.tolist() for part in found] == [inequalities, equations]


def test_a_bound_is_not_rounded_to_single_precision():
    rows, _ = Box(0.1, torch.inf).as_constraints([t(0.1)])
    assert rows.tolist() == [0.0]


def test_an_l1_ball_has_no_rows_in_many_dimensions():
    problem = coupled(y_set=L1Ball(1.0))
    assert lacking(problem, Variable(t(0.5), "x"), Variable(torch.zeros(10, dtype=torch.float64), "y")) == ""
    wide = Variable(torch.zeros(11, dtype=torch.float64), "y")
    assert "L1Ball has no as_constraints for its 11 coordinates" in lacking(problem, Variable(t(0.5), "x"), wide)


def test_iterative_projections_are_replaced_by_rows_where_all_sets_have_them():
    def engine(x_set, y_set):
        problem = Problem(
            lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
            lambda x, y: (y - x).square().sum(),
            x_set=x_set,
            y_set=y_set,
        )
        solution = meha.solve(problem, t(0.5), t(0.5, 0.5))
        assert solution.status is meha.Status.CONVERGED
        assert float(solution.x) == pytest.approx(1.0, abs=1e-5)
        return "active" in solution.report

    triangle = Polyhedron([[1.0]], [1.0])
    assert engine(triangle, None)
    assert engine(triangle, WrittenInterval(3.0))
    assert not engine(triangle, Interval(3.0))


def test_an_orthant_of_the_user_goes_with_group_terms():
    class Orthant(Interval):
        orthant = True

    y = Variable(t(3.0, -4.0, 1.0), "y")
    results = []
    for domain in (Orthant(torch.inf), NonNegative()):
        prox = Problem(lambda x, y: y.sum(), lambda x, y: y.sum(), nonsmooth=GroupL2([2, 1]), y_set=domain)._bind_prox(y)
        leaves = [leaf.detach().clone() for leaf in y.leaves]
        prox(None, leaves, 1.0)
        results.append(leaves[0])
    assert torch.equal(*results)


# Constraints on x alone


def design(**parts):
    """Minimise c' M(x)^-1 c over shares x of seven points, M the information matrix of a quadratic regression."""
    points = torch.linspace(-1, 1, 7, dtype=torch.float64)
    V, c = torch.stack([points**k for k in range(3)], dim=1), t(1.0, 0.5, 0.25)
    information = lambda x: V.T @ (x[:, None] * V) + 1e-6 * torch.eye(3, dtype=torch.float64)  # noqa: E731
    problem = Problem(lambda x, y: c @ y, lambda x, y: y @ information(x) @ y / 2 - c @ y, **parts)
    return problem, lambda x: c @ torch.linalg.solve(information(x), c)


COST = meha.constraints.Linear(A=[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]], b=[3.0])


def test_linear_constraints_on_x_alone_belong_to_X():
    """The cost of x is bounded; the answer is at least as good as that of projected gradients on the formula."""
    problem, value = design(x_set=meha.sets.Simplex(), upper_constraints=COST)
    x = torch.full((7,), 1 / 7, dtype=torch.float64)
    solution = meha.solve(problem, x, torch.zeros(3, dtype=torch.float64))
    assert (solution.engine, solution.status) == ("ImplicitNewton", meha.Status.CONVERGED)
    assert not solution.problem.coupled
    assert float(COST(solution.x, solution.y)[0]) <= 1e-9
    domain = solution.problem.x_set
    assert isinstance(domain, Polyhedron)
    for _ in range(3000):
        (gradient,) = torch.autograd.grad(value(x.requires_grad_()), x)
        x = domain.project(x.detach() - 0.02 * gradient)
    assert float(value(solution.x)) <= float(value(x)) + 1e-8


@pytest.mark.parametrize(
    ("parts", "absorbed"),
    [
        (dict(upper_constraints=meha.constraints.Linear(A=[[1.0, 1.0]], b=[1.0])), True),
        (dict(upper_constraints=meha.constraints.Linear(A=[[1.0, 1.0]], b=[1.0]), x_set=Box(0.0, 4.0)), True),
        (dict(upper_constraints=meha.constraints.Linear(A_eq=[[1.0, 1.0]], b_eq=[1.0]), x_set=NonNegative()), True),
        (dict(upper_constraints=meha.constraints.Linear(A=[[1.0, 1.0]], B=[[1.0]], b=[1.0])), False),
        (dict(lower_constraints=meha.constraints.Linear(A=[[1.0, 1.0]], b=[1.0])), False),
        (dict(upper_constraints=meha.constraints.Linear(A=[[1.0, 1.0]], b=[1.0]), x_set=meha.sets.L2Ball(1.0)), False),
        (dict(upper_constraints=meha.constraints.Smooth(lambda x, y: x.sum() - 1)), False),
    ],
    ids=["alone", "box", "equation", "of y too", "lower", "ball", "smooth"],
)
def test_what_is_a_part_of_X(parts, absorbed):
    problem = Problem(
        lambda x, y: (x - 2).square().sum() + y.square().sum(), lambda x, y: (y - x.sum()).square().sum(), **parts
    )
    assert absorb_constraints_of_x(problem, Variable(t(0.5, 0.5), "x")).coupled is not absorbed
    solution = meha.solve(problem, t(0.5, 0.5), t(0.0))
    assert solution.converged
    assert solution.problem.coupled is not absorbed


def test_other_methods_take_constraints_on_x_alone():
    problem = Problem(
        lambda x, y: (x - 2).square().sum() + y.square().sum(),
        lambda x, y: (y - x.sum() / 4).square().sum(),
        upper_constraints=meha.constraints.Linear(A=[[1.0, 0.0]], b=[1.0]),
    )
    solution = meha.solve(problem, t(0.0, 0.0), t(0.0), meha.RHG(), max_steps=3000)
    assert solution.x.tolist() == pytest.approx([1.0, 31 / 17], abs=1e-3)  # minimise (x2 - 2)^2 + (1 + x2)^2 / 16


def test_constraints_on_x_that_contradict_X_are_refused_by_their_name():
    budget = meha.constraints.Linear(A=[[1.0, 1.0]], b=[-1.0])
    problem = Problem(
        lambda x, y: y.sum(), lambda x, y: (y - x.sum()).square().sum(), x_set=NonNegative(), upper_constraints=budget
    )
    with pytest.raises(ValueError, match=r"upper_constraints: no x in X meets them .* check their signs"):
        meha.solve(problem, t(0.0, 0.0), t(0.0))
