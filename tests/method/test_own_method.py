"""The method of examples/own_method.py: outside of the package, and treated as those inside."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import meha
from meha.running.compiled import CompileWarning

FILE = Path(__file__).parents[2] / "examples" / "own_method.py"


@pytest.fixture(scope="module")
def chase():
    spec = importlib.util.spec_from_file_location("own_method", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_method"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module.Chase
    del sys.modules["own_method"]


def solve(method, **options):
    problem = meha.problems.strong_convex(n=2)
    return meha.solve(problem, problem.x0, problem.y0, method, **options)


def test_it_is_short():
    assert len(FILE.read_text().split('"""', 2)[2].strip().splitlines()) <= 40  # without its title


def test_solve_runs_it(chase):
    solution = solve(chase(), tol=1e-5, max_steps=20_000)
    assert solution.status is meha.Status.RULE_MET
    assert solution.x.tolist() == pytest.approx([0.5, 0.5], abs=0.05)
    assert solution.counts.lower == 3 * solution.steps
    again = solve(chase(c=1e6), tol=None, max_steps=10)
    assert again.history["c"] == [1e6] * 10


def test_it_is_resumed_bit_for_bit(chase, tmp_path):
    whole = solve(chase(), tol=None, max_steps=60)
    solve(chase(), tol=None, max_steps=25, checkpoint=tmp_path / "run.pt")
    rest = solve(chase(), tol=None, max_steps=60, checkpoint=tmp_path / "run.pt")
    assert torch.equal(rest.x, whole.x)
    assert torch.equal(rest.y, whole.y)
    assert rest.history["upper"] == whole.history["upper"]
    with pytest.raises(ValueError, match="start the run with the same method"):
        solve(chase(alpha=0.2), tol=None, max_steps=60, checkpoint=tmp_path / "run.pt")


@pytest.mark.filterwarnings(f"error::{CompileWarning.__module__}.CompileWarning")
def test_it_is_compiled(chase):
    plain, compiled = (solve(chase(), tol=None, max_steps=200, compile=c) for c in (False, True))
    torch.testing.assert_close(compiled.x, plain.x, rtol=1e-12, atol=1e-12)
    assert len(compiled.history["step"]) < 200  # steps were taken in groups
    assert compiled.counts == plain.counts
