"""Finite sums with exact value functions: five families of bilevel problems with batches, for the race of methods.

Every instance is a function of its family, a seed and a size. A race is judged at x alone, by the value function

    h(x) = F(x, y*(x)),    y*(x) = argmin_y f(x, y),

with F and f the means over all examples, in double precision, y* by Newton steps until the gradient of f is below 1e-10.

- ``quadratic``: both levels are least squares with a random coupling; the mean Hessian of f has the condition number 10, that
  of h 70, both exactly, while those of single examples have a rank of 8 in 100 unknowns.
- ``logistic``: logistic regression with a penalty exp(x_j) for each feature; features have unequal scales, five of them tell
  the label in training and nothing in validation, and the others less there than in training, by unequal factors.
- ``cleaning``: half the labels of the training examples are redrawn; x are logits of a weight for each, f is softmax regression
  with a ridge, on 49 principal components of MNIST and a constant, or on Gaussian classes where there is no MNIST.
- ``network``: f trains a network of one hidden layer with tanh and a ridge; the weights of the examples come from a smaller
  network of their features, which is x. Labels are redrawn in one half of the space.
- ``domains``: x are logits of the weights of eight sources; f is softmax regression on all, F that on a target which is
  a mixture of three of them.

The lower level of ``network`` has several minima. Its y*(x) is the minimum that training reaches from the start of y at x0,
followed along the straight line from x0 to x in equal steps: a function of x alone, which has jumps where that minimum
disappears on the way. A method whose y is in another basin is judged by this h all the same.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from meha_lab import datasets
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

import meha
from meha.problem.loaders import Draw, Indices

VERSION = 1
"""Of the instances; a part of the key of every record."""

Size = Literal["full", "small"]
Point = Tensor | list[Tensor]

ALL = Draw(slice(None), slice(None))
"""The batch of all examples, which are not copied for it."""

ACCURATE = 1e-10
"""The norm of the gradient of f at which Newton's method ends."""

REUSED = 0.3
"""The factor of a Hessian serves for further steps as long as each reduces the gradient by this."""

MOST = 1000  # Newton steps; some 5 are needed, and more where the minimum that was followed disappears
PATH = 4  # steps along the line from x0 to x, for ``network``
COARSE = 1e-5  # the norm of the gradient of f on the way


def leaves(point: Point) -> list[Tensor]:
    return [point] if isinstance(point, Tensor) else list(point)


def flat(point: Point) -> Tensor:
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves(point)])


def like(point: Point, vector: Tensor) -> Point:
    """The parts of a vector, in the form of a point."""
    parts = vector.split([leaf.numel() for leaf in leaves(point)])
    shaped = [part.view_as(leaf) for part, leaf in zip(parts, leaves(point), strict=True)]
    return shaped[0] if isinstance(point, Tensor) else shaped


def chosen(index: Any) -> Any:
    """The indices of a batch as a vector; several batches of a step are one where they are not taken apart."""
    return index if isinstance(index, slice) else index.reshape(-1)


class FiniteSum(ABC):
    """F and f as means over examples, in one dtype.

    Attributes:
        counts: numbers of examples of F and of f.
        batch: examples of a batch, which divides both.
        x0, y0: the start.
        box: the interval of every number of x; None for all of them.
        data: where the examples come from.
        convex: whether h is convex, so that one start finds its minimum.
    """

    family: ClassVar[str]
    convex: ClassVar[bool] = False
    rates: ClassVar[tuple[float, float]]
    """Rates of x that are tried, in units of 1 / L_h."""

    counts: tuple[int, int]
    x0: Point
    y0: Point
    batch: int = 64
    box: tuple[float, float] | None = None
    data: str = "drawn"

    def __init__(self, seed: int, size: Size) -> None:
        self.seed, self.size = seed, size
        self.generator = torch.Generator().manual_seed(1000 * seed + list(FAMILIES).index(self.family))
        self.make(size == "small")

    @abstractmethod
    def make(self, small: bool) -> None:
        """Draw the data, and set the attributes above."""

    @abstractmethod
    def upper(self, x: Any, y: Any, batch: Any) -> Tensor:
        """F on a batch."""

    @abstractmethod
    def lower(self, x: Any, y: Any, batch: Any) -> Tensor:
        """f on a batch."""

    @abstractmethod
    def hessian(self, x: Any, y: Any) -> Tensor:
        """f_yy on all examples, as a matrix, from a formula."""

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def integers(self, high: int, n: int) -> Tensor:
        return torch.randint(high, (n,), generator=self.generator)

    def to(self, dtype: torch.dtype) -> FiniteSum:
        """The same in another dtype."""

        def cast(value: Any) -> Any:
            if isinstance(value, list):
                return [cast(part) for part in value]
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        other = copy.copy(self)
        vars(other).update({name: cast(value) for name, value in vars(self).items()})
        return other

    @property
    def dtype(self) -> torch.dtype:
        return leaves(self.x0)[0].dtype

    @property
    def problem(self) -> meha.Problem:
        x_set = None if self.box is None else meha.sets.Box(*self.box)
        return meha.Problem(self.upper, self.lower, x_set=x_set)

    def batches(self, draws: int = 1) -> Indices:
        """Batches of fixed groups, so that methods with a memory take part; for several in a step, independent ones."""
        several: dict[str, Any] = {"draws": draws} if draws > 1 else {"groups": True}
        return Indices(self.batch, upper=self.counts[0], lower=self.counts[1], seed=self.seed, **several)

    @property
    def key(self) -> str:
        """Names the instance in records."""
        return f"{self.family} {self.size} {self.data} v{VERSION} seed {self.seed}"


