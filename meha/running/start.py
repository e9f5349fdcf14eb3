"""start(): a run whose steps the caller takes, in a training loop of their own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from meha.method.method import Run, StepInfo
from meha.method.status import Status, Verdict
from meha.methods import Method, default_method
from meha.problem.oracle import ScaleOverflowError
from meha.problem.problem import Problem
from meha.running.loop import finished, mark_trained, solution_of, warn_about_modules, warn_about_rounding
from meha.running.observers import Recorder
from meha.running.solution import Refit, Solution
from meha.tensors.checks import check_count
from meha.tensors.state import pack, unpack

SMALLEST = torch.finfo(torch.float16).tiny
"""Scale at which gradients that overflow still are no matter of the scale: half precision has no smaller normal number."""


class TrainingRun(Run):
    """A run in a loop of your own, which :func:`meha.start` returns: a :class:`~meha.Run` with a solution at any time.

    >>> import meha, torch
    >>> problem = meha.problems.strong_convex(n=2)
    >>> run = start(problem, problem.x0, problem.y0, meha.RHG(alpha=0.4, beta=0.5, inner_steps=30))
    >>> for _ in range(50):
    ...     info = run.step()
    >>> solution = run.solution()
    >>> solution.x, solution.message
    (tensor([0.5000, 0.5000], dtype=torch.float64), 'The loop ended after 50 steps.')
    """

    def __init__(
        self, method: Method, problem: Problem, x: Any, y: Any, group: Any = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        super().__init__(method, problem, x, y, group)
        self.scaler, self._good = scaler, 0  # steps since the scale changed
        if scaler is not None:
            scaler.scale(torch.ones((), device=self.state.y.device))  # makes the scale, which can be changed only then
        self._y0 = [leaf.detach().clone() for leaf in self.state.y.leaves]
        self._recorder = Recorder()
        self._recorder.begin(self, 0)

    def step(self, batch: Any = None) -> StepInfo:
        """Take one step, as :meth:`meha.Run.step` does, and record its numbers for the history of the solution.

        With a scaler, a step has two numbers more: ``scale``, and ``skipped``, which is 1 where gradients overflowed. Such a
        step has no other numbers and does not count in ``run.k``. It ends before anything else moves; what some methods have
        moved before, such as theta or z, stays where it is.
        """
        before = self.k
        info = super().step(batch) if self.scaler is None else self._scaled_step(self.scaler, batch)
        if self.k > before:  # neither skipped nor broken down
            warn_about_rounding(self, info)
            self._recorder(self, info)
        return info

    def _scaled_step(self, scaler: torch.amp.GradScaler, batch: Any) -> StepInfo:
        """Take a step with scaled values, and set the scale as :meth:`torch.amp.GradScaler.update` does."""
        self.prepare(batch)  # measures the problem, with values that are not scaled
        scale = self.oracle.scale = scaler.get_scale()
        try:
            info = super().step(batch)
        except ScaleOverflowError:
            self._good = 0
            smaller = scale * scaler.get_backoff_factor()
            if smaller < SMALLEST:
                self._verdict = Verdict(
                    Status.NON_FINITE,
                    f"Step {self.k + 1} gave gradients that are NaN or infinite, also at a scale of {scale:.1e}; look for the"
                    " cause in F and f, or take smaller steps.",
                )
            scaler.update(smaller)
            return StepInfo(self.k, {"skipped": 1.0, "scale": scale})
        finally:
            self.oracle.scale = None
        self._good += 1
        if self._good == scaler.get_growth_interval():
            self._good, larger = 0, scale * scaler.get_growth_factor()
            if larger < torch.finfo(torch.float32).max:
                scaler.update(larger)
        return info.plus(skipped=0.0, scale=scale)

    def solution(self) -> Solution:
        """The present x and y as a :class:`~meha.Solution`; the run can go on. With a group, all its processes must call it.

        Modules are those of the run, and go on with it; all else is a copy.
        """
        steps = f"{self.k} step{'s' * (self.k != 1)}" if self.last is None else f"{self.k} of {self.last} steps"
        done = self.last is not None and self.k >= self.last and self.method.open_ended
        ended = finished(self) if done else Verdict(Status.STOPPED, f"The loop ended after {steps}.")
        recorder = copy.deepcopy(self._recorder)
        recorder.end(self)
        mark_trained(self)
        return solution_of(self, self.verdict or ended, recorder.history, self._y0)

    def refit(self, **options: Any) -> Refit:
        """Solve or train the lower level again at the present x: :meth:`meha.Solution.refit` with these options."""
        return self.solution().refit(**options)

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`meha.Run.state_dict` has, the scaler, and the history; batches and your own schedulers have their own."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        loop = {"seconds": self.seconds, "y0": self._y0, "recorder": self._recorder, "scaler": scaler, "good": self._good}
        return {**super().state_dict(), "loop": pack(loop)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the run that wrote ``state`` was, bit for bit; see :meth:`meha.Run.load_state_dict`."""
        loop = state.get("loop") if isinstance(state, Mapping) else None
        if loop is None:
            raise ValueError("state: lacks ['loop']; pass what state_dict() of a run of meha.start returned.")
        if (loop["scaler"] is None) != (self.scaler is None):
            had, has = ("no", "one") if loop["scaler"] is None else ("one", "none")
            raise ValueError(f"scaler: the run that was saved had {had}, this one has {has}; start it as that one.")
        super().load_state_dict(state)
        self.seconds, self._good, self._y0 = loop["seconds"], loop["good"], unpack(loop["y0"], self._y0)
        self._recorder.load_state_dict(loop["recorder"])
        if self.scaler is not None:
            self.scaler.load_state_dict(loop["scaler"])


