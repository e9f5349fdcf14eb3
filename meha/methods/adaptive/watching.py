"""What AdaptiveMEHA learns from the gradients on its way: the first c, curvatures, steps that are too long, and gamma."""

from __future__ import annotations

import math

from meha._oracle import Oracle
from meha._variables import Variable
from meha.methods._curvatures import Curvatures, balance, flatten, lower_gradients, probe, upper_gradients, write
from meha.methods.adaptive.state import AdaptiveState, Pace, Record, Sight
from meha.methods.adaptive.steps import StepMap
from meha.methods.adaptive.tuning import TUNING

__all__ = ["check_start", "first_look", "grow_gamma", "look_again", "watch"]


def check_start(oracle: Oracle, x: Variable, y: Variable) -> None:
    """Raise if the start has no value, or an objective ignores its variables."""
    for function in (oracle.upper, oracle.lower):
        value = float(function(x, y))
        if not math.isfinite(value):
            raise ValueError(f"{function.level}: is {value} at the start (x0, y0); check it, or start elsewhere.")
    upper_gradients(oracle, x, y, strict=True)
    oracle.gradient(y, [(1.0, oracle.lower, x, y)])
    oracle.gradient(x, [(1.0, oracle.phi, x, y)])


def first_look(oracle: Oracle, x: Variable, y: Variable) -> tuple[Sight, Pace]:
    """The curvatures at the start, and the first c: from them or, where F is linear, from the slopes of F and f in y.

    A linear f gets the curvature that would bring its slope to zero within the size of y.
    """
    sight = Sight({}, {})
    sight.curvatures = curvatures = probe(oracle, x, y, sight.vectors, TUNING.first_look)
    _, _, F_y = upper_gradients(oracle, x, y)
    _, _, f_y = lower_gradients(oracle, x, y)
    start = flatten(y)
    curvatures["f_yy"] = L = curvatures["f_yy"] or float(f_y.norm()) / (float(start.norm()) or 1.0) or 1.0
    c = _first_c(curvatures)
    if c < math.inf:
        return sight, Pace(c)
    write(start - f_y / L, y)
    oracle.prox(x.value, y.leaves, 1 / (L + 2 * oracle.problem.g.rho))
    slope, mapping = float(F_y.norm()), float((start - flatten(y)).norm()) * L
    write(start, y)
    return sight, Pace(TUNING.first_c_linear * slope / mapping if slope and mapping else 1.0)


def look_again(oracle: Oracle, state: AdaptiveState) -> None:
    """Look at the curvatures again, first often, then rarely, and follow them where they have changed."""
    sight = state.sight
    if state.k + 1 - sight.step < min(max(1, sight.step), TUNING.wait):
        return
    sight.step, sight.vectors = state.k + 1, dict(sight.vectors)
    now, old = probe(oracle, state.at_x, state.at_y, sight.vectors, TUNING.next_look), sight.curvatures
    sight.curvatures = {
        name: old[name] if TUNING.fall * old[name] <= value <= TUNING.rise * old[name] else max(value, TUNING.fall * old[name])
        for name, value in now.items()
    }
    if not state.course.stages:
        state.pace.c = min(state.pace.c, _first_c(sight.curvatures))


def _first_c(seen: Curvatures) -> float:
    return TUNING.first_c * balance(seen["F_xx"], seen["F_yy"], seen["f_yy"], seen["f_xy"])


def watch(state: AdaptiveState, here: StepMap, record: Record) -> None:
    """Shorten the steps where the residual changed faster than they allow, and note negative curvature.

    Acceleration goes to a maximum as readily as to a minimum, so it starts again where the residual of (x, y) turned against
    their move.
    """
    if state.memory.records:
        last, n = state.memory.records[-1], len(state.origin)
        step = (here.before_prox(record) - here.before_prox(last)) / here.roots
        change = here.residual(record) - here.residual(last)
        length, changes = float(step.norm()), [float(part.norm()) for part in change.split(here.parts)]
        state.pace.scale(*(max(length / part, TUNING.least_cut) if part > TUNING.excess * length else 1.0 for part in changes))
        if float(step[:n] @ change[:n]) < -TUNING.against * float(step[:n].norm() * change[:n].norm()):
            state.memory.forget()
    z, w, _, lower = record
    _, y, theta = z.split(here.parts)
    apart, slope = y - theta, lower.split(here.parts)[1] + w.split(here.parts)[2]
    distance = float(apart.square().sum())
    curvature = float(apart @ slope) / distance if distance else 0.0
    if curvature < -TUNING.concave * state.sight.curvatures["f_yy"]:
        state.sight.concave = max(state.sight.concave, -curvature)


def grow_gamma(state: AdaptiveState, here: StepMap, record: Record) -> None:
    """Let gamma grow if theta has arrived, still has most of the slope that y has, and no negative curvature forbids it.

    In a direction in which f has the curvature mu, that share q is 1 / (1 + gamma mu), and gamma q / (1 - q) is 1 / mu.
    """
    z, w, _, lower = record
    _, y, theta = z.split(here.parts)
    (_, w_y, w_theta), (_, difference, f_theta) = w.split(here.parts), lower.split(here.parts)
    at_theta = f_theta + w_theta
    share = float(at_theta.norm()) / (float((difference + at_theta + w_y).norm()) or 1.0)
    lag = float((at_theta - (y - theta) / here.gamma).norm())
    if share > TUNING.flat and lag < TUNING.arrived * float(at_theta.norm()):
        sight, pace = state.sight, state.pace
        most = max(sight.curvatures["f_yy"] / sight.concave, 1.0) if sight.concave else TUNING.largest
        growth = min(pace.growth * min(share / max(1 - share, TUNING.share_left), TUNING.growth), most)
        if growth > TUNING.worth * pace.growth:
            pace.growth = growth
