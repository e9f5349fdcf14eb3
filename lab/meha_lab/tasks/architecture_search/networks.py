"""Networks of cells: the super-network of a search, and the final network of a genotype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, max_pool2d

from meha_lab.tasks.architecture_search.genotype import INCOMING, INPUTS, CellGenotype, Genotype, SearchSpace
from meha_lab.tasks.architecture_search.operations import SKIP, FactorisedReduction, Projection, Skip, Style, ZeroOperation

__all__ = ["FinalNetwork", "Kept", "SuperNetwork"]


STEM = 3
"""Ratio of the channels of the stem to those of the first cells, as in DARTS."""

Kept = Mapping[str, Sequence[Sequence[str]]]
"""The operations that remain on each edge, for "normal" and "reduction"."""

KINDS = ("normal", "reduction")


def check_kept(space: SearchSpace, kept: Kept) -> None:
    """Raise unless all edges of each kind of cell keep the same number of different operations of the space."""
    for kind in KINDS:
        edges = kept.get(kind, ())
        if len(edges) != space.edges:
            raise ValueError(f"kept: must have {space.edges} edges for {kind!r}, got {len(edges)}.")
        for edge, names in enumerate(edges):
            unknown = [name for name in names if name not in space.operations]
            if unknown:
                raise ValueError(
                    f"kept: edge {edge} of {kind!r} has {unknown} that the space lacks; there are {list(space.operations)}."
                )
            if not names or len(set(names)) != len(names) or len(names) != len(edges[0]):
                raise ValueError(
                    f"kept: all edges of {kind!r} must have as many different operations, got {list(edges[0])} on edge 0 and"
                    f" {list(names)} on edge {edge}."
                )


def _is_reduction(cell: int, cells: int) -> bool:
    """Return True if a cell halves height and width: two of them do, at one and two thirds of the depth."""
    return cell in (cells // 3, 2 * cells // 3)


class Body(nn.Module):
    """Base class of both networks: the stem, the preprocessing of the inputs of cells, and the classifier."""

    def __init__(self, inputs: int, classes: int, channels: int, cells: int, style: Style, nodes: int) -> None:
        super().__init__()
        self.style = style
        stem = STEM * channels
        self.stem = nn.Sequential(
            nn.Conv2d(inputs, stem, 3, padding=1, bias=False),
            nn.BatchNorm2d(stem, affine=True, track_running_stats=style.final),
        )
        self.plan: list[tuple[int, bool]] = []
        self.before = nn.ModuleList()
        widths, halved, width = [stem, stem], False, channels
        for i in range(cells):
            reduction = _is_reduction(i, cells)
            width *= 2 if reduction else 1  # twice the channels for a quarter of the pixels
            first = FactorisedReduction if halved else Projection  # the older input has the size before the reduction
            self.before.append(nn.ModuleList([first(widths[-2], width, style), Projection(widths[-1], width, style)]))
            self.plan.append((width, reduction))
            widths.append(nodes * width)  # a cell returns all its nodes
            halved = reduction
        self.widths = widths[INPUTS:]
        self.linear = nn.Linear(widths[-1], classes)

    def inputs_of(self, i: int, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of cell i, projected to its number of channels."""
        return [before(state) for before, state in zip(self.before[i].children(), states[-INPUTS:], strict=True)]

    def classify(self, features: Tensor) -> Tensor:
        """Return class scores from the output of the last cell."""
        scores: Tensor = self.linear(avg_pool2d(features, features.shape[2:]).flatten(1))
        return scores


