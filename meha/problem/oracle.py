"""The oracle of a problem: F, f and f + g as checked scalar functions, their gradients and Hessian-vector products."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meha.numerics.tolerances import DIFFERENCE, TIGHT
from meha.problem.loaders import MicroBatches, StepDraws
from meha.problem.problem import Problem, sum_of_parts
from meha.problem.responses import ResponseTerm
from meha.tensors.distributed import Group, is_dtensor
from meha.tensors.gradients import Gradient, PlainAttention, depends, differentiate, fill, passing, split, weighted
from meha.tensors.torch_private import differentiable_once, from_compiled, is_view, pull_back, under_trace
from meha.tensors.variables import Leaves, Variable, all_finite, named_parts, norm, scaled

HALF = frozenset({torch.float16, torch.bfloat16})
JOINT_LIMIT = 1 << 16  # size of x and y up to which, without modules, a sum takes one backward pass: calls dominate the time

ON_OTHER_DEVICE = re.compile(
    r"same device|expected device|two devices|"
    r"\(torch\.[A-Z]\w+\) and weight type \(torch\.cuda|\(torch\.cuda\.\w+\) and weight type \(torch\.[A-Z]"
)
"""Matches torch's errors about tensors on different devices."""

ONCE = re.compile(r"derivative for \S+ is not implemented|once_differentiable|double backward|donated buffers")
"""Matches torch's errors about gradients that cannot be differentiated again: of kernels, functions and compiled modules."""

WITH_TORCH = "use the functions of torch"

OF_OTHER_DTYPE = re.compile(r"same dtype|Float but found Double|Double but found Float|mat1 and mat2 must have|dtype, but got")
"""Matches torch's errors about operations that do not convert between precisions."""

LENGTH = 2.0
"""Length over which gradients of networks change, along F_y: differences are best at eps^(1/3) times 2, give or take a factor
of 2, for 700 to 270,000 parameters, trained and not, though the norms of y are 5 to 255."""


def lack(error: RuntimeError) -> str:
    """Why torch cannot differentiate a gradient again, if an error says that; else empty."""
    if isinstance(error, torch.OutOfMemoryError):
        return ""
    if from_compiled(error):  # in many words; where the cause is another one, the gradients of a difference raise it as well
        return "torch.compile makes code for first derivatives only"
    return first_sentence(error) if ONCE.search(str(error)) else ""


def first_sentence(error: Exception) -> str:
    """The first sentence of an error, without its full stop."""
    return re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".")


@contextmanager
def refusing_lack(argument: str, remedy: str) -> Iterator[None]:
    """Refuse problems without second derivatives, where nothing takes their place."""
    try:
        yield
    except RuntimeError as error:
        if lack(error):
            raise ValueError(f"{argument}: torch has no second derivatives here ({lack(error)}); {remedy}.") from error
        raise


Evaluate = Callable[[Variable, Variable, Any], Tensor]


class ScaleOverflowError(Exception):
    """Gradients of scaled values are NaN or infinite, as where the scale is too large for half precision."""