def start(
    problem: Problem,
    x: Any,
    y: Any,
    method: Method | None = None,
    *,
    x_optimizer: Any = None,
    y_optimizer: Any = None,
    max_steps: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: Any = None,
) -> TrainingRun:
    """Begin a run whose steps you take, in a training loop of your own: ``run.step(batch)`` among your own lines.

    Each step is that of :func:`meha.solve`: with the same batches, x, y and the numbers of each step are the same, bit for bit.
    What ``solve`` does around them is yours: batches, stopping, checkpoints (:meth:`TrainingRun.state_dict`), logs. See "Your
    own loop" in docs/training.md.

    Args:
        problem: the problem.
        x, y: the start. Modules are trained in place, and so are tensors that a built optimizer holds; others are copied.
            ``x=None`` for a problem without x.
        method: the method; by default that of ``solve`` (:func:`meha.methods.default_method`).
        x_optimizer, y_optimizer: take the steps of x and of y, as the fields of this name of the method: a factory such as
            ``partial(torch.optim.Adam, lr=1e-3)``, an optimizer that is built, such as
            ``torch.optim.AdamW(net.parameters())``, or :class:`meha.Optimizer`, which adds a schedule or clipping.
        max_steps: the number of steps that you will take, if you know it. The rates of
            :class:`~meha.stochastic.NetworkSOBA` fall to 0 at that step, and x rests before; without it they fall as
            1 / (1000 + k).
        scaler: for ``torch.autocast`` with float16, where small gradients would be zero. Values are multiplied by its scale
            before each backward pass, and gradients divided by it. Where they overflow, the step is skipped and the scale
            falls; after some good steps it grows. Do not call the scaler yourself. bfloat16 needs none.
        group: the processes that take part, see :func:`meha.solve`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it and the remedy.

    >>> import meha, torch
    >>> _ = torch.manual_seed(0)
    >>> x, net = torch.zeros(1, requires_grad=True), torch.nn.Linear(2, 1)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: (y(batch.valid) - 1).square().mean(),
    ...     lower=lambda x, y, batch: (y(batch.train) - x).square().mean(),
    ... )
    >>> x_optimizer, y_optimizer = torch.optim.Adam([x], lr=0.01), torch.optim.AdamW(net.parameters(), lr=0.05)
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(y_optimizer, T_max=300)
    >>> batches = meha.loaders.Together(train=torch.randn(3, 20, 2), valid=torch.randn(2, 20, 2))
    >>> run = start(problem, x, net, x_optimizer=x_optimizer, y_optimizer=y_optimizer)
    >>> for epoch in range(100):
    ...     for batch in batches:  # ends with the longer loader, after 3 batches
    ...         info = run.step(batch)
    ...         scheduler.step()
    >>> print(run.k, run.method.name, f"{run.x.item():.1f}")
    300 NetworkSOBA 1.0
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
    if method is not None and not isinstance(method, Method):
        raise TypeError(f"method: expected a method such as meha.MEHA(), got {method!r}.")
    if max_steps is not None:
        check_count("max_steps", max_steps)
    chosen = default_method(problem, x, y, None) if method is None else method
    for name, optimizer in (("x_optimizer", x_optimizer), ("y_optimizer", y_optimizer)):
        if optimizer is not None:
            chosen = _with_optimizer(chosen, name, optimizer, named=method is not None)
    run = TrainingRun(chosen, problem, x, y, group, _check_scaler(scaler, chosen))
    run.last = max_steps
    warn_about_modules(run, resumes=False)
    return run


def _with_optimizer(method: Method, name: str, optimizer: Any, *, named: bool) -> Method:
    """The method with an optimizer, or raise if it takes none, or has one already and was ``named`` by the caller."""
    if not hasattr(method, name):
        who = method.name if named else f"the method that is chosen for this problem, {method.name},"
        fitting = [n for n in ("x_optimizer", "y_optimizer") if hasattr(method, n)]
        has = f" (it takes {fitting[0]})" if fitting else ""
        raise ValueError(
            f"{name}: {who} takes its own steps of {name[0]} and has no {name}{has}, got {type(optimizer).__name__}; leave it"
            " out, or pass a method that takes one, such as meha.stochastic.NetworkSOBA(), meha.F2SA() or meha.MEHA()."
        )
    if named and getattr(method, name) is not None:
        raise ValueError(f"{name}: the method has one already ({method.describe()}); give it in one place.")
    return dataclasses.replace(method, **{name: optimizer})


def _check_scaler(scaler: Any, method: Method) -> torch.amp.GradScaler | None:
    """The scaler, or None if it is switched off; raise if it is something else, or the method cannot take it."""
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f'scaler: expected a torch.amp.GradScaler("cuda"), got {type(scaler).__name__}.')
    if method.refuses_scaler:
        raise ValueError(
            f"scaler: {method.name} cannot take one, because {method.refuses_scaler}; compute in torch.bfloat16, which needs"
            " none, or take meha.stochastic.NetworkSOBA(), meha.F2SA() or meha.MEHA()."
        )
    return scaler if scaler.is_enabled() else None
