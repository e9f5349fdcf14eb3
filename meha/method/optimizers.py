"""Use an optimizer of torch.optim for a level, with a schedule of its learning rate and clipping."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meha.problem.problem import Problem
from meha.problem.sets import ConvexSet
from meha.tensors.checks import check_positive
from meha.tensors.distributed import is_dtensor
from meha.tensors.variables import Leaves, Variable

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer] | torch.optim.Optimizer


class Optimizer:
    """The optimizer of a level, for ``x_optimizer``, ``y_optimizer`` and ``theta_optimizer`` of methods.

    Without ``scheduler`` and ``clip``, ``partial(torch.optim.Adam, lr=1e-3)`` does the same, and so does an optimizer that is
    built already, such as ``torch.optim.AdamW(net.parameters(), lr=1e-3)``. A built one trains the tensors that it holds: it
    must hold all tensors of the level that require gradients and none of the other level, and tensors that are no module are
    then trained in place as well, not copied. It keeps its groups with their options and its moments. A copy of y that the
    method trains, such as theta, gets a new optimizer of the same kind, whose options follow those of the built one, so that a
    scheduler moves both; hooks stay with the built one.

    Args:
        kind: a class of torch.optim, or a built optimizer.
        scheduler: makes the scheduler from the optimizer, such as ``partial(CosineAnnealingLR, T_max=1000)``, or is that of a
            built optimizer. It advances once with every step of this optimizer; with ``inner_steps``, a lower level takes
            several in one step of the method. In a loop of your own, you can leave it out and step it yourself.
        clip: the largest Euclidean norm of the direction, all tensors of the level together; a longer one is shortened. It is
            the direction that the method computed, including its penalty and proximal terms.
        options: for a class.

    >>> from torch.optim.lr_scheduler import CosineAnnealingLR
    >>> Optimizer(torch.optim.Adam, lr=1e-3, scheduler=partial(CosineAnnealingLR, T_max=1000), clip=1.0)
    Optimizer(Adam, lr=0.001, scheduler=CosineAnnealingLR(T_max=1000), clip=1.0)
    >>> Optimizer(torch.optim.AdamW(torch.nn.Linear(3, 2).parameters(), lr=0.01), clip=1.0)
    Optimizer(AdamW of 2 tensors, clip=1.0)
    """

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer,
        *,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | LRScheduler | None = None,
        clip: float | None = None,
        **options: Any,
    ) -> None:
        built = kind if isinstance(kind, torch.optim.Optimizer) else None
        if built is None and not callable(kind):
            raise TypeError(
                f"kind: expected a class such as torch.optim.Adam, or an optimizer that is built, got {type(kind).__name__}."
            )
        if built is not None and options:
            raise ValueError(
                f"{next(iter(options))}: the {type(kind).__name__} is built already; give this option when you build it."
            )
        if isinstance(scheduler, LRScheduler):
            if built is None or scheduler.optimizer is not built:
                raise ValueError(
                    f"scheduler: the {type(scheduler).__name__} belongs to another optimizer; pass both, as in"
                    " Optimizer(optimizer, scheduler=scheduler), or a factory such as partial(CosineAnnealingLR, T_max=1000)."
                )
        elif scheduler is not None and not callable(scheduler):
            raise TypeError(
                f"scheduler: expected a factory such as partial(CosineAnnealingLR, T_max=1000), got {type(scheduler).__name__}."
            )
        if clip is not None:
            check_positive("clip", clip)
        self.kind, self.built, self.scheduler, self.clip, self.options = kind, built, scheduler, clip, options

    @classmethod
    def of(cls, given: Any) -> Optimizer:
        """What a method was given, as one kind of object."""
        return given if isinstance(given, cls) else cls(given)

    def __call__(self, leaves: Iterable[Tensor]) -> torch.optim.Optimizer:
        return self.built or cast(Any, self.kind)(leaves, **self.options)

    def __repr__(self) -> str:
        parts = [text(self.kind), *(f"{name}={text(value, sample=True)}" for name, value in self.options.items())]
        parts += [f"scheduler={text(self.scheduler)}"] if self.scheduler is not None else []
        parts += [f"clip={self.clip}"] if self.clip is not None else []
        return f"Optimizer({', '.join(parts)})"


class RunningOptimizer:
    """An optimizer bound to a variable, with its scheduler and the clipping of its directions.

    Attributes:
        variable: the leaves of the variable, in its order.
        leader: of an optimizer on a copy of a variable, the one that the user built, whose options it takes over.
        start: of one that the user built, its parts with their states at the start.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        clip: float | None,
        variable: Leaves,
        *,
        leader: RunningOptimizer | None = None,
        start: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        self.optimizer, self.scheduler, self.clip, self.variable = optimizer, scheduler, clip, variable
        self.leader, self.start = leader, start
        self.used: list[dict[str, Any]] = []  # the options of the last step, for those who follow
        self.steps = 0  # since it was built or loaded
        # While steps are recorded as a CUDA graph, they do not advance the schedule: the graph reads the rate from a tensor.
        self.recording = False

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        self._follow()
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, leaves: Leaves, direction: Leaves, size: Tensor) -> None:
        """Take one step of the optimizer along a direction of norm ``size``; the list may be overwritten."""
        if self.clip is not None:
            factor = (self.clip / size).clamp(max=1.0)  # a tensor, so that the host does not wait for the device
            for i, part in enumerate(direction):
                direction[i] = part * factor
        users = [leaf.grad for leaf in leaves]  # gradients that the user keeps on a module stay as they are
        try:
            for leaf, part in zip(leaves, direction, strict=True):
                leaf.grad = part if part.stride() == leaf.stride() else torch.empty_like(leaf).copy_(part)
            self._follow()
            self.optimizer.step()
        finally:
            for leaf, user in zip(leaves, users, strict=True):
                leaf.grad = user
        self.steps += 1
        if not self.recording:
            self.advance()

    def _follow(self) -> None:
        """Take over the options of the leader, those of its step with the same number; or keep one's own for followers."""
        leader = self.leader
        if leader is not None:
            # The leader may have taken this step already, and its scheduler may have moved on to the next.
            theirs = leader.used if leader.steps > self.steps else leader.groups
            for group, options in zip(self.optimizer.param_groups, theirs, strict=True):
                group.update(options)
        elif self.built:
            self.used = self.groups

    @property
    def built(self) -> bool:
        """Whether it is an optimizer that the user built, whose options may change between steps."""
        return bool(self.start) or self.leader is not None

    def begin_again(self) -> None:
        """Give an optimizer that the user built its state at the start of the run; others are built again."""
        for part, state in self.start:
            part.load_state_dict(copy.deepcopy(state))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The options of the groups now, without their tensors."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]

    def advance(self) -> None:
        """Advance the scheduler, which sets the learning rate of the next step."""
        if self.scheduler is not None:
            self.scheduler.step()

    def forget(self) -> None:
        """Clear moments and other state, which belong to another problem; the schedule goes on."""
        self.optimizer.state.clear()

    def make_capturable(self) -> bool:
        """Keep all state of the optimizer on the GPU, so that its steps can be recorded as a CUDA graph; False if it cannot.

        A learning rate with a schedule becomes a tensor, which the schedule fills before each step.
        """
        groups = self.optimizer.param_groups
        plain = isinstance(self.optimizer, torch.optim.SGD)
        if not (plain or all("capturable" in group for group in groups)):  # plain SGD keeps no step count
            return False
        for group in groups:
            if self.scheduler is not None:
                group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
                if plain:  # the other forms of SGD read a learning rate on the host
                    group["fused"], group["foreach"] = True, False
            if plain:
                continue
            group["capturable"] = True
            for leaf in group["params"]:
                state = self.optimizer.state.get(leaf, {})
                if "step" in state:  # Adam counts steps on the host until it is capturable
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(leaf.device)
        return True

    def release(self) -> None:
        """Undo :meth:`make_capturable`: the learning rate is a number on the host again."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(group["lr"])
            if isinstance(self.optimizer, torch.optim.SGD) and self.scheduler is not None:
                group["fused"], group["foreach"] = None, None

    @property
    def schedule(self) -> tuple[Any, list[float]]:
        """The state of the scheduler, and the learning rates."""
        state = None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())
        return state, [float(group["lr"]) for group in self.optimizer.param_groups]

    @schedule.setter
    def schedule(self, state: tuple[Any, list[float]]) -> None:
        if self.scheduler is None:
            return
        self.scheduler.load_state_dict(state[0])
        for group, lr in zip(self.optimizer.param_groups, state[1], strict=True):
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr  # a graph keeps reading this tensor

    def leaves(self) -> Leaves:
        """The tensors that it optimizes, in the order of its state."""
        return [leaf for group in self.optimizer.param_groups for leaf in group["params"]]

    def tensors(self) -> Leaves:
        """The tensors in its state, such as moments."""
        return [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """The states of the optimizer and the scheduler."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        optimizer = self.optimizer.state_dict()
        for group in optimizer["param_groups"]:
            group["lr"] = float(group["lr"])  # a checkpoint must load on another device, too
        return {"optimizer": optimizer, "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        own, saved = self.state_dict()["scheduler"], state["scheduler"]
        if not _alike(own, saved):  # schedulers take over any dictionary, and would fail in a later step
            raise ValueError(f"state: the scheduler needs {own}, and gets {saved}; the state is damaged.")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved)


