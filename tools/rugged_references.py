"""The answers of the rugged problems, each computed in two ways, without any method of the library.

    python tools/rugged_references.py [--only NAME ...] [--half tuning]

The search: the hyper-objective F(x, y*(x)) is minimised over x. y*(x) is the blueprint's response, a global minimum by
the structure of the problem: one coordinate at a time, dynamic programming, eigenvectors, all faces of a box, or a grid.
One variable x: all local minima of a grid, closed in upon. More: Nelder and Mead's method from random starts, scans along the
coordinates, and again.

The confirmation uses the objectives only, not the response (see ``confirm``). Written to meha/problems/rugged.json: x, y, the
number of local optima that the search met and their x, and how both ways went.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from scipy import optimize

from meha.problems.blueprints import double
from meha.problems.exact import minimiser
from meha.problems.rugged import FAMILIES, HELD_OUT
from meha.problems.rugged._minima import newton
from meha.sets import Box

PATH = Path(__file__).parent.parent / "meha" / "problems" / "rugged.json"

APART = 1e-3
"""Local optima closer than this to a better one are the same."""


def ends(low_high, size):
    return np.stack([np.broadcast_to(np.asarray(end, dtype=float), (size,)) for end in low_high], axis=1)


class Hyper:
    """x -> F(x, y*(x)) for flat numpy arrays, with the interval of each coordinate that is searched."""

    def __init__(self, blueprint):
        self.blueprint, self.problem = blueprint, blueprint.exact
        self.n, self.m = blueprint.x0.size, blueprint.y0.size
        self.region = ends(blueprint.region.x, self.n)
        if isinstance(self.problem.x_set, Box):
            self.bounds = self.region
        else:
            middle, width = self.region.mean(1, keepdims=True), np.diff(self.region)
            self.bounds = middle + width * np.array([-2.0, 2.0])

    def value(self, x):
        value = self.blueprint.value(double(np.atleast_1d(x)))
        return value if math.isfinite(value) else math.inf


def close_in(value, low, high, rounds=14):
    """The least value between low and high, by grids that shrink around the best point: a jump does not disturb it."""
    for _ in range(rounds):
        grid = np.linspace(low, high, 17)
        values = [value(t) for t in grid]
        k = int(np.argmin(values))
        low, high = grid[max(k - 1, 0)], grid[min(k + 1, 16)]
    return values[k], grid[k]


def line(hyper, points=801):
    ((low, high),) = hyper.bounds
    grid = np.linspace(low, high, points)
    values = np.array([hyper.value(t) for t in grid])
    padded = np.concatenate([[np.inf], values, [np.inf]])
    places = np.flatnonzero((values <= padded[:-2]) & (values < padded[2:]))
    found = [close_in(hyper.value, grid[max(i - 1, 0)], grid[min(i + 1, points - 1)]) for i in places]
    return [(value, np.array([x])) for value, x in found]


def scan(hyper, x, points=49):
    """The best point of the line along each coordinate in turn."""
    value = hyper.value(x)
    for i in range(hyper.n):

        def along(t, i=i):
            new = x.copy()
            new[i] = t
            return hyper.value(new)

        grid = np.linspace(*hyper.bounds[i], points)
        values = [along(t) for t in grid]
        k = int(np.argmin(values))
        if values[k] < value - 1e-9:
            value, t = close_in(along, grid[max(k - 1, 0)], grid[min(k + 1, points - 1)], rounds=6)
            x = x.copy()
            x[i] = t
    return x


def simplex(hyper, x, accuracy):
    options = {"xatol": accuracy, "fatol": accuracy**2, "maxiter": 400 * hyper.n}
    bounds = hyper.bounds if isinstance(hyper.problem.x_set, Box) else None
    return optimize.minimize(hyper.value, x, method="Nelder-Mead", bounds=bounds, options=options).x


def space(hyper, rng, starts=10):
    points = [hyper.blueprint.x0.reshape(-1)]
    points += [rng.uniform(*(hyper.bounds if i % 2 else hyper.region).T) for i in range(starts)]
    found = [simplex(hyper, x, 1e-4) for x in points]
    found += [simplex(hyper, scan(hyper, x), 1e-4) for x in sorted(found, key=hyper.value)[:2]]
    best = min(found, key=hyper.value)
    for accuracy in (1e-6, 1e-9, 1e-9):
        best = simplex(hyper, best, accuracy)
    return [(hyper.value(x), x) for x in [best, *found]]


def distinct(found):
    """The best point, and local ones that are not near a better one."""
    kept = []
    for value, x in sorted(found, key=lambda pair: pair[0]):
        if all(np.linalg.norm(x - other) > APART * (1 + np.linalg.norm(x)) for _, other in kept):
            if not kept or value > kept[-1][0] + 1e-6 * (1 + abs(value)):
                kept.append((value, x))
    return kept


def search(hyper, rng):
    return distinct(line(hyper) if hyper.n == 1 else space(hyper, rng))


def reference(name, make):
    blueprint = make()
    hyper = Hyper(blueprint)
    kept = search(hyper, np.random.default_rng(0))
    value, x = kept[0]
    y = blueprint.respond(double(x))
    way = "grid" if hyper.n == 1 else "simplex"
    print(
        f"    F {value:.10g} at x {np.array2string(x, precision=5)}, local {[(np.round(v, 4), np.round(z, 3).tolist()) for v, z in kept[1:]]}"
    )
    return {
        "x": x.tolist(),
        "y": y.reshape(-1).tolist(),
        "optima": len(kept),
        "local": [z.tolist() for _, z in kept[1:]],
        "found": way,
    }


def chosen(options):
    for family, makers in FAMILIES.items():
        for i, (name, make) in enumerate(makers.items()):
            half = "held-out" if family in HELD_OUT or i % 2 else "tuning"
            named = not options.only or any(name.startswith(start) for start in options.only)
            if named and options.half in (None, half) and make().x_star is None:
                yield name, make


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names, or the beginnings of names")
    parser.add_argument("--half", choices=["tuning", "held-out"])
    options = parser.parse_args()
    for name, make in chosen(options):
        print(name, flush=True)
        begin = time.perf_counter()
        found = reference(name, make)
        print(f"    {time.perf_counter() - begin:.1f} s", flush=True)
        stored = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
        stored[name] = found
        lines = [f"{json.dumps(key)}: {json.dumps(stored[key])}" for key in sorted(stored)]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
