"""solve(): the loop around a run, with observers and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, cast

import torch

from meha.method.method import Run
from meha.method.optimizers import RunningOptimizer
from meha.method.status import Status, TrainingWarning, Verdict, first_line
from meha.methods import Method, default_method
from meha.problem.loaders import (
    EMPTY,
    BatchSource,
    Group,
    check_divided,
    check_resumable,
    joined,
    random_states,
    set_random_states,
)
from meha.problem.oracle import BudgetError
from meha.problem.problem import Problem
from meha.running.checkpoints import REMEDY, Checkpoint, SharedCheckpoint
from meha.running.compiled import CompiledPace
from meha.running.loop import Loop, finished, mark_trained, warn_about_modules
from meha.running.observers import Observer
from meha.running.solution import Solution, train_fresh
from meha.running.stopping import RelativeChange
from meha.tensors.checks import check_count, check_positive, check_switch, check_tolerance
from meha.tensors.torch_private import BREAKDOWNS
from meha.tensors.variables import Variable, map_tensors, modules_of, sharing

CHANGE = 1e-8  # default tolerance on the relative change of (x, y), near the root of the rounding error of double precision


def solve(
    problem: Problem,
    x0: Any,
    y0: Any,
    method: Method | None = None,
    *,
    max_steps: int = 10_000,
    max_seconds: float | None = None,
    tol: float | Literal["default"] | None = "default",
    batches: Iterable[Any] | None = None,
    callbacks: Observer | Sequence[Observer] = (),
    checkpoint: str | os.PathLike[str] | Checkpoint | SharedCheckpoint | None = None,
    compile: bool | Literal["auto"] = False,
    copy: bool = False,
    group: Any = None,
    refit: bool = True,
) -> Solution:
    """Solve a bilevel problem from (x0, y0).

    Args:
        problem: the problem.
        x0, y0: the start. Tensors are not changed, but for those that a built optimizer of the method holds; modules are
            trained in place, and a second run goes on from there, unless ``copy=True``. ``x0=None`` for a problem without x.
        method: the method; by default the one that :func:`meha.methods.default_method` chooses, with nothing to tune.
            Tensors without batches go to :class:`Default`, which finds accurate solutions of deterministic problems;
            tensors with batches go to :class:`~meha.stochastic.AdaptiveSOBA`, networks with batches to
            :class:`~meha.stochastic.NetworkSOBA`.
        max_steps: upper bound on the number of steps.
        max_seconds: upper bound on the time; the best point until then is returned, with the status ``max seconds`` and what is
            known of it. Engines look at the clock inside their searches, other methods after each step.
        tol: the accuracy; None means never to stop because of it. Methods with a ``tol`` of their own take it for that, by
            default 1e-6 in :class:`Default`, and None means as accurate as possible; all others stop when the relative
            change of (x, y) in a step falls to it, by default 1e-8.
        batches: an iterable of batches for the objectives, repeated when it ends (if it can be). Several loaders in a tuple are
            joined, as :class:`meha.loaders.Together` does; :class:`meha.loaders.Accumulated` makes steps on several batches.
        callbacks: observers (:mod:`meha.observers`), called as ``callback(run, info)`` after each step: stopping rules
            (:mod:`meha.stopping`), loggers (:mod:`meha.loggers`), :class:`~meha.observers.Progress` and functions of your own.
            A :class:`~meha.observers.Recorder` or :class:`~meha.observers.DivergenceGuard` among them replaces the default.
        checkpoint: a file, or :class:`meha.Checkpoint` to say how often it is written. If the process is killed, repeat the
            call in a new process that builds the same problem, start and batches: it resumes from the last checkpoint and ends
            with the same numbers, bit for bit. The file holds x, y, the method's own variables and optimizers, the place in the
            batches, the states of the random number generators (of torch on all devices, of Python, of numpy, and those that a
            DataLoader holds), and the states of the observers. Repeated after its end, the call returns the same solution; with
            a larger ``max_steps`` it goes on, as does a run that a rule had ended when that rule is changed, and one that a
            callback had stopped. A run that fails, an exception or Ctrl-C saves nothing: the file remains the last good one,
            and the one before it is kept as well. A full disk is a :class:`~meha.TrainingWarning`, and the run goes on.
        compile: take many steps as one compiled call, with results equal up to rounding. True warns
            where this cannot be done, and goes on step by step; "auto" compiles where it pays, and does not warn.
            Objectives must be functions of x, y and the batch, in torch alone: what else they depend on stays as it was in the
            first step. Now and then a group of steps on tensors is compared with eager steps; on a difference the run goes back
            to where both agreed, warns, and goes on eagerly.
        copy: train copies of modules, and leave those in x0 and y0 as they are. ``solution.x`` and ``solution.y`` are the
            copies; objectives must use the modules that they are given.
        group: the processes of torch.distributed that take part: a process group such as ``torch.distributed.group.WORLD``, or
            a DeviceMesh. All of them make the same call, each with batches of its own, and an objective is the mean of its
            values in them. The start is that of the first. By default, the processes among which y0 or x0 is divided, by
            ``fully_shard`` or as a DTensor; if neither is, this process alone. ``checkpoint`` is then a folder, or
            :class:`meha.SharedCheckpoint`. docs/distributed.md shows how.
        refit: where y is a network, train two new ones at the end, at the x found and at x0, with a fifth as many gradients as
            the run took; ``solution.fresh`` and the printed solution compare F of the returned y and of the new ones. A warning
            says when x is worth less than x0 to a new network: y fits the data of F directly, or x fits this y alone. Left out
            after short runs, for a y that each step trains afresh, and for sharded modules.

    A run that diverges on step sizes that it chose itself, because the method leaves them out, goes back to the start with
    shorter ones, five times at most; numbers that were given never change. The message says so, and lost work is counted.

    Returns:
        The last finite iterate with its status. Failures of the run and Ctrl-C are a status, not an exception. An exception of
        an objective or a callback is passed on, and its attribute ``solution`` is the solution until then.

    >>> import torch
    >>> problem = Problem(
    ...     upper=lambda x, y: (x - 2).square().sum() + (y - 4).square().sum(),
    ...     lower=lambda x, y: torch.sin(x + y - 2).sum(),
    ... )
    >>> solution = solve(problem, x0=torch.tensor([-6.0]), y0=torch.zeros(1))
    >>> print(solution.status, round(float(solution.x), 3))
    converged 2.356
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a meha.Problem, got {type(problem).__name__}.")
    check_count("max_steps", max_steps)
    if max_seconds is not None:
        check_positive("max_seconds", max_seconds)
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    if tol is not None and tol != "default":
        check_tolerance("tol", tol)
    if isinstance(batches, str | bytes | Mapping):
        raise TypeError(
            f"batches: a {type(batches).__name__} yields its {'keys' if isinstance(batches, Mapping) else 'letters'}, not"
            " batches; pass a list of batches, such as [batch], or a loader."
        )
    batches = joined(batches)
    if batches is not None and not isinstance(batches, Iterable):
        raise TypeError(f"batches: expected an iterable of batches, got {type(batches).__name__}.")
    if compile not in (True, False, "auto"):
        raise ValueError(f'compile: must be True, False or "auto", got {compile!r}.')
    check_switch("copy", copy)
    check_switch("refit", refit)
    if copy:
        x0, y0 = (map_tensors(z, lambda tensor: tensor, {id(part): deepcopy(part) for part in modules_of(z)}) for z in (x0, y0))
    if method is not None and not isinstance(method, Method):
        raise TypeError(f"method: expected a method such as meha.MEHA(), got {method!r}.")
    # Objectives of two arguments may be functions of (x, y) or of (y, batch); without x0 and batches, neither fits.
    if x0 is None and batches is None and problem._with_dummy_x(None, Variable.of(y0, "y"))[0].needs_batch:
        raise TypeError(
            "upper, lower: there is no x (x0=None) and there are no batches, so both must be functions of y alone; pass x0, or"
            " leave x out of them."
        )
    if method is None:
        method = default_method(problem, x0, y0, batches)
    observers = _functions(callbacks)
    if not any(field.name == "tol" for field in dataclasses.fields(method)):
        observers = ([] if tol is None else [RelativeChange(CHANGE if tol == "default" else tol)]) + observers
    elif tol != "default":
        method = dataclasses.replace(cast(Any, method), tol=0.0 if tol is None else tol)  # methods are frozen dataclasses
    if checkpoint is not None:
        check_resumable(batches, "batches")  # now, and not when the run is resumed
    run = method.start(problem, x0, y0, group=group)
    run.last = max_steps
    if run.group is None:
        check_divided(batches)  # a forgotten group= would solve another problem in each process
    file = _open(checkpoint, run)
    warn_about_modules(run, resumes=file is not None)
    with Loop(
        run, BatchSource(batches, remember=file is not None, grouped=bool(compile)), observers, max_steps, deadline
    ) as loop:
        if file is not None:  # other runs need no values at the start, and save these calls
            loop.remember()
            _resume(loop, file)
        pace = CompiledPace(compile, run, max_steps)
        try:
            _advance(loop, pace, file)
        except KeyboardInterrupt:
            loop.interrupt(pace, file)
        except BudgetError:  # in the middle of a step
            loop.undo(pace)
            loop.end_late()
        except Exception as error:
            loop.annotate(error, pace)
            raise
    mark_trained(run)
    solution = loop.solution()
    if refit and loop.can_refit and solution.status is not Status.MAX_SECONDS:
        del pace  # and with it a copy of y
        _refit(loop, solution)
    return solution


