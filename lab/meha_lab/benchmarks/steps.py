"""Compiled steps per second, with batches and without, and what a compiled run costs besides its steps.

    python -m meha_lab.benchmarks.steps [--jax]

A step is measured in the margin: the processor time of a long run of ``meha.solve`` less that of a short one, divided by the
difference of their steps, with all work between steps. ``--jax`` adds a ``lax.scan`` of the same SOBA step, in turns with ours;
it makes an environment for JAX. Set OMP_NUM_THREADS=1.
"""

import argparse
import statistics
import time

import torch
from meha_lab.benchmarks.peers.environments import Peer
from torch.nn.functional import softplus

import meha

EXAMPLES, FEATURES, SIZE = (10_000, 50_000), 22, 64  # examples of F and of f
WARM, SHORT, LONG = 200, 20_000, 100_000  # steps
REPEATS = 5


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

    def run(steps):
        batches = meha.loaders.Indices(SIZE, upper=EXAMPLES[0], lower=EXAMPLES[1])
        return meha.solve(problem, x0, y0, method, max_steps=steps, tol=None, batches=batches, compile=True)

    return run


def on_sine(n):
    problem = meha.problems.sine(n)

    def run(steps):
        method = problem.preset("recipe")
        return meha.solve(problem, problem.x0, problem.y0, method, max_steps=steps, tol=None, compile=True)

    return run


CASES = {
    "SOBA, batches of 64": lambda: on_batches(meha.stochastic.SOBA(alpha=0.1, beta=0.1, eta=0.1)),
    "MEHA, batches of 64": lambda: on_batches(meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)),
    "sine, n = 1": lambda: on_sine(1),
    "sine, n = 1,000": lambda: on_sine(1000),
}


def seconds(run, *arguments):
    begin = time.process_time()
    run(*arguments)
    return time.process_time() - begin


def step(run):
    """Microseconds of a step in the margin."""
    return (seconds(run, LONG) - seconds(run, SHORT)) / (LONG - SHORT) * 1e6


def report(jax):
    """Print a line for each case: its first run, a warm run beyond its steps, a step, and the ratio to JAX."""
    print(f"{'':22}{'first, s':>10}{'warm, ms':>10}{'step, us':>10}{'steps/s':>10}{'/ JAX':>8}")
    for name, case in CASES.items():
        run = case()
        begin = time.perf_counter()
        run(WARM)
        first = time.perf_counter() - begin  # on the wall, as the compiler is another program
        peer = jax if name.startswith("SOBA") else None
        turns = [(step(run), seconds(run, WARM), peer and peer.ask(steps=LONG)["seconds"] * 1e6) for _ in range(REPEATS)]
        spent, warm = (statistics.median(column) for column in list(zip(*turns, strict=True))[:2])
        ratio = f"{statistics.median(own / other for own, _, other in turns):8.2f}" if peer else ""
        fixed = 1e3 * warm - 1e-3 * WARM * spent
        print(f"{name:22}{first:10.1f}{fixed:10.0f}{spent:10.2f}{1e6 / spent:10,.0f}{ratio}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", action="store_true", help="measure JAX as well")
    torch.set_num_threads(1)
    if parser.parse_args().jax:
        with Peer("jax", "jax_soba.py") as peer:
            report(peer)
    else:
        report(None)
