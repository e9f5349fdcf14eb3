"""The answers of the rugged problems, each computed in two ways, without any method of the library.

    python -m meha_lab.tools.rugged_references [--only NAME ...] [--half tuning]

The search: the hyper-objective F(x, y*(x)) is minimised over x. y*(x) is the blueprint's response, a global minimum by
the structure of the problem: one coordinate at a time, dynamic programming, eigenvectors, all faces of a box, or a grid.
One variable x: all local minima of a grid, closed in upon. More: Nelder and Mead's method from random starts, scans along the
coordinates, and again.

The confirmation uses the objectives only, not the response (see ``confirm``). Written to rugged.json: x, y, the
number of local optima that the search met and their x, and how both ways went.
"""

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from meha_lab.problems.blueprints import double
from meha_lab.problems.exact import minimiser
from meha_lab.problems.rugged import FAMILIES, HELD_OUT
from meha_lab.problems.rugged._minima import newton
from meha_lab.problems.rugged.flat import equations, power
from scipy import optimize

from meha.problem.nonsmooth import MCP, SCAD, GroupL2, NonNegativeL1
from meha.problem.sets import Box

PATH = Path(__file__).parent.parent / "problems" / "rugged.json"

APART = 1e-3
"""Local optima closer than this to a better one are the same."""


def ends(low_high, size):
    return np.stack([np.broadcast_to(np.asarray(end, dtype=float), (size,)) for end in low_high], axis=1)


class BoundedHyperObjective:
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


def _along(hyper, x, i, t):
    return hyper.value(np.where(np.arange(hyper.n) == i, t, x))


def scan(hyper, x, points=49):
    """The best point of the line along each coordinate in turn."""
    value = hyper.value(x)
    for i in range(hyper.n):
        along = partial(_along, hyper, x, i)
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


def space(hyper, rng):
    starts = 10 if hyper.n <= 3 else 4
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
        apart = all(np.linalg.norm(x - other) > APART * (1 + np.linalg.norm(x)) for _, other in kept)
        if apart and (not kept or value > kept[-1][0] + 1e-6 * (1 + abs(value))):
            kept.append((value, x))
    return kept


def search(hyper, rng):
    return distinct(line(hyper) if hyper.n == 1 else space(hyper, rng))


def penalties(term, x, points):
    """g at each row, by formulas of their own: SCAD and MCP are integrals of their slopes."""
    ((weight, _),) = term.weighted(term.weight, x, [points[0]])
    w, t = float(weight.reshape(-1)[0]), points.abs().numpy()
    if isinstance(term, GroupL2):
        return w * np.sqrt((t**2).sum(1))
    if isinstance(term, MCP):
        return (term.a * w**2 - np.maximum(term.a * w - t, 0) ** 2 / term.a).sum(1) / 2
    if isinstance(term, SCAD):
        sloping = ((term.a - 1) * w) ** 2 - np.maximum(term.a * w - np.maximum(t, w), 0) ** 2
        return (w * np.minimum(t, w) + sloping / (2 * (term.a - 1))).sum(1)
    return w * t.sum(1)