def build_optimizer(
    name: str,
    factory: OptimizerFactory | None,
    variable: Variable,
    problem: Problem,
    leader: RunningOptimizer | None = None,
) -> RunningOptimizer | None:
    """Build and check the optimizer of a variable; None without a factory.

    Args:
        leader: where the variable is a copy of another one, the optimizer of that.
    """
    if factory is None:
        return None
    given = Optimizer.of(factory)
    follows = given.built is not None and leader is not None and leader.optimizer is given.built
    if leader is not None and follows:
        optimizer = _alike_on(variable, leader)
    else:
        optimizer, leader = given.built or _made(f"{name}:", cast(Any, factory), variable.leaves), None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{name}: the factory returned {type(optimizer).__name__}, expected a torch.optim.Optimizer.")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(f"{name}: maximize=True would climb; leave it out.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"{name}: LBFGS evaluates the objective itself, which a single-loop method does not allow; use another."
        )
    _check_tensors(name, optimizer, variable, built=given.built is not None)
    if 0 < sum(map(is_dtensor, variable.leaves)) < len(variable.leaves):  # torch cannot batch both kinds in one call
        for group in optimizer.param_groups:
            group["foreach"] = False
    lower = variable.argument != "x"  # y or theta
    nonsmooth = lower and problem.nonsmooth is not None
    _check_metric(optimizer, problem.y_set if lower else problem.x_set, nonsmooth, name)
    if given.clip is not None and nonsmooth:
        raise ValueError(
            f"{name}: clip would shorten the step along the gradient, but not the prox of the non-smooth term, so that the run"
            " would end elsewhere; leave clip out."
        )
    if follows:
        return RunningOptimizer(optimizer, None, given.clip, variable.leaves, leader=leader)
    # Before the scheduler is made, which writes its own numbers into the groups.
    start: list[tuple[Any, Any]] = [] if given.built is None else [(optimizer, copy.deepcopy(optimizer.state_dict()))]
    if isinstance(given.scheduler, LRScheduler):
        start.append((given.scheduler, copy.deepcopy(given.scheduler.state_dict())))
    scheduler = None if given.scheduler is None else _build_scheduler(name, given.scheduler, optimizer)
    return RunningOptimizer(optimizer, scheduler, given.clip, variable.leaves, start=start)