HOLLOW = (  # what to say of an x that is worth less than x0 to a new network
    "Warning: the x found is worth less than x0 to a network that is trained afresh: F = {upper:.3g}, and {start:.3g} at x0;"
    " F = {returned:.3g} at the returned y. F has too few data, its y fits them directly, or x fits this y alone. See"
    " docs/responses.md."
)


def _refit(loop: Loop, solution: Solution) -> None:
    """Train new networks at x and at x0, and note what this shows; random numbers of later runs do not depend on it."""
    source, batches = loop.source, loop.source.loader
    x0 = loop.guard.start[: len(loop.run.state.x.leaves)]
    loop.release()  # which makes room for the new networks
    states = random_states(batches)
    try:
        with torch.no_grad():
            solution.fresh = train_fresh(solution, x0, source, batches)
    except (StopIteration, KeyboardInterrupt, *BREAKDOWNS):  # batches that end are no mistake, and the run itself is whole
        return
    except Exception as error:
        warnings.warn(
            f"refit: a new network could not be trained at the x found ({first_line(error)}); objectives must use the y that"
            " they get. Pass refit=False to leave this out.",
            TrainingWarning,
            stacklevel=3,
        )
    finally:
        set_random_states(states, batches)
    if solution.fresh is None:
        return
    solution.upper = solution.fresh.returned
    if solution.fresh.worse:
        fresh = solution.fresh
        warning = HOLLOW.format(upper=fresh.upper, start=fresh.start, returned=fresh.returned)
        solution.message = f"{solution.message} {warning}"
        if loop.run.main:
            warnings.warn(warning.removeprefix("Warning: "), TrainingWarning, stacklevel=3)