class BlackBox:
    """The lower level known by its values only: a grid (up to three variables) or scans along lines, then local descents."""

    def __init__(self, blueprint, rng):
        self.problem, self.rng, self.m = blueprint.exact, rng, blueprint.y0.size
        box = ends(blueprint.region.y, self.m)
        if self.problem.y_set is None and not isinstance(self.problem.nonsmooth, NonNegativeL1):
            middle, width = box.mean(1, keepdims=True), np.diff(box)
            box = middle + width * np.array([-0.8, 0.8])
        self.box = box

    def totals(self, x, points):
        """f + g at each row."""
        points = double(points)
        with torch.no_grad():
            smooth = torch.func.vmap(lambda y: self.problem.lower(x, y))(points).numpy()
        return smooth if self.problem.nonsmooth is None else smooth + penalties(self.problem.nonsmooth, x, points)

    def polish(self, x, y):
        """A local minimum near y: Newton steps; with bounds, on the optimality conditions; with a kink, Powell's method."""
        term = self.problem.nonsmooth
        smooth = term is None or (isinstance(term, GroupL2) and np.linalg.norm(y) > 0.1)
        if smooth and self.problem.y_set is None:
            w = 0.0 if term is None else float(term.weight)
            total = torch.func.vmap(lambda z: self.problem.lower(x, z) + w * (z.norm() if w else 0.0))
            return newton(total, double(y)[None], steps=200)[0].numpy()
        if self.problem.nonsmooth is None:
            try:
                return minimiser(self.problem, x, double(y), max_steps=60).numpy()
            except ArithmeticError:
                return y
        bounds = np.clip(np.stack([y - 0.2, y + 0.2], 1), self.box[:, :1], self.box[:, 1:])
        options = {"xtol": 1e-12, "ftol": 1e-15}
        end = optimize.minimize(lambda z: self.totals(x, z[None])[0], y, method="Powell", bounds=bounds, options=options).x
        snapped = np.where(np.abs(end) < 1e-5, 0.0, end)
        return min((end, snapped), key=lambda z: self.totals(x, z[None])[0])

    def solve(self, x):
        """The lowest points that are found, as pairs of a value and y."""
        starts = self.grid(x) if self.m <= 3 else [self.scan(x, self.rng.uniform(*self.box.T)) for _ in range(8)]
        ends = [self.polish(x, y) for y in starts]
        return sorted(((self.totals(x, y[None])[0], y) for y in ends), key=lambda pair: pair[0])

    def grid(self, x, kept=8):
        points = {1: 2001, 2: 101, 3: 41}[self.m]
        axes = [np.linspace(*end, points) for end in self.box]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, self.m)
        values = self.totals(x, grid).reshape((points,) * self.m)
        local = np.ones(values.shape, dtype=bool)
        for axis in range(self.m):
            for shift in (1, -1):
                other = np.roll(values, shift, axis)
                np.moveaxis(other, axis, 0)[0 if shift == 1 else -1] = np.inf
                local &= values <= other
        places = np.flatnonzero(local)
        return grid[places[np.argsort(values.reshape(-1)[places])][:kept]]

    def scan(self, x, y, points=81, sweeps=6):
        """Go to the lowest point of a line through y, along the coordinates and as many random directions, in turn."""
        value = self.totals(x, y[None])[0]
        reach = np.linspace(-1, 1, points)[:, None] * np.diff(self.box).max()
        for _ in range(sweeps):
            before = value
            for direction in np.vstack([np.eye(self.m), self.rng.normal(size=(self.m, self.m)) / math.sqrt(self.m)]):
                trial = np.clip(y + reach * direction, *self.box.T)
                values = self.totals(x, trial)
                if values.min() < value:
                    y, value = trial[values.argmin()], values.min()
            if value > before - 1e-6 * (1 + abs(before)):
                break
        return y


def confirm(name, blueprint, x, y, rng):
    """Check the answer with the objectives alone, and say how.

    At x*, near it and at random x, a black-box search of the lower level must not go below the response's value, and must
    reach it. Then x* is computed a second time: where the lower level has the least value 0 for every x, as the minimum of
    F + c f over x and y together, c growing; where two valleys tie, as the point where the local minima of both are equal;
    otherwise as the minimum of F along the branch of local minima that starts from y*.
    """
    hyper, box = BoundedHyperObjective(blueprint), BlackBox(blueprint, rng)
    places = [x, *(x + 0.03 * rng.normal(size=(3, hyper.n))), *rng.uniform(*hyper.region.T, size=(4, hyper.n))]
    reached = 0
    for place in (np.clip(p, *hyper.bounds.T) for p in places):
        at = double(place)
        known = float(box.totals(at, blueprint.respond(at).reshape(1, -1))[0])
        value, _ = box.solve(at)[0]
        if value < known - 1e-8 * (1 + abs(known)):
            raise ArithmeticError(f"{name}: at x = {place} a lower value {value} was found; the response has {known}.")
        reached += value <= known + 1e-6 * (1 + abs(known))
    lower = f"lower level by {'a grid' if box.m <= 3 else 'scans'}: {reached} of {len(places)} reached, none lower"
    second, way = second_computation(name, blueprint, hyper, box, x, y, rng)
    error = np.linalg.norm(second - x) / (1 + np.linalg.norm(x))
    if not error <= (1e-3 if blueprint.exact.nonsmooth is not None else 1e-5):
        raise ArithmeticError(f"{name}: x = {x} by the search and {second} by the {way}.")
    return f"{lower}; x by the {way}, {error:.0e} apart"


