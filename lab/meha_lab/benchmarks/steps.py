"""Compiled steps per second, on batches and without, and what a compiled run costs besides its steps.

    python -m meha_lab.benchmarks.steps [--jax FOLDER]

Steps are measured in the margin: the processor time of a long run of ``meha.solve`` less that of a short one, divided by the
difference of their steps, all work between steps included. ``--jax`` is an environment with JAX, in which a ``lax.scan`` of
the same step is measured in turns with ours.
"""

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import softplus

import meha
from meha.methods import Method, State, Variable

EXAMPLES, FEATURES, SIZE = (10_000, 50_000), 22, 64  # examples of F and of f
SHORT, LONG = 20_000, 100_000
REPEATS = 5


@dataclass
class SOBAState(State):
    v: Variable  # the solution of f_yy v = -F_y


@dataclass(frozen=True, kw_only=True)
class SOBA(Method):
    """Steps of x, y and v at once, each along its own direction on the batch (Dagreou et al., 2022)."""

    alpha: meha.schedules.Schedule = 0.1
    beta: meha.schedules.Schedule = 0.1

    def init(self, oracle, x, y):
        v = y.copy()
        for leaf in v.leaves:
            leaf.zero_()
        return SOBAState(x, y, v=v)

    def step(self, oracle, state, at):
        x, y, v = state.x, state.y, state.v
        (upper,), (F_x, F_y) = oracle.gradients((x, y), [(1.0, oracle.upper, x, y)], at.batch)
        hessian = oracle.hessian([(1.0, oracle.lower, x, y)], at.batch)
        cross, curved = hessian(v.leaves, x, y)
        moves = (
            (x, [a + b for a, b in zip(F_x, cross, strict=True)], at.alpha),
            (y, hessian.gradient, at.beta),
            (v, [a + b for a, b in zip(F_y, curved, strict=True)], at.beta),
        )
        for variable, direction, size in moves:
            for leaf, part in zip(variable.leaves, direction, strict=True):
                leaf.sub_(size * part)
        return {"upper": upper}


def logistic():
    """Logistic regression with a weight for each feature, on data in memory."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(FEATURES, generator=generator)
    levels = []
    for count in EXAMPLES:
        features = torch.randn(count, FEATURES, generator=generator)
        signs = torch.sign(features @ truth + torch.randn(count, generator=generator))
        levels.append(features * -signs[:, None])
    far, near = levels

    def upper(x, y, batch):
        return softplus(far[batch.upper] @ y).mean()

    def lower(x, y, batch):
        return softplus(near[batch.lower] @ y).mean() + 0.5 * (x.exp() * y.square()).sum()

    return meha.Problem(upper, lower), torch.full((FEATURES,), -3.0), torch.zeros(FEATURES)


def on_batches(method):
    """A run on batches, as a function of the number of steps."""
    problem, x0, y0 = logistic()

    def run(steps, compile=True):
        batches = meha.loaders.Indices(SIZE, upper=EXAMPLES[0], lower=EXAMPLES[1])
        return meha.solve(problem, x0, y0, method, max_steps=steps, tol=None, batches=batches, compile=compile)

    return run


def on_sine(n):
    problem = meha.problems.sine(n)

    def run(steps, compile=True):
        method = problem.preset("recipe")
        return meha.solve(problem, problem.x0, problem.y0, method, max_steps=steps, tol=None, compile=compile)

    return run


CASES = {
    "SOBA, batches of 64": on_batches(SOBA()),
    "MEHA, batches of 64": on_batches(meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)),
    "sine, n = 1": on_sine(1),
    "sine, n = 1,000": on_sine(1000),
}


def seconds(function, *arguments):
    begin = time.process_time()
    function(*arguments)
    return time.process_time() - begin


def margin(run, short=SHORT, long=LONG, **options):
    """Seconds of a step in the margin."""
    return (seconds(lambda: run(long, **options)) - seconds(lambda: run(short, **options))) / (long - short)
