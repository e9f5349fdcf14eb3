"""Solve the lower level at one x by Newton steps on the face of g and Y that contains y."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha.lower.expansion import Expansion
from meha.lower.newton_tuning import TUNING
from meha.numerics.line_search import SHORTER, TRIALS, LineTrial, line_search
from meha.numerics.linear_systems import CurvatureError, conjugate_gradients
from meha.numerics.tolerances import DIFFERENCE, LOOSE, PATIENCE, PROBES, ROUNDING, SINGULAR, STEPS, TIGHT
from meha.problem.oracle import BudgetError, Oracle
from meha.problem.problem import Problem
from meha.tensors.state import Saved
from meha.tensors.variables import Leaves, Variable
from meha.tensors.vectors import Clock, Flat, vector_norm


@dataclass(frozen=True, eq=False)
class SmoothFace:
    """A face: the affine piece of space around a point on which g is smooth and the active constraints of Y stay active.

    Attributes:
        index: the coordinates that can move; None for all.
        rows: directions d also satisfy rows @ d[index] = 0; None without equations.
        basis: an orthonormal basis of these directions; None without equations.
    """

    index: Tensor | None = None
    rows: Tensor | None = None
    basis: Tensor | None = None

    @property
    def trivial(self) -> bool:
        """Whether the face is the whole space."""
        return self.index is None

    def equals(self, other: SmoothFace | None) -> bool:
        """Whether both have the same coordinates and equations."""
        if other is None or self.index is None or other.index is None:
            return other is not None and self.index is None and other.index is None
        same = torch.equal(self.index, other.index)
        if not same or self.rows is None or other.rows is None:
            return same and self.rows is None and other.rows is None
        return torch.equal(self.rows, other.rows)

    def count(self, size: int) -> int:
        """The number of coordinates that can move, of ``size``."""
        return size if self.index is None else self.index.numel()

    def reduce(self, vector: Tensor) -> Tensor:
        """The part of a vector along the face, in coordinates of the face."""
        part = vector if self.index is None else vector[self.index]
        return part if self.basis is None else self.basis.T @ part

    def extend(self, part: Tensor, size: int) -> Tensor:
        """The vector with this part along the face, and zeros elsewhere."""
        part = part if self.basis is None else self.basis @ part
        return part if self.index is None else part.new_zeros(size).index_copy_(0, self.index, part)


class Faces:
    """The proximal map and the faces of g + indicator of Y on flat vectors, for problems without :func:`unknown_faces`."""

    def __init__(self, oracle: Oracle, flat: Flat) -> None:
        problem, y = oracle.problem, flat.variable
        self._prox, self._flat, self.smooth = oracle.prox, flat, oracle.prox.identity
        self._terms = problem.g.terms(y)
        self._sets = [] if problem.y_set is None else problem.y_set.parts(y)
        self.quadratic = all(term.quadratic for term, _ in self._terms)
        self.separable = all(term.separable for term, _ in self._terms)

    def prox(self, x: Variable, vector: Tensor, step: float) -> Tensor:
        """argmin_w step * (g + indicator of Y)(x, w) + 0.5 ||w - vector||^2."""
        leaves = [leaf.clone() for leaf in self._flat.split(vector)]  # the parts are views, and the map works in place
        self._prox(x.value, leaves, step)
        return self._flat.join(leaves)

    def feasible(self, x: Variable, vector: Tensor, start: Tensor) -> Tensor:
        """The end of a move from ``start``, stopped at the kinks of g that it crosses and projected on Y."""
        leaves, old = self._flat.split(vector), self._flat.split(start)
        leaves = list(leaves)
        for term, chosen in self._terms:
            for i, leaf in zip(chosen, term.cut([leaves[i] for i in chosen], [old[i] for i in chosen]), strict=True):
                leaves[i] = leaf
        # With so short a step the proximal map only projects on Y: g no longer matters.
        return self.prox(x, self._flat.join(leaves), torch.finfo(vector.dtype).tiny)

    def at(self, vector: Tensor) -> SmoothFace:
        """The face of a point that a proximal map returned."""
        if self.smooth:
            return SmoothFace()
        leaves = self._flat.split(vector)
        free: Leaves = [torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]
        equations: list[Tensor] = []
        for term, chosen in self._terms:
            for i, mask in zip(chosen, term.free([leaves[i] for i in chosen]) or [], strict=True):
                free[i] = free[i] & mask
        for part, chosen in self._sets:
            face = part.face([leaves[i] for i in chosen])
            assert face is not None  # unknown_faces() has refused other sets
            for i, mask in zip(chosen, face.free, strict=True):
                free[i] = free[i] & mask
            if face.rows is not None:
                equations.append(self._widened(face.rows, chosen))
        mask = torch.cat([leaf.reshape(-1) for leaf in free])
        index = mask.nonzero().reshape(-1)
        if not equations:
            return SmoothFace(index)
        rows = torch.cat(equations)[:, index]  # directions are zero on the other coordinates
        return SmoothFace(index, rows, _kernel(rows))

    def _widened(self, rows: Tensor, chosen: list[int]) -> Tensor:
        """Pad equations of some leaves with zero columns for the others."""
        sizes, wide = self._flat.sizes, rows.new_zeros(len(rows), self._flat.size)
        begin = 0
        for i in chosen:
            first = sum(sizes[:i])
            wide[:, first : first + sizes[i]] = rows[:, begin : begin + sizes[i]]
            begin += sizes[i]
        return wide


def _kernel(rows: Tensor) -> Tensor:
    """An orthonormal basis of {d : rows @ d = 0}."""
    _, values, vectors = torch.linalg.svd(rows, full_matrices=True)
    eps = torch.finfo(rows.dtype).eps
    # The rank tolerance of numpy.linalg.matrix_rank: equations may repeat each other.
    rank = int((values > max(rows.shape) * eps * values.max()).sum()) if values.numel() else 0
    return vectors[rank:].T.contiguous()


def unknown_faces(problem: Problem, y: Variable) -> str:
    """Name the first term of g or part of Y whose faces are not known; empty if all are known."""
    for term, chosen in problem.g.terms(y):
        if term.free([y.leaves[i].detach() for i in chosen]) is None:
            return type(term).__name__
    for part, chosen in [] if problem.y_set is None else problem.y_set.parts(y):
        if part.face([y.leaves[i].detach() for i in chosen]) is None:
            return type(part).__name__
    return ""


@dataclass(frozen=True, eq=False)
class Factor:
    """The Hessian H on a face, factorised: by Cholesky, or by eigenvalues where it is not positive definite.

    Attributes:
        face: the face.
        lower: the Cholesky factor; None if H is not positive definite.
        scale, values, vectors: the eigenvalues of H after a division by scale on both sides; None if H is positive definite.
        pivot: the smallest pivot relative to its diagonal entry, 1 for diagonal matrices, 0 for singular ones.
    """

    face: SmoothFace
    lower: Tensor | None
    scale: Tensor | None = None
    values: Tensor | None = None
    vectors: Tensor | None = None
    pivot: float = 0.0

    @property
    def definite(self) -> bool:
        """Whether H is positive definite, up to rounding."""
        return self.lower is not None

    def solve(self, vector: Tensor) -> Tensor:
        """H^-1 v along the face; with |H| in place of H, bounded below, where H is not positive definite."""
        part = self.face.reduce(vector)
        if not part.numel():
            return torch.zeros_like(vector)
        if self.lower is not None:
            solution = torch.cholesky_solve(part[:, None], self.lower)[:, 0]
        else:
            scale, values, vectors = self._eigen()
            # |H| gives a descent direction; without the lower bound, a zero eigenvalue up to rounding would give a huge step.
            sizes = values.abs()
            sizes = sizes.clamp(min=torch.finfo(sizes.dtype).eps ** DIFFERENCE * float(sizes.max()))
            solution = vectors @ ((vectors.T @ (part / scale)) / sizes) / scale
        return self.face.extend(solution, vector.numel())

    def shortest(self, vector: Tensor) -> tuple[Tensor, float]:
        """Solve H v = vector along the face by the pseudo-inverse; returns v and the relative residual."""
        part = self.face.reduce(vector)
        scale, values, vectors = self._eigen()
        cutoff = SINGULAR * len(values) * torch.finfo(values.dtype).eps * float(values.abs().max())
        inverse = torch.where(values.abs() > cutoff, 1 / values, 0.0)
        image = vectors.T @ (part / scale)
        size = vector_norm(image)
        missed = vector_norm(torch.where(inverse == 0, image, 0.0))  # in the kernel of H
        return self.face.extend(vectors @ (inverse * image) / scale, vector.numel()), missed / size if size else 0.0

    @property
    def indefinite(self) -> bool:
        """Whether H has a direction of negative curvature, beyond rounding."""
        least = torch.finfo(self.values.dtype).eps ** LOOSE if self.values is not None else 0.0
        return self.values is not None and float(self.values[0]) < -least * float(self.values.abs().max())

    def downwards(self, size: int) -> Tensor | None:
        """The direction of the most negative curvature; None if there is none."""
        if not self.indefinite:
            return None
        scale, _, vectors = self._eigen()
        return self.face.extend(vectors[:, 0] / scale, size)  # eigh sorts: the first has the least eigenvalue

    def _eigen(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self.scale is not None
        assert self.values is not None
        assert self.vectors is not None
        return self.scale, self.values, self.vectors


def factorise(matrix: Tensor, face: SmoothFace, clock: Clock) -> Factor:
    """Factorise the Hessian on a face; ``matrix`` has one row and column for each coordinate that can move."""
    begin = time.perf_counter()
    matrix = matrix if face.basis is None else face.basis.T @ matrix @ face.basis
    n, eps = len(matrix), torch.finfo(matrix.dtype).eps
    result = Factor(face, matrix, pivot=1.0)  # of a face without directions
    if n:
        lower, info = torch.linalg.cholesky_ex(matrix)
        diagonal = matrix.diagonal()
        pivot = float((lower.diagonal().square() / diagonal).min()) if not int(info) else 0.0
        if pivot > SINGULAR * n * eps:  # Cholesky alone also passes where H is singular up to rounding
            result = Factor(face, lower, pivot=pivot)
        else:
            if not bool(torch.isfinite(matrix).all()):
                raise ArithmeticError("the Hessian of lower in y has entries that are not finite")
            scale = diagonal.abs().sqrt()  # so that units of y do not decide which eigenvalues count as zero
            scale = torch.where(scale > 0, scale, 1.0)
            scaled = matrix / scale / scale[:, None]
            values, vectors = torch.linalg.eigh((scaled + scaled.T) / 2)  # derivatives are symmetric up to rounding only
            result = Factor(face, None, scale, values, vectors)
    clock.algebra += time.perf_counter() - begin
    return result


def semidefinite(hessians: Tensor, eps: float) -> Tensor:
    """Whether a matrix, or each of several, has no negative eigenvalue up to rounding.

    >>> semidefinite(torch.stack([torch.eye(2), -torch.eye(2)]), 1e-7)
    tensor([ True, False])
    """
    n = hessians.shape[-1]
    # Cholesky fails at an eigenvalue of zero; shifted by its rounding error, it fails at negative ones only.
    shift = SINGULAR * n * eps * hessians.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    eye = torch.eye(n, dtype=hessians.dtype, device=hessians.device)
    return torch.linalg.cholesky_ex(hessians + shift[..., None, None] * eye).info == 0


class Hessians(Saved):
    """A cache of the last Hessian of f in y that learns what changes from one Hessian to the next.

    A product with a fixed vector shows whether a Hessian has changed. Where it has, and changes were seen to have a pattern (a
    diagonal, or a block for each of several independent problems), a few products give the new one, and the fixed vector
    checks it.

    Args:
        eps: rounding error of the variables.

    Attributes:
        quadratic: whether f is quadratic in y; None while unknown.
        constant, varies: whether the Hessian was the same, or differed, at two x.
        matrix: the last Hessian; None before the first.
        groups: the pattern of changes, and the group of each column, so that no row has two entries in one group; None if
            unknown.
        dense: whether changes have no such pattern.
        formulas: whether losses in f may give the Hessian by their formulas.
    """

    saves = ("quadratic", "constant", "varies", "matrix", "groups", "dense", "formulas")

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.quadratic: bool | None = None
        self.constant = self.varies = self.dense = False
        self.formulas = True
        self.matrix: Tensor | None = None
        self.groups: tuple[Tensor, Tensor] | None = None
        self._x: Variable | None = None
        self._fixed: Tensor | None = None
        self._vectors: Tensor | None = None  # the sums of unit vectors of each group, and a fixed vector

    def known_at(self, x: Variable) -> bool:
        """Whether the cached matrix belongs to this x, at some y."""
        return self.matrix is not None and self._x is x

    def still_quadratic(self, at: Expansion) -> bool:
        """Check by one product that the Hessian here is the cached one; otherwise f is not quadratic."""
        probe = self.probe(at.y)
        if self.matrix is None or not self.agrees(self.matrix, at.product(probe, g=False), probe):
            self.quadratic, self.constant = False, False
        return bool(self.quadratic)

    def at(self, at: Expansion) -> Tensor:
        """The Hessian at a point, by as few products as what was learned allows."""
        known = self.matrix
        if known is None:
            return self._keep(at, self._computed(at))
        same_x = self._x is at.x
        if self.quadratic and same_x:  # one Hessian for all y
            return known
        probe = self.probe(at.y)
        # One product tells whether the Hessian is the cached one; it is not spent where the answer is known to be no.
        if self.quadratic is not False and not (self.varies and not same_x):
            if self.agrees(known, at.product(probe, g=False), probe):
                self.quadratic, self.constant = True, self.constant or not same_x
                self._x = at.x
                return known
            self.constant = False
            if same_x:
                self.quadratic = False
            else:
                self.varies = True
        new = self._updated(at, known, probe)
        return self._keep(at, self._compared(self._computed(at), known) if new is None else new)

    def _computed(self, at: Expansion) -> Tensor:
        """The Hessian by the closed forms of losses, if a product confirms it; otherwise row by row."""
        if self.formulas:
            matrix, probe = at.by_formula(), self.probe(at.y)
            if matrix is not None and self.agrees(matrix, at.product(probe, g=False), probe):
                return matrix
            self.formulas = False  # f is not a sum of such losses, and will not be at other points
        return at.rows()

    def _keep(self, at: Expansion, matrix: Tensor) -> Tensor:
        self.matrix, self._x = matrix, at.x
        return matrix

    def agrees(self, matrix: Tensor, product: Tensor, vector: Tensor) -> bool:
        """Whether ``product`` (or each row of it) equals ``matrix @ vector`` up to rounding."""
        expected = matrix @ vector
        change = float(torch.linalg.vector_norm(product - expected, dim=-1).max())
        return change <= SINGULAR * self.eps * vector_norm(expected)

    def _updated(self, at: Expansion, known: Tensor, probe: Tensor) -> Tensor | None:
        """The Hessian from the cached one and a few products; None if changes have no pattern or leave it."""
        if self.groups is None:
            return None
        pattern, group = self.groups
        vectors = self._vectors
        if vectors is None:
            vectors = torch.zeros(int(group.max()) + 2, len(known), dtype=known.dtype, device=known.device)
            vectors[group, torch.arange(len(known), device=known.device)] = 1.0
            vectors[-1] = probe  # checks the result, in the same batch
            self._vectors = vectors
        products = at.products(vectors)
        changes = products[:-1] - vectors[:-1] @ known  # columns of one group share no row: one product gives all of them
        new = known + torch.where(pattern, changes[group].T, 0.0)
        if self.agrees(new, products[-1], probe):
            return new
        self.groups = None
        return None

    def _compared(self, new: Tensor, known: Tensor) -> Tensor:
        """Learn the pattern of changes from two complete Hessians; returns the new one."""
        if not self.dense:
            change = (new - known).abs()
            pattern = change > SINGULAR * self.eps * new.abs().max()
            group = colours(pattern)
            self.dense, self.groups = group is None, None if group is None else (pattern, group)
            self._vectors = None
        return new

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another cache was."""
        super().load_state_dict(state)
        self._x = self._vectors = None  # x is recognised by identity, so the next Hessian is checked by a product

    def probe(self, y: Tensor) -> Tensor:
        """The vector of all checks: without zeros, and the same in a resumed run."""
        if self._fixed is None:
            self._fixed = torch.arange(len(y), dtype=y.dtype, device=y.device).cos()
        return self._fixed


