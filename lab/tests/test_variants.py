"""The toys in other units and from other starts: the same problem, or none."""

import pytest
import torch
from meha_lab.problems import collection
from meha_lab.problems.variants import TOYS, VARIANTS, in_units, started_near

import meha
from meha.problems import group_lasso, lasso, sine


@pytest.mark.parametrize("name", TOYS)
def test_the_answer_stays_the_answer(name):
    for variant, change in VARIANTS.items():
        known, problem = TOYS[name](), change(TOYS[name]())
        assert problem.constants is None
        assert problem.name == known.name == name
        assert problem.error(problem.x_star, problem.y_star) == pytest.approx(0.0, abs=1e-12), variant
        assert float(problem.upper(problem.x_star, problem.y_star)) == pytest.approx(problem.upper_star), variant


def test_steps_of_meha_in_other_units():
    """Algorithm 1 for x u, y v, F w and f w takes the same steps if alpha is u^2/w times as long, beta, eta and gamma v^2/w."""
    u, v, w = 0.01, 100.0, 10.0
    numbers = dict(alpha=0.1, beta=0.1, eta=0.1, gamma=10.0, c=2.0, p=0.1)
    units = dict(alpha=u * u / w, beta=v * v / w, eta=v * v / w, gamma=v * v / w, c=1.0, p=1.0)
    known, problem = lasso(4), in_units(lasso(4), x=u, y=v, F=w, f=w)
    run = meha.MEHA(**numbers).start(known, known.x0, known.y0)
    other = meha.MEHA(**{name: numbers[name] * unit for name, unit in units.items()}).start(problem, problem.x0, problem.y0)
    for _ in range(20):
        run.step()
        other.step()
    assert not torch.equal(run.x, known.x0)
    assert torch.allclose(other.x, u * run.x)
    assert torch.allclose(other.y, v * run.y)


def test_starts_differ_and_are_in_the_set():
    starts = [started_near(lasso(100), seed) for seed in range(3)]
    assert len({float(problem.x0.sum()) for problem in starts}) == 3
    assert all(problem.x_set.contains(problem.x0) for problem in starts)
    assert started_near(sine(10, dtype=torch.float32), 0).y0.dtype is torch.float32


@pytest.mark.parametrize("name", ["group lasso, m = 600", "circle", "coreset, 15 examples"])
def test_what_cannot_be_rescaled_is_refused(name):
    """A group term, a set Y, a simplex."""
    makers = {entry.name: entry.make for entry in collection()} | {"group lasso, m = 600": lambda: group_lasso(600)}
    with pytest.raises(ValueError, match=r"known: .* cannot be put in other units"):
        in_units(makers[name](), x=2.0)
