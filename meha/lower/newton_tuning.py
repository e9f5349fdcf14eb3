"""The numbers behind the decisions of the Newton solver and of implicit Newton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NewtonTuning:
    """Every heuristic number of these solvers; eps is the rounding error of the variables."""

    # The lower level
    dense: int = 2000  # largest face with a dense Hessian: there, its rows and factor take as long as some 150 products
    batched: int = 40  # most unknowns for which several points are evaluated at once, or one coordinate after the other
    batched_elements: float = 3e5  # most unknowns times numbers in the graph of f for that: beyond, arithmetic dominates calls
    contraction: float = 0.3  # an old factor is kept while it shrinks the error to this part in each step
    old_steps: float = 2.0  # most further steps with an old factor
    old_steps_by_size: float = 0.02  # and more of them for each unknown, since a new Hessian costs as many products
    quick: float = 0.1  # y may be less accurate where a step is this part of the one before: at singular Hessians none is
    cg_steps: int = 1000  # upper bound on products of one solve by conjugate gradients
    # Steps in x
    first_step: float = 0.1  # length of the first step, relative to x
    probe_growth: float = 1e3  # factor of such a move by which a saddle or a kink is left
    accuracy: float = 1e-4  # of y in a step in x, in units of the relative hypergradient before it
    # The end
    recent: int = 4  # last points, whose smallest changes are the scales of the end: a far start may lie among them


TUNING = NewtonTuning()
