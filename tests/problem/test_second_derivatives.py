"""Products with second derivatives where torch cannot differentiate a gradient again: differences of gradients."""

import copy
import warnings

import pytest
import torch
from structures import OnlyOnce
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

import meha
from meha.problem.oracle import Oracle
from meha.running.compiled import CompileWarning
from meha.tensors.variables import Variable

DOUBLE = torch.float64


class Attending(nn.Module):
    """Attention with a kernel of the user's choice, and dropout."""

    def __init__(self, fused, rate=0.0):
        super().__init__()
        self.fused, self.rate = fused, rate
        self.into, self.out = nn.Linear(3, 12), nn.Linear(4, 3)

    def forward(self, tokens):
        q, k, v = self.into(tokens)[:, None].chunk(3, -1)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if self.fused else SDPBackend.MATH):
            return self.out(dropout(scaled_dot_product_attention(q, k, v)[:, 0], self.rate))


def levels(dtype=DOUBLE):
    """F and f of a module on a batch of examples, which x weighs."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randn(2, 6, 4, 3, generator=generator, dtype=DOUBLE).to(dtype)

    def errors(y, batch):
        return (y(tokens[batch]) - targets[batch]).square().mean((1, 2))

    return (
        lambda x, y, batch=slice(None): errors(y, batch).mean(),
        lambda x, y, batch=slice(None): (x[batch].exp() * errors(y, batch)).mean(),
    )


def module(fused, rate=0.0, dtype=DOUBLE):
    torch.manual_seed(0)
    return Attending(fused, rate).to(dtype)


def products(y, batch=None, dtype=DOUBLE, times=1):
    """The oracle, and products of f_xy and f_yy with a fixed vector; those of the last of several times."""
    variables = Variable(torch.linspace(-1, 1, 6, dtype=dtype), "x"), Variable(y, "y")
    oracle, generator = Oracle(meha.Problem(*levels(dtype)), *variables), torch.Generator().manual_seed(1)
    v = [torch.randn(leaf.shape, generator=generator, dtype=DOUBLE).to(dtype) for leaf in variables[1].leaves]
    hessian = oracle.hessian([(1.0, oracle.lower, *variables)], batch)
    for _ in range(times):
        found = hessian(v, *variables)
    return oracle, found


def apart(a, b):
    """The relative distance of two lists of leaves."""
    away, size = (
        sum(part.double().square().sum() for part in parts) for parts in ([u - w for u, w in zip(a, b, strict=True)], b)
    )
    return float((away / size).sqrt())


@pytest.mark.parametrize(("dtype", "most"), [(DOUBLE, 1e-8), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("batch", [None, meha.MicroBatches([slice(0, 2), slice(2, 6, 2)])], ids=["whole", "parts"])
def test_differences_equal_exact_products(dtype, most, batch):
    """They are right to 1e-10 and 1e-4 here. y is where it was, bit for bit."""
    oracle, exact = products(module(False, dtype=dtype), batch, dtype)
    assert (oracle.lacking, oracle.counts) == ("", meha.problem.oracle.Counts(hvp=1))
    y = module(True, dtype=dtype)
    before = [p.detach().clone() for p in y.parameters()]
    oracle, found = products(y, batch, dtype)
    assert "flash_attention" in oracle.lacking
    assert oracle.counts == meha.problem.oracle.Counts(lower=2)
    assert all(map(torch.equal, before, y.parameters()))
    for a, b in zip(found, exact, strict=True):
        assert apart(a, b) < most
        assert apart([-leaf for leaf in a], b) > 1


@pytest.mark.parametrize("times", [1, 2])
def test_dropout_draws_one_mask_for_all_products_at_a_point(times):
    """The one that an exact product has; and what is drawn next is the same as well."""
    found, states = [], []
    for fused in (False, True):
        y = module(fused, rate=0.5)
        torch.manual_seed(3)
        found.append(products(y, times=times)[1])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for a, b in zip(*found, strict=True):
        assert apart(b, a) < 1e-8
    other = products(module(False, rate=0.5), times=times)[1]  # with another mask
    assert apart(other[1], found[0][1]) > 0.1


def test_later_points_need_no_graph():
    """What failed once is not tried again. A gradient that comes with the products is counted once, when it is asked for."""
    y = module(True)
    variables = Variable(torch.zeros(6, dtype=DOUBLE), "x"), Variable(y, "y")
    oracle = Oracle(meha.Problem(*levels()), *variables)
    v = [torch.ones_like(leaf) for leaf in variables[1].leaves]
    oracle.hessian([(1.0, oracle.lower, *variables)], counted=True)(v, variables[1])
    assert (oracle.counts.lower, oracle.counts.hvp) == (1 + 2, 0)  # the gradient of the first graph, and a difference
    _, gradient = oracle.gradient(variables[1], [(1.0, oracle.lower, *variables)])
    hessian = oracle.hessian([(1.0, oracle.lower, *variables)], counted=True)
    assert oracle.counts.lower == 4
    assert all(torch.equal(a, b) for a, b in zip(hessian.gradient, gradient, strict=True))
    hessian(v, variables[1])
    assert hessian.gradient is hessian.gradient
    assert (oracle.counts.lower, oracle.counts.hvp) == (4 + 1 + 2, 0)


def once(x, y):
    return OnlyOnce.apply(y) - (x * y).sum() + 0.1 * (x * y).square().sum()


def smooth(x, y):
    return (y.square() / 2).sum() - (x * y).sum() + 0.1 * (x * y).square().sum()


def upper(x, y):
    return (y - 1).square().sum() + 0.1 * x.square().sum()


START = torch.full((3,), 0.5, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)

UNROLLED = {
    "RHG": meha.RHG(alpha=0.3, beta=0.3, inner_steps=5),
    "IAPTT": meha.IAPTT(alpha=0.1, beta=0.3, inner_steps=5),
    "CG": meha.CG(alpha=0.3, beta=0.3, inner_steps=5, cg_steps=3),
    "SOBA": meha.stochastic.SOBA(alpha=0.1, beta=0.3, eta=0.3),
    "BDA": meha.BDA(alpha=0.1, beta=0.3, inner_steps=5),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_runs_take_differences_and_say_so_once(name):
    expected = meha.solve(meha.Problem(upper, smooth), *START, UNROLLED[name], max_steps=20, tol=None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        solution = meha.solve(meha.Problem(upper, once), *START, UNROLLED[name], max_steps=20, tol=None)
    assert [warning.category for warning in told] == [meha.TrainingWarning]
    assert f"{name} takes products with second derivatives as differences of two gradients" in str(told[0].message)
    assert "differences of gradients" in solution.report["products"]
    assert solution.counts.hvp == 0 < expected.counts.hvp
    torch.testing.assert_close(solution.x, expected.x, rtol=0, atol=1e-8)
    assert float((solution.x - START[0]).abs().max()) > 0.01


class Marked(torch.autograd.Function):
    """z -> z^2, marked as differentiable once: torch raises in some second backward passes, and in others it goes on with 0."""

    @staticmethod
    def forward(context, z):
        context.save_for_backward(z)
        return z.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        return 2 * context.saved_tensors[0] * grad


@pytest.mark.parametrize("inside", [lambda z: z, lambda z: (z / 2).exp()], ids=["linear", "curved"])
@pytest.mark.parametrize("method", [meha.RHG(inner_steps=50), meha.CG(inner_steps=50)], ids=["RHG", "CG"])
def test_marked_functions_are_no_zeros(method, inside):
    """Whatever the gradient that reaches the function: both parts of f count."""

    def problem(square):
        return meha.Problem(
            lambda x, y: (y - 2).square().sum() + (x - 1).square().sum(),
            lambda x, y: inside(square(y - x)).sum() + (x * y - 1).square().sum(),
        )

    expected = meha.solve(problem(torch.square), *START, method)
    with pytest.warns(meha.TrainingWarning, match="MarkedBackward is marked with once_differentiable"):
        solution = meha.solve(problem(Marked.apply), *START, method)
    torch.testing.assert_close(solution.x, expected.x, rtol=0, atol=1e-6)
    assert meha.solve(problem(Marked.apply), *START, meha.ImplicitNewton()).status is meha.Status.BROKE_DOWN
    assert not meha.check(problem(Marked.apply), *START).twice


def test_random_numbers_of_tensors_are_repeated_as_well():
    """f draws a mask in each call: with two masks, a difference would be their noise divided by its length."""

    def drawn(x, y):
        return once(x, dropout(y, 0.5))

    run = meha.RHG(alpha=0.1, beta=0.3, inner_steps=3).start(meha.Problem(upper, drawn), *START)
    torch.manual_seed(0)
    with pytest.warns(meha.TrainingWarning, match="differences"):
        sizes = [run.step()["d_x"] for _ in range(10)]
    assert max(sizes) < 100


@pytest.mark.filterwarnings("ignore:torch cannot differentiate")
def test_runs_with_differences_resume_bit_for_bit(tmp_path):
    def solve(steps, **options):
        return meha.solve(meha.Problem(upper, once), *START, UNROLLED["RHG"], max_steps=steps, tol=None, **options)

    whole = solve(6)
    solve(3, checkpoint=tmp_path / "run.pt")
    again = solve(6, checkpoint=tmp_path / "run.pt")
    assert torch.equal(again.x, whole.x)
    assert again.counts == whole.counts


@pytest.mark.parametrize("kind", [meha.RHG, meha.BDA, meha.IAPTT])
def test_kept_graphs_are_refused(kind):
    run = kind(alpha=0.1, beta=0.1, keep_graph=True).start(meha.Problem(upper, once), *START)
    with pytest.raises(
        ValueError, match=r"keep_graph: torch has no second derivatives here .double backward.; leave keep_graph"
    ):
        run.step()


def test_steps_with_differences_are_not_compiled():
    with pytest.warns(meha.TrainingWarning, match="differences"), pytest.warns(CompileWarning, match="same random numbers"):
        meha.solve(meha.Problem(upper, once), *START, UNROLLED["RHG"], max_steps=80, tol=None, compile=True)


def test_other_errors_pass():
    def wrong(x, y):
        return (y * torch.ones(2, dtype=DOUBLE)).sum() if torch.is_grad_enabled() else y.sum()

    run = meha.CG(alpha=0.1, beta=0.1).start(meha.Problem(upper, wrong), *START)
    with pytest.raises(RuntimeError, match="must match the size"):
        run.step()


def test_compiled_modules():
    """x moves as with the module itself; torch's compiler has many words for what it cannot do."""
    ends = []
    for compiled in (False, True):
        y = module(False)
        y = torch.compile(y, backend="aot_eager") if compiled else y
        problem, method = meha.Problem(*levels()), meha.RHG(alpha=1.0, beta=0.1, inner_steps=2)
        x0 = torch.zeros(6, dtype=DOUBLE)
        if not compiled:
            ends.append(meha.solve(problem, x0, y, method, max_steps=2, tol=None).x)
            continue
        with pytest.warns(meha.TrainingWarning, match="torch.compile makes code for first derivatives only"):
            ends.append(meha.solve(problem, x0, y, method, max_steps=2, tol=None).x)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=0)
    assert float(ends[0].abs().max()) > 1e-4