def colours(pattern: Tensor) -> Tensor | None:
    """Group the columns of a symmetric pattern so that no row has two entries in one group; None if that saves less than half.

    The greedy rule of Curtis, Powell and Reid (1974).

    >>> colours(torch.eye(9, dtype=torch.bool))
    tensor([0, 0, 0, 0, 0, 0, 0, 0, 0])
    >>> colours(torch.block_diag(*[torch.ones(2, 2)] * 5).bool())
    tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    >>> colours(torch.ones(4, 4, dtype=torch.bool)) is None
    True
    """
    n = len(pattern)
    pattern = pattern | pattern.T
    if int(pattern.sum(1).max()) > 0.5 * n:  # a row with r entries needs r groups
        return None
    weights = pattern.to(torch.float32)
    near = (weights @ weights).bool().cpu()  # columns that share a row
    group = torch.full((n,), -1)
    for i in range(n):
        taken = set(group[:i][near[i, :i]].tolist())
        group[i] = next(k for k in range(n) if k not in taken)
    return group.to(pattern.device) if int(group.max()) + 1 <= 0.5 * n else None


@dataclass(frozen=True, eq=False)
class LowerResponse:
    """A solution y of the lower level at one x.

    Attributes:
        at: f + g around (x, y).
        face: the face of y.
        error: estimated error of y, relative to y.
        solved: whether that error is small.
    """

    at: Expansion
    face: SmoothFace
    error: float
    solved: bool

    @property
    def y(self) -> Tensor:
        """The solution."""
        return self.at.y


