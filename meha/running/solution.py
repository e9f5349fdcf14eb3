"""Solution, the result of :func:`meha.solve`, and Refit, a lower solution that is computed again at its x."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from meha.analysis import diagnostics
from meha.analysis.theory import Constants
from meha.lower.curvature import flatten, probe, write
from meha.lower.flat_problem import FlatProblem
from meha.lower.nearest import solve_nearest
from meha.method.optimizers import Optimizer, OptimizerFactory, build_optimizer
from meha.method.status import Status
from meha.methods import Method
from meha.methods.frames import move
from meha.problem.loaders import Endless, from_start, joined, length
from meha.problem.oracle import Counts, Oracle
from meha.problem.problem import Problem
from meha.problem.responses import Nearest, Response, Trained, redraw
from meha.running.observers import History
from meha.running.verify import Verification, verify
from meha.tensors.checks import check_count, check_positive
from meha.tensors.distributed import Group
from meha.tensors.variables import Leaves, Variable, copy_, named_leaves

ACCURACY = 1e-7  # relative, of a lower level that is solved again
PROBES = 4  # power steps by which the curvature of f is measured first
LR = 1e-3  # learning rate of Adam, which trains y by default; that of Kingma and Ba (2015)
MOST = 100  # upper bound on the batches over which F is averaged, as a loader may have no end
SHARE = 0.2  # of the gradients of a run; as many more train new networks at its end
FEWEST = 50  # a network that was trained for fewer steps says nothing about x
FRESH_LR = 6e-3  # of Adam, falls to 0; a short training, of some hundred steps, needs longer ones than Adam's 1e-3
WORSE = 0.02  # a relative difference of F below which two values of x are as good
TRAINED = 0.5  # y0 was trained before where f is smaller there by this share than at new parameters


@dataclass(frozen=True, eq=False, repr=False)
class Refit:
    """The lower level, solved or trained again at the x of a solution; ``print`` it.

    Attributes:
        y: the new lower variable, in the structure of the start.
        upper: F(x, y) with the new y, the mean over batches if there are any.
        returned: F(x, y) with the y of the solution.
        lower: f + g at the new y; after training, in its last step.
        metrics: by name, the pair of the measure at the new y and at that of the solution.
        counts: gradients that were taken.
        how: where y began, and what was done.
        start: F(x0, y) with a y trained in the same way at x0; None where :meth:`Solution.refit` made this.
        worse: whether x serves a new y less well than x0 does, beyond what batches explain.
    """

    y: Any
    upper: float
    returned: float
    lower: float
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    how: str = ""
    start: float | None = None
    worse: bool = False

    def __repr__(self) -> str:
        return f"Refit(F={self.upper:.6g}, returned={self.returned:.6g})"

    def __str__(self) -> str:
        pairs = {"F": (self.upper, self.returned), **self.metrics}
        width = max(map(len, pairs))
        lines = [f"  {name:<{width}}  fresh {fresh:.6g}, returned {old:.6g}" for name, (fresh, old) in pairs.items()]
        lines[0] += "" if self.start is None else f", fresh at x0 {self.start:.6g}"
        return "\n".join([f"refit: {self.how}, {self.counts.lower} gradient{'s' * (self.counts.lower != 1)} of f", *lines])


def _begin(x: Variable, y: Variable, y0: Leaves, response: Response | None, start: Any, seed: int | None) -> str:
    """Set y to its starting point, and say which one that is."""
    if start is None and seed is not None and y.has_modules:
        start = "redraw"  # with y0, all seeds would begin at the same parameters
    if start is None and response is not None:
        start = response.start
    if start is None:
        copy_(y.leaves, y0)
        return "y0"
    if isinstance(start, str) and start == "redraw":
        redraw(y)
        return "new random parameters"
    if callable(start) and not isinstance(start, torch.nn.Module):  # a module is callable too, but stands for its parameters
        leaves = Nearest(start=start).begin(x, y)
        where = "the start of the response" if response is not None and start is response.start else "the given function of x"
    else:
        leaves, where = list(named_leaves(start, "start").values()), "the given start"
        if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in y.leaves]:
            raise ValueError("start: has leaves of other shapes than y; give a value like y0.")
    copy_(y.leaves, [leaf.detach() for leaf in leaves])
    return where


def _solve(oracle: Oracle, x: Variable, y: Variable) -> float:
    """Set y to the solution of the lower level that is nearest to it, and return f + g there."""
    levels, begin = FlatProblem(oracle, x, y), flatten(y)
    levels.curvatures = probe(oracle, x, y, {}, rounds=PROBES)  # their size sets the weights of the proximal terms
    nearest = solve_nearest(levels, begin, ACCURACY, levels.curvatures["f_yy"])
    write(nearest.y, y)
    return nearest.lower


def _train(
    oracle: Oracle,
    pairs: Sequence[tuple[Variable, Variable]],
    stream: Iterator[Any],
    steps: int,
    lr: float | None,
    factory: OptimizerFactory | None,
) -> list[float]:
    """Train each y of the pairs (x, y) on the lower level, all on the same batches, and return f + g in the last step."""
    if lr is None and factory is None:
        factory = partial(torch.optim.Adam, lr=LR)
    running = [build_optimizer("optimizer", factory, y, oracle.problem) for _, y in pairs]
    values = [math.nan] * len(pairs)
    for _ in range(steps):
        batch, states = next(stream), oracle.random_states()
        for i, (x, y) in enumerate(pairs):
            oracle.set_random_states(states)  # the same dropout masks, so that the pairs differ in x alone
            (lower,), direction = oracle.gradient(y, [(1.0, oracle.lower, x, y)], batch)
            values[i] = float(lower) + float(oracle.g(x, y))
            move(y, direction, lr, oracle.prox, x.value, running[i])
    return values


def _uppers(oracle: Oracle, pairs: Sequence[tuple[Variable, Variable]], stream: Iterator[Any], count: int) -> Tensor:
    """F at each pair (x, y), a row for each of the batches; the buffers of modules, such as those of batch norm, stay."""
    buffers = [(buffer, buffer.clone()) for pair in pairs for variable in pair for buffer in variable.buffers().values()]
    rows = []
    for _ in range(count):
        batch, states = next(stream), oracle.random_states()
        row = []
        for x, y in pairs:
            oracle.set_random_states(states)  # and the same batch, so that they can be compared
            row.append(float(oracle.upper(x, y, batch)))
        rows.append(row)
    for buffer, before in buffers:
        buffer.copy_(before)
    return torch.tensor(rows, dtype=torch.float64)


def _count(batches: Any) -> int:
    """The number of batches over which F is averaged: one pass, as far as its end is known and near."""
    return 1 if batches is None else min(MOST, length(batches) or MOST)


def train_fresh(solution: Solution, x0: Leaves, stream: Iterator[Any], batches: Any) -> Refit | None:
    """Train two new networks on the lower level, one at x and one at x0, and compare F; None where this says nothing.

    A network can fit the data of F directly, or x can fit this one network; then F of the returned y is small, and x is worth
    nothing to a network that is trained afresh. Both networks begin alike and see the same batches. They take a SHARE of the
    gradients of the run.
    """
    spent = solution.counts
    steps = min(solution.steps, int(SHARE * (spent.upper + spent.lower + spent.hvp) / 2))
    if steps < FEWEST:
        return None
    problem, returned, x = solution.problem, Variable(solution.y, "y"), Variable(solution.x, "x")
    before, y, y_before = x.copy(), returned.copy(), returned.copy()
    copy_(before.leaves, x0)
    copy_(y.leaves, solution.y0)
    oracle = Oracle(problem, x, y, solution.group)
    oracle.response_term.hold(y)
    first = next(stream)
    where = _renew(oracle, before, y, y_before, first)
    copy_(y_before.leaves, y.leaves)
    falling = partial(LinearLR, start_factor=1.0, end_factor=1 / steps, total_iters=steps)
    fused = y.device.type in ("cpu", "cuda")  # other forms make two temporary tensors of the size of y
    own = getattr(solution.method, "y_optimizer", None)
    factory = own or Optimizer(torch.optim.Adam, lr=FRESH_LR, fused=fused, scheduler=falling)
    pairs = [(x, y), (before, y_before)]
    lower, _ = _train(oracle, pairs, chain([first], stream), steps, None, factory)
    uppers = _uppers(oracle, [*pairs, (x, returned)], stream, max(1, min(_count(batches), steps // 2)))
    (upper, start, old), differences = uppers.mean(0).tolist(), uppers[:, 0] - uppers[:, 1]
    noise = float(differences.std()) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    worse = not upper - start <= max(WORSE * abs(start), 2 * noise) and math.isfinite(start)  # so that NaN at x is worse
    how = f"{steps} steps from {where}"
    return Refit(y.snapshot(), upper, old, lower, counts=oracle.counts, how=how, start=start, worse=worse)


def _renew(oracle: Oracle, x0: Variable, y: Variable, spare: Variable, batch: Any) -> str:
    """Draw the parameters of y again, unless they cannot be or were trained before the run; say where y begins then."""
    copy_(spare.leaves, y.leaves)
    try:
        redraw(spare)  # x is often made for the path from y0, and of no use on another one
    except ValueError:
        return "y0"
    if oracle.group is not None:
        oracle.group.broadcast_(spare.tensors().values())
    here, there = (float(oracle.lower(x0, start, batch)) for start in (y, spare))
    if there - here > TRAINED * abs(there):
        return "y0"
    copy_(y.leaves, spare.leaves)
    return "new random parameters"


WIDTH = 100  # columns of printed text
SEVERAL = 20.0  # the ratio of the largest to the smallest number from which a plot has a logarithmic scale
DECADES = 1e8  # numbers that are smaller than the largest by more than this lie in the linear part of a scale through zero


@dataclass(frozen=True)
class Diagnosis:
    """How well a point solves both levels, by measures that do not depend on the method.

    Attributes:
        gap: (f + g)(x, y) - v_gamma(x, y); zero where y is stationary for the lower level.
        residual: :func:`meha.diagnostics.prox_residual` of the penalised problem at c; None without c.
        gamma, c: the parameters of the envelope and of the penalty.
    """

    gap: float
    residual: float | None
    gamma: float
    c: float | None

    def __str__(self) -> str:
        lines = [f"gap       {self.gap:.3g}  (f + g above its Moreau envelope, gamma = {self.gamma:.3g})"]
        if self.residual is not None:
            lines.append(f"residual  {self.residual:.3g}  (stationarity of the penalised problem, c = {self.c:.3g})")
        return "\n".join(lines)


@dataclass(eq=False, repr=False)
class Solution:
    """The last finite iterate of a run, and how it was reached. ``print`` it, or ``plot`` it.

    It is data: nothing is computed when it is read or printed, except by :meth:`diagnose` and :meth:`refit`.

    Attributes:
        x, y: the solution, in the structure of the start.
        status: how the run ended.
        message: the reason in a sentence, with what to try when it went wrong.
        upper: F(x, y); with batches, the mean over those on which ``fresh`` was judged, or F on the last one. None if unknown.
        steps: number of steps taken.
        seconds: time of the start, where left-out numbers are chosen, and of the steps; not of observers and checkpoints.
        counts: gradients of F and of f, Hessian-vector products.
        history: numbers of the recorded steps.
        method: the hyper-parameters, with those that were left out filled in.
        engine: the method that the answer comes from: that of the engine which the default chose, or ``method`` itself.
        constants: of the problem, as stated with it or estimated to fill in the method; None when nothing is known.
        report: what the run learned about the problem, in lines by heading.
        y0: the leaves of y at the start, where :meth:`refit` begins.
        group: the processes that took part; None for this one alone.
        fresh: for networks, how good x is for a network that is trained afresh; None if that was not tried.
    """

    problem: Problem
    method: Method
    x: Any
    y: Any
    status: Status
    message: str
    upper: float | None
    steps: int
    seconds: float
    counts: Counts
    history: History
    engine: str = ""
    constants: Constants | None = None
    batch: Any = None
    report: Mapping[str, str] = field(default_factory=dict)
    y0: Leaves = field(default_factory=list)
    group: Group | None = None
    fresh: Refit | None = None

    @property
    def converged(self) -> bool:
        """Return whether the method found evidence for a solution; a stopping rule gives none."""
        return self.status is Status.CONVERGED

    def diagnose(self, gamma: float | None = None, c: float | None = None) -> Diagnosis:
        """Measure gap and residual at the solution, which takes many gradients. With a group, all its processes must call it.

        Args:
            gamma: the envelope parameter; that of the method by default, or 1 where it has none.
            c: the penalty; by default the last one of the run, if its method has a gamma.

        Raises:
            ValueError: the objectives need a batch, and there was none.
        """
        if self.problem.needs_batch and self.batch is None:
            raise ValueError("diagnose: the objectives need a batch, and the run had none; use meha.diagnostics with one.")
        own = getattr(self.method, "gamma", None) or self._last("gamma")  # the history's, where the run chose it
        c = self._last("c") if c is None and own else c  # without a gamma, c weighs something else than the envelope
        gamma = gamma or own or 1.0
        gap = diagnostics.gap(self.problem, self.x, self.y, gamma, batch=self.batch, group=self.group)
        residual = None
        if c is not None:
            residual = diagnostics.prox_residual(self.problem, self.x, self.y, gamma, c, batch=self.batch, group=self.group)
        return Diagnosis(gap, residual, gamma, c)

    def refit(
        self,
        *,
        steps: int | None = None,
        lr: float | None = None,
        optimizer: OptimizerFactory | None = None,
        start: Any = None,
        seed: int | None = None,
        batches: Iterable[Any] | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    ) -> Refit:
        """Solve or train the lower level again at the x of the solution, and report F and other measures at the new y.

        Where the lower level has many solutions, a low F may come from the choice of y, which used the data of F, and not from
        x. A y that comes from the lower level alone shows how good x is. The solution itself stays as it is.

        Args:
            steps: the number of training steps; None solves the lower level (tensors without batches only), at the solution
                nearest to the start, or takes those of a response ``Trained``.
            lr: the size of plain gradient steps.
            optimizer: a factory such as ``partial(torch.optim.Adam, lr=1e-3)``, which is the default, to take the steps.
            start: where y begins: y0, or where the response of the problem begins (None); ``"redraw"`` for new random
                parameters of modules; a function of x; or a value like y0.
            seed: of all random numbers; a y with modules then begins with new random parameters, unless there is a start.
            batches: for the objectives, repeated when they end; F is averaged over one pass, or 100 of them.
            metrics: further measures, functions of (x, y), such as the accuracy on a test set.

        Raises:
            ValueError: steps, batches or a start are missing or do not fit, or y is a sharded module.

        >>> import meha, torch
        >>> problem = meha.Problem(
        ...     upper=lambda x, y: (x - 1).square().sum() + (y - torch.tensor([3.0, 1.0])).square().sum(),
        ...     lower=lambda x, y: (y.sum() - x).square().sum(),
        ... )
        >>> x0, y0 = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        >>> solution = meha.solve(problem, x0, y0)
        >>> fresh = solution.refit(metrics={"largest": lambda x, y: y.max()})
        >>> fresh, [round(number, 4) for number in fresh.metrics["largest"]]  # fresh, and as returned
        (Refit(F=5, returned=3), [1.0, 2.0])
        """
        returned, problem, response = Variable(self.y, "y"), self.problem, self.problem._selected_response
        if returned.sharded:
            raise ValueError(
                "refit: y is a sharded module, which cannot be copied; train a new one on the lower level at solution.x"
                " instead."
            )
        if steps is None and lr is None and optimizer is None and isinstance(response, Trained):
            steps, lr = response.steps, response.lr  # the problem says that y is trained like this
        if steps is not None:
            check_count("steps", steps)
        if lr is not None:
            check_positive("lr", lr)
            if optimizer is not None:
                raise ValueError(f"lr: is {lr:g}, but there is an optimizer; give one of them.")
        problem, x_value = problem._with_dummy_x(self.x, returned)
        if problem.needs_batch and batches is None:
            raise ValueError("batches: the objectives need some; pass those of the run, as in refit(batches=loader).")
        if steps is None and (returned.has_modules or batches is not None):
            raise ValueError(
                "steps: a network, or a y trained on batches, needs their number; pass it, such as refit(steps=1000)."
            )
        x, y = Variable(x_value, "x"), returned.copy()  # the solution itself stays as it is
        batches = from_start(joined(batches))  # a loop that draws from them as well goes on where it is
        oracle, stream = Oracle(problem, x, y, self.group), repeat(None) if batches is None else Endless(batches)
        devices = [y.device] if y.device.type == "cuda" else []
        # The generators of the caller are restored afterwards.
        with torch.no_grad(), torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            where = _begin(x, y, self.y0, response, start, seed)
            oracle.response_term.hold(y)  # a proximal term that does not vanish is a part of the lower level
            if steps is None:
                lower, done = _solve(oracle, x, y), "lower level solved"
            else:
                (lower,) = _train(oracle, [(x, y)], stream, steps, lr, optimizer)
                done = f"{steps} step{'s' * (steps != 1)}"
            upper, old = _uppers(oracle, [(x, y), (x, returned)], stream, _count(batches)).mean(0).tolist()
            values = {
                name: (float(measure(x_value, y.detached())), float(measure(x_value, self.y)))
                for name, measure in (metrics or {}).items()
            }
        return Refit(y.snapshot(), upper, old, lower, values, oracle.counts, f"{done} from {where}")

    def verify(self, *, budget: int = 20_000, tol: float = 1e-3) -> Verification:
        """Test whether this is a solution: :func:`meha.verify` at its x and y, for the solution of any method.

        Args:
            budget: upper bound on the gradients of f.
            tol: the relative accuracy of x and y.
        """
        y0 = Variable(self.y, "y")  # a copy, in the structure of y
        with torch.no_grad():
            copy_(y0.leaves, self.y0)
        return verify(self.problem, self.x, self.y, y0=y0.detached(), budget=budget, tol=tol)

    def _last(self, name: str) -> float | None:
        """Return the last recorded number of this name; None if there is none."""
        return self.history[name][-1] if name in self.history else None

    def __repr__(self) -> str:
        return f"Solution({self.status}, steps={self.steps}, seconds={self.seconds:.3g})"

    def __str__(self) -> str:
        return "\n".join(self._summary())

    @property
    def details(self) -> str:
        """Return the printed solution, the method's numbers, and all that the run learned about the problem."""
        more = {"method": self.method.describe(), **self.report}
        lines = [_line(heading, text) for heading, text in more.items() if heading != "accuracy"]  # the summary has it
        return "\n".join([*self._summary(), *lines])

    def _summary(self) -> list[str]:
        """Return the lines that ``print`` shows."""
        upper, hvp = self.counts.upper, self.counts.hvp
        work = f"{upper} gradient{'s' * (upper != 1)} of F, {self.counts.lower} of f"
        work += f", {hvp} Hessian-vector product{'s' * (hvp != 1)}" if hvp else ""
        last = {
            name: value for name in ("gap", "residual") if (value := self._last(name)) is not None and not math.isnan(value)
        }
        words = {"gap": " (below 0, so the lower level is not solved)"} if last.get("gap", 0.0) < 0 else {}
        estimates = [f"{name} {value:.2g}{words.get(name, '')}" for name, value in last.items()]
        accuracy = self.report.get("accuracy") or (f"{', '.join(estimates)}; the run's own estimates" if estimates else "")
        rows = {"F": "unknown" if self.upper is None else f"{self.upper:.6g}", "accuracy": accuracy, "work": work}
        if self.fresh is not None:
            parts = f"F = {self.fresh.upper:.6g} with y trained afresh at x, {self.fresh.start:.6g} at x0"
            rows["fresh"] = f"{parts} ({self.fresh.how}, {self.fresh.counts.lower} further gradients of f)"
        lines = [_line(heading, text) for heading, text in (rows | {"note": self.message}).items() if text]
        return [f"{self._headline()}, {self.seconds:.2f} s", *lines]

    def _headline(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return f"{self.engine or self.method.name}: {self.status} after {steps}"

    def _repr_html_(self) -> str:
        """Return what notebooks show: the printed solution, with the details folded."""
        head, *rows = self._summary()
        body, details = html.escape("\n".join(rows)), html.escape(self.details)
        folded = f"<details><summary>details</summary><pre>{details}</pre></details>"
        return f"<b>{html.escape(head)}</b><pre>{body}</pre>{folded}"

    def plot(self, names: Sequence[str] = ("upper", "gap", "residual", "change"), path: str | None = None) -> Figure:
        """Plot convergence curves of recorded numbers against the step, one panel each.

        Where a method made several passes from different starts, each is a line of its own: the one that led to the answer is
        drawn strong, the others light. A dotted line marks the F that was returned.

        Args:
            names: columns of :attr:`history`; those that the run did not record are left out.
            path: a file to save the figure to, such as ``"run.png"``.

        Returns:
            A figure of ``matplotlib.pyplot``, so that ``plt.show()`` shows it.

        Raises:
            ImportError: matplotlib is missing: ``pip install "meha[plot]"``.
            ValueError: the history has none of the names.
        """
        try:
            from matplotlib import pyplot  # not at the top: it is optional
        except ImportError as error:
            raise ImportError('plot() needs matplotlib; install it with: pip install "meha[plot]"') from error
        shown = [name for name in names if name in self.history]
        if not shown:
            raise ValueError(f"names: none of {list(names)} is in the history, which has {list(self.history)}.")
        passes = self._passes()
        figure, axes = pyplot.subplots(1, len(shown), figsize=(3.4 * len(shown), 2.8), layout="constrained", squeeze=False)
        for axis, name in zip(axes[0], shown, strict=True):
            for rows in reversed(passes):  # the answer on top
                style = {"color": "C0"} if rows is passes[0] else {"color": "0.7", "linewidth": 1}
                axis.plot([self.history["step"][i] for i in rows], [self.history[name][i] for i in rows], **style)
            if name == "upper" and self.upper is not None:
                axis.axhline(self.upper, linestyle=":", color="C3", linewidth=1, label=f"returned: {self.upper:.4g}")
                axis.legend(fontsize="small", frameon=False)
            _scale(axis, [value for value in self.history[name] if math.isfinite(value)])
            axis.set_xlabel("step")
            axis.set_title(_TITLES.get(name, name), fontsize="medium")
            axis.grid(alpha=0.3)
        figure.suptitle(self._headline())
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def _passes(self) -> list[list[int]]:
        """Return the rows of the history by pass of the method; the pass whose F ended closest to the answer comes first."""
        rows: dict[float, list[int]] = {}
        for i, number in enumerate(self.history.get("run", [0.0] * len(self.history["step"]))):
            rows.setdefault(number, []).append(i)
        upper = self.history.get("upper")
        if upper is None or self.upper is None:
            return list(rows.values())  # nothing to compare with: the passes in their order
        answer = self.upper
        return sorted(rows.values(), key=lambda own: abs(upper[own[-1]] - answer))


def _scale(axis: Any, values: Sequence[float]) -> None:
    """Set a logarithmic scale for numbers of different magnitudes; it is linear near zero where some are not positive."""
    sizes = [abs(value) for value in values if value]
    if not sizes or max(sizes) < SEVERAL * min(sizes):
        return
    if min(values) > 0:
        axis.set_yscale("log")
    else:
        axis.set_yscale("symlog", linthresh=max(min(sizes), max(sizes) / DECADES))


def _line(heading: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"  {heading:<10} ", subsequent_indent=" " * 13)  # 2 + 10 + 1


_TITLES = {
    "upper": "F(x, y)",
    "lower": "(f + g)(x, y)",
    "gap": "gap (as the run estimates it)",
    "residual": "residual (as the run estimates it)",
    "change": "relative change of (x, y)",
}
