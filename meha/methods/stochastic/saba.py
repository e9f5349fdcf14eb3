"""SABA: SOBA with the last derivatives on every group of examples in memory, which removes the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from meha.method.method import At, Run, State
from meha.methods.stochastic.frame import Derivatives, SystemMethod, SystemState, Triple, derivatives, grouped, is_first
from meha.problem.oracle import Oracle
from meha.tensors.memory import available
from meha.tensors.variables import Leaves, Variable, add_, copy_


@dataclass
class MemoryState(State):
    """A state with fields that are None until the first batch says how many groups there are.

    Attributes:
        memories: the names of these fields.
    """

    memories: ClassVar[tuple[str, ...]] = ()

    @property
    def bytes(self) -> int:
        """The size of the memory."""
        parts = [part for name in self.memories if (part := getattr(self, name)) is not None]
        return sum(leaf.nbytes for part in parts for leaf in part.leaves)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = {name: getattr(self, name) for name in self.memories}
        try:
            for name in self.memories:  # another run may have more groups, or none yet
                saved = state.get(name) if isinstance(state, Mapping) else None
                if isinstance(saved, Mapping) and all(isinstance(part, Tensor) for part in saved.values()):
                    like = self.y.leaves[0]
                    tensors = {key: like.new_zeros(part.shape, dtype=part.dtype) for key, part in saved.items()}
                    setattr(self, name, Variable.of(tensors, name))
                else:
                    setattr(self, name, None)
            super().load_state_dict(state)
        except Exception:
            for name, part in before.items():
                setattr(self, name, part)
            raise


@dataclass
class SABAState(MemoryState, SystemState):
    """Besides x, y and v: the last derivatives on every group of each level, a row for each, and the means of the rows.

    They are None before the first step, because only a batch says how many groups there are.
    """

    memories: ClassVar[tuple[str, ...]] = ("upper_memory", "lower_memory", "upper_mean", "lower_mean")

    upper_memory: Variable | None = None
    lower_memory: Variable | None = None
    upper_mean: Variable | None = None
    lower_mean: Variable | None = None


def remember(memory: Variable, mean: Variable, group: Tensor, new: Leaves) -> Leaves:
    """Return the estimates new - row + mean, put the new derivatives into the row of their group, and move the mean."""
    row = group.reshape(1)
    change = [part - table.index_select(0, row)[0] for part, table in zip(new, memory.leaves, strict=True)]
    estimates = [a + b for a, b in zip(change, mean.leaves, strict=True)]
    add_(mean.leaves, change, 1 / len(memory.leaves[0]))
    for table, part in zip(memory.leaves, new, strict=True):
        table.index_copy_(0, row, part[None])
    return estimates


@dataclass(frozen=True, kw_only=True)
class SABA(SystemMethod):
    """Stochastic average bilevel algorithm (Dagréou, Ablin, Vaiter and Moreau 2022): SOBA with the memory of SAGA.

    F and f are means over groups of examples. For each of the five derivatives d (F_x, F_y, f_y, f_yy [v], f_xy [v]), with i
    the group of the batch, and a table of the last derivatives m_1, ..., m_n on the n groups,

        D = d_i - m_i + mean(m);    m_i <- d_i

    takes its place in a step of :class:`~meha.stochastic.SOBA`. A step costs 1 gradient of f, 1 of F and 1 Hessian-vector
    product. The estimates become exact as the run converges, so that rates need not fall.

    The theory is that of SOBA, with constant rates of the order of n^(-2/3). In
    the paper, the memory begins with the derivatives on every group, at the start. Here its rows begin with those
    on the first batch, which needs no pass over the data, and is forgotten after one.

    Args:
        alpha, beta, eta, x_optimizer: see :class:`~meha.methods.stochastic.frame.ImplicitSteps`.

    Batches are those of ``meha.loaders.Indices(..., groups=True)``. The memory takes (n_F + 1) (dim x + dim y) +
    (n_f + 1) (dim x + 2 dim y) numbers, for n_F and n_f groups; where they do not fit, the first step says so.
    ``solution.report`` has the bytes.
    Directions are noisy until every group was seen.

    >>> import torch, meha
    >>> data, target = torch.linspace(0, 2, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    >>> problem = meha.Problem(
    ...     upper=lambda x, y, batch: 0.5 * (y - target[batch.upper]).square().mean(),
    ...     lower=lambda x, y, batch: 0.5 * (y - x * data[batch.lower]).square().mean(),
    ... )
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> batches = meha.loaders.Indices(2, upper=4, lower=8, groups=True)
    >>> method = meha.stochastic.SABA(alpha=0.2, beta=0.3, eta=0.3)
    >>> solution = meha.solve(problem, zero, zero, method, batches=batches, max_steps=300)
    >>> print(f"{float(solution.x):.6f}")
    1.000000
    """

    refuses_group: ClassVar[str] = "its memory is of derivatives on groups of examples, and those of processes differ"

    def init(self, oracle: Oracle, x: Variable, y: Variable) -> SABAState:
        return SABAState(**vars(super().init(oracle, x, y)))

    def directions(self, oracle: Oracle, state: SABAState, at: At) -> tuple[Tensor, Triple]:
        batch = grouped(self.name, at.batch)
        if at.rare(is_first):
            allocate(state, batch.groups)
        found = derivatives(oracle, state.x, state.y, state.v.leaves, batch)
        levels = {"upper": [*found.F_x, *found.F_y], "lower": [*found.f_xy, *found.f_y, *found.f_yy]}
        estimates: Leaves = []
        for (level, new), group in zip(levels.items(), batch.group, strict=True):
            memory, mean = getattr(state, f"{level}_memory"), getattr(state, f"{level}_mean")
            if at.rare(is_first):
                copy_(mean.leaves, new)
                copy_(memory.leaves, [part.expand_as(table) for part, table in zip(new, memory.leaves, strict=True)])
            estimates += remember(memory, mean, group, new)
        parts = iter(estimates)
        fields = {name: [next(parts) for _ in getattr(found, name)] for name in Derivatives._fields[1:]}
        return found.upper, Derivatives(found.upper, **fields).directions

    def report(self, run: Run) -> Mapping[str, str]:
        taken = run.state.bytes
        return {"memory": f"derivatives on every group of examples, {shown(taken)}"} if taken else {}


def allocate(state: SABAState, groups: tuple[int, int]) -> None:
    """Make the memory for these numbers of groups of the upper and of the lower examples, or raise if it does not fit."""
    x, y = state.x.leaves, state.y.leaves
    kinds = {"upper": [*x, *y], "lower": [*x, *y, *y]}
    needed = sum((n + 1) * leaf.nbytes for n, leaves in zip(groups, kinds.values(), strict=True) for leaf in leaves)
    left = available(state.y.device)
    if left is not None and needed > left:
        raise ValueError(
            f"batches: the memory of SABA for {groups[0]} groups of upper and {groups[1]} of lower examples needs"
            f" {shown(needed)}, and {shown(left)} are left; take larger groups, or SOBA, which has no memory."
        )
    for (level, leaves), n in zip(kinds.items(), groups, strict=True):
        setattr(state, f"{level}_memory", Variable([leaf.new_zeros((n, *leaf.shape)) for leaf in leaves], f"{level}_memory"))
        setattr(state, f"{level}_mean", Variable([leaf.new_zeros(leaf.shape) for leaf in leaves], f"{level}_mean"))


def shown(size: int) -> str:
    """A number of bytes with a unit.

    >>> shown(1500), shown(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    power = min(3, max(0, int(math.log2(max(size, 1)) / 10)))
    return f"{size / 2 ** (10 * power):.1f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