class Function:
    """F, f or f + g as a function of variables, ``function(x, y, batch)``, with a checked scalar result.

    Half-precision results, as under ``torch.autocast``, are converted to single precision. With a group, values without a
    gradient are averaged over its processes here; values with a gradient are averaged by the oracle.

    Attributes:
        half: the dtype of a half-precision result; None if there was none.
    """

    def __init__(self, level: str, evaluate: Evaluate, device: torch.device, group: Group | None = None) -> None:
        self.level, self._evaluate, self._device, self._group = level, evaluate, device, group
        self.half: torch.dtype | None = None
        self._unseen = True  # the device of results and writes to x and y are checked in the first call only, to save time

    def __call__(self, x: Variable, y: Variable, batch: Any = None) -> Tensor:
        if isinstance(batch, MicroBatches):
            return torch.stack([self(x, y, part) for part in batch]).mean()
        if isinstance(batch, StepDraws):  # no method took them apart: objectives know one batch
            batch = batch.joined()
        torch.clear_autocast_cache()  # an autocast around the run would reuse the parameters from before the last move
        before = self._sums(x, y)
        try:
            with x.seated(), y.seated():
                value = self._evaluate(x, y, batch)
        except RuntimeError as error:
            if ON_OTHER_DEVICE.search(str(error)):
                raise self._elsewhere(batch, f"uses tensors on other devices ({error})") from error
            if "nference tensor" in str(error):
                where = "the batch" if any(tensor.is_inference() for tensor in _tensors(batch)) else "the objective"
                made = f"{where} has a tensor that was made under torch.inference_mode(), through which no gradient can pass"
                raise ValueError(f"{self.level}: {made}; make it outside, or use tensor.clone().") from error
            if OF_OTHER_DTYPE.search(str(error)):
                kinds = " and ".join(sorted({str(leaf.dtype) for leaf in (*x.leaves, *y.leaves)}))
                mixed = f"mixes tensors of other dtypes with x and y, which are {kinds} ({first_sentence(error)})"
                raise ValueError(f"{self.level}: {mixed}; pass x0.double() and y0.double(), or convert the data.") from error
            if "Can't call numpy()" in str(error):
                raise ValueError(
                    f"{self.level}: calls numpy, which gradients cannot pass; use the functions of torch."
                ) from error
            raise
        if isinstance(value, Tensor) and value.ndim and value.numel() == 1:  # shapes such as (1,) are common, and clear
            value = value.reshape(())
        if type(value).__module__ == "numpy":
            raise ValueError(
                f"{self.level}: returns a number of numpy, which gradients cannot pass; use the functions of torch."
            )
        if not isinstance(value, Tensor) or value.ndim:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{self.level}: must return a scalar tensor, got {got}; reduce it with .sum() or .mean().")
        if value.is_complex():
            raise ValueError(f"{self.level}: must return a real number, got dtype {value.dtype}; take its .real or .abs().")
        if before != self._sums(x, y):
            raise ValueError(f"{self.level}: changes x or y in place; compute with a copy, such as y.clone() or y * 0.9.")
        if self._unseen:
            if value.device != self._device:
                raise self._elsewhere(batch, f"returns a tensor on {value.device}")
            self._unseen = False
        if value.dtype in HALF:  # weighted sums of half-precision values would round or overflow
            self.half, value = value.dtype, value.float()
        if self._group is not None and not torch.is_grad_enabled():
            (value,) = self._group.mean([value])
        return value

    def _sums(self, x: Variable, y: Variable) -> list[str]:
        """Return checksums that reveal objectives which modify x or y (first call only; empty for sharded variables)."""
        if not self._unseen or self._group is not None or under_trace():
            return []
        leaves = [*x.leaves, *y.leaves]
        if any(is_dtensor(leaf) or type(leaf).__name__ == "FakeTensor" for leaf in leaves):
            return []
        return [repr(float(leaf.detach().sum())) for leaf in leaves]  # as text, so that NaN equals NaN

    def _elsewhere(self, batch: Any, finding: str) -> ValueError:
        """Return the error for tensors of the batch or the objective that are not on the device of x and y."""
        here = self._device
        others = sorted({str(tensor.device) for tensor in _tensors(batch) if tensor.device != here})
        if others:
            return ValueError(f"batch: has tensors on {', '.join(others)}, but x and y are on {here}; move them there.")
        return ValueError(f"{self.level}: {finding}, but x and y are on {here}; move its tensors there.")


def call_objective(objective: Callable[..., Tensor]) -> Evaluate:
    """Turn an objective of values, such as tensors or modules, into a function of variables."""
    return lambda x, y, batch: objective(x.value, y.value) if batch is None else objective(x.value, y.value, batch)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch of nested dicts, lists and objects with attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for _, item in named_parts(value):
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


class BudgetError(Exception):
    """The budget of gradients of f, or the time, is used up."""


@dataclass
class Counts:
    """Numbers of gradients of F, gradients of f (or f + g) and Hessian-vector products so far."""

    upper: int = 0
    lower: int = 0
    hvp: int = 0

    def add(self, other: Counts, times: int) -> None:
        """Add ``times`` times the counts of ``other``."""
        self.upper += times * other.upper
        self.lower += times * other.lower
        self.hvp += times * other.hvp