def root(matrix: Tensor, power: float = 0.5) -> Tensor:
    """A power of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values**power) @ vectors.T


def gram(A: Tensor, B: Tensor) -> Tensor:
    """The mean of A_i' B_i over examples."""
    return torch.einsum("nri,nrj->ij", A, B) / len(A)


class QuadraticSum(FiniteSum):
    """f_i = |A_i y + G_i x + g_i|^2 / 2 and F_i = |C_i y + D_i x + e_i|^2 / 2."""

    family = "quadratic"
    convex = True
    rates = (0.01, 3.0)
    condition, condition_of_h = 10.0, 70.0

    def make(self, small: bool) -> None:
        n, unknowns, rank = (128, 8, 4) if small else (1024, 100, 8)
        self.batch, self.counts = (16 if small else 64), (n, n)

        def spectrum(condition: float) -> Tensor:
            """A random symmetric matrix with eigenvalues from 1 / condition to 1."""
            vectors, _ = torch.linalg.qr(self.normal(unknowns, unknowns))
            values = torch.logspace(-math.log10(condition), 0.0, unknowns, dtype=torch.float64)
            return (vectors * values) @ vectors.T

        A = self.normal(n, rank, unknowns)
        A = A @ root(gram(A, A), -0.5) @ root(spectrum(self.condition))
        coupling = self.normal(unknowns, unknowns) / unknowns**0.5
        G = A @ coupling + 0.3 * self.normal(n, rank, unknowns) / (rank * unknowns) ** 0.5
        C, D = (self.normal(n, rank, unknowns) / rank**0.5 for _ in range(2))
        g = self.normal(n, rank)
        S = torch.linalg.solve(gram(A, A), gram(A, G))  # y*(x) = -S x - s
        through = D - C @ S
        scale = root(gram(through, through), -0.5) @ root(spectrum(self.condition_of_h))
        self.A, self.G, self.g, self.C, self.D = A, G @ scale, g, C, D @ scale
        self.e = self.normal(n, rank) - self.C @ self.normal(unknowns) - self.D @ self.normal(unknowns)
        self.x0, self.y0 = torch.zeros(unknowns, dtype=torch.float64), torch.zeros(unknowns, dtype=torch.float64)

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        i = chosen(batch.upper)
        return (self.C[i] @ y + self.D[i] @ x + self.e[i]).square().sum(1).mean() / 2

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        i = chosen(batch.lower)
        return (self.A[i] @ y + self.G[i] @ x + self.g[i]).square().sum(1).mean() / 2

    def hessian(self, x: Tensor, y: Tensor) -> Tensor:
        return gram(self.A, self.A)


