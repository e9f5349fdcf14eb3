"""Losses of linear models, with Hessians in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, huber_loss, logsigmoid, one_hot

from meha.tensors.checks import check_count
from meha.tensors.torch_private import in_transform

__all__ = ["Huber", "LeastSquares", "LinearModelLoss", "Logistic", "Softmax"]

Reduction = Literal["mean", "sum"]

PART = 1 << 22  # entries of the largest temporary matrix of a softmax Hessian, which bounds its memory
LARGE = 1 << 14  # entries from which the memory layout of the data matters for speed


def stored(A: Tensor) -> Tensor:
    """Return the numbers that A stores in memory: of a sparse matrix, the non-zeros."""
    return A.values() if A.layout == torch.sparse_csr else A


def by_columns(A: Tensor) -> Tensor:
    """Return A, stored by columns if it is large, dense, on a CPU and has more rows than columns."""
    suits = A.layout == torch.strided and A.device.type == "cpu" and A.numel() >= LARGE and A.shape[0] > A.shape[1]
    return A.t().contiguous().t() if suits else A


def gram(A: Tensor) -> Tensor:
    """Return A'A in double precision."""
    A = A.double()  # A'A has the square of the condition number of A
    product = A.t() @ A
    return product if product.layout == torch.strided else product.to_dense()


def check_data(A: Tensor) -> None:
    """Raise unless A can be the data of a loss."""
    if not isinstance(A, Tensor):
        raise TypeError(f"A: must be a tensor, got {type(A).__name__}; wrap arrays with torch.as_tensor.")
    if A.layout not in (torch.strided, torch.sparse_csr):
        raise ValueError(f"A: must be dense or sparse_csr, got the layout {A.layout}; convert it with .to_sparse_csr().")
    if A.ndim != 2 or not A.shape[0] or not A.shape[1] or A.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"A: must be a matrix of float32 or float64, an example in each row, got {shown(A)}; convert it.")
    if A.requires_grad:
        raise ValueError("A: requires a gradient, but the data of a loss are constants; pass A.detach().")
    if not bool(stored(A).isfinite().all()):
        raise ValueError("A: contains NaN or infinite numbers; remove or impute them.")


def check_targets(name: str, targets: Tensor, A: Tensor, dimensions: tuple[int, ...] = (1,), *, real: bool = False) -> None:
    """Raise unless the targets, of these numbers of dimensions, fit the data; ``real`` ones are finite and of its dtype."""
    if not isinstance(targets, Tensor):
        raise TypeError(f"{name}: must be a tensor, got {type(targets).__name__}; wrap arrays with torch.as_tensor.")
    if targets.ndim not in dimensions or len(targets) != len(A):
        raise ValueError(f"{name}: is {shown(targets)}, but A has {len(A)} rows; pass one entry for each.")
    if targets.device != A.device:
        raise ValueError(f"{name}: is on {targets.device}, but A is on {A.device}; move one of them.")
    if targets.requires_grad:
        raise ValueError(f"{name}: requires a gradient, but the data of a loss are constants; pass {name}.detach().")
    if real and targets.dtype != A.dtype:
        raise ValueError(f"{name}: is {targets.dtype}, but A is {A.dtype}; convert one of them.")
    if real and not bool(targets.isfinite().all()):
        raise ValueError(f"{name}: contains NaN or infinite numbers; remove these examples.")


