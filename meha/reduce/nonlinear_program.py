"""A coupled problem as functions of one long vector (x, y): F, f and all constraints, with first to third derivatives.

The sets X and Y become rows of the constraints. Quadratic functions are recognised, and replaced by their exact models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from meha.numerics.quadratic_program import Array
from meha.problem.constraints import Constraint
from meha.problem.oracle import Oracle, refusing_lack
from meha.problem.sets.base import Rows
from meha.reduce.as_constraints import Epigraph, Membership, lacking
from meha.tensors.gradients import PlainAttention
from meha.tensors.state import Saved
from meha.tensors.variables import Variable
from meha.tensors.vectors import Flat, split

PROBES = 12  # points at which a function is compared with its quadratic model
QUADRATIC = 1e6  # rounding errors, relative to the size of a function and its model, within which both agree
COARSE = 1e-4  # upper bound of this tolerance, which matters in single precision only
REACH = 10.0  # distance from the start, beyond its size, within which unbounded unknowns are drawn
FIRST = "use functions that can be differentiated twice, or LVHBA() or BiCGAFFA(), which take first derivatives"
LARGEST = 1 << 27  # numbers in the Hessians of all functions, beyond which a problem is refused: 1 GB
MEMORY = 1000  # points at which values are remembered

Part = Callable[[Variable, Variable, Tensor], Tensor]
"""A group of functions of x, y, and the epigraph unknowns t of g, as one call."""


@dataclass(frozen=True)
class ConstraintRows:
    """The indices of each kind of function in the list of all functions."""

    F: int
    f: int
    lower: slice
    lower_equations: slice
    upper: slice
    upper_equations: slice


class NonlinearProgram(Saved):
    """All functions of a coupled problem, stacked: F, f, h, e (lower level), G, E (upper level).

    Args:
        oracle: it has the problem, and counts derivatives.
        x, y: variables with the structure and the point around which quadratic functions are recognised.

    Attributes:
        n, m: the sizes of x, and of y with the epigraph unknowns t of g.
        rows: the indices of each kind of function.
        names: a name for each function, for reports.
        quadratic: which of them are quadratic (or linear).
        linear: which are linear.
        eps: the rounding error of a number.
    """

    def __init__(self, oracle: Oracle, x: Variable, y: Variable) -> None:
        self.oracle = oracle
        self.flat = Flat(x), Flat(y)
        if missing := lacking(oracle.problem, x, y):
            raise ValueError(missing)
        self.lifting = Epigraph(oracle.problem, y)
        self.n, self.m = x.numel, y.numel + self.lifting.size
        self._parts, self._sizes, self.names, self.rows = self._list(oracle, x, y)
        self.dtype = self._precision()
        self.eps = torch.finfo(self.dtype).eps
        self._known: dict[bytes, Array] = {}
        self._last: tuple[bytes, Array] = b"", np.zeros(0)
        self._drawn: tuple[bytes, Tensor, Tensor | None, Array] | None = None  # the graph of the gradients at the last point
        self._bent: tuple[bytes, Array, Array] = b"", np.zeros(0), np.zeros(0)
        start = self.read()
        size, values = len(start), self.call(start)
        self.count = len(values)
        if self.count * size**2 > LARGEST:
            sizes = f"with {size} unknowns and {self.count - 2} rows"
            reason = "the problem is too large for a method that takes Hessians of all functions"
            raise ValueError(f"constraints: {sizes} {reason}; use BiCGAFFA().")
        self._recognise(start, values)

    def read(self) -> Array:
        """Return the variables as one vector, with the least feasible t."""
        with torch.no_grad():
            parts = [*(flat.read() for flat in self.flat), self.lifting.start(self.flat[1].variable)]
        return np.concatenate([part.detach().double().cpu().numpy() for part in parts])

    def write(self, z: Array) -> None:
        """Overwrite the variables by a vector."""
        end = len(z) - self.lifting.size
        for flat, part in zip(self.flat, (z[: self.n], z[self.n : end]), strict=True):
            flat.write(torch.from_numpy(np.ascontiguousarray(part)).to(flat.variable.device, flat.dtype))

    def forget(self) -> None:
        """Drop all remembered values, so that a resumed run and an uninterrupted one evaluate the same points."""
        self._known.clear()
        self._last, self._drawn = (b"", np.zeros(0)), None

    # Functions

    def _list(self, oracle: Oracle, x: Variable, y: Variable) -> tuple[list[Part], list[int], list[str], ConstraintRows]:
        """Return the groups of functions, their sizes, the names of the functions, and the indices of each kind."""
        problem, lifting = oracle.problem, self.lifting
        listed: list[tuple[str, str, Callable[[Variable, Variable, Tensor], Rows]]] = []
        for kinds, argument, constraints in zip(("he", "GE"), ("lower", "upper"), problem.constraints, strict=True):
            for k, constraint in enumerate(constraints):
                label = f"{argument}_constraints" + (f"[{k}]" if len(constraints) > 1 else "")
                listed.append((kinds, label, partial(_values, constraint)))
        for kinds, variable, domain in zip(("GE", "he"), (x, y), problem.domains, strict=True):
            inside = Membership(variable.argument, domain.parts(variable))
            listed.append((kinds, f"{variable.argument}_set", partial(_values, inside)))
        listed.append(("he", "nonsmooth", lifting.rows))
        groups: dict[str, list[tuple[Part, list[str]]]] = {kind: [] for kind in "heGE"}
        for kinds, label, rows in listed:
            with torch.no_grad():
                sizes = [len(side) for side in rows(x, y, lifting.start(y))]
            for which, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
                if size:
                    mark = " (equation)" if which else ""
                    groups[kind].append((partial(_side, rows, which), [f"{label}{mark} row {i}" for i in range(size)]))
        parts: list[Part] = [
            lambda x, y, t: oracle.upper(x, y),
            lambda x, y, t: oracle.lower(x, y) + lifting.value(x, y, t),
        ]
        sizes, names, ends = [1, 1], ["F", "f"], [2]
        for members in groups.values():
            for part, labels in members:
                parts.append(part)
                sizes.append(len(labels))
                names += labels
            ends.append(len(names))
        return parts, sizes, names, ConstraintRows(0, 1, *(slice(a, b) for a, b in itertools.pairwise(ends)))

    def _torch(self, z: Array) -> tuple[Tensor, tuple[Variable, Variable, Tensor]]:
        """Return a point as a leaf of a new graph, and as variables that depend on it."""
        leaf = torch.from_numpy(np.ascontiguousarray(z)).to(self.flat[0].variable.device, self.dtype).requires_grad_()
        return leaf, self._split(leaf)

    def _split(self, leaf: Tensor) -> tuple[Variable, Variable, Tensor]:
        first, second = self.flat
        end = self.n + self.m - self.lifting.size
        x, y = split(leaf[: self.n], first.variable.leaves), split(leaf[self.n : end], second.variable.leaves)
        return first.variable.moved(x), second.variable.moved(y), leaf[end:]

    def _precision(self) -> torch.dtype:
        """Return double precision, also for single-precision variables, unless the functions cannot compute with it."""
        self.dtype = torch.float64
        try:
            self.call(self.read())
        except (RuntimeError, TypeError, ValueError):  # single-precision data do not mix with double
            return torch.promote_types(self.flat[0].dtype, self.flat[1].dtype)
        return torch.float64

    def _stack(self, at: tuple[Variable, Variable, Tensor], parts: list[int] | None = None) -> Tensor:
        """Return the values of all functions, or of some groups, as one tensor."""
        chosen = self._parts if parts is None else [self._parts[k] for k in parts]
        return torch.cat([part(*at).reshape(-1).to(self.dtype) for part in chosen])

    def call(self, z: Array, parts: list[int] | None = None) -> Array:
        """Evaluate all functions at z, or those of some groups, without the quadratic models."""
        with torch.no_grad():
            return self._stack(self._torch(z)[1], parts).double().cpu().numpy()

    def many(self, points: Array) -> Array:
        """Return the values of all functions at many points, one row each; in one batched call if the objectives allow it."""
        if not self.quadratic.all():
            # Not all functions can be batched: some branch on values.
            with suppress(RuntimeError, ValueError, TypeError), torch.no_grad(), PlainAttention():
                leaves = torch.from_numpy(points).to(self.flat[0].variable.device, self.dtype)
                return torch.vmap(lambda leaf: self._stack(self._split(leaf)))(leaves).double().cpu().numpy()
        return np.stack([self.values(z) for z in points])

    def _recognise(self, start: Array, values: Array) -> None:
        """Find the functions that are quadratic, by comparing them with their second-order models at random points."""
        every = np.ones(self.count, dtype=bool)
        gradient, hessian = self._derivatives(start, every)
        self._centre, self._value0 = start, values.copy()
        self._gradient0, self._hessian0 = gradient, hessian
        generator = np.random.default_rng(0)  # a seed of its own: the same functions are recognised in every run
        agrees = np.asarray(np.isfinite(hessian).all(axis=(1, 2)) & np.isfinite(gradient).all(axis=1))
        for _ in range(PROBES):
            agrees &= self._agrees(start + (np.abs(start) + REACH) * generator.uniform(-1, 1, len(start)))
        bent = np.abs(hessian).max(axis=(1, 2)) > QUADRATIC * self.eps * (1 + np.abs(gradient).max(axis=1))
        self.quadratic, self.linear = agrees, agrees & ~bent
        self._hessian0[self.linear] = 0.0  # removes rounding, so that linear programs are seen as such
        for model in (self._value0, self._gradient0, self._hessian0):  # a start may be a pole of the others, with NaN
            model[~agrees] = 0.0
        self._general = self._groups(~agrees)

    def _agrees(self, z: Array) -> Array:
        """Return a mask of the functions that equal their quadratic models at z."""
        step = z - self._centre
        with np.errstate(invalid="ignore", over="ignore"):
            here, model = self.call(z), self._model(step)
            reach = np.abs(step) + np.abs(z)
            size = np.abs(self._value0) + np.abs(self._gradient0) @ reach + np.abs(here) + self._bend(reach)  # bounds rounding
            return np.asarray(np.abs(here - model) <= min(QUADRATIC * self.eps, COARSE) * size)

    def confirm(self, z: Array) -> bool:
        """Whether all quadratic models agree with their functions at z; those that do not are dropped."""
        agrees = self._agrees(z) | ~self.quadratic
        if not agrees.all():
            self.quadratic, self.linear = self.quadratic & agrees, self.linear & agrees
            self._general = self._groups(~self.quadratic)
            self._known.clear()  # they were computed with the wrong models
            self._last, self._bent, self._drawn = (b"", np.zeros(0)), (b"", np.zeros(0), np.zeros(0)), None
        return bool(agrees.all())

    def _groups(self, which: Array) -> tuple[list[int], Array]:
        """Return the groups that contain functions of a mask, and the indices of all functions of these groups."""
        ends = np.concatenate([[0], np.cumsum(self._sizes)])
        parts = [k for k in range(len(self._sizes)) if which[ends[k] : ends[k + 1]].any()]
        where = [np.arange(ends[k], ends[k + 1]) for k in parts]
        return parts, np.concatenate(where) if where else np.zeros(0, dtype=int)

    def _model(self, step: Array) -> Array:
        return self._value0 + self._gradient0 @ step + 0.5 * np.einsum("kij,i,j->k", self._hessian0, step, step)

    def _bend(self, step: Array) -> Array:
        return np.einsum("kij,i,j->k", np.abs(self._hessian0), np.abs(step), np.abs(step))

    def values(self, z: Array) -> Array:
        """Return the values of all functions at z."""
        self.oracle.check_time()
        if self.quadratic.all():
            return self._model(z - self._centre)
        key = z.tobytes()
        if key not in self._known:
            if len(self._known) > MEMORY:  # bounds the memory of long runs
                self._known.clear()
            values = self._model(z - self._centre)
            values[self._general[1]] = self.call(z, self._general[0])
            self._known[key] = values
        return self._known[key]

    def jacobian(self, z: Array) -> Array:
        """Return the gradients of all functions at z, one row each."""
        key = z.tobytes()
        if self._last[0] == key:
            return self._last[1]
        rows = self._gradient0 + self._hessian0 @ (z - self._centre)
        general = ~self.quadratic
        if general.any():
            leaf, gradients, chosen = self._graph(z, general, twice=True)
            self._drawn = key, leaf, gradients, chosen  # second derivatives at this point, which come next, need no other
            if gradients is not None:
                rows[chosen] = gradients.detach().double().cpu().numpy()
        self._last = key, rows
        return rows

    def hessians(self, z: Array, needed: Array | None = None) -> Array:
        """Return the Hessians of all functions at z; those outside of the mask ``needed`` may be wrong."""
        general = ~self.quadratic if needed is None else ~self.quadratic & needed
        if not general.any():
            return self._hessian0
        key = z.tobytes()
        if self._bent[0] != key:
            self._bent = key, np.zeros(self.count, dtype=bool), self._hessian0.copy()
        _, known, hessians = self._bent
        missing = general & ~known
        if missing.any():  # only what earlier calls at this point did not need
            hessians[missing] = self._derivatives(z, missing)[1][missing]
            known |= missing
        return hessians

    def _derivatives(self, z: Array, which: Array, *, second: bool = True) -> tuple[Array, Array]:
        """Return gradients and, with ``second``, Hessians of the functions of a mask at z, by automatic differentiation."""
        size = len(z)
        gradient, hessian = np.zeros((self.count, size)), np.zeros((self.count, size, size))
        leaf, rows, chosen = self._graph(z, which, twice=second)
        if rows is not None:
            gradient[chosen] = rows.detach().double().cpu().numpy()
            if second and rows.requires_grad:
                self.oracle.counts.hvp += size * int(which[:2].sum())  # F and f only: constraints are not counted
                with torch.enable_grad():
                    flat = rows.reshape(-1)
                images = _products(flat, leaf)
                hessian[chosen] = _symmetric(images.reshape(len(chosen), size, size))
        return gradient, hessian

    def _graph(self, z: Array, which: Array, *, twice: bool) -> tuple[Tensor, Tensor | None, Array]:
        """Return z as a leaf, the gradients of the functions of a mask there, one row each, and the indices of these.

        With ``twice``, the rows can be differentiated again. None in place of the rows if all functions are constant.
        """
        counts = self.oracle.counts
        counts.upper += int(which[0])
        counts.lower += int(which[1])
        parts, where = self._groups(which)
        kept = which[where]
        with refusing_lack("upper, lower", FIRST), torch.enable_grad(), PlainAttention() if twice else nullcontext():
            leaf, at = self._torch(z)
            values = self._stack(at, parts)
            if twice:
                self.oracle.check_twice(values, self)
            values = values[torch.from_numpy(np.flatnonzero(kept)).to(leaf.device)]
            rows = _products(values, leaf, twice=twice) if values.requires_grad else None
        return leaf, rows, where[kept]

    def weighted(self, z: Array, weights: Array, along: Array, held: Array) -> tuple[Array, Array]:
        """Return the Hessian of sum_k weights_k function_k at z, and the products of those of some functions with a vector.

        Args:
            along: the vector, in the space of y; it may be zero.
            held: the indices of these functions; each product is a row.
        """
        total, bent = np.einsum("k,kij->ij", weights, self._hessian0), ~self.quadratic
        rows = self._hessian0[held][:, :, self.n :] @ along
        wanted = weights != 0
        wanted[held] |= bool(along.any())
        if not (bent & wanted).any():
            return total, rows
        self.jacobian(z)
        assert self._drawn is not None
        _, leaf, gradients, chosen = self._drawn
        if gradients is None or not gradients.requires_grad:
            return total, rows
        moved = torch.from_numpy(along).to(leaf)
        with torch.enable_grad():
            # The gradient of the sum, then the slopes of the functions along the vector, as the rows of one product.
            place = {int(k): i for i, k in enumerate(chosen)}
            general = [int(k) for k in held if int(k) in place] if along.any() else []
            outputs = [torch.from_numpy(weights[chosen]).to(leaf) @ gradients]
            outputs += [(gradients[[place[k] for k in general], self.n :] @ moved)] if general else []
            stacked = torch.cat(outputs)
        self.oracle.counts.hvp += len(z) * int((bent & wanted)[:2].sum())
        images = _products(stacked, leaf).double().cpu().numpy()
        total += _symmetric(images[: len(z)])
        if general:
            rows[[k in place for k in held.tolist()]] = images[len(z) :]
        return total, rows

    def third(self, z: Array, weights: Array, mu: Array) -> Array:
        """Return the Hessian of <mu, grad_y sum_k weights_k function_k> at z; quadratic functions do not contribute."""
        none = np.zeros((len(z), len(z)))
        weights = np.where(self.quadratic, 0.0, weights)  # their third derivatives are zero
        if not weights.any() or not mu.any():
            return none
        with torch.enable_grad(), PlainAttention():
            leaf, at = self._torch(z)
            parts, where = self._groups(weights != 0)
            total = self._stack(at, parts) @ torch.from_numpy(weights[where]).to(leaf)
            (first,) = torch.autograd.grad(total, leaf, create_graph=True)
            if not first.requires_grad:
                return none
            along = first[self.n :] @ torch.from_numpy(mu).to(leaf)
            (second,) = torch.autograd.grad(along, leaf, create_graph=True, allow_unused=True)
            if second is None or not second.requires_grad:
                return none
            self.oracle.counts.hvp += len(z)
            return _symmetric(_products(second, leaf).double().cpu().numpy())

    def violation(self, z: Array) -> float:
        """Return the largest violation of a constraint of either level, without the quadratic models."""
        values, rows = self.call(z), self.rows
        parts = [values[kind] for kind in (rows.lower, rows.upper)]
        parts += [np.abs(values[kind]) for kind in (rows.lower_equations, rows.upper_equations)]
        worst = float(np.concatenate(parts).max(initial=0.0))
        return abs(worst) if math.isfinite(worst) else math.inf  # NaN counts as a violation

    def exact(self, z: Array) -> tuple[float, float]:
        """Return F and f at z, without the quadratic models."""
        values = self.call(z)
        return float(values[0]), float(values[1])


def _products(outputs: Tensor, leaf: Tensor, *, twice: bool = False) -> Tensor:
    """Return the derivatives of each output in ``leaf``, one row each, in one batched pass if possible.

    With ``twice``, they can be differentiated again.
    """
    units = torch.eye(len(outputs), dtype=leaf.dtype, device=leaf.device)

    def products(cotangents: Tensor, *, batched: bool) -> Tensor:
        (images,) = torch.autograd.grad(
            outputs, leaf, cotangents, create_graph=twice, retain_graph=True, materialize_grads=True, is_grads_batched=batched
        )
        return images

    if len(units) > 1:  # one alone is faster without a batch
        with suppress(RuntimeError):  # some functions cannot be batched
            return products(units, batched=True)
    return torch.stack([products(unit, batched=False) for unit in units])


def _symmetric(matrices: Array | Tensor) -> Array:
    """Make matrices symmetric, which rounding breaks and eigenvalues need."""
    array = matrices.detach().double().cpu().numpy() if isinstance(matrices, Tensor) else matrices
    return np.asarray(0.5 * (array + array.swapaxes(-1, -2)))


def _values(constraint: Constraint, x: Variable, y: Variable, t: Tensor) -> Rows:
    return constraint.values(x, y)


def _side(rows: Callable[[Variable, Variable, Tensor], Rows], which: int, x: Variable, y: Variable, t: Tensor) -> Tensor:
    """Return the inequalities (0) or the equations (1)."""
    return rows(x, y, t)[which]