def _open(checkpoint: Any, run: Run) -> Checkpoint | SharedCheckpoint | None:
    """The checkpoint of a run: a file for one process, a folder for several, or None."""
    if checkpoint is None:
        return None
    if run.group is None:
        if isinstance(checkpoint, SharedCheckpoint):
            raise TypeError(
                "checkpoint: SharedCheckpoint is for several processes; pass a path, or meha.Checkpoint, or group=."
            )
        return checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    if isinstance(checkpoint, Checkpoint):
        raise TypeError("checkpoint: Checkpoint is the file of one process; pass a folder, or meha.SharedCheckpoint(folder).")
    file = checkpoint if isinstance(checkpoint, SharedCheckpoint) else SharedCheckpoint(checkpoint)
    file.open(run.group)
    return file


def uninterrupted(solution: Solution) -> Solution:
    """Return a solution, or raise the KeyboardInterrupt that ended its run, for callers that must stop as well."""
    if solution.status is Status.INTERRUPTED:
        raise KeyboardInterrupt(solution.message)
    return solution


def _advance(loop: Loop, pace: CompiledPace, file: Checkpoint | SharedCheckpoint | None) -> None:
    """Take steps until there is a verdict, and write checkpoints in between and at the end."""
    run, source, begun, restarts = loop.run, loop.source, loop.run.k, len(loop.restarts)
    if 0 < run.k < loop.max_steps and loop.verdict is None:  # a resumed run has taken its eager step, and may compile now
        pace.update()
    # Nothing to draw, nothing to compile: one step after another. A resumed run may have compiled its steps just now.
    plain = source.loader is None and not pace.wanted and pace.compiled is None
    group: Group
    while loop.verdict is None:
        if plain:
            group = [(None, None, "")] if run.k < loop.max_steps else []
        else:
            group = source.take(pace.steps, together=pace.compiled is not None)
        ended = not group
        # Loaders that restart never end, and need no message; with others, no process may take a step that one cannot.
        if run.group is not None and source.finite:
            ended = run.group.any(ended, run.state.y.device)
        if ended:
            break
        loop.advance(group, pace)
        if run.oracle.late or (loop.verdict is None and loop.late):  # an engine may have ended because of it
            loop.end_late()
        if len(loop.restarts) > restarts:
            restarts, begun = len(loop.restarts), -1  # what follows is new, whatever the number of its steps
            pace.begin_again()
        if loop.verdict is None:
            if pace.wanted and run.k:
                pace.update()
            if file is not None and run.k < loop.max_steps and loop.due(file.every):  # the last step is written below
                _write(file, loop)
    if source.empty and not run.k:
        raise ValueError(f"batches: yields nothing; {EMPTY}.")
    if loop.verdict is None and run.k < loop.max_steps:
        loop.verdict = Verdict(Status.MAX_STEPS, f"The batches ran out after {run.k} of {loop.max_steps} steps.")
    elif loop.verdict is None and run.method.open_ended:
        loop.verdict = finished(run)
    elif loop.verdict is None:
        remedy = ", or relax tol." if run.settled else "."
        loop.verdict = Verdict(Status.MAX_STEPS, f"No stopping rule was met; allow more steps{remedy}")
    if run.k > begun:  # a call that is repeated after the end returns what the checkpoint holds
        if loop.check_end():  # the last step was too long, and the run begins again
            pace.begin_again()
            _advance(loop, pace, file)
            return
        if file is not None and not loop.verdict.status.failed:  # a failed run leaves the last good checkpoint
            _write(file, loop, last=True)


