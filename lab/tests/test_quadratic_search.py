"""Searches on quadratic lower levels: semismooth Newton steps against FISTA, checkpoints, and what is refused."""

import io

import pytest
import torch
from meha_lab.baselines.quadratic_search import QUADRATIC, QuadraticRandomSearch

import meha
from meha.methods import LogUniform, RandomSearch
from meha.problem.nonsmooth import L1, GroupL2, SparseGroup
from meha.problem.sets import NonNegative


def regression(**changes):
    """A regression with 12 rows and 20 coefficients in groups that are not contiguous; two coefficients are free."""
    generator = torch.Generator().manual_seed(3)
    rows, labels = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((12, 20), (12,)))
    groups = [list(range(first, 18, 6)) for first in range(6)]
    parts = {
        "upper": lambda x, y: (rows @ y + labels).square().mean(),
        "lower": lambda x, y: (rows @ y - labels).square().mean() + 0.01 * y.sum(),
        "nonsmooth": GroupL2(groups, weight=lambda x: x),
        "x_set": NonNegative(),
    }
    return meha.Problem(**{**parts, **changes})


START = torch.full((6,), 0.1, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)


@pytest.mark.parametrize("warm_start", [True, False])
def test_semismooth_steps_find_the_solutions_of_fista(warm_start):
    settings = {"space": LogUniform(1e-3, 3.0), "trials": 8, "warm_start": warm_start, "lower_tol": 1e-10}
    plain, quick = (
        meha.solve(regression(), *START, kind(inner_steps=50_000, **settings)) for kind in (RandomSearch, QuadraticRandomSearch)
    )
    assert quick.history["trial"] == pytest.approx(plain.history["trial"], rel=1e-6)
    assert torch.allclose(quick.y, plain.y, atol=1e-6)
    assert len({round(value, 6) for value in quick.history["trial"]}) == 8
    assert quick.counts.lower < 20 < 1000 < plain.counts.lower


def test_semismooth_steps_are_resumed_bit_for_bit():
    method = QuadraticRandomSearch(space=LogUniform(1e-3, 3.0), trials=6, lower_tol=1e-8)
    run, other = (method.start(regression(), *START) for _ in range(2))
    for _ in range(3):
        run.step()
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for _ in range(3):
        assert dict(run.step()) == dict(other.step())
    assert torch.equal(run.y, other.y)


@pytest.mark.parametrize(
    ("changes", "y0", "message"),
    [
        (
            {"nonsmooth": L1(lambda x: x.sum())},
            START[1],
            r"nonsmooth: QuadraticRandomSearch needs GroupL2 and no y_set",
        ),
        ({"nonsmooth": SparseGroup([20])}, START[1], "needs GroupL2 and no y_set"),
        ({"y_set": NonNegative()}, START[1], "needs GroupL2 and no y_set"),
        (
            {"lower": lambda x, y: y.square().sum() * x.sum()},
            START[1],
            r"lower: QuadraticRandomSearch .* changes with x",
        ),
        ({"lower": lambda x, y: y.pow(4).sum() + y.square().sum()}, START[1], "it is not quadratic"),
        (
            {"nonsmooth": GroupL2([10, 10]), "lower": lambda x, y: y["a"].square().sum() + y["b"].square().sum()},
            {"a": START[1][:10], "b": START[1][10:]},
            r"y: QuadraticRandomSearch needs one tensor, got 2: a, b",
        ),
    ],
)
def test_lower_levels_that_are_not_quadratic_are_refused(changes, y0, message):
    method = QuadraticRandomSearch(space=LogUniform(1e-3, 3.0))
    changes.setdefault("upper", lambda x, y: x.sum())
    with pytest.raises(ValueError, match=message):
        method.start(regression(**changes), START[0], y0)


def test_too_few_semismooth_steps_are_a_failure():
    method = QuadraticRandomSearch(space=LogUniform(1e-3, 3.0), trials=2, inner_steps=1)
    solution = meha.solve(regression(), *START, method)
    assert solution.status is meha.Status.BROKE_DOWN


@pytest.mark.parametrize("kind", QUADRATIC, ids=lambda kind: kind.__name__)
def test_every_search_tries_what_it_tries_with_fista(kind):
    """One weight for all groups."""
    settings = {"space": {"w": LogUniform(1e-2, 1.0)}, "to_x": lambda p: torch.full_like(START[0], p["w"]), "lower_tol": 1e-10}
    size = {"points": 3} if kind is meha.GridSearch else {"trials": 3}
    runs = [search(inner_steps=50_000, **settings, **size) for search in (kind, QUADRATIC[kind])]
    plain, quick = (meha.solve(regression(), *START, method) for method in runs)
    assert quick.history["trial"] == pytest.approx(plain.history["trial"], rel=1e-5)
    assert torch.allclose(quick.x, plain.x)
