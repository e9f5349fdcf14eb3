"""Selection: a selected response at work, as a proximal term of the lower level and as a start of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meha._gradients import depends, fill
from meha._leaves import Leaves, copy_
from meha._variables import Variable
from meha.responses import Nearest, Response

__all__ = ["Selection"]


class Selection:
    """The response of a problem, where it begins, and the weight of its proximal term.

    Args:
        response: the selected response; None where y is the best for F.

    Attributes:
        start: the run's y0; None before :meth:`hold`.
        weight: that of the term weight / 2 ||y - start||^2, which the lower level of a response ``Nearest`` holds.
        nearest: whether the response is of this kind.
    """

    def __init__(self, response: Response | None) -> None:
        self.response = response
        self.nearest = isinstance(response, Nearest)
        self.start: Variable | None = None
        self.weight = 0.0
        self._begun: Leaves = []

    @property
    def fixed(self) -> float | None:
        """The weight of a ``Nearest`` response that keeps its term; None if it is to vanish."""
        return self.response.weight if isinstance(self.response, Nearest) else None

    @property
    def vanishes(self) -> bool:
        """Whether the solution nearest to the start is meant, so that the term is to vanish."""
        return self.nearest and self.fixed is None

    @property
    def moves(self) -> bool:
        """Whether x may act by the start of y alone."""
        return self.response is not None and callable(self.response.start)

    def hold(self, y: Variable) -> None:
        """Take the present y for y0."""
        if self.response is not None:
            self.start, self.weight = y.copy(), self.fixed or 0.0

    def centre(self, x: Variable) -> Leaves:
        """Where the response begins at x, with the graph that leads there."""
        assert self.response is not None
        assert self.start is not None
        return self.response.begin(x, self.start)

    def term(self, x: Variable, y: Variable) -> Tensor | float:
        """The proximal term."""
        if not self.weight or self.start is None:
            return 0.0
        parts = [(a - b).square().sum() for a, b in zip(y.leaves, self.centre(x), strict=True)]
        return self.weight / 2 * torch.stack(parts).sum()

    def begin(self, x: Variable, y: Variable, *, through: bool) -> None:
        """Put where the response begins at x into ``y``; nothing happens where that is y0.

        Args:
            through: whether the method differentiates in the start, and will ask for :meth:`pull_back`.

        Raises:
            ValueError: the start depends on x, and the method would not notice.
        """
        if self.response is None or self.response.start is None:
            return
        with torch.enable_grad():
            begun = self.response.begin(x, y)
            if begun is y.leaves:
                return
            lost = not through and any(depends(leaf.sum(), x.leaves) for leaf in begun)
        if lost:
            raise ValueError(
                "start: depends on x, and the method does not differentiate in it; use RHG, or .detach() what start returns."
            )
        self._begun = begun if through else []
        copy_([leaf.detach() for leaf in y.leaves], [leaf.detach() for leaf in begun])

    def pull_back(self, x: Variable, cotangent: Leaves) -> Leaves:
        """The gradient in x of <start(x), cotangent>, for the last start; zero where it does not depend on x."""
        pairs = [(leaf, part) for leaf, part in zip(self._begun, cotangent, strict=False) if leaf.requires_grad]
        self._begun = []
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in x.leaves]
        outputs, parts = zip(*pairs, strict=True)
        return fill(torch.autograd.grad(outputs, x.leaves, parts, allow_unused=True), x.leaves)

    def state_dict(self) -> dict[str, Any]:
        """Where it begins, and the weight; nothing where y is the best for F."""
        return {} if self.start is None else {"start": self.start.state_dict(), "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as another selection."""
        if self.start is not None and state:
            self.start.load_state_dict(state["start"])
            self.weight = state["weight"]