def shown(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor as text."""
    return f"{tuple(tensor.shape)} {tensor.dtype}"


class LossCall(NamedTuple):
    """A recorded call of a loss; ``value`` is a leaf of the graph that replaces its result."""

    function: LinearModelLoss
    y: Tensor
    weights: Tensor | None
    value: Tensor


_RECORDER: ContextVar[tuple[Sequence[Tensor], list[LossCall]] | None] = ContextVar("recorder", default=None)
"""The tensors at which calls are recorded, and the calls; threads do not see each other's."""


@contextmanager
def record_known_hessians(leaves: Sequence[Tensor]) -> Iterator[list[LossCall]]:
    """Record the calls at one of these tensors; autograd then sees the objective without them."""
    calls: list[LossCall] = []
    token = _RECORDER.set((leaves, calls))
    try:
        yield calls
    finally:
        _RECORDER.reset(token)


class LinearModelLoss(ABC):
    """Base class: the mean or sum of l_i(<a_i, y>) over the rows a_i of A, with optional weights.

    Attributes:
        A: the data, one example per row; dense, or sparse in the layout ``torch.sparse_csr``. On a CPU, large dense data with
            more rows than columns are stored by columns (copied if necessary), which makes products up to twice as fast.
        shape: of the coefficients y.
        reduction: "mean" or "sum".
    """

    A: Tensor
    shape: tuple[int, ...]
    reduction: Reduction
    _curvature: float
    """Largest second derivative of l_i in any direction."""

    def __init__(self, A: Tensor, columns: tuple[int, ...], reduction: Reduction) -> None:
        if str(reduction) not in ("mean", "sum"):
            raise ValueError(f"reduction: must be 'mean' or 'sum', got {reduction!r}.")
        self.A, self.shape, self.reduction = A, (A.shape[1], *columns), reduction
        self._scale = 1 / len(A) if reduction == "mean" else 1.0

    def __call__(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss at the coefficients y, with an optional weight for each example."""
        self._check(y, weights)
        value = self._total(y) if weights is None else torch.dot(weights, self._each(y)) * self._scale
        recorder = _RECORDER.get()
        if recorder is None or self.A.layout != torch.strided:  # a Hessian of sparse data would be dense
            return value
        leaves, calls = recorder
        if not any(y is leaf for leaf in leaves):  # the formula is for y itself, not functions of it
            return value
        stand_in = value.detach().requires_grad_()  # its gradient is the weight of the loss in the objective
        calls.append(LossCall(self, y, weights, stand_in))
        return stand_in

    def hessian(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """The second derivatives at y by a formula, as a matrix with a row for each entry of ``y.reshape(-1)``.

        It takes the time of one product A'A, or less; sparse data are made dense.

        >>> loss = Logistic(torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.tensor([0, 1]))
        >>> loss.hessian(torch.zeros(2))  # A'A / 4 / 2
        tensor([[0.6250, 0.2500],
                [0.2500, 0.1250]])
        """
        self._check(y, weights)
        with torch.no_grad():
            return self._hessian(y, weights)

    def _check(self, y: Tensor, weights: Tensor | None) -> None:
        A = self.A
        if y.shape != self.shape or y.dtype != A.dtype:
            data = f"{len(A)} examples with {A.shape[1]} features"
            raise ValueError(f"y: is {shown(y)}, expected {self.shape} {A.dtype} for {data}; reshape or convert it, or A.")
        if weights is not None and (weights.shape != A.shape[:1] or weights.dtype != A.dtype):
            raise ValueError(f"weights: are {shown(weights)}, expected {(len(A),)} {A.dtype}; pass one for each example.")

    def _total(self, y: Tensor) -> Tensor:
        """Return the loss without weights."""
        return self._each(y).sum() * self._scale

    def _each(self, y: Tensor) -> Tensor:
        """Return the losses l_i of all examples."""
        return self.losses(self.A @ y)

    @abstractmethod
    def losses(self, scores: Tensor) -> Tensor:
        """l_i at the scores A y of many models: (..., n) from (..., n), or from (..., n, outputs) for several outputs."""

    @abstractmethod
    def slopes(self, scores: Tensor) -> Tensor:
        """Derivatives of :meth:`losses` by the scores, in their shape."""

    @abstractmethod
    def curvatures(self, scores: Tensor) -> Tensor:
        """Second derivatives of :meth:`losses` by the scores; for :class:`Softmax` the probabilities q, with diag(q) - q q'."""

    def _hessian(self, y: Tensor, weights: Tensor | None) -> Tensor:
        """Return the second derivatives of a loss with one output."""
        curvatures = self.curvatures(self.A @ y)
        return self._weighted_gram(curvatures if weights is None else weights * curvatures)

    def _weighted_gram(self, weights: Tensor) -> Tensor:
        """Return A' diag(weights) A, times the scale of the loss."""
        A = self._dense
        return A.t() @ (A * (self._scale * weights)[:, None])

    @property
    def _dense(self) -> Tensor:
        return self.A if self.A.layout == torch.strided else self.A.to_dense()

    @cached_property
    def lipschitz(self) -> float:
        """Lipschitz constant of the gradient in y without weights; with weights, at most this times the largest weight.

        It is the largest eigenvalue of A'A times the largest second derivative of l_i (a bound for the logistic and softmax
        loss), computed once from a dense matrix of min(rows, columns)^2 numbers.
        """
        A = self.A if len(self.A) >= self.shape[0] else self.A.t()  # A'A and AA' have the same largest eigenvalue
        return self._curvature * self._scale * float(torch.linalg.eigvalsh(gram(A))[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.A)} x {self.shape[0]}, {self.reduction})"


class LeastSquares(LinearModelLoss):
    """Least squares: l_i(z) = (z - b_i)^2 / 2, so the loss is ||A y - b||^2 / (2 n).

    With at least as many examples n as features p, the p^2 numbers of the Gram matrix A'A replace the n p of the data: with
    d = y - y* for a minimiser y*, value and gradient come from the single product A'A d, where the data need two passes.
    Accuracy is that of the residual, even for residuals of zero: the value is exact up to rounding of the minimum and of
    L ||d|| (||d|| + ||y*||), the gradient up to rounding of L (||d|| + ||y*||), where L is :attr:`lipschitz`. Calls with
    weights use the data.

    Args:
        A: the data, (n, p).
        b: the targets, (n,), or (n, k) for k outputs; then y is (p, k).
        reduction: "mean", or "sum" for ||A y - b||^2 / 2.
        gram: whether to form the Gram matrix, which costs about n p^2 operations; by default if it is at most as large as the
            data (their stored numbers, if sparse). Pass False for a loss that is always called with weights: it is not used.

    >>> loss = LeastSquares(torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([1.0, 2.0, 6.0]))
    >>> loss(torch.tensor([3.0]))  # (4 + 1 + 9) / 2 / 3
    tensor(2.3333)
    >>> loss(torch.tensor([3.0]), weights=torch.tensor([0.0, 3.0, 0.0]))
    tensor(0.5000)
    >>> loss.lipschitz
    1.0
    """

    _curvature = 1.0

    def __init__(self, A: Tensor, b: Tensor, reduction: Reduction = "mean", *, gram: bool | None = None) -> None:
        check_data(A)
        check_targets("b", b, A, (1, 2), real=True)
        if gram is None:  # the Gram matrix pays where it is not larger than the data
            gram = A.shape[1] ** 2 <= stored(A).numel()
        super().__init__(A if gram else by_columns(A), tuple(b.shape[1:]), reduction)
        self.b = b
        self._minus_b = -b
        self._quadratic = self._about_minimiser() if gram else None

    def _total(self, y: Tensor) -> Tensor:
        if self._quadratic is not None:
            # Transforms such as vmap do not take custom autograd functions.
            return _quadratic(y, *self._quadratic) if in_transform(y) else _Quadratic.apply(y, *self._quadratic)
        residual = _affine(self._minus_b, self.A, y).reshape(-1)
        return torch.dot(residual, residual) * (0.5 * self._scale)

    def _each(self, y: Tensor) -> Tensor:
        squares = _affine(self._minus_b, self.A, y).square()
        return 0.5 * (squares if squares.ndim == 1 else squares.sum(dim=1))

    def losses(self, scores: Tensor) -> Tensor:
        squares = 0.5 * (scores - self.b).square()
        return squares if self.b.ndim == 1 else squares.sum(dim=-1)

    def slopes(self, scores: Tensor) -> Tensor:
        return scores - self.b

    def curvatures(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores)

    def _hessian(self, y: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None and self._quadratic is not None:
            matrix = self._quadratic[0]
        else:
            matrix = self._weighted_gram(y.new_ones(len(self.A)) if weights is None else weights)
        block = torch.eye(y[0].numel(), dtype=matrix.dtype, device=matrix.device)  # outputs do not interact
        return torch.kron(matrix, block) if len(block) > 1 else matrix.clone()

    def _about_minimiser(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute G, y*, and the gradient and value at y*, in double precision until the last conversion.

        y* is rounded first, so that the gradient there accounts for its distance from a minimiser.
        """
        A, b = self.A.double(), self.b.double()
        G = gram(A)
        size = G.diagonal().sqrt()
        size = torch.where(size > 0, size, 1.0)  # of the columns, whose units may differ
        ridge = 4 * len(G) ** 2 * torch.finfo(G.dtype).eps  # for columns that depend on each other
        factor = torch.linalg.cholesky(G / size / size[:, None] + ridge * torch.eye(len(G), dtype=G.dtype, device=G.device))
        right = (A.t() @ b).reshape(len(G), -1) / size[:, None]
        y = (torch.cholesky_solve(right, factor) / size[:, None]).reshape(self.shape).to(self.A.dtype)
        residual = A @ y.double() - b
        parts = G, A.t() @ residual, 0.5 * residual.square().sum()
        G, gradient, value = ((self._scale * part).to(self.A.dtype) for part in parts)
        return G, y, gradient, value


class Huber(LinearModelLoss):
    """Huber's loss: l_i(z) = r^2 / 2 where the distance r of z and b_i is at most delta, and delta (r - delta / 2) beyond.

    Args:
        A: the data, (n, p).
        b: the targets, (n,).
        delta: from which residual on the loss is linear; positive.
        reduction: "mean" or "sum".

    >>> loss = Huber(torch.tensor([[1.0], [1.0]]), torch.tensor([0.0, 10.0]), delta=2.0)
    >>> loss(torch.tensor([1.0]))  # (1 / 2 + 2 * (9 - 1)) / 2
    tensor(8.2500)
    """

    _curvature = 1.0

    def __init__(self, A: Tensor, b: Tensor, delta: float = 1.0, reduction: Reduction = "mean") -> None:
        check_data(A)
        check_targets("b", b, A, real=True)
        if not delta > 0:
            raise ValueError(f"delta: must be positive, got {delta!r}.")
        super().__init__(by_columns(A), (), reduction)
        self.b, self.delta = b, float(delta)

    def losses(self, scores: Tensor) -> Tensor:
        return huber_loss(scores, self.b.expand(scores.shape), reduction="none", delta=self.delta)

    def slopes(self, scores: Tensor) -> Tensor:
        return (scores - self.b).clamp(-self.delta, self.delta)

    def curvatures(self, scores: Tensor) -> Tensor:
        return ((scores - self.b).abs() <= self.delta).to(scores)  # at the kinks, an element of the generalised Hessian


class Logistic(LinearModelLoss):
    """Logistic loss: l_i(z) = log(1 + exp(-s_i z)) with the signs s_i = +-1 of the labels.

    Args:
        A: the data, (n, p).
        labels: (n,), -1 and 1, or 0 and 1 (or False and True).
        reduction: "mean" or "sum".

    >>> loss = Logistic(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]))
    >>> loss(torch.zeros(1))  # log 2
    tensor(0.6931)
    """

    _curvature = 0.25  # the maximum of q (1 - q)

    def __init__(self, A: Tensor, labels: Tensor, reduction: Reduction = "mean") -> None:
        check_data(A)
        check_targets("labels", labels, A)
        values = labels.unique().tolist()
        if not (set(values) <= {-1, 1} or set(values) <= {0, 1}):
            got = ", ".join(f"{value:g}" for value in values[:5]) + (", ..." if len(values) > 5 else "")
            raise ValueError(f"labels: must be -1 and 1, or 0 and 1, got {got}; for more classes use Softmax.")
        super().__init__(by_columns(A), (), reduction)
        self.signs = torch.where(labels > 0, 1.0, -1.0).to(A.dtype)

    def _total(self, y: Tensor) -> Tensor:
        return logsigmoid(self.signs * (self.A @ y)).sum() * -self._scale  # log(1 + exp) would overflow

    def losses(self, scores: Tensor) -> Tensor:
        return -logsigmoid(self.signs * scores)

    def slopes(self, scores: Tensor) -> Tensor:
        return -self.signs * torch.sigmoid(-self.signs * scores)

    def curvatures(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) * torch.sigmoid(-scores)  # 1 - sigmoid would cancel for large scores


class Softmax(LinearModelLoss):
    """Cross entropy: l_i(z) = log sum_k exp(z_k) - z_{label i}; y is a matrix (p, classes).

    Args:
        A: the data, (n, p).
        labels: (n,), whole numbers from 0.
        classes: number of classes; by default the largest label plus 1.
        reduction: "mean" or "sum".

    >>> loss = Softmax(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 2]))
    >>> loss(torch.zeros(1, 3))  # log 3
    tensor(1.0986)
    """

    _curvature = 0.5  # bounds the eigenvalues of diag(q) - q q'

    def __init__(self, A: Tensor, labels: Tensor, classes: int | None = None, reduction: Reduction = "mean") -> None:
        check_data(A)
        check_targets("labels", labels, A)
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(f"labels: must be whole numbers from 0, got {labels.dtype}; convert them with .long().")
        if classes is not None:
            check_count("classes", classes)
        low, high = int(labels.min()), int(labels.max())
        count = high + 1 if classes is None else classes
        if low < 0 or high >= count:
            got = low if low < 0 else high
            raise ValueError(f"labels: must lie in 0 to {count - 1}, got {got}; number the classes from 0.")
        super().__init__(by_columns(A), (count,), reduction)
        self.labels = labels.long()

    def _total(self, y: Tensor) -> Tensor:
        return self._cross_entropy(y, self.reduction)

    def _each(self, y: Tensor) -> Tensor:
        return self._cross_entropy(y, "none").reshape(-1)

    def losses(self, scores: Tensor) -> Tensor:
        labels = self.labels.expand(scores.shape[:-1])[..., None]
        return scores.logsumexp(dim=-1) - scores.gather(-1, labels)[..., 0]

    def slopes(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1) - one_hot(self.labels, scores.shape[-1])

    def curvatures(self, scores: Tensor) -> Tensor:
        return scores.softmax(dim=-1)

    def _hessian(self, y: Tensor, weights: Tensor | None) -> Tensor:
        """sum_i w_i a_i a_i' x (diag(q_i) - q_i q_i') with the probabilities q_i of example i, by parts of the data."""
        p, classes = y.shape
        A, likely = self._dense, (self.A @ y).softmax(dim=1)
        scales = torch.full_like(A[:, 0], self._scale) if weights is None else self._scale * weights
        matrix = A.new_zeros(p * classes, p * classes)
        for part, q, scale in zip(*(full.split(max(1, PART // len(matrix))) for full in (A, likely, scales)), strict=True):
            rows = (part[:, :, None] * q[:, None, :]).reshape(len(part), -1)
            matrix.addmm_(rows.t(), rows * scale[:, None], alpha=-1)  # the outer products q q', for which rows are a times q
        blocks = matrix.view(p, classes, p, classes)
        for k in range(classes):  # diag(q) is in the blocks of equal classes only
            blocks[:, k, :, k] += A.t() @ (A * (scales * likely[:, k])[:, None])
        return matrix

    def _cross_entropy(self, y: Tensor, reduction: str) -> Tensor:
        # If A is stored by columns, products with a row of scores for each class are faster.
        if self.A.layout == torch.strided and self.A.stride(0) == 1:
            return cross_entropy((y.t() @ self.A.t())[None], self.labels[None], reduction=reduction)
        return cross_entropy(self.A @ y, self.labels, reduction=reduction)


def _quadratic(y: Tensor, G: Tensor, center: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
    """Return value + <gradient, d> + <d, G d> / 2 with d = y - center."""
    d = y - center
    return value + 0.5 * (d * (_affine(gradient, G, d) + gradient)).sum()


class _Quadratic(torch.autograd.Function):
    """The function :func:`_quadratic` in less time: the product G d gives both value and derivative."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, G: Tensor, center: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        d = y - center
        slope = _affine(gradient, G, d)
        ctx.save_for_backward(y, slope, G, center, gradient)
        return torch.add(value, torch.dot(d.reshape(-1), (slope + gradient).reshape(-1)), alpha=0.5)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        y, slope, G, center, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivative will be differentiated again, which the saved slope does not allow
            slope = _affine(gradient, G, y - center)
        return outputs[0] * slope, None, None, None, None


def _affine(offset: Tensor, matrix: Tensor, y: Tensor) -> Tensor:
    """Return offset + matrix y, in one operation."""
    return torch.addmv(offset, matrix, y) if y.ndim == 1 else torch.addmm(offset, matrix, y)
