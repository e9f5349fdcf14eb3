"""Losses of linear models: values and derivatives against plain expressions, accuracy, whole runs, tracing, errors."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy, softplus

import meha
from meha.problem.losses import LeastSquares, Logistic, Softmax

N, K = 30, 3


def data(p, dtype=torch.float64, seed=0):
    """A of N rows, targets in three forms, y as a vector and as a matrix, and weights."""
    rng = np.random.default_rng(seed)
    A, b, B = rng.normal(size=(N, p)), rng.normal(size=N), rng.normal(size=(N, K))
    y, Y, weights = rng.normal(size=p), rng.normal(size=(p, K)), rng.uniform(size=N)
    A, b, B, y, Y, weights = (torch.tensor(part, dtype=dtype) for part in (A, b, B, y, Y, weights))
    return A, b, B, y, Y, weights


def cases(p, dtype=torch.float64, reduction="mean", sparse=False):
    """Name -> loss, the losses of single examples as a plain expression of y, and a point y."""
    A, b, B, y, Y, _ = data(p, dtype)
    signs, labels = b.sign(), B.argmax(1)
    D = compressed(A) if sparse else A
    return {
        "least squares": (LeastSquares(D, b, reduction), lambda y: 0.5 * (A @ y - b) ** 2, y),
        "least squares, other path": (LeastSquares(D, b, reduction, gram=p > N), lambda y: 0.5 * (A @ y - b) ** 2, y),
        "outputs": (LeastSquares(D, B, reduction), lambda y: 0.5 * ((A @ y - B) ** 2).sum(1), Y),
        "logistic": (Logistic(D, signs, reduction), lambda y: softplus(-signs * (A @ y)), y),
        "logistic, 0 and 1": (Logistic(D, (b > 0).long(), reduction), lambda y: softplus(-signs * (A @ y)), y),
        "softmax": (Softmax(D, labels, reduction=reduction), lambda y: cross_entropy(A @ y, labels, reduction="none"), Y),
    }


NAMES = list(cases(5))


def compressed(A):
    with warnings.catch_warnings():  # torch calls the layout a beta
        warnings.simplefilter("ignore")
        return A.to_sparse_csr()


def total(each, reduction="mean", weights=None):
    each = each if weights is None else weights * each
    return each.mean() if reduction == "mean" else each.sum()


def derivatives(function, *inputs):
    """The value, the gradients, and second derivatives in a direction, by two backward passes."""
    inputs = [part.clone().requires_grad_() for part in inputs]
    value = function(*inputs)
    first = torch.autograd.grad(value, inputs, create_graph=True)
    directional = sum((part * torch.cos(torch.arange(part.numel()).to(part)).reshape(part.shape)).sum() for part in first)
    return [value, *first, *torch.autograd.grad(directional, inputs)]


def assert_same(actual, expected, tol):
    for a, b in zip(actual, expected, strict=True):
        a, b = a.detach(), b.detach()
        assert a.dtype == b.dtype
        assert float((a - b).norm()) <= tol * max(1.0, float(b.norm()))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("p", [5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_derivatives_are_those_of_the_plain_expression(name, p, reduction, dtype, sparse):
    loss, each, y = cases(p, dtype, reduction, sparse)[name]
    tol = 1e-12 if dtype == torch.float64 else 2e-5
    actual = derivatives(loss, y)
    assert_same(actual, derivatives(lambda y: total(each(y), reduction), y), tol)
    weights = data(p, dtype)[-1]
    weighted = derivatives(lambda y, w: loss(y, weights=w.sigmoid()), y, weights)
    assert_same(weighted, derivatives(lambda y, w: total(each(y), reduction, w.sigmoid()), y, weights), tol)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("p", [5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_hessians_are_those_of_the_plain_expression(name, p, reduction, sparse, monkeypatch):
    loss, each, y = cases(p, reduction=reduction, sparse=sparse)[name]
    monkeypatch.setattr(meha.losses, "PART", 7 * y.numel())  # so that the data come in several parts
    for weights in (None, data(p)[-1] - 0.3):
        expected = torch.autograd.functional.hessian(lambda y, w=weights: total(each(y), reduction, w), y).reshape(
            y.numel(), -1
        )
        assert_same([loss.hessian(y, weights)], [expected], 1e-12)
    with pytest.raises(ValueError, match="weights: are"):
        loss.hessian(y, torch.ones(N + 1, dtype=y.dtype))


@pytest.mark.parametrize("p", [4, 40])
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_agree_with_differences(name, p):
    loss, _, y = cases(p)[name]
    weights = data(p)[-1]
    part = y.clone()[:4].requires_grad_()

    def of_part(part, *rest):
        return loss(torch.cat([part, y[4:]]), *rest)

    assert torch.autograd.gradcheck(of_part, part)
    assert torch.autograd.gradgradcheck(of_part, part)
    assert torch.autograd.gradgradcheck(of_part, (part, weights.requires_grad_()))


@pytest.mark.parametrize("p", [5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_traced_gradients_equal_eager_ones(name, p):
    loss, _, y = cases(p)[name]
    weights = data(p)[-1]

    def gradient(y):
        y = y.detach().requires_grad_()
        value = loss(y)
        return value, torch.autograd.grad(value, y)[0]

    def products(y, w):
        return derivatives(loss, y, w)

    other = 2 * y + 1  # the graph must not hold numbers of the point where it was traced
    assert_same(make_fx(gradient)(y)(other), gradient(other), 1e-13)
    assert_same(make_fx(products)(y, weights)(other, 1 - weights), products(other, 1 - weights), 1e-13)


@pytest.mark.parametrize(("p", "chosen"), [(5, True), (N - 1, True), (N + 1, False)])
def test_gram_matrix_is_used_where_it_is_no_larger_than_the_data(p, chosen):
    """Then nothing of the size of the examples is computed in a call."""
    A, b, _, y, _, _ = data(p)
    for gram in (None, True, False):
        graph = make_fx(LeastSquares(A, b, gram=gram))(y).graph
        shapes = {tuple(node.meta["val"].shape) for node in graph.nodes if "val" in node.meta}
        assert ((N,) not in shapes) is (chosen if gram is None else gram)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("away", [0.0, 1e-3, 1.0, 1e3])
def test_gram_matrix_is_as_accurate_as_the_residual(away, dtype, noise):
    """Against extended precision, down to a zero residual; columns in units from 1e-3 to 1e3."""
    rng = np.random.default_rng(3)
    units = np.geomspace(1e-3, 1e3, 8)
    A = torch.tensor(rng.integers(-8, 8, size=(500, 8)) * units).to(dtype)
    v = torch.tensor(rng.integers(-8, 8, size=8) / units).to(dtype)
    b = (A.double() @ v.double() + noise * torch.tensor(rng.normal(size=500))).to(dtype)
    y = v + away * torch.tensor(rng.normal(size=8) / units).to(dtype)

    A_, b_, y_ = (part.numpy().astype(np.longdouble) for part in (A, b, y))
    residual = A_ @ y_ - b_
    value, gradient = residual @ residual / 1000, A_.T @ residual / 500

    def errors(loss):
        at = y.clone().requires_grad_()
        actual = loss(at)
        slope = torch.autograd.grad(actual, at)[0].numpy() - gradient
        return abs(actual.item() - float(value)), float(np.abs(slope / units).max())

    A_, residual = A_.astype(float), residual.astype(float)
    by_gram, by_rows = errors(LeastSquares(A, b)), errors(LeastSquares(A, b, gram=False))
    eps = torch.finfo(dtype).eps
    L = float(np.linalg.norm(A_ / units, 2) ** 2 / 500)  # with all columns in the same units, as are the lengths below
    distance, length = (float((part * torch.tensor(units)).norm()) for part in (y - v, v))
    assert by_gram[0] <= 8 * eps * (float(value) + L * distance * (distance + length)) + by_rows[0] + (eps * length) ** 2 * L
    assert by_gram[1] <= 8 * eps * L * (distance + length) + by_rows[1]


def test_gram_matrix_of_dependent_columns():
    A, b, _, y, _, _ = data(6)
    A = torch.cat([A, A[:, :2], torch.zeros(N, 1, dtype=torch.float64)], dim=1)
    y = torch.cat([y, y[:3]])
    actual = derivatives(LeastSquares(A, b), y)
    assert_same(actual, derivatives(lambda y: total(0.5 * (A @ y - b) ** 2), y), 1e-12)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("p", [5, 40])
def test_lipschitz_constant_is_the_largest_curvature(p, sparse):
    A, b, B, _, _, _ = data(p)
    D = compressed(A) if sparse else A
    top = float(torch.linalg.matrix_norm(A, 2) ** 2)
    for reduction, n in (("mean", N), ("sum", 1)):
        assert LeastSquares(D, b, reduction).lipschitz == pytest.approx(top / n, rel=1e-12)
        assert Logistic(D, b.sign(), reduction).lipschitz == pytest.approx(top / n / 4, rel=1e-12)
        assert Softmax(D, B.argmax(1), reduction=reduction).lipschitz == pytest.approx(top / n / 2, rel=1e-12)
    at = torch.zeros(p, dtype=torch.float64)  # where the logistic loss is curved most
    hessian = torch.autograd.functional.hessian(Logistic(A, b.sign()), at)
    assert float(torch.linalg.eigvalsh(hessian)[-1]) == pytest.approx(top / N / 4, rel=1e-12)


def stated(kind, p):
    """The same problem with losses and with plain expressions: weights of features, or of examples, learned on other data."""
    train, each, y = cases(p)[kind]
    A2, b2, B2, _, _, _ = data(p, seed=1)
    if kind == "least squares":
        valid, plain = LeastSquares(A2, b2), lambda y: 0.5 * (A2 @ y - b2).square().mean()
    elif kind == "logistic":
        valid, plain = Logistic(A2, b2.sign()), lambda y: softplus(-b2.sign() * (A2 @ y)).mean()
    else:
        valid, plain = Softmax(A2, B2.argmax(1)), lambda y: cross_entropy(A2 @ y, B2.argmax(1))
    return train, each, valid, plain, torch.zeros_like(y)


@pytest.mark.parametrize(
    "method", [meha.MEHA(), meha.MEHA(gamma=10.0, c=2.0), meha.RHG(inner_steps=5), meha.CG(), meha.GALET()]
)
@pytest.mark.parametrize(("kind", "p"), [("least squares", 5), ("least squares", 40), ("logistic", 5), ("softmax", 5)])
def test_runs_equal_those_with_plain_expressions(kind, p, method):
    train, each, valid, plain, y0 = stated(kind, p)
    ridge = lambda x, y: 0.5 * (x.exp() * y.square().flatten(1 if y.ndim > 1 else 0)).sum()  # noqa: E731
    weights = lambda x: x.sigmoid()  # noqa: E731
    pairs = [
        (lambda x, y: train(y) + ridge(x, y), lambda x, y: each(y).mean() + ridge(x, y), torch.zeros(1, dtype=y0.dtype)),
        (
            lambda x, y: train(y, weights=weights(x)) + 0.05 * y.square().sum(),
            lambda x, y: (weights(x) * each(y)).mean() + 0.05 * y.square().sum(),
            torch.zeros(N, dtype=y0.dtype),
        ),
    ]
    for lower, plain_lower, x0 in pairs:
        ends = []
        for F, f in ((lambda x, y: valid(y), lower), (lambda x, y: plain(y), plain_lower)):
            run = method.start(meha.Problem(F, f), x0, y0)
            for _ in range(10):
                run.step()
            ends.append((run.x, run.y))
        assert_same(*ends, 1e-7)
        assert float((ends[0][0] - x0).norm()) > 0
        assert float((ends[0][1] - y0).norm()) > 1e-3


def test_intercept_is_a_column_of_ones():
    """With a part of y of its own, which no term of g shrinks."""
    A, b, _, _, _, _ = data(5)
    train = LeastSquares(torch.cat([A, torch.ones(N, 1, dtype=A.dtype)], dim=1), b + 7)
    problem = meha.Problem(
        upper=lambda x, y: y["coef"].square().sum() + x.square().sum(),
        lower=lambda x, y: train(torch.cat([y["coef"], y["intercept"]])),
        nonsmooth=meha.nonsmooth.L1(100.0, part="coef"),
    )
    y0 = {"coef": torch.ones(5, dtype=A.dtype), "intercept": torch.zeros(1, dtype=A.dtype)}
    theta = meha.diagnostics.envelope(problem, torch.zeros(1, dtype=A.dtype), y0, gamma=1e6).theta
    assert theta["coef"].abs().max() == 0
    assert float(theta["intercept"]) == pytest.approx(float(b.mean()) + 7, rel=1e-5)


A, B, Y = torch.ones(4, 2), torch.ones(4), torch.ones(2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LeastSquares(A.numpy(), B), TypeError, "A: must be a tensor, got ndarray; .*torch.as_tensor"),
        (lambda: LeastSquares(A.to_sparse(), B), ValueError, r"A: .*torch.sparse_coo; .*to_sparse_csr"),
        (lambda: LeastSquares(B, B), ValueError, r"A: must be a matrix .* got \(4,\) torch.float32"),
        (lambda: LeastSquares(A.long(), B), ValueError, r"A: .* got \(4, 2\) torch.int64"),
        (lambda: LeastSquares(A[:0], B[:0]), ValueError, r"A: .* got \(0, 2\)"),
        (lambda: LeastSquares(A.clone().requires_grad_(), B), ValueError, r"A: requires a gradient.*A.detach\(\)"),
        (lambda: LeastSquares(A / 0, B), ValueError, "A: contains NaN or infinite"),
        (lambda: LeastSquares(A, B * torch.nan), ValueError, "b: contains NaN"),
        (lambda: LeastSquares(A, B.numpy()), TypeError, "b: must be a tensor, got ndarray"),
        (lambda: LeastSquares(A, B[:3]), ValueError, r"b: is \(3,\) torch.float32, but A has 4 rows"),
        (lambda: LeastSquares(A, B.double()), ValueError, "b: is torch.float64, but A is torch.float32; convert"),
        (lambda: LeastSquares(A, B.to("meta")), ValueError, "b: is on meta, but A is on cpu; move"),
        (lambda: LeastSquares(A, B.clone().requires_grad_()), ValueError, r"b: requires a gradient.*b.detach\(\)"),
        (lambda: LeastSquares(A, B, "none"), ValueError, "reduction: must be 'mean' or 'sum', got 'none'"),
        (lambda: Logistic(A, torch.tensor([0, 1, -1, 0])), ValueError, "labels: .* got -1, 0, 1; .*Softmax"),
        (lambda: Logistic(A, torch.tensor([1.0, 2, 1, 1])), ValueError, "labels: must be -1 and 1, or 0 and 1, got 1, 2;"),
        (lambda: Logistic(A, B * torch.nan), ValueError, "labels: .* got nan"),
        (lambda: Logistic(A, A), ValueError, r"labels: is \(4, 2\)"),
        (lambda: Softmax(A, B), TypeError, r"labels: .* got torch.float32; .*long\(\)"),
        (lambda: Softmax(A, B.long() - 2), ValueError, "labels: must lie in 0 to -?[0-9]+, got -1; number"),
        (lambda: Softmax(A, B.long(), classes=1), ValueError, "labels: must lie in 0 to 0, got 1;"),
        (
            lambda: LeastSquares(A, B)(torch.ones(3)),
            ValueError,
            r"y: is \(3,\) .*, expected \(2,\) .* 4 examples with 2 feat",
        ),
        (lambda: LeastSquares(A, B)(Y.double()), ValueError, r"y: is \(2,\) torch.float64, expected \(2,\) torch.float32"),
        (lambda: Softmax(A, B.long())(Y), ValueError, r"y: is \(2,\) .* expected \(2, 2\)"),
        (lambda: Logistic(A, B)(Y, Y), ValueError, r"weights: are \(2,\) .* expected \(4,\) .* one for each example"),
    ],
)
def test_errors_name_argument_value_and_remedy(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("kind", ["least squares", "logistic", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_data_are_held_by_columns(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(2048, 9, dtype=dtype, generator=generator)
    b, weights = torch.randn(2048, dtype=dtype, generator=generator), torch.rand(2048, dtype=dtype, generator=generator)
    labels = torch.randint(3, (2048,), generator=generator)
    y = torch.randn(9, dtype=dtype, generator=generator)
    if kind == "least squares":
        loss, each = LeastSquares(A, b, gram=False), lambda y: 0.5 * (A @ y - b).square()
    elif kind == "logistic":
        loss, each = Logistic(A, b > 0), lambda y: softplus(-b.sign() * (A @ y))
    else:
        loss, each, y = Softmax(A, labels), lambda y: cross_entropy(A @ y, labels, reduction="none"), y.outer(y[:3])
    assert loss.A.stride() == (1, 2048)
    tol = 1e-12 if dtype == torch.float64 else 1e-4
    assert_same(derivatives(loss, y), derivatives(lambda y: each(y).mean(), y), tol)
    assert_same(derivatives(loss, y, weights), derivatives(lambda y, w: (w * each(y)).mean(), y, weights), tol)


def test_data_stay_as_they_are():
    A, b, _, y, _, _ = data(5)
    before = A.clone(), b.clone(), y.clone()
    for loss in (LeastSquares(A, b), Logistic(A, b.sign())):
        derivatives(loss, y)
        assert loss.A is A
    assert all(torch.equal(new, old) for new, old in zip((A, b, y), before, strict=True))
    assert repr(LeastSquares(A, b)) == "LeastSquares(30 x 5, mean)"


PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


@pytest.mark.slow
def test_example_on_the_page_prints_what_it_says(capsys):
    example, printed = (PAGE.read_text().split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    exec(example, {})
    assert capsys.readouterr().out == printed


def test_least_squares_works_inside_of_transforms_of_torch():
    """torch.func does not take the quick derivative of our own, and needs none."""
    generator = torch.Generator().manual_seed(2)
    A, b = torch.randn(20, 3, generator=generator), torch.randn(20, generator=generator)
    loss, points = LeastSquares(A, b), torch.randn(4, 3, generator=generator)
    assert torch.allclose(torch.func.vmap(loss)(points), torch.stack([loss(y) for y in points]))
    assert torch.allclose(torch.func.jacrev(torch.func.jacrev(loss))(points[0]), A.T @ A / 20, atol=1e-5)