# Engines


def test_engines_say_what_they_need():
    problem = meha.Problem(upper, once)
    solution = meha.solve(problem, *START, meha.ImplicitNewton())
    assert solution.status is meha.Status.BROKE_DOWN
    assert "Torch has no second derivatives of this problem (double backward)" in solution.message
    assert "Take the default" in solution.message
    solution = meha.solve(problem, *START)
    assert solution.converged
    assert solution.engine == "PenaltyContinuation"
    rows = meha.constraints.Linear(
        torch.eye(3, dtype=DOUBLE), torch.zeros(3, 3, dtype=DOUBLE), -5 * torch.ones(3, dtype=DOUBLE)
    )
    with pytest.raises(ValueError, match=r"upper, lower: torch has no second derivatives here .*or LVHBA"):
        meha.solve(meha.Problem(upper, once, lower_constraints=rows), *START)


# The check before a run


def test_a_check_says_whether_f_can_be_differentiated_twice():
    report = meha.check(meha.Problem(upper, smooth), *START)
    assert report.twice
    assert "derivatives of f in y agree with differences of gradients" in str(report)
    report = meha.check(meha.Problem(upper, once), *START)
    assert report.twice is False
    assert report.ok  # the default has engines for it
    assert "torch cannot differentiate f twice (double backward)" in dict(report.findings)["second"]