class LogisticSum(FiniteSum):
    """f = mean log(1 + exp(-a_i y)) + sum_j exp(x_j) y_j^2 / 2, with the labels multiplied into a_i; F is the mean alone."""

    family = "logistic"
    rates = (0.003, 3.0)
    box = (-8.0, 3.0)
    misleading = 5

    def make(self, small: bool) -> None:
        features = 8 if small else 22
        misleading = 2 if small else self.misleading
        self.counts = (256, 1024) if small else (9984, 49984)
        scales = 3 ** torch.linspace(-1.0, 1.0, features, dtype=torch.float64)
        scales = scales[torch.randperm(features, generator=self.generator)]
        truth = self.normal(features)
        truth[:misleading] = 0.0
        lasting = 0.2 + 0.8 * torch.rand(features, dtype=torch.float64, generator=self.generator)

        def examples(n: int, truth: Tensor, share: float) -> Tensor:
            a = self.normal(n, features)
            labels = (a @ truth + self.normal(n)).sign()[:, None]
            a[:, :misleading] += share * labels
            return labels * a * scales

        self.A, self.V = examples(self.counts[1], truth, 0.7), examples(self.counts[0], lasting * truth, 0.0)
        self.x0, self.y0 = torch.zeros(features, dtype=torch.float64), torch.zeros(features, dtype=torch.float64)

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return softplus(-(self.V[chosen(batch.upper)] @ y)).mean()

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return softplus(-(self.A[chosen(batch.lower)] @ y)).mean() + 0.5 * (x.exp() * y.square()).sum()

    def hessian(self, x: Tensor, y: Tensor) -> Tensor:
        p = (self.A @ y).sigmoid()
        return (self.A.T * (p * (1 - p))) @ self.A / len(self.A) + torch.diag(x.exp())