Term = tuple[float, Function, Variable, Variable]
"""weight * function(x, y), a summand for :meth:`Oracle.gradient`."""


class Oracle:
    """First and second derivatives of a problem at variables with the structure of ``x`` and ``y``.

    Attributes:
        upper: F as a function of variables.
        lower: f.
        phi: f + g.
        partial: f + g with y fixed inside g: its gradient in x is that of f + g, its gradient in y that of f.
        prox: the proximal map of g + indicator of Y; ``prox(x_value, leaves, step)`` works in place.
        project: the projection onto X, with the same signature.
        response_term: the response of the problem, whose proximal term is part of ``lower``, ``phi`` and ``partial``.
        counts: gradients and Hessian-vector products computed so far.
        lacking: why torch has no second derivatives of this problem, as far as met; products with them are then differences.
        group: the processes over which objectives and their derivatives are averaged; None for this one alone.
        scale: factor of values in first derivatives, which keeps those of float16 from becoming zero; None for none.
        deadline: the time of ``time.monotonic`` after which :class:`BudgetError` is raised; None for none.
        late: whether that has happened.

    >>> problem = Problem(upper=lambda x, y: (x * y).sum(), lower=lambda x, y: (y - x).square().sum())
    >>> x, y = Variable(torch.tensor([1.0]), "x"), Variable(torch.tensor([3.0]), "y")
    >>> oracle = Oracle(problem, x, y)
    >>> values, gradient = oracle.gradient(y, [(2.0, oracle.upper, x, y), (1.0, oracle.lower, x, y)])
    >>> gradient, oracle.counts
    ([tensor([6.])], Counts(upper=1, lower=1, hvp=0))
    """

    def __init__(self, problem: Problem, x: Variable, y: Variable, group: Group | None = None) -> None:
        self.problem, self.group, self.counts, self._device = problem, group, Counts(), y.device
        self.scale: float | None = None
        self.deadline: float | None = None
        self.late = False
        self.prox, self.project = problem._bind_prox(y), problem._bind_projection(x)
        self.upper = Function("upper", call_objective(problem.upper), self._device, group)
        self.response_term = ResponseTerm(problem._selected_response)
        self._smooth = call_objective(problem.lower)
        # The proximal term of the response is part of f, so that methods need no code for it.
        self.lower = Function("lower", self._tied if self.response_term.nearest else self._smooth, self._device, group)
        self._g = problem.g.terms(y)
        self.phi = Function("lower", self._phi, self._device) if self._g else self.lower
        self.partial = Function("lower", self._partial, self._device) if self._g else self.lower
        self.upper_uses_x = True  # until the first gradient shows otherwise; affects only the counts
        self._repeats = x.has_modules or y.has_modules  # random numbers: modules draw some
        small = x.numel + y.numel <= JOINT_LIMIT and not self._repeats
        self._joint = (small if problem.joint is None else problem.joint) and not (x.sharded or y.sharded)
        self.lacking = ""
        self._checks = True
        self._checked: set[tuple[object, ...]] = set()

    def bare(self, *, joint: bool | None = None) -> Oracle:
        """Return a copy for a traced or recorded step, with new counts, no checks of dependence and no random states.

        Args:
            joint: whether to take one backward pass for a sum of terms; None keeps the present choice.
        """
        other = copy.copy(self)
        other.counts, other._repeats, other._checks = Counts(), False, False
        other._joint = self._joint if joint is None else joint
        return other

    def check_time(self) -> None:
        """Raise an error after the deadline."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.late = True
            raise BudgetError

    @property
    def longest_prox(self) -> float:
        """The longest step of the proximal map: below 1 / rho, that of a weakly convex g has one value."""
        return 0.5 / self.problem.g.rho if self.problem.g.rho else math.inf

    def g(self, x: Variable, y: Variable) -> Tensor | float:
        """Return g(x, y), or 0 if there is no g."""
        return self._g_at(x, y.current)

    def _g_at(self, x: Variable, leaves: Leaves) -> Tensor | float:
        return sum(sum_of_parts(term, x.value, [leaves[i] for i in chosen]) for term, chosen in self._g)

    def g_gradient(self, x: Variable, y: Variable) -> Leaves:
        """Return the gradient of g in x; it does not count as a gradient of f."""
        with torch.enable_grad():
            value = self.g(x, y)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return fill([None] * len(x.leaves), x.leaves)
        return fill(torch.autograd.grad(value, x.leaves, allow_unused=True), x.leaves)

    def _tied(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        """Return f plus the proximal term of a response ``Nearest``."""
        return self._smooth(x, y, batch) + self.response_term.term(x, y)

    def _phi(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self.lower(x, y, batch) + self.g(x, y)

    def _partial(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self.lower(x, y, batch) + self._g_at(x, [leaf.detach() for leaf in y.current])

    def gradient(
        self, wrt: Variable, terms: list[Term], batch: Any = None, *, strict: bool = True
    ) -> tuple[list[Tensor], Leaves]:
        """Return the values of the functions, and the gradient of their weighted sum with respect to ``wrt``."""
        values, (gradient,) = self.gradients((wrt,), terms, batch, strict=strict)
        return values, gradient

    def gradients(
        self, wrt: tuple[Variable, ...], terms: list[Term], batch: Any = None, *, strict: bool = True, own: bool = False
    ) -> tuple[list[Tensor], list[Leaves]]:
        """Return the values of the functions, and the gradients of their weighted sum in each variable of ``wrt``.

        A function counts as one gradient, for any number of variables. Small problems take one backward pass through the sum,
        because calls dominate their time; networks and larger problems take one pass per term, which keeps the intermediate
        results of only one term in memory.

        With modules, a function that occurs in several terms, such as f(x, y) - f(x, theta), uses the same random numbers in
        all of them; otherwise the difference of two dropout masks would swamp that of y and theta.

        Args:
            strict: refuse functions that do not depend on their variable, instead of treating them as constants; the first
                gradient of each kind checks it. If F does not depend on x, it is still evaluated, since that may change, but
                its gradients in x alone are not counted.
            own: leave values and gradients as this process has them, to combine them before :meth:`average`.
        """
        self.check_time()
        parts = batch if isinstance(batch, MicroBatches) else (batch,)
        n = len(parts)
        # Parts of a batch are there to keep only one graph at a time. One term has one graph anyhow.
        gradient = Gradient(wrt, joint=(self._joint or len(terms) == 1) and n == 1)
        functions, scale = [function for _, function, _, _ in terms], self.scale or 1.0
        key = (*[variable.argument for variable in wrt], *functions)
        unchecked = strict and self._checks and key not in self._checked  # once per kind of gradient, as it takes time
        values: list[Tensor] = []
        used: list[list[bool]] = []
        reached = False  # whether x has a part in F
        streams: dict[Function, list[Tensor]] = {}  # random states
        with torch.enable_grad():
            for weight, function, x, y in terms:
                if function in streams:
                    self.set_random_states(streams[function])  # as at its first evaluation
                elif self._repeats and functions.count(function) > 1:
                    streams[function] = self.random_states()
                with passing(wrt, x, y) as sharded:
                    for part in parts:
                        value = function(x, y, part)
                        # A value that is itself a parameter, or a view of one, would change with the next step.
                        values.append(value.detach().clone() if value.is_leaf or is_view(value) else value.detach())
                        if sharded:
                            used.append(gradient.add_sharded(value, scale * weight / n, x, y, check=unchecked))
                            reached = reached or x not in wrt or (function is self.upper and any(used[-1][:1]))
                        elif unchecked:
                            used.append([depends(value, variable.leaves) for variable in wrt])
                            reached = reached or (function is self.upper and depends(value, x.leaves))
                            if y.follows and y not in wrt and function is not self.upper and not depends(value, y.leaves):
                                raise self._bound(function)
                        if value.requires_grad and not sharded:
                            gradient.add(value, scale * weight / n)
                        del value  # free its graph before the next one is built
        self._count(functions, wrt)
        if n > 1:  # the parts of a term are adjacent
            values = [torch.stack(values[i : i + n]).mean() for i in range(0, len(values), n)]
            used = [[any(column) for column in zip(*used[i : i + n], strict=True)] for i in range(0, len(used), n)]
        if unchecked:
            self._check_dependence(wrt, terms, used, reached)
            self._checked.add(key)
        gradients = split(gradient.result() if self.scale is None else self._unscaled(gradient.result(), self.scale), wrt)
        return values, gradients if own else self.average(gradients, wrt, values)

    def _unscaled(self, gradient: Leaves, scale: float) -> Leaves:
        """Divide a gradient by the scale, or raise if it is not finite, in any of the processes."""
        gradient = scaled(gradient, torch.tensor(1 / scale, device=self._device))
        bad = not all_finite(gradient)
        if bad if self.group is None else self.group.any(bad, self._device):
            raise ScaleOverflowError
        return gradient

    def average(self, gradients: list[Leaves], wrt: tuple[Variable, ...], values: list[Tensor]) -> list[Leaves]:
        """Return the means of gradients over the processes, and replace the values in their list by their means."""
        if self.group is None:
            return gradients
        parts = [part for leaves in gradients for part in leaves]
        leaves = [leaf for variable in wrt for leaf in variable.leaves]
        self.group.average(parts, leaves, [done for variable in wrt for done in variable.managed], values)
        return split(parts, wrt)

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        return tensor if self.group is None else self.group.mean([tensor])[0]

    def _count(self, functions: list[Function], wrt: tuple[Variable, ...]) -> None:
        """Count one gradient per function; that of an F without x, in x alone, is zero and not counted."""
        for function in functions:
            if function is not self.upper:
                self.counts.lower += 1
            elif self.upper_uses_x or wrt[-1].argument != "x":
                self.counts.upper += 1

    def random_states(self) -> list[Tensor]:
        """Return the states of the random number generators of the host and the device; none where nothing is repeated."""
        if not self._repeats:
            return []
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else [])]

    def set_random_states(self, states: list[Tensor]) -> None:
        for state in states[:1]:
            torch.set_rng_state(state)
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self._device)

    def traced(self, wrt: Variable, terms: list[Term], batch: Any = None) -> Leaves:
        """Return the gradient of a weighted sum of functions with respect to ``wrt``, as part of the graph."""
        if self.group is not None:
            reason = "steps that are kept as graphs are not averaged over processes"
            raise ValueError(f"keep_graph: {reason}; leave keep_graph out, or group.")
        self._count([function for _, function, _, _ in terms], (wrt,))
        return self._differentiated(terms, wrt, batch)

    def _differentiated(self, terms: list[Term], wrt: Variable, batch: Any, *, strict: bool = False) -> Leaves:
        """Return the gradient of a weighted sum of functions as part of the graph; for ``strict``, see :meth:`gradients`."""
        key = (wrt.argument, *[function for _, function, _, _ in terms])
        with torch.enable_grad(), PlainAttention():
            values = [function(x, y, batch) for _, function, x, y in terms]
            if strict and self._checks and key not in self._checked:
                pairs = list(zip(values, terms, strict=True))
                reached = any(function is self.upper and depends(value, x.leaves) for value, (_, function, x, _) in pairs)
                self._check_dependence((wrt,), terms, [[depends(value, wrt.leaves)] for value in values], reached)
                self._checked.add(key)
            total = weighted([weight for weight, _, _, _ in terms], values)
            self.check_twice(total, *key)
            return differentiate(total, wrt.leaves)

    def check_twice(self, value: Tensor, *kind: object) -> None:
        """Raise for functions that say they cannot be differentiated twice, as torch does not always; once for each kind."""
        key = ("twice", *kind)
        if self._checks and key not in self._checked:
            if name := differentiable_once(value):
                raise RuntimeError(f"{name} is marked with once_differentiable")
            self._checked.add(key)

    def pull_back(
        self, function: Function, x: Variable, iterates: Sequence[Variable], batch: Any = None
    ) -> tuple[Tensor, list[Leaves]]:
        """Return the value of a function at (x, last iterate), and its gradients in x and the first iterate.

        Each iterate after the first comes from a traced gradient, and the pass back through it counts as a Hessian-vector
        product.
        """
        wrt = (x, iterates[0])
        gradient = Gradient(wrt, joint=True)
        with torch.enable_grad():
            value = function(x, iterates[-1], batch)
        if value.requires_grad:
            gradient.add(value, 1.0)
        self._count([function], wrt)
        self.counts.hvp += len(iterates) - 1
        with PlainAttention():  # what was checkpointed is computed again on the way back
            return value.detach(), split(gradient.result(), wrt)

    def _check_dependence(self, wrt: tuple[Variable, ...], terms: list[Term], used: list[list[bool]], reached: bool) -> None:
        """Raise for objectives that ignore their variable, and note whether F uses x; once per kind of gradient."""
        simple = self.problem._without_x  # simple bilevel optimization
        for (_, function, x, y), uses in zip(terms, used, strict=True):
            upper = function is self.upper
            for variable, use in zip(wrt, uses, strict=True):
                if variable is y and not use and not (upper and reached):
                    if y.follows:
                        raise self._bound(function)
                    reason = "any y solves the lower level"
                    if upper and simple:
                        reason = "so all solutions of the lower level are as good, and there is no x; minimise lower alone"
                    elif upper:
                        reason = "and not on x either, so there is nothing to minimise"
                    found = "does not depend on y (or was detached from it)"
                    raise ValueError(f"{function.level}: {found}; {reason}. Use y in it, without .detach(), .item() or numpy.")
                if variable is x and upper and self.upper_uses_x and not use:
                    self.upper_uses_x = False
                    self.counts.upper -= len(wrt) == 1  # it was counted before this was known
        only_upper = all(function is self.upper for _, function, _, _ in terms)
        unused = wrt[0].argument == "x" and not any(uses[0] for uses in used)
        # F alone may ignore x, as in hyper-parameter optimization, where x acts through y.
        if unused and not only_upper and not self.upper_uses_x and not simple and not self.response_term.moves:
            remedy = "use x in one, or leave it out: write both objectives as functions of y alone, and pass x0=None"
            raise ValueError(
                f"x: neither upper nor lower nor nonsmooth depends on it (or they were detached from it); {remedy}."
            )

    @staticmethod
    def _bound(function: Function) -> ValueError:
        """Return the error for an objective that does not use the copy of a module that it gets."""
        return ValueError(
            f"{function.level}: gets a copy of the module y, and does not compute with its parameters; use the y that it gets,"
            " not the module from outside, and give that no forward that is bound to its own parameters, as by a wrapper."
        )

    def hessian(self, terms: list[Term], batch: Any = None, *, counted: bool = False) -> Hessian:
        """Return the second derivatives of a weighted sum of functions at one point (x, y).

        Args:
            counted: the caller also uses the gradient in y that comes with them, which then counts and is checked like others.
        """
        return Hessian(self, terms, batch, counted=counted)


class Hessian:
    """Products of second derivatives at one point with vectors, from one graph that the object keeps.

    Where torch cannot differentiate a gradient again, as with fused kernels or compiled modules, a product is a central
    difference of two gradients, at y + e v and y - e v with e ||v|| = eps^(1/3) min(||y||, 2), and these are what is counted.
    On networks with smooth activations it is right to 1e-9 in double and 1e-4 in single precision, as a rule, and to a digit at
    most in half; where f is nearly flat, less. The first product that fails finds this out, and :attr:`Oracle.lacking` keeps it
    for the run. (x, y) must stay where it is as long as products are taken.
    """

    def __init__(self, oracle: Oracle, terms: list[Term], batch: Any, *, counted: bool = False) -> None:
        self._oracle, self._terms, self._batch, self._counted = oracle, terms, batch, counted
        self._random: list[Tensor] = []  # the random states at the first evaluation; empty before
        self._first: Leaves | None = None  # the gradient in y, with its graph; None where there can be none
        self._gradient: Leaves | None = None
        if oracle.lacking:
            return
        y, random = terms[0][3], oracle.random_states()
        try:
            self._first = oracle._differentiated(terms, y, batch, strict=counted)
        except RuntimeError as error:  # some compiled modules refuse already here
            self._lose_graph(error)
            oracle.set_random_states(random)
            return
        self._random = random
        if counted:
            oracle._count([function for _, function, _, _ in terms], (y,))
        (self._gradient,) = oracle.average([[leaf.detach() for leaf in self._first]], (y,), [])

    @property
    def gradient(self) -> Leaves:
        """The gradient of the sum in y."""
        if self._gradient is None:
            y = self._terms[0][3]
            (self._gradient,) = self._gradients((y,), y, strict=self._counted)
        return self._gradient

    def __call__(self, vector: Leaves, *wrt: Variable) -> list[Leaves]:
        """Return d/dv <grad_y, vector> for each variable v of ``wrt``, by one double backward pass; it is counted."""
        oracle = self._oracle
        if self._first is None:
            return self._difference(vector, wrt)
        curved = [(first, part) for first, part in zip(self._first, vector, strict=True) if first.requires_grad]  # not linear
        targets = [leaf for variable in wrt for leaf in variable.leaves]
        products: Sequence[Tensor | None] = [None] * len(targets)
        if curved:
            outputs, cotangents = zip(*curved, strict=True)
            try:
                with PlainAttention():  # checkpointed activations are computed again on the way back
                    products = pull_back(outputs, cotangents, targets)  # keeps the graph: solvers ask for many products
            except RuntimeError as error:
                self._lose_graph(error)
                del curved, outputs  # with the graph
                return self._difference(vector, wrt)
        oracle.counts.hvp += 1
        for variable, pieces in zip(wrt, split(products, wrt), strict=True):
            elsewhere = oracle.upper_uses_x or oracle.response_term.moves
            if variable.argument == "x" and not elsewhere and all(piece is None for piece in pieces):
                if oracle.problem._without_x:
                    found = "it moves x along a hypergradient, and there is no x (x0=None)"
                    raise ValueError(f"method: {found}; use the default, or AdaptiveMEHA().")
                found = "neither upper nor the y-gradient of lower depends on it, so it has no influence"
                raise ValueError(f"x: {found} (or they were detached from it); use x in one.")
        return oracle.average(split(fill(products, targets), wrt), wrt, [])

    def _lose_graph(self, error: RuntimeError) -> None:
        """Take differences from now on, unless an error has another cause."""
        oracle = self._oracle
        oracle.lacking = lack(error)
        if not oracle.lacking:
            raise error
        oracle._repeats = True  # random numbers, in both gradients of a difference
        self._first = None

    def _difference(self, vector: Leaves, wrt: tuple[Variable, ...]) -> list[Leaves]:
        """Return the same by a central difference of gradients; the host does not wait for the device."""
        y = self._terms[0][3]
        eps = max(torch.finfo(leaf.dtype).eps for leaf in y.leaves)
        with torch.no_grad():
            own, size = norm(y.leaves), norm(vector)
            length = torch.where(own > 0, own.clamp(max=LENGTH), LENGTH)
            reach = torch.maximum(eps**DIFFERENCE * length, eps**TIGHT * own)  # a shorter one would be rounded away
            unit = scaled([*vector], 1 / size.clamp(min=torch.finfo(size.dtype).tiny))  # v = 0 stays 0
            ends = []
            for step in (reach, -reach):
                with y.at([leaf + step * part for leaf, part in zip(y.leaves, unit, strict=True)]) as there:
                    ends.append(self._gradients(wrt, there))
            slope = size / (2 * reach)
            return [
                [slope * (up - down) for up, down in zip(ups, downs, strict=True)] for ups, downs in zip(*ends, strict=True)
            ]

    def _gradients(self, wrt: tuple[Variable, ...], there: Variable, *, strict: bool = False) -> list[Leaves]:
        """Return gradients at (x, there), with the random numbers of the first evaluation of this object."""
        oracle, y = self._oracle, self._terms[0][3]
        now: list[Tensor] = []
        if self._random:
            now = oracle.random_states()
            oracle.set_random_states(self._random)
        else:
            self._random = oracle.random_states()
        terms: list[Term] = [(weight, function, x, there) for weight, function, x, _ in self._terms]
        here = tuple(there if variable is y else variable for variable in wrt)
        _, gradients = oracle.gradients(here, terms, self._batch, strict=strict)
        oracle.set_random_states(now)  # what others draw next does not depend on the number of products
        return gradients