class NewtonLower(Saved):
    """A Newton solver of the lower level at any x, which reuses the last Hessian.

    A step solves the Newton equation on the face of y, which the proximal map of g + indicator of Y finds. A factor of an old
    Hessian serves as long as its steps converge quickly: from the solution at the last x, such a step is the first-order
    prediction of the solution at the new one.

    Attributes:
        tol, accuracy: the smallest relative error of y that rounding allows, and the one that the next solves must reach.
        factor: the last factor; None before the first, and where systems are too large for one.
        hessians: those of f.
        curved: whether g added to the Hessian of the factor.
        failed: the shortest first step with an old factor after which a new factor was needed all the same.
        scale, largest: the largest norm of y in this solve, and so far.
        step: the length of proximal steps; zero before the first.
        limit: gradients of f and products with its Hessian, counted from the start of the run, after which
            :class:`BudgetError` is raised.
    """

    saves = ("accuracy", "curved", "failed", "largest", "limit", "scale", "step", "hessians", "factor")

    def __init__(self, oracle: Oracle, flat_x: Flat, flat_y: Flat, clock: Clock) -> None:
        self.oracle, self.flat_x, self.flat_y, self.clock = oracle, flat_x, flat_y, clock
        self.faces = Faces(oracle, flat_y)
        self.eps = flat_y.eps
        self.tol = self.accuracy = self.eps**TIGHT
        self.factor: Factor | None = None
        self.hessians = Hessians(self.eps)
        self.curved = False
        self.failed = math.inf
        self.scale = self.largest = self.step = 0.0
        self.limit = math.inf
        self._exact_at: Expansion | None = None  # the point whose Hessian was factorised

    def expand(self, x: Variable, y: Tensor) -> Expansion:
        """f + g around (x, y)."""
        if self.oracle.counts.lower + self.oracle.counts.hvp >= self.limit:
            raise BudgetError
        return Expansion(self.oracle, x, y, self.flat_x, self.flat_y, self.clock)

    @property
    def small(self) -> bool:
        """Whether y is small enough for a dense Hessian, whatever its face is."""
        return self.flat_y.size <= TUNING.dense

    def solve(self, x: Variable, y: Tensor) -> LowerResponse:
        """Minimise f + g over Y at ``x``, from ``y``."""
        response = self._solve(x, y)
        # Tolerances are relative to the largest y of the solve; where y became much smaller, they were too loose.
        shrank = vector_norm(response.y) < TUNING.contraction * self.scale
        return self._solve(x, response.y) if response.solved and shrank and self.scale > self._least_scale else response

    @property
    def _least_scale(self) -> float:
        return self.eps**LOOSE * self.largest  # tolerances must not vanish where the solution is y = 0

    def _solve(self, x: Variable, y: Tensor) -> LowerResponse:
        at = self.expand(x, y)
        self.scale = max(vector_norm(y), self._least_scale)
        if not math.isfinite(at.value):
            return LowerResponse(at, self.faces.at(y), math.inf, solved=False)
        stalled, last, old_steps = 0, math.inf, TUNING.old_steps + TUNING.old_steps_by_size * self.flat_y.size
        first = 0.0 if self.small else vector_norm(at.f_y)
        attempt = math.inf  # the length of the first step with an old factor
        for _ in range(STEPS):
            at, face = self._identify(at)
            self.scale = max(self.scale, vector_norm(at.y))
            self.largest = max(self.largest, self.scale)
            gradient = at.gradient
            direction, exact = self._direction(at, face, gradient, first)
            size = vector_norm(direction)
            if exact and self._exact_at is not at and size > TUNING.contraction * last:  # f may not be quadratic
                exact = self.hessians.still_quadratic(at)
            if not exact and attempt == math.inf:
                attempt = size
            if not exact and not self._worthwhile(size, last, old_steps):
                self.failed = min(self.failed, attempt)  # so that the next first step as long as this renews the factor at once
                self.renew(at, face)
                direction, exact = self._direction(at, face, gradient, first)
                size = vector_norm(direction)
            if not math.isfinite(size):
                break
            if self._enough(size, last):
                lower = self._escape(at, face) if exact else None  # Newton steps with |H| also end at saddles
                if lower is not None:
                    at, last = lower, math.inf
                    continue
                # A long step that left no error suggests a quadratic f: comparing the Hessians here decides.
                if self.small and self.hessians.quadratic is None and self.eps**LOOSE * self.scale < last < math.inf:
                    self.hessians.at(at)
                return LowerResponse(at, face, size / self.scale if self.scale else 0.0, solved=True)
            slope = float(torch.dot(gradient, direction))
            blurred = -slope <= self._noise(at)  # the promised decrease is lost in rounding
            stalled = stalled + 1 if blurred and size > 0.5 * last else 0
            if stalled > PATIENCE:  # only rounding is left
                break
            moved = self._move(at, direction, slope, patient=exact)
            if moved is None and not exact:  # the old factor may be to blame
                self.renew(at, face)
                continue
            if moved is None and not self.faces.smooth:  # or the face, which a proximal step can change
                moved = self._proximal(at)
            if moved is None:
                break
            at, last = moved, size
        # Ended by rounding or by the number of steps: the next Newton step estimates the error.
        at, face = (at, self.faces.at(at.y))
        direction, _ = self._direction(at, face, at.gradient, first)
        error = vector_norm(direction) / (self.scale or 1.0)
        return LowerResponse(at, face, error, solved=error <= self.eps**LOOSE)

    def renew(self, at: Expansion, face: SmoothFace) -> Factor | None:
        """Factorise the Hessian on the face at this point; None if the face is too large for that."""
        if face.count(self.flat_y.size) > TUNING.dense:
            self.factor = None
            return None
        index, matrix = face.index, self.hessian(at, face.index)
        curved = at.g_rows(index, self.faces.separable)
        if curved is not None:
            matrix = matrix + (curved if index is None else curved[:, index])
        self.curved = curved is not None
        self.factor = factorise(matrix, face, self.clock)
        self._exact_at = at
        return self.factor

    def hessian(self, at: Expansion, index: Tensor | None) -> Tensor:
        """The Hessian of f on some coordinates."""
        # The whole matrix serves all faces while f may be quadratic; otherwise the rows of one face cost less.
        if self.small and (index is None or self.hessians.quadratic is not False):
            matrix = self.hessians.at(at)
            return matrix if index is None else matrix[index][:, index]
        return at.rows(index)[:, index]

    def exact(self, at: Expansion, face: SmoothFace) -> bool:
        """Whether the factor at hand is that of the Hessian at this point, and not of an older one."""
        made = self._exact_at
        if self.factor is None or not self.factor.face.equals(face):
            return False
        if made is at or not (self.hessians.quadratic and self.faces.quadratic):
            return made is at
        if made is not None and made.x is at.x:  # a quadratic f + g has one Hessian for all y
            return True
        if not self.hessians.constant and not self.hessians.varies:
            self.hessians.at(at)  # which compares them
        return self.hessians.constant and not self.curved  # the curvature of g may depend on x

    def solve_system(self, at: Expansion, face: SmoothFace, right: Tensor) -> tuple[Tensor, bool, float]:
        """Solve (f + g)_yy v = right along the face; returns v, whether there is a solution, and the relative residual."""
        factor = self.factor if self.factor is not None and self.factor.face.equals(face) else None
        large = face.count(self.flat_y.size) > TUNING.dense
        if not self.exact(at, face):
            steps = int(TUNING.old_steps + TUNING.old_steps_by_size * face.count(self.flat_y.size))
            if large or (factor is not None and factor.definite):  # an old factor is a good preconditioner
                most = TUNING.cg_steps if large else steps
                v, residual, positive = self.iterate(at, face, right, self.accuracy, most, factor)
                if large or (positive and residual <= self.accuracy):  # a large system has no other solver
                    return v, positive and residual <= max(self.accuracy, self.eps**LOOSE), residual
            factor = self.renew(at, face)
        assert factor is not None
        begin = time.perf_counter()
        if factor.definite:
            v, consistent = factor.solve(right), True
        else:
            v, missed = factor.shortest(right)
            consistent = missed <= self.eps**LOOSE  # a singular system is solvable if the right side is in its range
        self.clock.algebra += time.perf_counter() - begin
        return v, consistent, 0.0

    def iterate(
        self, at: Expansion, face: SmoothFace, right: Tensor, tol: float, steps: int, factor: Factor | None
    ) -> tuple[Tensor, float, bool]:
        """Solve on the face by conjugate gradients; returns v, its relative residual, and whether H seems semidefinite."""
        size = right.numel()

        def product(part: Leaves) -> Leaves:
            return [face.reduce(at.product(face.extend(part[0], size)))]

        def precondition(part: Leaves) -> Leaves:
            return part if factor is None else [face.reduce(factor.solve(face.extend(part[0], size)))]

        try:
            (v,), residual = conjugate_gradients(product, [face.reduce(right)], steps=steps, tol=tol, precondition=precondition)
        except CurvatureError as met:  # its v is a descent direction all the same
            return face.extend(met.v[0], size), met.residual, met.curvature > 0
        return face.extend(v, size), residual, True

    def _direction(self, at: Expansion, face: SmoothFace, gradient: Tensor, first: float) -> tuple[Tensor, bool]:
        """The Newton direction, and whether it uses the Hessian at this point (not an older one)."""
        if face.count(self.flat_y.size) > TUNING.dense:
            size = vector_norm(face.reduce(gradient))
            # Inexact Newton (Nocedal and Wright, 2006, 7.1): tighter as the gradient falls, for superlinear convergence.
            tol = min(0.5, math.sqrt(size / first)) if first else 0.5
            v, _, _ = self.iterate(at, face, gradient, tol, TUNING.cg_steps, None)
            return -v, True
        if self.factor is None or not self.factor.face.equals(face):
            self.renew(at, face)
        assert self.factor is not None
        begin = time.perf_counter()
        direction = -self.factor.solve(gradient)
        self.clock.algebra += time.perf_counter() - begin
        return direction, self.exact(at, face)

    def _enough(self, size: float, last: float) -> bool:
        """Whether a step is short enough to end the solve; a loose accuracy is allowed only where steps shrink quickly."""
        # At singular Hessians steps shrink slowly, and the error is no smaller than the step.
        quick = size <= TUNING.quick * last < math.inf
        return size <= (self.accuracy if quick else self.tol) * self.scale

    def _worthwhile(self, size: float, last: float, most: float) -> bool:
        """Whether to go on with the old factor: it is positive definite, and would end the solve within ``most`` steps."""
        if self.factor is None or not self.factor.definite:
            return False
        if self._enough(size, last):
            return True
        if last == math.inf:
            return size <= 0.5 * self.failed
        ratio = size / last
        end = (self.accuracy if ratio <= TUNING.quick else self.tol) * self.scale
        # Linear convergence: the steps to go are log(end / size) / log(ratio), and log(ratio) is negative.
        return ratio <= TUNING.contraction and math.log(end / size) >= most * math.log(ratio)

    def _noise(self, at: Expansion) -> float:
        """The error of values, which may be far above their own rounding where f subtracts large numbers.

        Where the Hessian is not positive definite, a smaller gradient is no sign of a lower value, so values must decide.
        """
        definite = self.factor is None or self.factor.definite
        return (self.eps**LOOSE if definite else ROUNDING * self.eps) * (abs(at.f) + abs(at.g))

    def _move(self, at: Expansion, direction: Tensor, slope: float, *, patient: bool) -> Expansion | None:
        """Search along the direction for a point of lower f + g; None if there is none."""

        def trial(length: float) -> LineTrial[Expansion]:
            end = torch.add(at.y, direction, alpha=length)
            new = self.expand(at.x, end if self.faces.smooth else self.faces.feasible(at.x, end, at.y))
            return LineTrial(new, new.value, float(torch.dot(new.gradient, direction)), length * slope)

        # An old factor gets one trial: then a new one pays.
        return line_search(trial, at.value, slope, noise=self._noise(at), wolfe=False, trials=TRIALS if patient else 1)

    def _escape(self, at: Expansion, face: SmoothFace) -> Expansion | None:
        """Leave a saddle: find a lower point along the direction of most negative curvature; None if there is none."""
        direction = None if self.factor is None else self.factor.downwards(len(at.y))
        if direction is None:
            return None
        direction = direction * ((self.scale or 1.0) / vector_norm(direction))
        for _ in range(TRIALS):
            direction = SHORTER * direction
            for end in (at.y + direction, at.y - direction):  # curvature does not tell the two sides apart
                new = self.expand(at.x, end if self.faces.smooth else self.faces.feasible(at.x, end, at.y))
                if new.value < at.value - self._noise(at):
                    return new
        return None

    def _identify(self, at: Expansion) -> tuple[Expansion, SmoothFace]:
        """The face for the next Newton step: that of y if a proximal step stays on it, else move y to the end of that step."""
        if self.faces.smooth:
            return at, SmoothFace()
        if not self.step:
            self.step = self.first_step(at)
        # Near a solution, proximal gradient steps end on its face (Hare and Lewis, 2004).
        image = self.faces.prox(at.x, at.y - self.step * at.f_y, self.step)
        here, there = self.faces.at(at.y), self.faces.at(image)
        unmoved = image == at.y  # equal faces may differ in the bounds at which coordinates are fixed
        if there.index is not None:
            unmoved[there.index] = True
        if here.equals(there) and bool(unmoved.all()) and bool((image.sign() * at.y.sign() >= 0).all()):
            return at, here
        moved = self._proximal(at)
        return (moved, self.faces.at(moved.y)) if moved is not None else (at, here)

    def _proximal(self, at: Expansion) -> Expansion | None:
        """A proximal gradient step with backtracking; None if y is a fixed point or no step is short enough."""
        for _ in range(TRIALS):
            image = self.faces.prox(at.x, at.y - self.step * at.f_y, self.step)
            move = image - at.y
            square = float(torch.dot(move, move))
            if not square:
                return None
            new = self.expand(at.x, image)
            # The quadratic upper bound of f that Beck and Teboulle (2009) test.
            model = at.f + float(torch.dot(at.f_y, move)) + square / (2 * self.step)
            if new.f <= model + self._noise(at):
                return new
            self.step *= SHORTER
        return None

    def first_step(self, at: Expansion) -> float:
        """The inverse of the largest curvature of f, estimated by the power method."""
        v = torch.arange(len(at.y), dtype=at.y.dtype, device=at.y.device).cos()
        size, matrix = 0.0, self.hessians.matrix if self.hessians.known_at(at.x) else None
        for _ in range(PROBES):
            v = v / torch.linalg.vector_norm(v)
            v = at.product(v, g=False) if matrix is None else matrix @ v
            size = vector_norm(v)
            if not size:
                break
        return min(1 / size if size else 1.0, self.oracle.longest_prox)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another solver was."""
        super().load_state_dict(state)
        self._exact_at = None  # an expansion holds a graph, which cannot be saved