def second_computation(name, blueprint, hyper, box, x, y, rng):
    at = double(x)
    near = TWINS.get(name, lambda: blueprint)()
    zero = blueprint.exact.nonsmooth is None and abs(float(blueprint.exact.lower(at, double(y)))) < 1e-12
    if zero or name in TWINS:
        return penalty(near, hyper, box, rng), "penalty on f"
    rivals = [z for value, z in box.solve(at) if value <= box.totals(at, y[None])[0] + 1e-7 and np.linalg.norm(z - y) > 1e-2]
    differ = [
        z for z in rivals if abs(float(blueprint.exact.upper(at, double(z)) - blueprint.exact.upper(at, double(y)))) > 1e-6
    ]
    if differ and not symmetric(box, x, differ[0], y):
        return (tie if hyper.n == 1 else along_tie)(blueprint, box, x, y, differ[0]), "tie of two valleys"
    return branch(blueprint, hyper, box, x, y), "branch of local minima"


def symmetric(box, x, first, second):
    """Whether two local minima stay equally deep as x moves."""
    at = double(x + 0.01)
    one, two = (box.totals(at, box.polish(at, z)[None])[0] for z in (first, second))
    return abs(one - two) < 1e-9


def tie(blueprint, box, x, first, second):
    def difference(t):
        at = double([t])
        one, two = (box.totals(at, box.polish(at, z)[None])[0] for z in (first, second))
        return one - two

    low, high = x[0] - 0.02, x[0] + 0.02
    if difference(low) * difference(high) > 0:
        return np.array([np.nan])
    return np.array([optimize.brentq(difference, low, high, xtol=1e-13)])


def along_tie(blueprint, box, x, first, second):
    """The minimum of F along the branch of the first valley where it is no higher than the second, from a point off by 0.01."""

    def excess(point):
        at = double(point)
        one, two = (box.totals(at, box.polish(at, z)[None])[0] for z in (first, second))
        return two - one

    def value(point):
        at = double(point)
        return float(blueprint.exact.upper(at, double(box.polish(at, first)).reshape(blueprint.y0.shape)))

    end, rule = x + 0.01, {"type": "ineq", "fun": excess}
    for _ in range(3):
        end = optimize.minimize(value, end, method="SLSQP", constraints=rule, options={"ftol": 1e-14, "maxiter": 200}).x
    return end


def branch(blueprint, hyper, box, x, y):
    """The minimum of F along the branch, by the method of Nelder and Mead from a point that is off by 0.02."""

    def value(point):
        at = double(np.clip(point, *hyper.bounds.T))
        return float(blueprint.exact.upper(at, double(box.polish(at, y)).reshape(blueprint.y0.shape)))

    smooth = blueprint.exact.nonsmooth is None
    options = {"xatol": 1e-9 if smooth else 1e-6, "fatol": 1e-15 if smooth else 1e-11, "maxiter": 100 * hyper.n}
    bounds = hyper.bounds if isinstance(hyper.problem.x_set, Box) else None
    end = np.clip(x + 0.02, *hyper.bounds.T)
    for _ in range(2 if smooth else 1):
        end = optimize.minimize(value, end, method="Nelder-Mead", bounds=bounds, options=options).x
    return end