class Fan(nn.Module):
    """All edges that leave one state, each a weighted mixture of operations on this state.

    Args:
        kept: the names of the operations of each edge.
        partial: K; only the first 1/K of the channels goes through the operations, the others pass.
    """

    def __init__(
        self, space: SearchSpace, kept: Sequence[Sequence[str]], channels: int, stride: int, style: Style, partial: int
    ) -> None:
        super().__init__()
        self.stride, self.partial, self.active, self.count = stride, partial, channels // partial, len(kept)
        self.names = list(space.operations)
        # Grouped by operation, so that all edges with the same one are computed by one call.
        self.edges = [[i for i, names in enumerate(kept) if name in names] for name in self.names]
        self.operations = nn.ModuleList(
            nn.ModuleList(space.operations[name](self.active, stride, style) for _ in edges)
            for name, edges in zip(self.names, self.edges, strict=True)
        )

    def forward(self, state: Tensor, weights: Tensor, masks: Tensor | None = None) -> list[Tensor]:
        """Return the outputs of all edges.

        Args:
            weights: (edges, operations); those of operations that an edge lacks are not used.
            masks: (N, edges), factors of the skip connections.
        """
        active, others = state.split([self.active, state.shape[1] - self.active], dim=1) if self.partial > 1 else (state, None)
        shared: Tensor | None = None  # the sum of operations that all edges have, as one tensor
        parts: list[list[Tensor]] = [[] for _ in range(self.count)]
        for column, (edges, made) in enumerate(zip(self.edges, self.operations, strict=True)):
            operations = list(made.children())
            if not edges or isinstance(operations[0], ZeroOperation):  # zeros add nothing
                continue
            images = _evaluate(operations, active, _pick(weights[:, column], edges, 0))
            if masks is not None and self.names[column] == SKIP:
                factors = _pick(masks, edges, 1)[:, :, None].expand(-1, -1, self.active).flatten(1)
                images = images * factors[:, :, None, None].to(images.dtype)
            if len(edges) == self.count:
                shared = images if shared is None else shared + images
            else:
                for edge, image in zip(edges, images.chunk(len(edges), dim=1), strict=True):
                    parts[edge].append(image)
        for edge, image in enumerate([] if shared is None else shared.chunk(self.count, dim=1)):
            parts[edge].append(image)
        mixed = [_sum(images) if images else torch.zeros_like(active[:, :, :: self.stride, :: self.stride]) for images in parts]
        return mixed if others is None else self._with_others(mixed, others)

    def _with_others(self, mixed: Sequence[Tensor], others: Tensor) -> list[Tensor]:
        """Append the bypassed channels, and shuffle, so that other channels go through the operations of the next edge."""
        others = others if self.stride == 1 else max_pool2d(others, 2)  # to the size of the mixed channels
        return [_shuffle(torch.cat([image, others], dim=1), self.partial) for image in mixed]


def _evaluate(operations: Sequence[nn.Module], x: Tensor, weights: Tensor) -> Tensor:
    """Return the outputs of several operations of a kind at x, times their weights, as blocks of channels."""
    together = getattr(type(operations[0]), "together", None)  # one call for all is faster than one each
    if together is not None:
        images: Tensor = together(operations, x, weights)
        return images
    return torch.cat([weight.to(x.dtype) * operation(x) for operation, weight in zip(operations, weights, strict=True)], dim=1)


