"""Refit: y computed afresh at the x of a solution, and what F and other measures are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from meha._checks import check_count, check_positive
from meha._distributed import Group
from meha._leaves import Leaves, copy_
from meha._oracle import Counts, Oracle
from meha._structures import modules_of, named_leaves
from meha._variables import Variable
from meha.loaders import Endless
from meha.methods._curvatures import flatten, probe, write
from meha.methods._levels import Levels
from meha.methods._moves import move
from meha.methods._nearest import nearest
from meha.methods._optimizers import OptimizerFactory, build_optimizer
from meha.problem import Problem
from meha.responses import Nearest, Response, Trained, redraw

__all__ = ["Refit", "refit"]

ACCURACY = 1e-7
"""Relative accuracy of a lower solution that is computed afresh."""

PROBES = 4
"""Power steps by which the curvature of f is measured first."""

LR = 1e-3
"""Learning rate of Adam, which trains y where nothing else is said."""

MOST = 100
"""Upper bound on the batches over which F is averaged."""

Metrics = Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True, eq=False, repr=False)
class Refit:
    """y computed afresh at the x of a solution; ``print`` it.

    Attributes:
        y: the fresh lower variable, in the structure of the start.
        upper: F(x, y) there, the mean over batches if there are any.
        returned: the same for the y of the solution.
        lower: f + g at the fresh y, as far as it was measured.
        metrics: by name, the pair of the measure at the fresh y and at that of the solution.
        counts: gradients that were taken.
        how: where y began, and what was done.
    """

    y: Any
    upper: float
    returned: float
    lower: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    how: str = ""

    def __repr__(self) -> str:
        return f"Refit(F={self.upper:.6g}, returned={self.returned:.6g})"

    def __str__(self) -> str:
        pairs = {"F": (self.upper, self.returned), **self.metrics}
        width = max(map(len, pairs))
        lines = [f"  {name:<{width}}  fresh {fresh:.6g}, returned {old:.6g}" for name, (fresh, old) in pairs.items()]
        return "\n".join([f"refit: {self.how}, {self.counts.lower} gradients of f", *lines])


def refit(
    problem: Problem,
    x_value: Any,
    y_value: Any,
    y0: Leaves,
    *,
    steps: int | None,
    lr: float | None,
    optimizer: OptimizerFactory | None,
    start: Any,
    seed: int | None,
    batches: Iterable[Any] | None,
    metrics: Metrics | None,
    group: Group | None = None,
) -> Refit:
    """Compute y afresh; see :meth:`meha.Solution.refit`."""
    returned = Variable(y_value, "y")
    if returned.sharded:
        raise ValueError(
            "refit: y is a sharded module, which cannot be copied; train a new one on the lower level at solution.x instead."
        )
    problem, x_value = problem.lifted(x_value, returned)
    x, y = Variable(x_value, "x"), returned.copy()
    oracle, response = Oracle(problem, x, y, group), problem.selected
    if steps is None and lr is None and optimizer is None and isinstance(response, Trained):
        steps, lr = response.steps, response.lr
    if steps is not None:
        check_count("steps", steps)
    if lr is not None:
        check_positive("lr", lr)
        if optimizer is not None:
            raise ValueError(f"lr: is {lr:g}, but there is an optimizer; give one of them.")
    if problem.needs_batch and batches is None:
        raise ValueError("batches: the objectives need some; pass those of the run, as in refit(batches=loader).")
    if steps is None and (y.has_modules or batches is not None):
        raise ValueError("steps: a network, or a y trained on batches, needs their number; pass it, such as refit(steps=1000).")
    stream = None if batches is None else Endless(batches)
    with torch.no_grad(), _seeded(seed, y):
        where = _begin(x, y, y0, response, start, seed)
        oracle.selection.hold(y)  # a proximal term that does not vanish is a part of the lower level
        if steps is None:
            lower = _solve(oracle, x, y)
            done = "lower level solved"
        else:
            lower = _train(oracle, x, y, steps, lr, optimizer, stream)
            done = f"{steps} steps"
        upper, old = _uppers(oracle, x, (y, returned), stream, batches)
        values = {
            name: (float(measure(x_value, y.detached())), float(measure(x_value, y_value)))
            for name, measure in (metrics or {}).items()
        }
    return Refit(y.snapshot(), upper, old, lower, values, oracle.counts, f"{done} from {where}")


@contextlib.contextmanager
def _seeded(seed: int | None, y: Variable) -> Iterator[None]:
    """Draw random numbers from this seed, and leave the generators as they were."""
    if seed is None:
        yield
        return
    devices = [y.device] if y.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _begin(x: Variable, y: Variable, y0: Leaves, response: Response | None, start: Any, seed: int | None) -> str:
    """Put y where it begins, and say where that is."""
    if start is None and seed is not None and next(modules_of(y.value), None) is not None:
        start = "redraw"
    if start is None and response is not None and response.start is not None:
        start = response.start
    if start is None:
        copy_(y.leaves, y0)
        return "y0"
    if isinstance(start, str) and start == "redraw":
        redraw(y)
        return "new random parameters"
    if callable(start) and not isinstance(start, torch.nn.Module):
        leaves = Nearest(start=start).begin(x, y)
        copy_(y.leaves, [leaf.detach() for leaf in leaves])
        return "the start of the response" if response is not None and start is response.start else "the given function of x"
    leaves = list(named_leaves(start, "start").values())
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in y.leaves]:
        raise ValueError("start: has leaves of other shapes than y; give a value like y0.")
    copy_(y.leaves, [leaf.detach() for leaf in leaves])
    return "the given start"


def _solve(oracle: Oracle, x: Variable, y: Variable) -> float:
    """Set y to the solution of the lower level nearest to it."""
    levels = Levels(oracle, x, y)
    begin = flatten(y)
    levels.curvatures = probe(oracle, x, y, {}, rounds=PROBES)
    fresh = nearest(levels, begin, ACCURACY, levels.curvatures["f_yy"])
    write(fresh.y, y)
    return fresh.lower


def _train(
    oracle: Oracle,
    x: Variable,
    y: Variable,
    steps: int,
    lr: float | None,
    factory: OptimizerFactory | None,
    stream: Iterator[Any] | None,
) -> float:
    """Train y on the lower level; the value of the last step."""
    if lr is None and factory is None:
        factory = partial(torch.optim.Adam, lr=LR)
    running = build_optimizer("optimizer", factory, y, oracle.problem)
    value = float("nan")
    for _ in range(steps):
        (lower,), direction = oracle.gradient(y, [(1.0, oracle.lower, x, y)], None if stream is None else next(stream))
        value = float(lower) + float(oracle.g(x, y))
        move(y, direction, lr, oracle.prox, x.value, running)
    return value


def _uppers(
    oracle: Oracle, x: Variable, ys: tuple[Variable, Variable], stream: Iterator[Any] | None, batches: Any
) -> tuple[float, float]:
    """F for both y, the mean over one pass through the batches."""
    number = 1 if stream is None else min(MOST, len(batches) if isinstance(batches, Sized) else MOST)
    totals = [0.0, 0.0]
    for _ in range(number):
        batch = None if stream is None else next(stream)
        for i, y in enumerate(ys):
            totals[i] += float(oracle.upper(x, y, batch)) / number
    return totals[0], totals[1]
