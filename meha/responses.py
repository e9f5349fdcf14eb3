"""Responses: which solution y of the lower level a problem means, where there are several.

The optimistic response, the default, is the best y for F: x and y are chosen together. It is right where whoever chooses x also
chooses y. It is wrong where y will be computed afresh from the lower level alone, as a model is trained with the weights or
hyper-parameters that were found: a lower level with many solutions (more unknowns than examples, a network that can memorise)
then lets y fit the data of F directly, and x hardly matters. A selected response is the y that the lower level gives by itself:
the solution nearest to a point, or what a number of training steps lead to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from meha._checks import check_count, check_positive
from meha._leaves import Leaves
from meha._structures import modules_of, named_leaves
from meha._variables import Variable

__all__ = ["Nearest", "Response", "Start", "Trained"]

Start = Callable[[Any], Any] | Literal["redraw"] | None
"""Where y begins: at y0 (None), where a function of x says, or at parameters that the modules in y draw again."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """Base class of selected responses.

    Args:
        start: where y begins, instead of y0. A function of x returns a value like y: a tensor, a dict or list of tensors, or a
            module or dict with the names of the parameters, for a module. It may depend on x, as in meta-learning where
            ``start=lambda x: x``, and it may draw random numbers. ``"redraw"`` calls ``reset_parameters`` of all modules in y.
    """

    start: Start = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not (self.start is None or self.start == "redraw" or callable(self.start)):
            raise TypeError(
                f'start: {name} takes a function of x that returns a value like y, or "redraw", or None for y0, got'
                f" {self.start!r}."
            )

    def begin(self, x: Variable, y: Variable) -> Leaves:
        """The leaves of the start for a lower variable with the structure of ``y``, with the graph that leads there from x.

        For ``"redraw"``, the parameters of ``y`` itself are drawn again.

        Raises:
            ValueError: the start has other leaves than y.
        """
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
    start as the weight falls, in the valley of the start.

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
            raise ValueError(
                'start: Nearest takes a function of x, got "redraw"; for random starts take Trained(steps=..., lr=...).'
            )
        if self.weight is not None:
            check_positive("weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class Trained(Response):
    """What a number of gradient steps on the lower level lead to from a fresh start:

        y_0 = start(x),    y_{t+1} = prox_{lr (g + indicator of Y)}( y_t - lr f_y(x, y_t) ),    y = y_steps,

    all steps on the batch of the upper step, if there are batches. The response of networks, whose training never ends.

    Args:
        steps: their number.
        lr: their size.
        start: see :class:`Response`.

    >>> Trained(steps=20, lr=0.1)  # from y0
    Trained(start=None, steps=20, lr=0.1)
    >>> Trained(steps=20, lr=0.1, start="redraw")  # from other random parameters in each step
    Trained(start='redraw', steps=20, lr=0.1)
    """

    steps: int
    lr: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("steps", self.steps)
        check_positive("lr", self.lr)


def redraw(y: Variable) -> None:
    """Draw the parameters of all modules in ``y`` again, in place.

    Raises:
        ValueError: there is no module, or one with parameters that it cannot draw.
    """
    modules = [part for module in modules_of(y.value) for part in module.modules()]
    drawn = [part for part in modules if callable(getattr(part, "reset_parameters", None))]
    left = {id(leaf) for leaf in y.leaves} - {id(p) for part in drawn for p in part.parameters(recurse=False)}
    if left:
        names = [name for name, leaf in zip(y.names, y.leaves, strict=True) if id(leaf) in left]
        raise ValueError(
            f"start: {', '.join(map(repr, names[:3]))} cannot be drawn again, as no module with reset_parameters() holds it;"
            " give start as a function of x that returns random parameters."
        )
    with torch.no_grad():
        for part in drawn:
            reset: Callable[[], None] = getattr(part, "reset_parameters")  # noqa: B009 (modules declare no such method)
            reset()
