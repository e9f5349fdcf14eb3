"""Problems whose lower levels have several basins, kinks, plateaus or many solutions, by family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from meha_lab.problems.blueprints import Blueprint
from meha_lab.problems.rugged._forms import numbers
from meha_lab.problems.rugged.boxes import indefinite, polynomial
from meha_lab.problems.rugged.curves import (
    bent_valley,
    curved_valley,
    moving_ring,
    pitchfork,
    ring,
    splitting_direction,
    subcritical,
    tilted_ring,
)
from meha_lab.problems.rugged.fits import centre, centres, mixture, network, smooth_minimum
from meha_lab.problems.rugged.flat import ball, budget, cubic_root, curve, equations, plateau, power, two_zeros
from meha_lab.problems.rugged.kinked import kinked_ring, kinked_ripples, kinked_wells, levelled, levelled_regression
from meha_lab.problems.rugged.matrices import phase_retrieval, rank_one, two_factors
from meha_lab.problems.rugged.wells import chain, crossing_wells, ripples, rotated_wells, tilted_wells

__all__ = ["FAMILIES", "HELD_OUT"]

CLUSTERS = np.array([[-1.0, 0.2], [-0.8, 0.0], [-1.2, 0.1], [0.9, -0.3], [1.1, -0.2], [0.2, 1.3]])
TWO_HUMPS = np.array([-1.4, -1.2, -1.1, -0.9, 0.7, 0.9, 1.0, 1.2, 1.3])

FAMILIES: dict[str, dict[str, Callable[[], Blueprint]]] = {
    "tilted wells": {
        "tilted well": partial(tilted_wells, [0.35], [[0.15]], [0.5], [1.0]),
        "tilted well, at the switch": partial(tilted_wells, [0.2], [[0.5]], [0.0], [0.5], height=4.0, cross=-0.8),
        "tilted wells, 2 of y": partial(tilted_wells, [0.3, -0.25], [[0.1], [0.08]], [-0.5], [1.0, -0.5]),
        "tilted wells, 5 of x and y": partial(
            tilted_wells,
            [0.3, -0.2, 0.25, -0.35, 0.2],
            0.08 * (np.eye(5) + np.eye(5, k=1)),
            [0.5, -0.4, 0.8, -0.6, 0.3],
            [1.0, 0.5, -1.0, 1.0, -0.5],
        ),
        "tilted wells, 10 of y": partial(
            tilted_wells,
            0.3 * np.array([1, -1, 1, 1, -1, -1, 1, -1, 1, -1]),
            0.15 * numbers(1, 10, 2),
            [0.6, -0.5],
            numbers(2, 10),
            height=2.0,
        ),
        "tilted wells, 20 of y": partial(
            tilted_wells, numbers(3, 20, low=0.2, high=0.5), 0.1 * numbers(4, 20, 3), [0.5, -0.5, 0.2], numbers(5, 20)
        ),
    },
    "crossing wells": {
        "crossing wells, inside": partial(crossing_wells, -0.6, 0.8, slope=0.5),
        "crossing wells, at the switch": partial(crossing_wells, 0.2, 0.6, slope=0.5, cross=-0.5),
    },
    "ripples": {
        "ripples": partial(ripples, [0.5], [[1.0]], [0.5], [1.0], rate=3.0),
        "ripples, fast": partial(ripples, [-0.2], [[1.0]], [0.4], [-1.0], rate=8.0),
        "ripples, 3 of x and y": partial(
            ripples, [0.2, -0.4, 0.6], 0.7 * np.eye(3), [0.5, 0.1, -0.3], [1.0, 0.0, -1.0], rate=3.0
        ),
        "ripples, 8 of y": partial(ripples, numbers(6, 8), 0.3 * numbers(7, 8, 2), [0.5, -0.4], numbers(8, 8), rate=4.0),
        "ripples, 20 of y": partial(ripples, numbers(9, 20), 0.2 * numbers(10, 20, 1), [0.6], numbers(11, 20), rate=2.5),
    },
    "pitchforks": {
        "pitchfork": partial(pitchfork, [-0.5], [1.0], weight=2.0),
        "pitchfork, pulled to the ridge": partial(pitchfork, [-1.0], [0.0], power=6),
        "pitchforks, 3 of x and y": partial(pitchfork, [-0.8, -0.3, -1.2], [0.6, -1.0, 0.2], offset=0.2),
        "subcritical, inside": partial(subcritical, 0.2, 0.8),
        "subcritical, at the switch": partial(subcritical, 0.5, 0.8, cross=-0.5),
        "splitting direction, 5 of y": partial(splitting_direction, [0.5, 1.0, 0.2, 1.5, 0.8], 1.5, numbers(12, 5), seed=12),
    },
    "rings": {
        "ring": partial(ring, 2, 0.7, seed=0),
        "ring, 5 of y": partial(ring, 5, -0.5, seed=1),
        "moving ring": partial(moving_ring, [0.5, -0.4], [2.0, 1.0], 0.7),
        "ring, 20 of y": partial(ring, 20, 0.5, seed=2),
        "tilted ring": partial(tilted_ring, [0.8, 0.6], [-0.2, 1.0], 0.3),
        "tilted ring, 4 of x and y": partial(tilted_ring, [0.8, 0.6, -0.5, 0.2], [-0.2, 1.0, 0.4, 0.6], 0.2),
    },
    "curved valleys": {
        "curved valley": partial(curved_valley, 2, 0.3, 0.1, 0.4, [0.8, 0.5]),
        "curved valley, 3 of y": partial(curved_valley, 3, -0.2, 0.1, -0.5, [-0.8, 0.5, 0.5]),
        "curved valley, 5 of y": partial(curved_valley, 5, 0.25, 0.05, 0.8, [1.0, 1.0, 1.0, 0.5, 0.0], steep=5.0),
        "bent valley": partial(bent_valley, 2, 1, 0.3, 0.2, seed=3),
        "bent valley, 6 of y": partial(bent_valley, 6, 2, -0.3, 0.15, seed=4),
        "bent valley, 15 of y": partial(bent_valley, 15, 4, 0.3, 0.1, seed=5),
    },
    "rotated wells": {
        "rotated wells, 2 of y": partial(rotated_wells, [0.3, -0.3], 0.12 * np.eye(2), [0.5, 0.5], [0.5, 1.0], seed=6),
        "rotated wells, 3 of y": partial(
            rotated_wells, [0.2, -0.3, 0.35], 0.1 * numbers(13, 3, 2), [0.5, -0.5], [1.0, -1.0, 0.5], seed=7, height=2.0
        ),
        "rotated wells, 4 of y": partial(
            rotated_wells, [0.25, -0.3, 0.35, -0.25], 0.15 * numbers(14, 4, 1), [0.5], [1.0, -0.5, 0.5, 0.2], seed=8
        ),
        "rotated wells, 8 of y": partial(
            rotated_wells,
            numbers(15, 8, low=0.2, high=0.5),
            0.1 * numbers(16, 8, 3),
            [0.5, 0.3, -0.5],
            numbers(17, 8),
            seed=9,
        ),
    },
    "rank one": {
        "rank one, 2 of y": partial(rank_one, 2, 1, seed=20),
        "rank one, 3 of y": partial(rank_one, 3, 2, seed=21),
        "rank one, 5 of y": partial(rank_one, 5, 3, seed=22, gap=1.5),
        "rank one, 12 of y": partial(rank_one, 12, 2, seed=23, gap=2.0),
    },
    "two factors": {
        "two factors, 2 and 2": partial(two_factors, 2, 2, 2, seed=24),
        "two factors, 4 and 3": partial(two_factors, 4, 3, 3, seed=25),
    },
    "boxes": {
        "parabola on a box": partial(polynomial, [0.0, -0.5], [1.0], [0.4], [-0.5], cross=0.3),
        "cubic on a box": partial(polynomial, [0.0, 0.2, 0.4], [-1.0], [1.3], [0.5], low=-2.0, high=2.0),
        "sixth power on a box": partial(polynomial, [0.1, 0.5, 0.0, -1.0, 0.0, 0.3], [0.5], [-0.5], [1.0], low=-1.5, high=1.5),
        "parabolas on a box, 5 of x and y": partial(
            polynomial, [0.1, -0.5], [1.0], [0.6, -0.7, 0.5, -0.9, 0.8], [-0.5, 0.5, -1.2, 0.8, -0.2], cross=0.2
        ),
        "indefinite, 2 of y": partial(indefinite, 2, 1, seed=30),
        "indefinite, 3 of y": partial(indefinite, 3, 2, seed=31),
        "indefinite, 5 of y": partial(indefinite, 5, 2, seed=35, lift=0.3),
        "indefinite, 6 of y": partial(indefinite, 6, 3, seed=38, lift=0.5),
    },
    "robust centres": {
        "robust centre": partial(centres, [[-1.0, -0.7, 0.8, 1.0, 1.3]], [[0.3], [0], [0], [-0.2], [0.5]], [0.4], [-0.5]),
        "robust centre, 2 clusters": partial(
            centres, [[-1.2, -1.0, -0.9, 1.0, 1.2]], [[0.2], [0.4], [0], [-0.2], [0.2]], [-0.5], [0.8], width=0.4
        ),
        "robust centre in the plane": partial(centre, CLUSTERS, [-0.3, 0.4, 0.1], [0.5, 0.5]),
        "robust centres, 8 of y": partial(
            centres, numbers(18, 8, 5, low=-2.0, high=2.0), 0.2 * numbers(19, 5, 2), [0.4, -0.4], numbers(20, 8)
        ),
    },
    "mixtures": {
        "mixture of 2": partial(mixture, TWO_HUMPS, 2, -0.5, [0.5, -1.0], prior=0.05),
        "mixture of 2, unlike its prior": partial(mixture, TWO_HUMPS + 0.3, 2, 0.2, [1.5, -0.5], prior=0.3),
        "mixture of 3": partial(mixture, np.r_[TWO_HUMPS, 0.0, 0.1, -0.1], 3, -1.0, [1.0, 0.0, -1.0], prior=0.05),
    },
    "levelled penalties": {
        "SCAD": partial(levelled, "SCAD", [1.5], [[0.5]], [1.0], [1.6], a=2.5, curvature=0.4, weight=0.6),
        "MCP": partial(levelled, "MCP", [1.2], [[0.5]], [0.8], [1.0], a=1.5, curvature=0.4, weight=0.7),
        "SCAD, its weight": partial(
            levelled, "SCAD", [2.5, 1.2, -0.6], np.zeros((3, 1)), [-0.5], [2.0, 0.5, 0.0], a=2.5, curvature=0.5
        ),
        "MCP, 6 of y": partial(
            levelled,
            "MCP",
            [1.5, -0.8, 2.2, 0.4, -1.8, 0.9],
            0.3 * numbers(21, 6, 2),
            [0.5, -0.3],
            [1.0, -0.5, 1.0, 0.2, -1.0, 0.3],
            a=1.5,
            curvature=0.5,
            weight=0.7,
        ),
        "MCP regression, 2 coefficients": partial(levelled_regression, 2, 12, seed=40),
        "MCP regression, 3 coefficients": partial(levelled_regression, 3, 15, seed=41),
        "SCAD, 12 of y": partial(
            levelled,
            "SCAD",
            numbers(22, 12, low=-3.0, high=3.0),
            0.1 * numbers(23, 12, 3),
            [0.4, -0.4, 0.2],
            numbers(24, 12),
            a=2.2,
            curvature=0.5,
            weight=0.6,
        ),
        "MCP regression, 5 coefficients": partial(levelled_regression, 5, 20, seed=42),
    },
    "kinked wells": {
        "kinked well": partial(kinked_wells, [0.1], [[0.2]], [-0.9], [0.4], weight=0.15),
        "kinked well, one side": partial(kinked_wells, [-0.1], [[0.3]], [-0.4], [0.3], weight=0.1, sides="positive"),
        "kinked wells, 3 of x and y": partial(
            kinked_wells, [0.2, -0.3, 0.3], 0.1 * np.eye(3), [0.5, 0.4, -0.5], [0.5, -0.5, 1.0], weight=0.1, height=2.0
        ),
        "kinked wells on a box, 8 of y": partial(
            kinked_wells,
            numbers(25, 8, low=0.2, high=0.6) * np.array([1, -1, 1, -1, 1, 1, -1, -1]),
            0.1 * numbers(26, 8, 2),
            [0.5, -0.4],
            numbers(27, 8),
            weight=0.1,
            sides="box",
        ),
        "kinked ripples": partial(kinked_ripples, [1.0], [0.5], [0.0], rate=4.0, weight=0.1),
        "kinked ripples, 3 of x and y": partial(
            kinked_ripples, [1.0, -0.8, 0.6], [0.5, -0.3, 0.2], [0.3, 0.0, 0.5], rate=3.0, weight=0.1
        ),
        "kinked ring": partial(kinked_ring, [0.8, -0.5], [0.9, 0.1], weight=0.5),
        "kinked ring, 4 of x and y": partial(kinked_ring, [0.6, -0.5, 0.3, 0.4], [0.8, -0.2, 0.1, 0.5], weight=0.7),
    },
    "flat": {
        "fourth power": partial(power, [1.0, -0.5], [0.2, 0.6], degree=4),
        "sixth power": partial(power, [0.8], [-0.3], degree=6),
        "degenerate at the answer": partial(cubic_root, [0.8, 1.0, -0.6], [-0.8, 0.4, -0.2]),
        "two zeros": partial(two_zeros, [1.2, -1.0, 0.5], [0.8, 0.3, 0.6]),
        "ball of solutions": partial(ball, [[1.0], [0.5], [-0.5]], [0.5], [1.5, 1.0, 0.8], 0.6),
        "ball of solutions, 10 of y": partial(ball, 0.5 * numbers(28, 10, 3), [0.5, -0.5, 0.3], numbers(29, 10), 0.8),
        "hole in a plateau": partial(plateau, [[1.0], [-0.5]], [0.6], [0.2, -0.8], kind="hole", sharpness=2.0),
        "log valley": partial(plateau, 0.5 * numbers(35, 6, 2), [0.5, -0.5], numbers(36, 6), kind="log", sharpness=20.0),
    },
    "many solutions": {
        "curve of solutions": partial(curve, 1.5, [0.6, 1.0], powers=(1, 2)),
        "curve of solutions, cubic": partial(curve, 0.8, [1.2, 0.9], powers=(2, 1)),
        "3 equations, 6 unknowns": partial(equations, 6, 3, 2, seed=37),
        "2 quartic equations, 5 unknowns": partial(equations, 5, 2, 2, seed=38, degree=4),
        "8 equations, 20 unknowns": partial(equations, 20, 8, 4, seed=39),
        "budget, 8 shares": partial(budget, 8, 3.0, seed=50),
    },
    "chains": {
        "chain, 3 of y": partial(chain, [0.4, -0.35, 0.4], [[0.1], [0.05], [-0.05]], [0.5], [1.0, 0.5, 0.5], coupling=0.1),
        "chain, 5 of y": partial(
            chain, [0.5, -0.6, 0.55, -0.5, 0.45], 0.08 * numbers(43, 5, 2), [0.5, -0.5], numbers(44, 5), coupling=0.15
        ),
        "chain, 8 of y": partial(
            chain, 0.4 * numbers(45, 8), 0.1 * numbers(46, 8, 2), [-0.4, 0.6], numbers(47, 8), coupling=0.2, height=2.0
        ),
        "chain, 12 of y": partial(
            chain, 0.5 * numbers(48, 12), 0.05 * numbers(49, 12, 3), [0.4, 0.6, -0.5], numbers(50, 12), coupling=0.2
        ),
    },
    "smooth minima": {
        "2 bowls": partial(smooth_minimum, [[-1.0], [1.2]], [0.0, 0.2], [[0.3], [-0.3]], [0.9], [0.8], softness=0.3),
        "2 bowls, 5 of y": partial(
            smooth_minimum,
            numbers(51, 2, 5),
            [0.0, 0.3],
            0.3 * numbers(52, 2, 2),
            [0.9, 1.0],
            numbers(53, 5),
            softness=0.2,
        ),
        "3 bowls, 2 of y": partial(
            smooth_minimum,
            [[-1.0, 0.0], [1.0, 0.3], [0.2, 1.2]],
            [0.1, 0.0, 0.2],
            0.4 * numbers(54, 3, 2),
            [0.4, 0.3],
            [0.3, 0.8],
            softness=0.2,
        ),
        "3 bowls, 10 of y": partial(
            smooth_minimum,
            numbers(55, 3, 10),
            [0.0, 0.3, 0.2],
            0.3 * numbers(56, 3, 2),
            [0.5, 0.2],
            numbers(57, 10),
            softness=0.3,
        ),
    },
    "small networks": {
        "network, 1 unit": partial(network, 1, 12, seed=60),
        "network, 1 unit with bias": partial(network, 1, 12, seed=61, bias=True),
        "network, 2 units": partial(network, 2, 15, seed=62),
    },
    "phase retrieval": {
        "phase retrieval, 2 of y": partial(phase_retrieval, 2, 6, 1, seed=63),
        "phase retrieval, 3 of y": partial(phase_retrieval, 3, 9, 2, seed=64),
        "phase retrieval, 5 of y": partial(phase_retrieval, 5, 20, 2, seed=65),
    },
}

HELD_OUT = {"chains", "smooth minima", "small networks", "phase retrieval"}
"""Families whose members are all in the held-out half."""