def test_a_check_warns_where_the_method_needs_it():
    trained = meha.responses.Trained(steps=3, lr=0.1)
    report = meha.check(meha.Problem(*levels(), response=trained), torch.zeros(6, dtype=DOUBLE), module(True))
    (warning,) = report.warnings
    assert warning.startswith("lower: cannot be differentiated twice (derivative for aten::_scaled_dot_product_flash_attention")
    assert "as RHG does" in warning
    assert meha.check(meha.Problem(*levels(), response=trained), torch.zeros(6, dtype=DOUBLE), module(False)).ok


class Silent(torch.autograd.Function):
    """y -> y^2, with a backward pass that can be differentiated again, and then gives a wrong result."""

    @staticmethod
    def forward(context, y):
        context.save_for_backward(y)
        return y.square()

    @staticmethod
    def backward(context, grad):
        (y,) = context.saved_tensors
        return grad * 2 * y.detach()


def test_a_check_finds_wrong_second_derivatives():
    report = meha.check(meha.Problem(upper, lambda x, y: Silent.apply(y - x).sum()), *START)
    (warning,) = report.warnings
    assert warning.startswith("lower: its second derivative in y deviates from differences of gradients (relative error 1.0")
    assert report.twice is False


def test_a_check_changes_nothing_of_a_module():
    y = module(True, rate=0.5)
    state, random = copy.deepcopy(y.state_dict()), torch.get_rng_state()
    report = meha.check(meha.Problem(*levels()), torch.zeros(6, dtype=DOUBLE), y)
    assert report.twice is False
    assert all(torch.equal(state[name], value) for name, value in y.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