def penalty(blueprint, hyper, box, rng):
    """The minimum of F + c f over x and y for growing c, from several starts; bounds by L-BFGS-B."""
    problem, n = blueprint.exact, hyper.n
    bounded = problem.x_set is not None or problem.y_set is not None

    def total(z, c):
        return problem.upper(z[:n], z[n:]) + c * problem.lower(z[:n], z[n:])

    starts = np.hstack([rng.uniform(*hyper.region.T, size=(24, n)), rng.uniform(*box.box.T, size=(24, box.m))])
    points = double(np.vstack([np.r_[blueprint.x0.reshape(-1), blueprint.y0.reshape(-1)], starts]))
    for c in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8):
        points = newton(torch.func.vmap(lambda z, c=c: total(z, c)), points, steps=40)
    values = torch.func.vmap(lambda z: total(z, 1e8))(points)
    if bounded:
        domain = np.vstack([hyper.bounds, box.box if problem.y_set is not None else np.tile([-9.0, 9.0], (box.m, 1))])
        inside = ((points.numpy() >= domain[:, 0]) & (points.numpy() <= domain[:, 1])).all(1)
        if not inside[int(values.argmin())]:
            return limited(total, domain, points.numpy())[:n]
    return points[values.argmin()][:n].numpy()


def limited(total, domain, starts):
    def both(z, c):
        z = double(z).requires_grad_()
        value = total(z, c)
        return float(value.detach()), torch.autograd.grad(value, z)[0].numpy()

    ends = []
    for z in np.clip(starts[:6], *domain.T):
        for c in (1e1, 1e2, 1e3, 1e4, 1e5, 1e6):
            options = {"ftol": 1e-16, "gtol": 1e-10, "maxiter": 3000}
            z = optimize.minimize(both, z, args=(c,), jac=True, bounds=domain, method="L-BFGS-B", options=options).x
        ends.append((both(z, 1e6)[0], z))
    return min(ends, key=lambda pair: pair[0])[1]


TWINS = {
    "2 quartic equations, 5 unknowns": lambda: equations(5, 2, 2, seed=38, degree=2),
    "fourth power": lambda: power([1.0, -0.5], [0.2, 0.6], degree=2),
    "sixth power": lambda: power([0.8], [-0.3], degree=2),
}
"""Problems with the same solutions of the lower level and more curvature, for the penalty."""


def reference(blueprint):
    hyper = BoundedHyperObjective(blueprint)
    kept = search(hyper, np.random.default_rng(0))
    value, x = kept[0]
    print(f"    F {value:.10g} at x {np.array2string(x, precision=5)}")
    for other, z in kept[1:]:
        print(f"    local: F {other:.5g} at x {np.array2string(z, precision=3)}")
    return {
        "x": x.tolist(),
        "y": blueprint.respond(double(x)).reshape(-1).tolist(),
        "optima": len(kept),
        "local": [z.tolist() for _, z in kept[1:]],
        "found": "grid over x" if hyper.n == 1 else "Nelder and Mead's method from several starts, scans along the coordinates",
    }


def _stored():
    return json.loads(PATH.read_text(encoding="utf-8"))


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
    parser.add_argument("--confirm", action="store_true", help="only confirm the stored answers")
    options, failures = parser.parse_args(), []
    for name, make in chosen(options):
        print(name, flush=True)
        begin = time.perf_counter()
        blueprint = make()
        found = _stored()[name] if options.confirm else reference(blueprint)
        x, y = np.array(found["x"]), np.array(found["y"])
        try:
            found["confirmed"] = confirm(name, blueprint, x, y, np.random.default_rng(1))
        except ArithmeticError as error:
            failures.append(str(error))
            print(f"    NOT CONFIRMED: {error}", flush=True)
            continue
        print(f"    {found['confirmed']}; {time.perf_counter() - begin:.1f} s", flush=True)
        stored = {**_stored(), name: found}
        lines = [f"{json.dumps(key)}: {json.dumps(stored[key])}" for key in sorted(stored)]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if failures:
        raise SystemExit("\n".join(["Not confirmed and not stored:", *failures]))


if __name__ == "__main__":
    main()
