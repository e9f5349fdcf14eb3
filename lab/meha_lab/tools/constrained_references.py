"""Compute the answers of the constrained problems without the methods of the library, and store them.

    python -m meha_lab.tools.constrained_references [--only NAME]

Linear and quadratic problems: the best of the convex programs of all active sets of the lower level, by cvxpy. Others: a grid
over x that is refined around its best points, with the lower level solved by enumeration, on a grid or in closed form.
"""

import argparse
import itertools
import json
from pathlib import Path

import meha_lab.problems
import numpy as np
import torch
from meha_lab.problems.blueprints import double
from meha_lab.problems.constrained import FAMILIES
from meha_lab.problems.constrained.known import FILE

PATH = Path(meha_lab.problems.__file__).parent / FILE
GRID = {1: 801, 2: 41}
FINER = {1: 41, 2: 17}
ZOOMS = 7
KEPT = 4


def value(problem, spec, x):
    """F at x with the exact lower level, infinite where no y or an upper constraint fails; and y."""
    y = spec.answer(x)
    if y is None:
        return np.inf, None
    at = double(x), double(y)
    if max((c.violation(*at) for c in problem.constraints[1]), default=0.0) > 1e-9:
        return np.inf, None
    return float(problem.upper(*at)), y


def grid(problem, spec):
    low, high = spec.box
    n = len(low)
    windows = [(low, high)]
    best = []
    for zoom in range(ZOOMS):
        count = (GRID if zoom == 0 else FINER)[n]
        found = []
        for a, b in windows:
            axes = [np.linspace(a[i], b[i], count) for i in range(n)]
            for x in itertools.product(*axes):
                F, y = value(problem, spec, np.array(x))
                if y is not None:
                    found.append((F, tuple(x), tuple(y), tuple((b - a) / (count - 1))))
        found.sort(key=lambda item: item[0])
        best, windows = found[:1], []
        chosen = []
        for _, x, _, step in found:
            if len(chosen) >= KEPT:
                break
            if all(np.max(np.abs(np.array(x) - other) / np.array(step)) > 3 for other in chosen):
                chosen.append(np.array(x))
                windows.append(
                    (np.maximum(low, np.array(x) - 2 * np.array(step)), np.minimum(high, np.array(x) + 2 * np.array(step)))
                )
    _, x, y, _ = best[0]
    return np.array(x), np.array(y)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=None)
    options = parser.parse_args()
    stored = json.loads(PATH.read_text()) if PATH.exists() else {}
    for family in FAMILIES.values():
        for name, make in family.items():
            if (options.only is None and name in stored) or options.only not in (None, name):
                continue
            spec = make()
            problem = spec.build(double)
            x, y = spec.solve() if spec.solve is not None else grid(problem, spec)
            stored[name] = {"x": x.tolist(), "y": y.tolist()}
            with torch.no_grad():
                print(f"{name}: F = {float(problem.upper(double(x), double(y))):.8g} at x = {x}, y = {y}", flush=True)
            PATH.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