def _write(file: Checkpoint | SharedCheckpoint, loop: Loop, *, last: bool = False) -> None:
    """Write a checkpoint; where this fails, as on a full disk, warn and let the run go on."""
    try:
        # A state that is written in the background must be a copy.
        with sharing() if isinstance(file, Checkpoint) else contextlib.nullcontext():
            file.write(loop.state_dict())
        if last and isinstance(file, SharedCheckpoint):
            file.finish()  # the process may end after this call, and writing in the background with it
    except OSError as error:
        warnings.warn(f"{error} The run goes on.", TrainingWarning, stacklevel=4)


def _read(loop: Loop, file: Checkpoint | SharedCheckpoint) -> dict[str, Any] | None:
    """Return the state in the checkpoint; None if there is none."""
    state = loop.run.state
    if isinstance(file, Checkpoint):
        return file.read(state.x.device)
    # Optimizers have no moments before their first step; their leaves show how moments in the checkpoint must be sharded.
    moments = {
        f"run.state.{name}.optimizer.state.{i}.": leaf
        for name, part in vars(state).items()
        if isinstance(part, RunningOptimizer)
        for i, leaf in enumerate(part.leaves())
    }
    return file.read(loop.state_dict(), moments)


def _resume(loop: Loop, file: Checkpoint | SharedCheckpoint) -> None:
    """Load the checkpoint into the loop, if there is one; if it does not fit, raise and change nothing."""
    run, source = loop.run, loop.source
    saved = _read(loop, file)
    if saved is None:
        return
    before, states = run.state_dict(), random_states(source.loader)
    try:
        with _refusing(file):
            loop.load_state_dict(saved)
        if run.k > loop.max_steps:
            raise ValueError(
                f"max_steps: the run in the checkpoint {file.path} has done {run.k} steps already, got {loop.max_steps}; allow"
                " at least as many, or give another path."
            )
        processes = 1 if run.group is None else run.group.count
        if saved.get("processes", processes) == processes:
            run.batch = source.find(saved["place"])
            with _refusing(file):  # after find, which draws random numbers to get to its place
                set_random_states(saved["random"], source.loader)
        elif run.main:
            warnings.warn(
                f"checkpoint: {saved['processes']} process{'es' * (saved['processes'] != 1)} wrote it, and {processes} read it:"
                " x, y and the method go on, batches and random numbers start over.",
                TrainingWarning,
                stacklevel=3,
            )
        with _refusing(file):
            for module, training in zip(loop.modules, saved["training"], strict=True):
                module.training = training
    except BaseException:  # Ctrl-C as well: x and y may be modules of the caller
        run.load_state_dict(before)
        set_random_states(states, source.loader)
        raise


@contextlib.contextmanager
def _refusing(file: Checkpoint | SharedCheckpoint) -> Iterator[None]:
    """Turn any error, such as one of a callback, into a ValueError that says that the checkpoint does not fit."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"checkpoint: {file.path} is not of this run: {error} Make the same call, or {REMEDY}.") from error


def _functions(callbacks: Any) -> list[Any]:
    """Return callbacks as a list, and raise if one of them cannot be called as callback(run, info)."""
    listed = [callbacks] if callable(callbacks) else callbacks
    if not isinstance(listed, list | tuple) or not all(callable(item) for item in listed):
        raise TypeError(f"callbacks: expected a function of (run, info) or a list of them, got {callbacks!r}.")
    for item in listed:
        if isinstance(item, type):
            raise TypeError(f"callbacks: {item.__name__} is a class; make an observer of it, as in {item.__name__}().")
        try:
            signature = inspect.signature(item)
            signature.bind(None, None)
        except ValueError:  # a function without a signature
            continue
        except TypeError:
            raise TypeError(
                f"callbacks: must be called as callback(run, info), but {item!r} takes {signature}; write it so."
            ) from None
    return list(listed)
