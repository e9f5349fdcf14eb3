"""The engines as methods that a user names: what they find, claim, print and refuse, and that they resume bit for bit."""

import pytest
import torch

import meha
from meha import ActiveSets, ImplicitNewton, PenaltyContinuation
from meha.methods import Default
from meha.problem.losses import LeastSquares

F64 = torch.float64


def ridge(n=4):
    generator = torch.Generator().manual_seed(3)
    A, A2 = torch.randn(2, 20, n, generator=generator, dtype=F64)
    b, b2 = torch.randn(2, 20, generator=generator, dtype=F64)
    train, valid = LeastSquares(A, b), LeastSquares(A2, b2)
    return meha.Problem(
        lambda x, y: valid(y), lambda x, y: train(y) + 0.5 * (x.exp() * y.square()).sum(), x_set=meha.sets.Box(-4, 4)
    )


def zeros(n=4):
    return torch.zeros(n, dtype=F64)


@pytest.mark.parametrize("engine", [ImplicitNewton(), PenaltyContinuation(), PenaltyContinuation(lower_first=True)], ids=str)
def test_engines_alone_end_where_the_default_does_and_claim_nothing(engine):
    expected = meha.solve(ridge(), zeros(), zeros())
    solution = meha.solve(ridge(), zeros(), zeros(), engine)
    assert solution.upper == pytest.approx(expected.upper, rel=1e-6)
    assert solution.status is meha.Status.RULE_MET
    assert "Nothing was verified" in solution.message
    assert str(solution).startswith(f"{type(engine).__name__}: rule met after ")
    assert solution.counts.lower + solution.counts.hvp < expected.counts.lower + expected.counts.hvp


def test_the_default_names_the_engine_of_its_answer():
    assert meha.solve(ridge(), zeros(), zeros()).engine == "ImplicitNewton"
    assert meha.solve(ridge(), zeros(), zeros(), Default(second_order=False)).engine == "PenaltyContinuation"
    coupled = meha.Problem(
        lambda x, y: ((x - 2) ** 2 + y**2).sum(),
        lambda x, y: ((y - 2) ** 2).sum(),
        lower_constraints=meha.constraints.Linear(
            torch.ones(1, 1, dtype=F64), torch.ones(1, 1, dtype=F64), torch.ones(1, dtype=F64)
        ),
    )
    for method in (None, ActiveSets()):
        solution = meha.solve(coupled, zeros(1), zeros(1), method)
        assert solution.engine == "ActiveSets"
        assert str(solution).startswith("ActiveSets: converged")
        assert float(solution.x) == pytest.approx(1.5)  # y = 1 - x, so that F = (x - 2)^2 + (1 - x)^2
        assert float(solution.y) == pytest.approx(-0.5)


@pytest.mark.parametrize("engine", [ImplicitNewton(), PenaltyContinuation()], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_engines_resume_bit_for_bit(engine, cut):
    whole = engine.start(ridge(), zeros(), zeros())
    while whole.verdict is None:
        whole.step()
    first = engine.start(ridge(), zeros(), zeros())
    for _ in range(cut):
        first.step()
    other = engine.start(ridge(), zeros(), zeros())
    other.load_state_dict(first.state_dict())
    while other.verdict is None:
        other.step()
    assert torch.equal(other.x, whole.x)
    assert torch.equal(other.y, whole.y)
    assert (other.k, other.counts, other.verdict) == (whole.k, whole.counts, whole.verdict)
    finished = engine.start(ridge(), zeros(), zeros())
    finished.load_state_dict(other.state_dict())
    assert finished.verdict == whole.verdict


def test_engines_refuse_what_they_cannot_take():
    net = torch.nn.Linear(2, 1)
    problem = meha.Problem(lambda x, y: y.weight.square().sum() + x.sum(), lambda x, y: (y.weight - x).square().sum())
    with pytest.raises(ValueError, match="ImplicitNewton cannot take this problem: x or y has modules; use the default"):
        meha.solve(problem, torch.zeros(1), net, ImplicitNewton())
    with pytest.raises(TypeError, match="ActiveSets takes tensors, not modules"):
        meha.solve(problem, torch.zeros(1), net, ActiveSets())
    with pytest.raises(ValueError, match="method: PenaltyContinuation compares values"):
        meha.solve(
            meha.Problem(lambda x, y, b: y.sum(), lambda x, y, b: y.sum()),
            zeros(1),
            zeros(1),
            PenaltyContinuation(),
            batches=[1],
        )
    with pytest.raises(ValueError, match="max_gradients"):
        ImplicitNewton(max_gradients=0)
    nearest = meha.Problem(lambda x, y: y.sum(), lambda x, y: (y - x).square().sum(), response=meha.responses.Nearest())
    with pytest.raises(ValueError, match="response"):
        meha.solve(nearest, zeros(1), zeros(1), ImplicitNewton())
