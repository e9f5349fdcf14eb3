"""Genotypes: the two cells of an architecture, derived from the weights of operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from meha.tensors.checks import check_count
from meha_lab.tasks.architecture_search.operations import OPERATIONS, SKIP, ZERO, Factory

__all__ = ["CellGenotype", "Genotype", "SearchSpace", "random_genotype"]


INPUTS = 2
"""Number of states of a cell that come from earlier cells."""

INCOMING = 2
"""Number of edges that enter a node of a derived cell."""

Edge = tuple[str, int]
"""An operation, and the index of its input: 0 and 1 are the inputs of the cell, later ones its nodes."""

CellGenotype = tuple[Edge, ...]
"""The edges of a cell, two for each node."""


@dataclass(frozen=True)
class SearchSpace:
    """The operations that an edge may have, and the number of nodes of a cell.

    Node i of a cell takes an edge from each of the 2 + i states before it; edges are numbered node by node.

    Args:
        operations: factories by name (:data:`OPERATIONS`); one named "none" is never derived.
        nodes: number of nodes of a cell.

    >>> space = SearchSpace()
    >>> space.edges, len(space.operations), space.sources[:5]
    (14, 8, (0, 1, 0, 1, 2))
    """

    operations: Mapping[str, Factory] = field(default_factory=lambda: OPERATIONS)
    nodes: int = 4

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        if not [name for name in self.operations if name != ZERO]:
            raise ValueError(f"operations: {list(self.operations)} has none besides {ZERO!r}; add a factory under its name.")

    @property
    def edges(self) -> int:
        """Return the number of edges of a cell."""
        return len(self.sources)

    @property
    def sources(self) -> tuple[int, ...]:
        """Return the state that each edge leaves."""
        return tuple(state for node in range(self.nodes) for state in range(INPUTS + node))

    @property
    def targets(self) -> tuple[int, ...]:
        """Return the state that each edge enters."""
        return tuple(INPUTS + node for node in range(self.nodes) for _ in range(INPUTS + node))

    @property
    def leaving(self) -> list[list[int]]:
        """Return the edges that leave each state, for all states but the last node."""
        return [[edge for edge, source in enumerate(self.sources) if source == s] for s in range(INPUTS + self.nodes - 1)]

    def all_kept(self) -> tuple[tuple[str, ...], ...]:
        """Return all operations for every edge."""
        return (tuple(self.operations),) * self.edges

    def derive(self, weights: Sequence[Mapping[str, float]], most_skips: int | None = None) -> CellGenotype:
        """Derive a cell: for each node the two edges whose best operation other than "none" has the largest weight.

        Args:
            weights: the weights of the operations of each edge.
            most_skips: upper bound on the skip connections in the cell. While there are more, the weakest of them is removed
                from the candidates of its edge.

        >>> space = SearchSpace(nodes=1)
        >>> space.derive([{"skip": 0.6, "max pool 3x3": 0.3}, {"none": 0.9, "max pool 3x3": 0.1}], most_skips=0)
        (('max pool 3x3', 0), ('max pool 3x3', 1))
        """
        allowed = [{name: float(w) for name, w in edge.items() if name != ZERO} for edge in weights]
        while True:  # removing a skip can bring in another edge, so the choice is repeated
            chosen = self._strongest(allowed)
            skips = [edge for edge in chosen if _best(allowed[edge])[0] == SKIP]
            if most_skips is None or len(skips) <= most_skips:
                return tuple((_best(allowed[edge])[0], self.sources[edge]) for edge in chosen)
            weakest = min(skips, key=lambda edge: allowed[edge][SKIP])
            del allowed[weakest][SKIP]

    def _strongest(self, allowed: Sequence[Mapping[str, float]]) -> list[int]:
        """Return the edges of the derived cell, ordered by node and source."""
        chosen = []
        for node in range(INPUTS, INPUTS + self.nodes):
            entering = [edge for edge, target in enumerate(self.targets) if target == node]
            by_weight = sorted(entering, key=lambda edge: -_best(allowed[edge])[1])
            best = by_weight[:INCOMING]
            if not all(allowed[edge] for edge in best):
                raise ValueError(
                    f"weights: node {node} needs two edges with an operation other than {ZERO!r}; keep more operations on its"
                    " edges, or raise most_skips."
                )
            chosen += sorted(best)
        return chosen


def _best(edge: Mapping[str, float]) -> tuple[str, float]:
    """Return the operation of largest weight; an edge without operations has a weight below all others."""
    return max(edge.items(), key=lambda item: item[1], default=(ZERO, -1.0))


@dataclass(frozen=True)
class Genotype:
    """The normal and the reduction cell of an architecture.

    >>> edges = (("skip", 0), ("max pool 3x3", 1)), (("separable conv 3x3", 0), ("skip", 1))
    >>> print(Genotype(*edges))
    node  normal cell                      reduction cell
    2     skip(0), max pool 3x3(1)         separable conv 3x3(0), skip(1)
    """

    normal: CellGenotype
    reduction: CellGenotype

    def __post_init__(self) -> None:
        for name in ("normal", "reduction"):
            cell = tuple((str(operation), int(source)) for operation, source in getattr(self, name))
            object.__setattr__(self, name, cell)  # lists, as from JSON, become tuples; the class is frozen
            for place, (_, source) in enumerate(cell):
                if not 0 <= source < INPUTS + place // INCOMING:
                    states = INPUTS + place // INCOMING
                    raise ValueError(
                        f"{name}: edge {place} takes state {source}, but its node has only states 0 to {states - 1}."
                    )
        if len(self.normal) != len(self.reduction) or len(self.normal) % INCOMING or not self.normal:
            sizes = f"{len(self.normal)} and {len(self.reduction)}"
            raise ValueError(f"normal, reduction: must have two edges for each node, and as many nodes, got {sizes} edges.")

    @property
    def nodes(self) -> int:
        """Return the number of nodes of a cell."""
        return len(self.normal) // INCOMING

    @property
    def skips(self) -> float:
        """Return the share of skip connections among the edges of the normal cell."""
        return sum(operation == SKIP for operation, _ in self.normal) / len(self.normal)

    def to_dict(self) -> dict[str, list[list[Any]]]:
        """Return the cells as lists, for JSON."""
        return {name: [list(edge) for edge in getattr(self, name)] for name in ("normal", "reduction")}

    @classmethod
    def from_dict(cls, cells: Mapping[str, Iterable[Iterable[Any]]]) -> Genotype:
        """Return the genotype of a result of :meth:`to_dict`."""
        normal, reduction = (tuple((str(o), int(s)) for o, s in map(tuple, cells[name])) for name in ("normal", "reduction"))
        return cls(normal, reduction)

    def __str__(self) -> str:
        def inputs(cell: CellGenotype, node: int) -> str:
            return ", ".join(f"{operation}({source})" for operation, source in cell[INCOMING * node : INCOMING * (node + 1)])

        rows = [("node", "normal cell", "reduction cell")]
        rows += [(str(INPUTS + i), inputs(self.normal, i), inputs(self.reduction, i)) for i in range(self.nodes)]
        width = max(len(row[1]) for row in rows) + 2
        return "\n".join(f"{node:<6}{normal:<{max(width, 33)}}{reduction}" for node, normal, reduction in rows)

    def draw(self) -> Figure:
        """Draw both cells as graphs. Needs matplotlib: ``pip install "meha[plot]"``."""
        try:
            from meha_lab.tasks.architecture_search.drawing import draw
        except ImportError as error:
            raise ImportError('draw() needs matplotlib; install it with: pip install "meha[plot]"') from error

        return draw(self)


def random_genotype(space: SearchSpace, generator: torch.Generator) -> Genotype:
    """Draw a genotype: for each node two different states, and an operation other than "none" for each.

    >>> random_genotype(SearchSpace(nodes=1), torch.Generator().manual_seed(0)).nodes
    1
    """
    names = [name for name in space.operations if name != ZERO]

    def cell() -> CellGenotype:
        edges: list[Edge] = []
        for node in range(space.nodes):
            sources = sorted(torch.randperm(INPUTS + node, generator=generator)[:INCOMING].tolist())
            edges += [(names[int(torch.randint(len(names), (), generator=generator))], source) for source in sources]
        return tuple(edges)

    return Genotype(cell(), cell())


def edge_weights(alpha: Tensor, kept: Sequence[Sequence[str]], edges: Tensor | None) -> list[dict[str, float]]:
    """Return the weights of the operations of each edge, from the architecture parameters (see :class:`SuperNetwork`)."""
    rows = alpha.detach().softmax(dim=1).tolist()
    factors = [1.0] * len(rows) if edges is None else edges.tolist()  # PC-DARTS compares weights times edge factors
    return [
        {name: factor * weight for name, weight in zip(names, row, strict=True)}
        for names, row, factor in zip(kept, rows, factors, strict=True)
    ]