def softmax_hessian(A: Tensor, y: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """The Hessian of mean_i weights_i cross_entropy(A_i y, .) + ridge |y|^2 / 2 in the matrix y."""
    p, (features, classes) = (A @ y).softmax(1), y.shape
    blocks = torch.empty(features, classes, features, classes, dtype=A.dtype)
    for j in range(classes):
        for k in range(j + 1):
            curvature = weights * p[:, j] * (float(j == k) - p[:, k]) / len(A)
            blocks[:, j, :, k] = blocks[:, k, :, j] = (A.T * curvature) @ A
    return blocks.view(y.numel(), y.numel()) + ridge * torch.eye(y.numel(), dtype=A.dtype)


class CleaningSum(FiniteSum):
    """f = mean sigmoid(x_i) cross_entropy(a_i y, redrawn label) + ridge |y|^2 / 2; F is the mean on clean examples."""

    family = "cleaning"
    rates = (0.1, 300.0)
    box = (-5.0, 5.0)
    ridge = 0.02

    def make(self, small: bool) -> None:
        components = 9 if small else 49
        self.counts = (128, 256) if small else (4992, 9984)
        n = sum(self.counts)
        try:
            images = datasets.mnist() if os.environ.get("MEHA_DATA") and not small else None
        except FileNotFoundError:
            images = None
        if images is None:
            classes = 4 if small else 10
            labels = self.integers(classes, n)
            points = 0.5 * self.normal(classes, components)[labels] + self.normal(n, components)
        else:
            self.data, classes = "mnist", len(images.classes)
            chosen = torch.randperm(len(images), generator=self.generator)[:n]
            labels = images.labels[chosen]
            pixels = images.images[chosen].flatten(1).double() / 255
            pixels = pixels - pixels.mean(0)
            points = pixels @ torch.linalg.eigh(pixels.T @ pixels).eigenvectors[:, -components:]
        points = torch.cat([points, torch.ones(n, 1, dtype=torch.float64)], 1)
        clean, train = labels.split(self.counts)
        redrawn = torch.rand(len(train), generator=self.generator) < 0.5
        self.labels, self.clean = torch.where(redrawn, self.integers(classes, len(train)), train), clean
        self.V, self.A = (part.contiguous() for part in points.split(self.counts))
        self.x0 = torch.zeros(len(train), dtype=torch.float64)
        self.y0 = torch.zeros(components + 1, classes, dtype=torch.float64)

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        i = chosen(batch.upper)
        return cross_entropy(self.V[i] @ y, self.clean[i])

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        i = chosen(batch.lower)
        losses = cross_entropy(self.A[i] @ y, self.labels[i], reduction="none")
        return (x[i].sigmoid() * losses).mean() + 0.5 * self.ridge * y.square().sum()

    def hessian(self, x: Tensor, y: Tensor) -> Tensor:
        return softmax_hessian(self.A, y, x.sigmoid(), self.ridge)


def two_layers(a: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """The output of a network of one hidden layer with tanh; a has a constant column."""
    return (a @ inner.T).tanh() @ outer[:-1] + outer[-1]


class NetworkSum(FiniteSum):
    """f = mean sigmoid(x(a_i)) log(1 + exp(-b_i y(a_i))) + ridge |y|^2 / 2, with networks x and y; F = mean + |x|^2 / 2000.

    Without its last term F has many minima, which differ by a few percent of what there is to gain.
    """

    family = "network"
    rates = (0.01, 10.0)
    box = (-4.0, 4.0)
    ridge, decay = 0.01, 0.001

    def make(self, small: bool) -> None:
        inputs, hidden, judges = (4, 3, 1) if small else (10, 8, 2)
        self.counts = (128, 256) if small else (1984, 4992)
        teacher, side = (2 * self.normal(hidden, inputs + 1), self.normal(hidden + 1)), self.normal(inputs)

        def examples(n: int) -> tuple[Tensor, Tensor]:
            a = torch.cat([self.normal(n, inputs), torch.ones(n, 1, dtype=torch.float64)], 1)
            out = two_layers(a, *teacher)
            return a, (out - out.median()).sign() + (out == out.median())  # a sign is never 0

        self.A, labels = examples(self.counts[1])
        redrawn = 2.0 * self.integers(2, self.counts[1]).double() - 1
        self.b = torch.where(self.A[:, :-1] @ side > 0, redrawn, labels)
        self.V, self.clean = examples(self.counts[0])
        self.x0 = [self.normal(judges, inputs + 1) / inputs**0.5, 0.3 * self.normal(judges + 1)]
        self.y0 = [self.normal(hidden, inputs + 1) / inputs**0.5, self.normal(hidden + 1) / hidden**0.5]

    def upper(self, x: list[Tensor], y: list[Tensor], batch: Any) -> Tensor:
        i = chosen(batch.upper)
        losses = softplus(-self.clean[i] * two_layers(self.V[i], *y))
        return losses.mean() + 0.5 * self.decay * sum(leaf.square().sum() for leaf in x)

    def lower(self, x: list[Tensor], y: list[Tensor], batch: Any) -> Tensor:
        i = chosen(batch.lower)
        a = self.A[i]
        losses = softplus(-self.b[i] * two_layers(a, *y))
        return (two_layers(a, *x).sigmoid() * losses).mean() + 0.5 * self.ridge * sum(leaf.square().sum() for leaf in y)

    def hessian(self, x: list[Tensor], y: list[Tensor]) -> Tensor:
        a, (inner, outer), n = self.A, y, len(self.A)
        h, d = inner.shape
        t = (a @ inner.T).tanh()
        slope = 1 - t.square()
        weights = two_layers(a, *x).sigmoid() / n
        p = (-self.b * two_layers(a, *y)).sigmoid()
        of_inner = (slope * outer[:-1])[:, :, None] * a[:, None, :]
        jacobian = torch.cat([of_inner.view(n, h * d), t, torch.ones(n, 1, dtype=a.dtype)], 1)
        H = (jacobian.T * (weights * p * (1 - p))) @ jacobian
        residual = -self.b * p * weights
        for k in range(h):
            rows = slice(k * d, (k + 1) * d)
            H[rows, rows] += (a.T * (residual * outer[k] * -2 * t[:, k] * slope[:, k])) @ a
            mixed = a.T @ (residual * slope[:, k])
            H[rows, h * d + k] += mixed
            H[h * d + k, rows] += mixed
        return H + self.ridge * torch.eye(len(H), dtype=a.dtype)


class DomainsSum(FiniteSum):
    """f = sum_s softmax(x)_s (mean of the cross-entropy on source s) + ridge |y|^2 / 2; F is the mean on the target."""

    family = "domains"
    rates = (0.003, 3.0)
    box = (-5.0, 5.0)
    ridge = 0.01
    mixture: ClassVar[dict[int, float]] = {2: 0.6, 5: 0.3, 7: 0.1}

    def make(self, small: bool) -> None:
        sources, features, classes = 8, (4 if small else 20), (3 if small else 5)
        self.counts = (128, 512) if small else (1984, 9984)
        common = 2 * self.normal(features + 1, classes) / features**0.5
        own = common + 2 * self.normal(sources, features + 1, classes) / features**0.5
        shift = 0.5 * self.normal(sources, features)

        def examples(source: Tensor) -> tuple[Tensor, Tensor]:
            n = len(source)
            a = torch.cat([self.normal(n, features) + shift[source], torch.ones(n, 1, dtype=torch.float64)], 1)
            chances = torch.einsum("nf,nfc->nc", a, own[source]).softmax(1)
            return a, torch.multinomial(chances, 1, generator=self.generator)[:, 0]

        self.source = torch.arange(self.counts[1]) % sources
        chances = torch.zeros(sources, dtype=torch.float64)
        chances[list(self.mixture)] = torch.tensor(list(self.mixture.values()), dtype=torch.float64)
        target = torch.multinomial(chances, self.counts[0], replacement=True, generator=self.generator)
        self.A, self.labels = examples(self.source)
        self.V, self.wanted = examples(target)
        self.x0 = torch.zeros(sources, dtype=torch.float64)
        self.y0 = torch.zeros(features + 1, classes, dtype=torch.float64)

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        i = chosen(batch.upper)
        return cross_entropy(self.V[i] @ y, self.wanted[i])

    def weights(self, x: Tensor, i: Any) -> Tensor:
        return len(x) * x.softmax(0)[self.source[i]]

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        i = chosen(batch.lower)
        losses = cross_entropy(self.A[i] @ y, self.labels[i], reduction="none")
        return (self.weights(x, i) * losses).mean() + 0.5 * self.ridge * y.square().sum()

    def hessian(self, x: Tensor, y: Tensor) -> Tensor:
        return softmax_hessian(self.A, y, self.weights(x, slice(None)), self.ridge)


FAMILIES: dict[str, type[FiniteSum]] = {}
FAMILIES.update({kind.family: kind for kind in (QuadraticSum, LogisticSum, CleaningSum, NetworkSum, DomainsSum)})


class ValueFunction:
    """h, its gradient, and y*, for vectors x in double precision.

    Attributes:
        solved: the number of Newton steps so far.
    """

    def __init__(self, model: FiniteSum) -> None:
        self.model, self.solved = model, 0
        self.x0, self._factor = flat(model.x0), torch.empty(0)
        y = flat(model.y0)
        if isinstance(model, NetworkSum):  # training from y0; Newton's steps from a random point could lead anywhere
            y = torch.from_numpy(_descend(lambda z: self.lower(self.x0, z), y.numpy()).x)
        self._factor = self._factorize(self.x0, y)
        self._first = self._y = self._newton(self.x0, y, ACCURATE)
        self._first_factor = self._factor

    def lower(self, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """f and its gradient in y."""
        y = y.detach().requires_grad_()
        value = self.model.lower(like(self.model.x0, x), like(self.model.y0, y), ALL)
        return float(value.detach()), torch.autograd.grad(value, y)[0]

    def upper(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model.upper(like(self.model.x0, x), like(self.model.y0, y), ALL)

    def y(self, x: Tensor) -> Tensor:
        """y*(x); a function of x alone, though it begins where the last one was where there is one minimum."""
        if not isinstance(self.model, NetworkSum):
            self._y = self._newton(x, self._y, ACCURATE)
            return self._y
        y, self._factor = self._first, self._first_factor
        for i in range(1, PATH + 1):
            y = self._newton(self.x0 + i / PATH * (x - self.x0), y, ACCURATE if i == PATH else COARSE)
        return y

    @torch.no_grad()
    def __call__(self, x: Tensor) -> float:
        with torch.enable_grad():
            y = self.y(x)
        return float(self.upper(x, y))

    def gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """h(x) and its gradient, F_x - f_xy (f_yy)^-1 F_y."""
        y = self.y(x).detach().requires_grad_()
        x = x.detach().clone().requires_grad_()
        value = self.upper(x, y)
        F_x, F_y = torch.autograd.grad(value, (x, y), allow_unused=True)
        self._factor = self._factorize(x.detach(), y.detach())
        v = torch.cholesky_solve(F_y[:, None], self._factor)[:, 0]
        lower = self.model.lower(like(self.model.x0, x), like(self.model.y0, y), ALL)
        (f_y,) = torch.autograd.grad(lower, y, create_graph=True)
        (through,) = torch.autograd.grad(f_y @ v, x)
        return float(value.detach()), (0 if F_x is None else F_x) - through

    def _factorize(self, x: Tensor, y: Tensor) -> Tensor:
        """The Cholesky factor of f_yy, shifted where it is not positive definite."""
        with torch.no_grad():
            H = self.model.hessian(like(self.model.x0, x), like(self.model.y0, y))
        factor, failed = torch.linalg.cholesky_ex(H)
        if failed:
            values, vectors = torch.linalg.eigh(H)
            factor = torch.linalg.cholesky((vectors * values.abs().clamp(min=1e-3 * float(values.max()))) @ vectors.T)
        return factor

    def _newton(self, x: Tensor, y: Tensor, accuracy: float) -> Tensor:
        """Newton's method with the last factor as long as it does, and steps that decrease f."""
        value, gradient = self.lower(x, y)
        for _ in range(MOST):
            size = float(gradient.norm())
            if size <= accuracy:
                return y
            self.solved += 1
            step, share = torch.cholesky_solve(gradient[:, None], self._factor)[:, 0], 1.0
            while True:
                ahead = y - share * step
                new_value, new_gradient = self.lower(x, ahead)
                # Close to the minimum, differences of f are rounding, and the gradient decides.
                if new_value <= value - 1e-4 * share * float(gradient @ step) or float(new_gradient.norm()) <= REUSED * size:
                    break
                share /= 2
                if share < 1e-10:
                    raise ArithmeticError(f"{self.model.key}: Newton's method ends with a gradient of {size:.1e}.")
            if float(new_gradient.norm()) > REUSED * size:
                self._factor = self._factorize(x, ahead)
            y, value, gradient = ahead, new_value, new_gradient
        raise ArithmeticError(f"{self.model.key}: Newton's method has not converged after {MOST} steps.")


def _descend(function: Callable[[Tensor], tuple[float, Tensor]], start: np.ndarray, box: Any = None) -> Any:
    """L-BFGS, projected on a box; what scipy returns."""

    def evaluate(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = function(torch.from_numpy(z.copy()))
        return value, gradient.numpy()

    options = dict(maxiter=3000, maxfun=6000, maxcor=30, ftol=1e-15, gtol=1e-9)
    bounds = None if box is None else [box] * len(start)
    return minimize(evaluate, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)


def least(value: ValueFunction, starts: int) -> tuple[Tensor, list[float]]:
    """The best x of projected L-BFGS on h from x0 and from random starts, and all ends; Newton's step where h is quadratic."""
    model = value.model
    if isinstance(model, QuadraticSum):
        S = torch.linalg.solve(gram(model.A, model.A), gram(model.A, model.G))
        s = torch.linalg.solve(gram(model.A, model.A), gram(model.A, model.g[:, :, None]))
        through, rest = model.D - model.C @ S, model.e[:, :, None] - model.C @ s
        x = -torch.linalg.solve(gram(through, through), gram(through, rest))[:, 0]
        return x, [value(x)]
    points = [value.x0.numpy()]
    rng = np.random.default_rng(model.seed)
    low, high = model.box or (-3.0, 3.0)
    points += [rng.uniform(low / 2, high / 2, len(value.x0)) for _ in range(starts - 1)]
    found = [_descend(value.gradient, point, model.box) for point in points]
    best = min(found, key=lambda end: end.fun)
    return torch.from_numpy(best.x), sorted(float(end.fun) for end in found)


def largest(product: Callable[[Tensor], Tensor], n: int, rounds: int = 12) -> float:
    """The largest absolute eigenvalue of a symmetric matrix, by power steps."""
    u = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    size = 0.0
    for _ in range(rounds):
        u = product(u / u.norm())
        size = float(u.norm())
        if not size:
            break
    return size


def curvatures(value: ValueFunction, best: Tensor) -> dict[str, float]:
    """The largest curvatures of f and F in y, and of h, at x0 and at the best x: the larger of the two each."""
    found = {"L_f": 0.0, "L_F": 0.0, "L_h": 0.0}
    for x in (value.x0, best):
        y = value.y(x)
        H = value.model.hessian(like(value.model.x0, x), like(value.model.y0, y))
        at = y.detach().requires_grad_()
        (F_y,) = torch.autograd.grad(value.upper(x, at), at, create_graph=True)
        here = {
            "L_f": float(torch.linalg.eigvalsh(H.detach()).abs().max()),
            "L_F": largest(lambda u, at=at, F_y=F_y: torch.autograd.grad(F_y, at, u, retain_graph=True)[0], len(y)),
            "L_h": largest(lambda u, x=x: (value.gradient(x + 1e-4 * u)[1] - value.gradient(x - 1e-4 * u)[1]) / 2e-4, len(x)),
        }
        found = {name: max(size, here[name]) for name, size in found.items()}
    return found
