"""Estimate the constants of a problem (Lipschitz constants, curvatures) from finite differences of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meha.lower.curvature import LENGTHS, SEEN
from meha.numerics.tolerances import DIFFERENCE, LOOSE
from meha.problem.constants import Constants
from meha.problem.oracle import Function, Oracle, Term
from meha.problem.problem import Problem
from meha.tensors.checks import check_count
from meha.tensors.distributed import distribute, is_dtensor, local, total
from meha.tensors.variables import Leaves, Variable, add_, copy_, norm, subtract


def estimate(
    problem: Problem, x: Any, y: Any, *, batch: Any = None, points: int = 3, rounds: int = 8, seed: int = 0
) -> Constants:
    """Estimate the constants of a problem by Lanczos' method on finite differences of gradients.

    The estimates are lower bounds from the start and random points around it; curvature elsewhere may be larger. No second
    derivatives are taken. The cost is about ``8 * points * rounds`` gradients of F and of f each (``10`` of f with a
    non-smooth term); less where they are simple.

    Args:
        points: number of points, including the given one; the others differ from it by normal noise of the size of x and y
            (their root mean square; 1 where they are zero), projected on X and Y. Points at which an objective raises are
            skipped.
        rounds: Hessian-vector products per constant.

    Returns:
        The constants, as far as they were measured.

    >>> problem = Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (3 * y.square() - x * y).sum())
    >>> c = estimate(problem, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    >>> round(c.f_yy, 4), round(c.f_xy, 4), round(c.F_yy, 4), round(c.rho_f, 4)
    (6.0, 1.0, 2.0, 0.0)
    """
    first, second = Variable.of(x, "x"), Variable.of(y, "y")
    return estimate_at(Oracle(problem, first, second), first, second, batch=batch, points=points, rounds=rounds, seed=seed)


def estimate_at(
    oracle: Oracle, x: Variable, y: Variable, *, batch: Any = None, points: int = 3, rounds: int = 8, seed: int = 0
) -> Constants:
    """Estimate the constants from an oracle, which counts the gradients; see :func:`estimate`."""
    check_count("points", points)
    check_count("rounds", rounds)
    for function in (oracle.upper, oracle.lower):
        with torch.no_grad():
            value = float(function(x, y, batch))
        if not math.isfinite(value):
            raise ValueError(f"{function.level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    probe = Probe(oracle, x.copy(), y.copy(), batch, torch.Generator().manual_seed(seed), rounds, around=(x, y))
    constants = probe.measure()
    for _ in range(points - 1):
        probe.move()  # to a point at which the constants may be larger
        try:
            here = probe.measure()
        except (RuntimeError, ValueError, ArithmeticError):  # outside the domain of an objective; the start was inside
            continue
        constants = {name: max(value, here[name]) for name, value in constants.items()}
    return Constants(**constants, rho_g=oracle.problem.g.rho)


class Probe:
    """Measures curvatures at a point (x, y) by differences of gradients.

    y may be a network, of which methods keep few copies. So a product takes the memory of one gradient, and Lanczos' method two
    vectors: a gradient is added to the older one as soon as it is computed.

    Args:
        x, y: the point; their tensors move while a product is computed, and return.
        generator: source of the random directions.
        rounds: Hessian-vector products per eigenvalue.
        around: variables with the numbers of x and y that nobody moves. They spare the probe a copy of each, and :meth:`move`
            goes to random points around them.
    """

    def __init__(
        self,
        oracle: Oracle,
        x: Variable,
        y: Variable,
        batch: Any,
        generator: torch.Generator,
        rounds: int,
        around: tuple[Variable, Variable] | None = None,
    ) -> None:
        self.oracle, self.x, self.y, self.batch = oracle, x, y, batch
        self.generator, self.rounds, self.around = generator, rounds, around
        self._drawn: dict[str, Tensor] = {}  # by argument, states of the generator before it drew the noise of this point
        self._longer: dict[tuple[Function, str, str], float] = {}  # multiples of the step at which differences were seen

    def noise(self, like: Leaves) -> Leaves:
        """Draw a random direction of length 1."""
        draw = [self._draw(leaf, self.generator) for leaf in like]
        size = norm(draw)
        return [leaf.div_(size) for leaf in draw]

    @staticmethod
    def _draw(leaf: Tensor, generator: torch.Generator) -> Tensor:
        """Draw normal numbers in the form of a leaf."""
        # Drawn on the host, so that all devices get the same numbers; half precision is drawn in single.
        draw = torch.randn(leaf.shape, generator=generator, dtype=torch.promote_types(leaf.dtype, torch.float32))
        return distribute(draw.to(leaf.device, leaf.dtype), leaf)

    def move(self) -> None:
        """Move to a random point of X and Y around the given one."""
        for variable in (self.x, self.y):
            self._drawn[variable.argument] = self.generator.get_state()
            self._go_to_point(variable, self.generator)
        self._longer.clear()

    def _go_to_point(self, variable: Variable, generator: torch.Generator | None = None) -> None:
        """Put x or y to where products are taken. A random point is drawn again, instead of kept."""
        assert self.around is not None
        start = [leaf.detach() for leaf in self.around[variable is self.y].leaves]
        with torch.no_grad():
            copy_(variable.leaves, start)
            if variable.argument not in self._drawn:
                return
            if generator is None:
                generator = torch.Generator()
                generator.set_state(self._drawn[variable.argument])
            size = float(norm(start)) / math.sqrt(variable.numel) or 1.0
            for leaf in variable.leaves:
                leaf.add_(self._draw(leaf, generator), alpha=size)
            self.oracle.problem.domains[variable is self.y].project_(variable)

    def gradient(self, function: Function, wrt: Variable) -> Leaves:
        """The gradient of ``function`` in ``wrt`` here."""
        return self.oracle.gradient(wrt, [(1.0, function, self.x, self.y)], self.batch, strict=False)[1]

    def product(self, function: Function, along: Variable, vector: Leaves, wrt: Variable, onto: Leaves | None = None) -> Leaves:
        """The second derivative of ``function`` along ``vector``, by central differences of its gradient in ``wrt``.

        A difference within rounding may come from a linear function or from a large gradient; a longer step decides which.

        Args:
            onto: is overwritten by the sum of itself and the derivative; then the step is one at which a difference was seen.
        """
        with torch.no_grad():
            key, size, scale = (function, along.argument, wrt.argument), float(norm(vector)), float(norm(along.leaves)) or 1.0
        if not 0 < size < math.inf:  # zero, infinite or NaN
            return [torch.zeros_like(leaf) for leaf in wrt.leaves] if onto is None else onto
        eps = max(torch.finfo(leaf.dtype).eps for leaf in along.leaves)
        step = eps**DIFFERENCE * scale / size
        if onto is not None:
            return self._difference(*key, vector, step * self._longer[key], onto)[0] if key in self._longer else onto
        for longer in LENGTHS:
            image, gradients = self._difference(*key, vector, longer * step)
            if float(norm(image)) > SEEN * eps * gradients:
                self._longer[key] = longer
                return image
            del image  # before the next one is made
        return [torch.zeros_like(leaf) for leaf in wrt.leaves]

    def _difference(
        self, function: Function, along: str, wrt: str, vector: Leaves, h: float, onto: Leaves | None = None
    ) -> tuple[Leaves, float]:
        """The gradient at point + h vector less that at point - h vector over 2 h, added to ``onto``; and their size."""
        moving, other = ({"x": self.x, "y": self.y}[name] for name in (along, wrt))
        kept = None if self.around else [leaf.detach().clone() for leaf in moving.leaves]
        states, sizes = self.oracle.random_states(), []
        for to in (h, -2 * h):  # from the point to one side, from there to the other
            with torch.no_grad():
                add_(moving.leaves, vector, to)
            self.oracle.set_random_states(states)  # the same dropout mask on both sides
            gradient = self.gradient(function, other)
            sizes.append(float(norm(gradient)) / (2 * h))
            weight = math.copysign(1 / (2 * h), to)
            with torch.no_grad():
                if onto is None:
                    onto = [weight * part for part in gradient]  # in new memory: autograd may return one tensor twice
                else:
                    add_(onto, gradient, weight)
            del gradient
        if kept is None:
            self._go_to_point(moving)
        else:
            with torch.no_grad():
                copy_(moving.leaves, kept)  # bit for bit, unlike a step back
        assert onto is not None
        return onto, math.hypot(*sizes)

    def spectrum(self, apply: Callable[[Leaves, Leaves | None], Leaves], like: Leaves) -> tuple[float, float]:
        """Smallest and largest eigenvalue of a symmetric operator, by ``rounds`` products of Lanczos' method.

        Args:
            apply: adds the image of the first vector to the second one, in its memory.
        """
        vector, before = self.noise(like), None
        diagonal: list[float] = []
        coupling: list[float] = []
        for _ in range(self.rounds):
            if before is not None:
                before = [leaf.mul_(-coupling[-1]) for leaf in before]
            rest = apply(vector, before)
            parts = [(a * b).sum() for a, b in zip(local(vector), local(rest), strict=True)]  # the older one is orthogonal
            alpha = float(total(parts, vector) if any(map(is_dtensor, vector)) else sum(parts))
            add_(rest, vector, -alpha)  # Lanczos' recurrence
            size = float(norm(rest))
            if not math.isfinite(alpha + size):  # what was measured before still counts
                break
            diagonal.append(alpha)
            if size <= torch.finfo(like[0].dtype).eps ** LOOSE * max(abs(alpha), *coupling, 0.0):
                break
            coupling.append(size)
            before, vector = vector, [leaf.div_(size) for leaf in rest]
        if not diagonal:
            return 0.0, 0.0
        side = torch.tensor(coupling[: len(diagonal) - 1], dtype=torch.float64)  # the last one leads out of the space
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(side, 1) + torch.diag(side, -1)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        return float(eigenvalues[0]), float(eigenvalues[-1])

    def mixed(self, function: Function) -> float:
        """The norm of the mixed derivative f_xy, as the root of the largest eigenvalue of f_xy f_yx or f_yx f_xy."""
        here, there = (self.x, self.y) if self.x.numel < self.y.numel else (self.y, self.x)

        def there_and_back(vector: Leaves, onto: Leaves | None) -> Leaves:
            return self.product(function, there, self.product(function, here, vector, there), here, onto)

        return math.sqrt(max(self.spectrum(there_and_back, here.leaves)[1], 0.0))

    def block(self, function: Function, variable: Variable) -> tuple[float, float]:
        """Smallest and largest eigenvalue of the block of ``variable`` in the Hessian of ``function``."""
        return self.spectrum(lambda v, onto: self.product(function, variable, v, variable, onto), variable.leaves)

    def measure(self) -> dict[str, float]:
        """Estimate the arguments of :class:`Constants` at this point, except rho_g."""
        F, f = self.oracle.upper, self.oracle.lower
        F_xx, F_yy, f_xx = (
            max(-low, high) for low, high in (self.block(F, self.x), self.block(F, self.y), self.block(f, self.x))
        )
        low, high = self.block(f, self.y)
        f_yy, F_xy, f_xy = max(-low, high), self.mixed(F), self.mixed(f)
        eps = max(torch.finfo(leaf.dtype).eps for leaf in self.y.leaves)
        return {
            "L_F": _norm_of_blocks(F_xx, F_yy, F_xy),
            "L_f": _norm_of_blocks(f_xx, f_yy, f_xy),
            "rho_f": -low if low < -(eps**DIFFERENCE) * f_yy else 0.0,  # errors must not make a convex f weakly convex
            "F_xx": F_xx,
            "F_yy": F_yy,
            "F_xy": F_xy,
            "f_yy": f_yy,
            "f_xy": f_xy,
            "L_g": self.nonsmooth_coupling(),
        }

    def nonsmooth_coupling(self) -> float:
        """A lower bound of L_g: the largest change of grad_x g over some short random moves of y, relative to the move."""
        oracle, y = self.oracle, self.y
        if oracle.phi is oracle.lower:  # there is no g
            return 0.0

        def gradient() -> Leaves:
            terms: list[Term] = [(1.0, oracle.phi, self.x, y), (-1.0, oracle.lower, self.x, y)]  # g alone = (f + g) - f
            return oracle.gradient(self.x, terms, self.batch, strict=False)[1]

        start, here = [leaf.detach().clone() for leaf in y.leaves], gradient()
        h, largest = 1e-3 * (float(norm(start)) or 1.0), 0.0
        with torch.no_grad():
            for _ in range(self.rounds):
                add_(y.leaves, self.noise(start), h)
                largest = max(largest, float(norm(subtract(gradient(), here))) / h)
                copy_(y.leaves, start)
        return largest


def _norm_of_blocks(a: float, b: float, mixed: float) -> float:
    """The norm of [[a, m], [m, b]]: a bound for that of the Hessian with blocks of these norms."""
    return (a + b) / 2 + math.sqrt(((a - b) / 2) ** 2 + mixed**2)