def held(factory: Any) -> Leaves:
    """The tensors that an optimizer holds if it is built already; none otherwise."""
    built = factory.built if isinstance(factory, Optimizer) else factory
    return [p for group in built.param_groups for p in group["params"]] if isinstance(built, torch.optim.Optimizer) else []


def _check_tensors(name: str, optimizer: torch.optim.Optimizer, variable: Variable, *, built: bool) -> None:
    """Raise unless an optimizer holds all leaves of a variable, and nothing else that it could move."""
    taken = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = {id(leaf) for leaf in variable.leaves}
    # torch.optim takes frozen parameters as well, and leaves them as they are.
    others = [p for key, p in taken.items() if key not in own and (p.requires_grad or not built)]
    missing = [n for n, leaf in zip(variable.names, variable.leaves, strict=True) if id(leaf) not in taken]
    if not others and not missing:
        return
    if not built:
        raise ValueError(f"{name}: the factory must hand all tensors that it gets to the optimizer, and no others.")
    level, found = variable.argument, []
    if missing:
        found.append(f"lacks {', '.join(repr(n) if n else level for n in missing[:3])}{', ...' * (len(missing) > 3)}")
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
        found.append(f"holds {len(others)} that {'is' if len(others) == 1 else 'are'} not of {level} (of shape {shapes})")
    raise ValueError(
        f"{name}: the {type(optimizer).__name__} must hold the tensors of {level} and no others, but it {' and '.join(found)};"
        " build one for each level, of the tensors that the run gets, or pass a factory such as partial(torch.optim.Adam,"
        " lr=1e-3)."
    )


