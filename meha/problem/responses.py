"""Responses: which solution y of the lower level is meant if there are several.

The optimistic response, the default, is the best y for F: right where whoever chooses x also chooses y, and wrong where y will
be computed again from the lower level alone, as a model is trained with the weights that were found. A lower level with many
solutions (more unknowns than examples, a network that can memorise) then lets y fit the data of F directly, and x hardly
matters. A selected response is the y that the lower level gives by itself: the solution nearest to a point, or what a number of
training steps lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meha.tensors.checks import check_count, check_positive
from meha.tensors.gradients import depends, fill
from meha.tensors.state import Saved
from meha.tensors.variables import Leaves, Variable, copy_, modules_of, named_leaves

__all__ = ["Nearest", "Response", "Start", "Trained"]

Start = Callable[[Any], Any] | Literal["redraw"] | None
"""Where y starts. None is y0, a function gives it from x, and ``"redraw"`` draws the parameters of its modules again."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """Base class of selected responses.

    Args:
        start: the starting point of y, instead of y0. A function of x returns a value like y: a tensor, a dict or list of
            tensors, or a module or dict with the names of the parameters, for a module. It may depend on x, as in meta-learning
            where ``start=lambda x: x``, and it may draw random numbers. ``"redraw"`` calls ``reset_parameters`` of all modules
            in y.
    """

    start: Start = None

    def __post_init__(self) -> None:
        kinds = 'a function of x that returns a value like y, or "redraw", or None for y0'
        if not (self.start is None or self.start == "redraw" or callable(self.start)):
            raise TypeError(f"start: {type(self).__name__} takes {kinds}, got {self.start!r}.")

    def begin(self, x: Variable, y: Variable) -> Leaves:
        """Return the leaves of the start for a variable like ``y``, in the graph from x; "redraw" draws those of ``y``."""
        if self.start is None:
            return y.leaves
        if self.start == "redraw":
            redraw(y)
            return y.leaves
        leaves = named_leaves(self.start(x.value), "start")
        own = dict(zip(y.names, y.leaves, strict=True))
        shapes, wanted = ({name: tuple(leaf.shape) for name, leaf in part.items()} for part in (leaves, own))
        if list(shapes.values()) != list(wanted.values()):
            raise ValueError(f"start: returned leaves of shapes {shapes}, but y has {wanted}; return a value like y0.")
        return list(leaves.values())


@dataclass(frozen=True, kw_only=True)
class Nearest(Response):
    """The solution of the lower level that is nearest to y0, or to another start.

    It is the limit, for a weight that vanishes, of the one solution of

        min_{y in Y} (f + g)(x, y) + weight / 2 ||y - start(x)||^2,

    for f + g convex in y. Least squares with more unknowns than equations then have the solution of least norm for y0 = 0, to
    which gradient descent from y0 leads as well. If f is not convex, it is where the solutions of this problem lead from the
    start as the weight falls, in the basin of the start.

    Args:
        weight: a number keeps the term with this weight (as implicit meta-learning does); None means the limit. The default
            method finds the limit; others that follow keep a weight of 1/1000 of the curvature of f in y, and have an error of
            that order.
        start: see :class:`Response`; not ``"redraw"``.

    >>> import meha
    >>> problem = meha.Problem(
    ...     upper=lambda x, y: (x - 1).square().sum() + (y - torch.tensor([3.0, 1.0])).square().sum(),
    ...     lower=lambda x, y: (y.sum() - x).square().sum(),
    ...     response=Nearest(),
    ... )
    >>> x0, y0 = torch.zeros(1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    >>> meha.solve(problem, x0, y0).y.round(decimals=4)  # x = 2, and both parts of y are x / 2
    tensor([1., 1.], dtype=torch.float64)
    """

    weight: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "redraw":
            remedy = 'for random starts take Trained(start="redraw")'
            raise ValueError(f'start: Nearest takes a function of x, got "redraw"; {remedy}.')
        if self.weight is not None:
            check_positive("weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class Trained(Response):
    """The result of a number of gradient steps on the lower level:

        y_0 = start(x),    y_{t+1} = prox_{lr (g + indicator of Y)}( y_t - lr f_y(x, y_t) ),    y = y_steps,

    all steps on the batch of the upper step, if there are batches. The response of networks, whose training never ends.

    Args:
        steps: the number of steps.
        lr: the step size.
        start: see :class:`Response`.

    What is left out is found where a run begins, on the lower level at x0 and the first batch: the best of the step sizes with
    which f + g falls in every step, and the number of steps after which 99 % is gained of what 50 steps gain. The run reports
    them, and the problem of its solution has them.

    >>> Trained(steps=20, lr=0.1)  # from y0
    Trained(start=None, steps=20, lr=0.1)
    >>> Trained(steps=20, lr=0.1, start="redraw")  # from other random parameters in each step
    Trained(start='redraw', steps=20, lr=0.1)
    """

    steps: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            check_count("steps", self.steps)
        if self.lr is not None:
            check_positive("lr", self.lr)

    @property
    def complete(self) -> bool:
        """Whether nothing is left out."""
        return self.steps is not None and self.lr is not None


def redraw(y: Variable) -> None:
    """Draw the parameters of all modules in ``y`` again, in place; raise if there is none, or one that cannot draw its own."""
    modules = [part for module in modules_of(y.value) for part in module.modules()]
    drawn = [part for part in modules if callable(getattr(part, "reset_parameters", None))]  # as most modules of torch have
    own = {id(leaf) for leaf in y.leaves}
    drawn = [part for part in drawn if own.issuperset(map(id, part.parameters(recurse=False)))]  # frozen parameters are shared
    left = own - {id(p) for part in drawn for p in part.parameters(recurse=False)}
    if left:
        names = [name for name, leaf in zip(y.names, y.leaves, strict=True) if id(leaf) in left]
        held = "no module with reset_parameters() and without frozen parameters holds it"
        reason = f"{', '.join(map(repr, names[:3]))} cannot be drawn again, as {held}"
        raise ValueError(f"start: {reason}; give start as a function of x that returns random parameters.")
    with torch.no_grad():
        for part in drawn:
            reset: Callable[[], None] = getattr(part, "reset_parameters")  # noqa: B009 (modules declare no such method)
            reset()


class ResponseTerm(Saved):
    """The response of a problem in a run: its starting point, and the weight of its proximal term.

    Args:
        response: the selected response; None for the optimistic one.

    Attributes:
        start: the run's y0; None before :meth:`hold`.
        weight: the weight of the term weight / 2 ||y - start||^2 that a response ``Nearest`` adds to the lower level.
        nearest: whether the response is ``Nearest``.
        found: the numbers of a response ``Trained`` that were left out, and how they were found; empty if none was.
    """

    saves = ("start", "weight", "found")

    def __init__(self, response: Response | None) -> None:
        self.response = response
        self.nearest = isinstance(response, Nearest)
        self.start: Variable | None = None
        self.weight = 0.0
        self.found: dict[str, Any] = {}
        self._begun: Leaves = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the term of another run; one of another response is left out, and refused with its problem."""
        if (state["start"] is None) == (self.start is None):
            super().load_state_dict(state)

    @property
    def fixed(self) -> float | None:
        """The constant weight of a ``Nearest`` response; None if the weight tends to zero."""
        return self.response.weight if isinstance(self.response, Nearest) else None

    @property
    def vanishes(self) -> bool:
        """Whether the weight tends to zero, as for the solution nearest to the start."""
        return self.nearest and self.fixed is None

    @property
    def moves(self) -> bool:
        """Whether the starting point may depend on x, which then matters even if f and F ignore x."""
        return self.response is not None and callable(self.response.start)

    def hold(self, y: Variable) -> None:
        """Take the present y as y0."""
        if self.response is not None:
            self.start, self.weight = y.copy(), self.fixed or 0.0

    def centre(self, x: Variable) -> Leaves:
        """Return the starting point at x, as part of the graph from x."""
        assert self.response is not None
        assert self.start is not None
        return self.response.begin(x, self.start)

    def term(self, x: Variable, y: Variable) -> Tensor | float:
        """Return the proximal term at (x, y)."""
        if not self.weight or self.start is None:  # also saves the evaluation of start(x)
            return 0.0
        parts = [(a - b).square().sum() for a, b in zip(y.leaves, self.centre(x), strict=True)]
        return self.weight / 2 * torch.stack(parts).sum()

    def begin(self, x: Variable, y: Variable, *, through: bool) -> None:
        """Copy the starting point at x into ``y``; do nothing if that is y0.

        Args:
            through: whether the method differentiates in the start, which may depend on x, and will ask for :meth:`pull_back`.
        """
        if self.response is None or self.response.start is None:
            return
        with torch.enable_grad():
            begun = self.response.begin(x, y)
            if begun is y.leaves:  # redrawn in place
                return
            lost = not through and any(depends(leaf.sum(), x.leaves) for leaf in begun)
        if lost:
            found = "depends on x, and the method does not differentiate in it"
            raise ValueError(f"start: {found}; use RHG, or .detach() what start returns.")
        self._begun = begun if through else []  # holds the graph until pull_back
        copy_([leaf.detach() for leaf in y.leaves], [leaf.detach() for leaf in begun])  # the graph is kept in _begun only

    def pull_back(self, x: Variable, cotangent: Leaves) -> Leaves:
        """Return the gradient in x of <start(x), cotangent> for the last starting point; zero if that does not depend on x."""
        pairs = [(leaf, part) for leaf, part in zip(self._begun, cotangent, strict=False) if leaf.requires_grad]  # none at y0
        self._begun = []  # frees the graph
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in x.leaves]
        outputs, parts = zip(*pairs, strict=True)
        return fill(torch.autograd.grad(outputs, x.leaves, parts, allow_unused=True), x.leaves)
