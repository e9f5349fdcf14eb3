"""A checkpoint of another problem is refused, also where both agree at the start; one of the same problem is taken."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import meha
from meha.problem.constraints import Bounds, Linear, Smooth
from meha.problem.nonsmooth import L1, ElasticNet, GroupL2
from meha.problem.responses import Nearest, Trained
from meha.problem.sets import Box, L2Ball, Polyhedron, Simplex

F64 = torch.float64


def t(*values):
    return torch.tensor(values, dtype=F64)


DATA, MATRIX = t(1.0, 2.0, 3.0), torch.linspace(0, 1, 9, dtype=F64).reshape(3, 3)


def upper(x, y):
    return (y - DATA).square().sum() + (x - 1).square().sum()


def lower(x, y, data=DATA):
    return (data * y - x).square().sum()


def problem(upper=upper, lower=lower, **parts):
    return meha.Problem(upper, lower, **parts)


def row(b=2.0, A=None, B=((1.0, 1.0, 1.0),)):
    return Linear(A, [list(r) for r in B], [b])


def least_squares(matrix):
    return lambda x, y: meha.losses.LeastSquares(matrix, DATA)(y) + x.exp().sum() * y.square().sum()


ONE = {"A": [[1.0]]}
PAIRS = {  # at y0 = 0, F and f are the same in both
    "data of f": (problem(), problem(lower=lambda x, y: lower(x, y, 2 * DATA))),
    "data of F": [problem(lambda x, y, s=s: upper(x, y) + (s * MATRIX @ y).square().sum()) for s in (1, 2)],
    "sign": [problem(lambda x, y, s=s: upper(x, y) + s * x.sum() * y.sum()) for s in (1, -1)],
    "a term in F": (problem(), problem(lambda x, y: upper(x, y) + y.pow(4).sum())),
    "a term in f": (problem(), problem(lower=lambda x, y: lower(x, y) + 0.1 * y.square().sum())),
    "a factor of f": (problem(), problem(lower=lambda x, y: 2 * lower(x, y))),
    "a kink in F": (problem(), problem(lambda x, y: upper(x, y) + y.abs().sum())),
    "data of a loss": [problem(lower=least_squares(matrix)) for matrix in (MATRIX, MATRIX.T.contiguous())],
    "x beyond the first order": (problem(), problem(lower=lambda x, y: (DATA * y - x - x**2).square().sum())),
    "right side": [problem(lower_constraints=row(b)) for b in (2.0, 3.0)],
    "matrix of y": [problem(lower_constraints=row(B=((1.0, b, 1.0),))) for b in (1.0, 2.0)],
    "matrix of x": [problem(lower_constraints=row(A=[[a]])) for a in (1.0, 2.0)],
    "one constraint more": (problem(lower_constraints=row()), problem(lower_constraints=[row(), Bounds(high=1.0)])),
    "the level of a constraint": (problem(lower_constraints=row(**ONE)), problem(upper_constraints=row(**ONE))),
    "a bound": [problem(lower_constraints=Bounds(high=high)) for high in (0.5, 0.7)],
    "one of three bounds": [problem(lower_constraints=Bounds(high=t(0.5, 0.5, high))) for high in (0.5, 0.6)],
    "a bound that moves": [problem(lower_constraints=Bounds(high=lambda x, s=s: s * x + 0.5)) for s in (1, 2)],
    "a smooth constraint": [problem(lower_constraints=Smooth(lambda x, y, s=s: s * y.square().sum() - 1)) for s in (1, 2)],
    "data of a smooth constraint": [problem(lower_constraints=Smooth(lambda x, y, s=s: s * DATA @ y - 1)) for s in (1, 2)],
    "a constraint on x alone": [problem(upper_constraints=Linear([[1.0]], None, [b])) for b in (0.5, 0.6)],
    "a weight": [problem(nonsmooth=L1(weight)) for weight in (0.1, 0.2)],
    "a weight of x": [problem(nonsmooth=L1(lambda x, s=s: (s * x).exp())) for s in (1, 2)],
    "weights, the same at x0": [problem(nonsmooth=L1(weight)) for weight in (lambda x: x.exp(), lambda x: 1 + x.square())],
    "data of weights": [problem(nonsmooth=L1(lambda x, data=data: x.exp() * data)) for data in (DATA, DATA.flip(0))],
    "another term": (problem(nonsmooth=L1(0.1)), problem(nonsmooth=ElasticNet(0.1, 0.1))),
    "no term": (problem(nonsmooth=L1(0.1)), problem()),
    "groups": [problem(nonsmooth=GroupL2(sizes, 0.1)) for sizes in ([2, 1], [1, 2])],
    "a bound of X": [problem(x_set=Box(-1.0, high)) for high in (0.5, 0.6)],
    "another X": (problem(x_set=Box(-1.0, 0.5)), problem(x_set=L2Ball(0.5))),
    "a bound of Y": [problem(y_set=Box(0.0, high)) for high in (1.0, 2.0)],
    "one bound of Y": [problem(y_set=Box(0.0, t(1.0, 1.0, high))) for high in (1.0, 2.0)],
    "a polyhedron": [problem(y_set=Polyhedron([[1.0, 1.0, 1.0]], [b])) for b in (1.0, 2.0)],
    "a simplex": [problem(y_set=Simplex(total)) for total in (1.0, 2.0)],
    "no Y": (problem(y_set=Box(0.0, 1.0)), problem()),
    "the response": (problem(response=Nearest()), problem()),
    "steps of the response": [problem(response=Trained(steps=steps, lr=0.1)) for steps in (5, 6)],
    "rate of the response": [problem(response=Trained(steps=5, lr=lr)) for lr in (0.1, 0.05)],
    "the kind of response": (problem(response=Nearest()), problem(response=Trained(steps=5, lr=0.1))),
}


def solve(problem, path):
    return meha.solve(problem, t(0.0), t(0.0, 0.0, 0.0), checkpoint=path, max_steps=100)


@pytest.mark.parametrize("name", PAIRS)
def test_other_problems_are_refused_and_the_same_is_taken(name, tmp_path):
    first, second = PAIRS[name]
    begun = solve(first, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"run.pt is not of this run: .* Make the same call"):
        solve(second, tmp_path / "run.pt")
    again = solve(first, tmp_path / "run.pt")
    assert torch.equal(begun.x, again.x)
    assert begun.steps == again.steps


TAKEN = list(PAIRS)[::2]


def test_the_same_problem_is_taken_in_a_new_process(tmp_path):
    for name in TAKEN:
        solve(PAIRS[name][0], tmp_path / f"{name}.pt")
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_foreign_checkpoints import PAIRS, TAKEN, Path, solve
for name in TAKEN:
    solve(PAIRS[name][0], Path({str(tmp_path)!r}) / f"{{name}}.pt")
print(len(TAKEN))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(len(TAKEN)), done.stderr


def test_objectives_that_raise_beside_the_start_have_checkpoints(tmp_path):
    """Problems are compared beside the start, where such a function may not be called."""

    def guarded(x, y, factor):
        if float(y.detach().abs().max()) > 0.1:
            raise KeyError("outside")
        return factor * (y - 0.01 * x).square().sum()

    first, second = (problem(lambda x, y: (x - 1).square().sum() + y.sum(), lambda x, y, k=k: guarded(x, y, k)) for k in (1, 1))
    method = meha.MEHA(alpha=0.01, beta=0.01, eta=0.01, gamma=1.0, c=1.0)
    start = t(0.0), t(0.0, 0.0, 0.0)
    for same in (first, second):
        assert meha.solve(same, *start, method, checkpoint=tmp_path / "run.pt", max_steps=5, tol=None).steps == 5