def _pick(tensor: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """Return entries along a dimension."""
    if len(places) == tensor.shape[dim]:
        return tensor
    # A list as an index would be copied to the GPU, which a CUDA graph does not allow.
    return torch.stack([tensor.select(dim, place) for place in places], dim)


def _shuffle(x: Tensor, groups: int) -> Tensor:
    """Interleave ``groups`` blocks of channels; the result is in channels-last memory format.

    >>> _shuffle(torch.arange(6).reshape(1, 6, 1, 1), 2).flatten().tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return x.permute(0, 2, 3, 1).unflatten(3, (groups, -1)).transpose(3, 4).flatten(3).permute(0, 3, 1, 2)


class MixedCell(nn.Module):
    """A cell in which every edge is a mixture of operations, computed state by state."""

    def __init__(
        self, space: SearchSpace, kept: Sequence[Sequence[str]], channels: int, reduction: bool, style: Style, partial: int
    ) -> None:
        super().__init__()
        leaving = space.leaving
        self.sizes, self.nodes = [len(edges) for edges in leaving], space.nodes
        self.targets = [[space.targets[edge] - INPUTS for edge in edges] for edges in leaving]
        self.fans = nn.ModuleList(
            Fan(space, [kept[edge] for edge in edges], channels, 2 if reduction and s < INPUTS else 1, style, partial)
            for s, edges in enumerate(leaving)
        )

    def forward(self, inputs: Sequence[Tensor], weights: Tensor, factors: Tensor | None, masks: Tensor | None) -> Tensor:
        """Return the nodes; see :class:`SuperNetwork` for the arguments, whose edges are ordered as in ``leaving``."""
        states, entering, place = list(inputs), [list[Tensor]() for _ in range(self.nodes)], 0
        for s, (fan, size, targets) in enumerate(zip(self.fans, self.sizes, self.targets, strict=True)):
            if s >= INPUTS:  # all edges that enter this node have been computed
                states.append(_sum(entering[s - INPUTS]))
            here = slice(place, place + size)
            images = fan(states[s], weights[here], None if masks is None else masks[:, here])
            for edge, (image, target) in enumerate(zip(images, targets, strict=True)):
                entering[target].append(image if factors is None else factors[place + edge].to(image.dtype) * image)
            place += size
        states.append(_sum(entering[-1]))
        return torch.cat(states[INPUTS:], dim=1)


def _sum(images: Sequence[Tensor]) -> Tensor:
    return sum(images[1:], images[0])


class SuperNetwork(Body):
    """The network of a search, whose edges mix operations by the softmax of architecture parameters.

    Architecture parameters are a dict: "normal" and "reduction" of shape (edges, operations) and, with edge normalisation,
    "normal edges" and "reduction edges" of shape (edges,), whose softmax over the edges that enter a node multiplies them.

    Args:
        space: the operations and the nodes.
        inputs: channels of the images.
        classes: number of classes.
        channels: C, of the first cells.
        cells: L.
        activation: see :class:`Style`.
        partial: K of PC-DARTS; 1 for all channels.
        kept: the operations of each edge, for "normal" and "reduction"; as many on each edge of a kind. All by default.
    """

    order: Tensor
    places_normal: Tensor
    places_reduction: Tensor

    def __init__(
        self,
        space: SearchSpace,
        inputs: int = 3,
        classes: int = 10,
        channels: int = 16,
        cells: int = 3,
        activation: str = "relu",
        partial: int = 1,
        kept: Kept | None = None,
    ) -> None:
        style = Style(activation)  # type: ignore[arg-type]
        super().__init__(inputs, classes, channels, cells, style, space.nodes)
        kept = kept or dict.fromkeys(KINDS, space.all_kept())
        check_kept(space, kept)
        self.sizes = [INPUTS + node for node in range(space.nodes)]
        order = [edge for edges in space.leaving for edge in edges]
        self.register_buffer("order", torch.tensor(order), persistent=False)
        for kind in KINDS:
            self.register_buffer(f"places_{kind}", _places(space, kept[kind], order), persistent=False)
        self.cells = nn.ModuleList(
            MixedCell(space, kept[KINDS[reduction]], width, reduction, style, partial) for width, reduction in self.plan
        )

    def forward(
        self, images: Tensor, x: Mapping[str, Tensor], noise: Tensor | None = None, dropout: Tensor | None = None
    ) -> Tensor:
        """Return class scores.

        Args:
            x: the architecture parameters.
            noise: (N, cells, edges), uniform in [0, 1): where it is below ``dropout``, the skip connection is dropped. Its
                edges are ordered by the state that they leave (``space.leaving``).
            dropout: the rate, a number.
        """
        weights = {
            kind: x[kind].softmax(dim=1).flatten().gather(0, getattr(self, f"places_{kind}").flatten()) for kind in KINDS
        }
        factors = {kind: self._factors(x[f"{kind} edges"]) if f"{kind} edges" in x else None for kind in KINDS}
        # Division by 1 - dropout keeps the expectation, so that evaluation needs no factor.
        masks = None if noise is None or dropout is None else (noise >= dropout).to(images.dtype) / (1 - dropout)
        states = [self.stem(images)] * INPUTS
        for i, (cell, (_, reduction)) in enumerate(zip(self.cells, self.plan, strict=True)):
            kind = KINDS[reduction]
            mixture = weights[kind].unflatten(0, (len(self.order), -1))
            output = cell(self.inputs_of(i, states), mixture, factors[kind], None if masks is None else masks[:, i])
            states = [states[-1], output]
        return self.classify(states[-1])

    def _factors(self, edges: Tensor) -> Tensor:
        return edge_factors(edges, self.sizes).gather(0, self.order)


def _places(space: SearchSpace, kept: Sequence[Sequence[str]], order: Sequence[int]) -> Tensor:
    """Return the index of each operation's weight among the kept ones; any index if it is not kept.

    Returns:
        (edges, operations), with edges as in ``order``.
    """
    width = len(kept[0])
    return torch.tensor(
        [[edge * width + (kept[edge].index(name) if name in kept[edge] else 0) for name in space.operations] for edge in order]
    )


def edge_factors(edges: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the softmax of edge parameters over the edges that enter the same node.

    >>> edge_factors(torch.zeros(5), (2, 3))
    tensor([0.5000, 0.5000, 0.3333, 0.3333, 0.3333])
    """
    return torch.cat([part.softmax(dim=0) for part in edges.split(list(sizes))])


class DerivedCell(nn.Module):
    """A cell of the final network, with one operation per edge."""

    def __init__(self, space: SearchSpace, cell: CellGenotype, channels: int, reduction: bool, style: Style) -> None:
        super().__init__()
        self.sources = [source for _, source in cell]
        self.operations = nn.ModuleList(
            space.operations[name](channels, 2 if reduction and source < INPUTS else 1, style) for name, source in cell
        )

    def forward(self, inputs: Sequence[Tensor], masks: Tensor | None) -> Tensor:
        """Return the nodes. ``masks`` (N, edges) are the factors of drop path, which leaves identities alone."""
        states, images = list(inputs), list[Tensor]()
        for edge, (operation, source) in enumerate(zip(self.operations, self.sources, strict=True)):
            image = operation(states[source])
            if masks is not None and not isinstance(operation, Skip):
                image = image * masks[:, edge, None, None, None].to(image.dtype)
            images.append(image)
            if len(images) == INCOMING:
                states.append(_sum(images))
                images = []
        return torch.cat(states[INPUTS:], dim=1)


class HeadPool(nn.Module):
    """Average pooling of images of any size to 2 x 2; images of 8 x 8 have the overlapping windows of DARTS."""

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool2d(x, 5, stride=3) if x.shape[2:] == (8, 8) else adaptive_avg_pool2d(x, 2)


class AuxiliaryHead(nn.Sequential):
    """A second classifier at two thirds of the depth, which brings gradients to the earlier cells."""

    def __init__(self, channels: int, classes: int) -> None:
        narrow, wide = 128, 768
        super().__init__(
            nn.ReLU(), HeadPool(), nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow),
            nn.ReLU(), nn.Conv2d(narrow, wide, 2, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU(), nn.Flatten(), nn.Linear(wide, classes),
        )  # fmt: skip


class FinalNetwork(Body):
    """The network of a genotype, trained from scratch.

    Args:
        genotype: the cells.
        space: makes the operations that the genotype names.
        auxiliary: whether there is an auxiliary head after two thirds of the cells.
        inputs, classes, channels, cells, activation: see :class:`SuperNetwork`.

    >>> genotype = Genotype((("skip", 0), ("skip", 1)), (("max pool 3x3", 0), ("skip", 1)))
    >>> network = FinalNetwork(genotype, channels=4, cells=3)
    >>> network(torch.zeros(2, 3, 32, 32)).shape, network.parameter_count
    (torch.Size([2, 10]), 1414)
    """

    def __init__(
        self,
        genotype: Genotype,
        space: SearchSpace | None = None,
        inputs: int = 3,
        classes: int = 10,
        channels: int = 36,
        cells: int = 8,
        activation: str = "relu",
        auxiliary: bool = False,
    ) -> None:
        style, space = Style(activation, final=True), space or SearchSpace()  # type: ignore[arg-type]
        unknown = {name for name, _ in genotype.normal + genotype.reduction} - set(space.operations)
        if unknown:
            raise ValueError(
                f"genotype: has operations {sorted(unknown)} that the space lacks; there are {list(space.operations)}."
            )
        super().__init__(inputs, classes, channels, cells, style, genotype.nodes)
        self.cells = nn.ModuleList(
            DerivedCell(space, getattr(genotype, KINDS[reduction]), width, reduction, style) for width, reduction in self.plan
        )
        self.head_after = 2 * cells // 3
        self.auxiliary = AuxiliaryHead(self.widths[self.head_after], classes) if auxiliary else None

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return class scores; ``masks`` (N, cells, edges) are the factors of drop path."""
        return self.scores(images, masks)[0]

    def scores(self, images: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return class scores, and those of the auxiliary head in training."""
        states, extra = [self.stem(images)] * INPUTS, None
        for i, cell in enumerate(self.cells):
            output = cell(self.inputs_of(i, states), None if masks is None else masks[:, i])
            states = [states[-1], output]
            if i == self.head_after and self.auxiliary is not None and self.training:
                extra = self.auxiliary(output)
        return self.classify(states[-1]), extra

    @property
    def parameter_count(self) -> int:
        """Return the number of parameters, without the auxiliary head."""
        head = {id(p) for p in self.auxiliary.parameters()} if self.auxiliary is not None else set()
        return sum(p.numel() for p in self.parameters() if id(p) not in head)