def _alike_on(variable: Variable, leader: RunningOptimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class, groups and options on a copy of the leader's variable, without moments and hooks."""
    other = copy.copy(leader.optimizer)
    twins = dict(zip(map(id, leader.variable), variable.leaves, strict=True))
    other.state = defaultdict(dict)
    other.param_groups = [
        {**options, "params": [twins[id(p)] for p in group["params"] if id(p) in twins]}
        for options, group in zip(leader.groups, leader.optimizer.param_groups, strict=True)
    ]
    return other


def _made(name: str, factory: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return factory(argument)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {text(factory)} cannot be made ({error}); correct its options.") from error


def _build_scheduler(
    name: str, factory: Callable[[Any], LRScheduler] | LRScheduler, optimizer: torch.optim.Optimizer
) -> LRScheduler:
    built = isinstance(factory, LRScheduler)
    scheduler: Any = factory if built else _made(f"{name}: the scheduler", cast(Any, factory), optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"{name}: scheduler returned {type(scheduler).__name__}, expected one of torch.optim.lr_scheduler.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            f"{name}: ReduceLROnPlateau waits for a number that a step does not have; use a scheduler that counts steps, such"
            " as CosineAnnealingLR, or build the optimizer and step this scheduler in a loop of your own (meha.start)."
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(f"{name}: scheduler must use the optimizer that it gets, and no other.")
    try:
        buffer = io.BytesIO()
        torch.save(scheduler.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)  # as checkpoints are loaded: better to fail before the run than at its end
    except Exception as error:  # pickle and torch raise several kinds
        raise ValueError(
            f"{name}: the state of {type(scheduler).__name__} cannot be saved, because it is not made of numbers; pass"
            " functions instead of objects."
        ) from error
    return scheduler


def _check_metric(optimizer: torch.optim.Optimizer, domain: ConvexSet | None, nonsmooth: bool, name: str) -> None:
    """Refuse optimizers that rescale coordinates where a prox or projection follows, which is correct in one metric only."""
    if not nonsmooth and (domain is None or domain.coordinatewise):  # a projection on a box is the same in any diagonal metric
        return
    rates = {group["lr"] for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ValueError(
            f"{name}: has several learning rates {sorted(rates)}, but a prox or projection has one step; use one lr."
        )
    if isinstance(optimizer, torch.optim.SGD):
        return
    what = "a non-smooth term" if nonsmooth else f"the set {domain!r}"
    raise ValueError(
        f"{name}: {type(optimizer).__name__} rescales coordinates, and the prox or projection of {what} is only correct"
        " after plain steps; use torch.optim.SGD or leave the optimizer out."
    )


def _alike(a: Any, b: Any) -> bool:
    """Whether two states have the same structure, with values of the same kind in all places."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_alike(u, v) for u, v in zip(a, b, strict=True))
    return type(a) is type(b) or all(isinstance(value, int | float | Tensor) for value in (a, b))


def text(value: Any, *, sample: bool = False) -> str:
    """Describe a hyper-parameter completely as text; factories by their names and options.

    Args:
        sample: describe a function of the step number by some of its values, too.

    >>> text(partial(torch.optim.SGD, lr=0.1)), text(lambda k: 2.0 * k, sample=True)
    ('SGD(lr=0.1)', '<lambda> with values [0.0, 2.0, 4.0, 20.0, 200.0, 2000.0]')
    """
    if isinstance(value, list | tuple) and any(callable(item) for item in value):
        return f"[{', '.join(text(item, sample=sample) for item in value)}]"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, torch.optim.Optimizer):  # its options are in its state, and change
        sizes = [len(group["params"]) for group in value.param_groups]
        return f"{type(value).__name__} of {' and '.join(map(str, sizes))} tensor{'s' * (sum(sizes) != 1)}"
    if isinstance(value, LRScheduler):
        return type(value).__name__
    if isinstance(value, partial):
        options = [text(item, sample=True) for item in value.args]
        options += [f"{name}={text(item, sample=True)}" for name, item in value.keywords.items()]
        found = f"{text(value.func)}({', '.join(options)})"
    elif callable(value) and not dataclasses.is_dataclass(value) and not isinstance(value, Optimizer):
        found = getattr(value, "__name__", type(value).__name__)
    else:
        return str(value)
    return found + (f" with values {[_try(value, k) for k in (0, 1, 2, 10, 100, 1000)]}" if sample else "")


def _try(function: Callable[[int], float], k: int) -> float | None:
    """The value of a user's function at step k, or None if it raises."""
    try:
        return float(function(k))
    except Exception:  # a table, for example, that ends before k
        return None
