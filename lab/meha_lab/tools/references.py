"""The answers of the collection's problems that have no closed form, computed without any method of the library.

    python -m meha_lab.tools.references [--only NAME ...] [--starts 12]

The hyper-objective F(x, y*(x)) is minimised over x in X from several starts. y*(x) is solved for to the last digits
(meha_lab/problems/exact.py), its derivative is that of the optimality conditions, and scipy does the rest: a grid and Brent's
method for one variable, L-BFGS-B for boxes, SLSQP for the simplex, then Newton steps on the coordinates that
are inside of their bounds; where a kink is in the way, gradient sampling; for two variables a grid and the method of Nelder
and Mead, which no kink disturbs.

Written to meha_lab/problems/references.json: x, y, and the number of different local optima that the starts ended in. Printed:
F, the size of the gradient that is left, the sharpness of the optimum (the least curvature in a free direction times ||x||^2,
relative to what can be gained from x0 on), and the values that other starts reached.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from meha_lab.problems.blueprints import double
from meha_lab.problems.collection import BLUEPRINTS
from meha_lab.problems.exact import Linearised, least_squares, minimiser
from scipy import optimize

from meha.problem.sets import Box, L2Ball, NonNegative, Simplex

PATH = Path(__file__).parent.parent / "problems" / "references.json"


class FlatHyperObjective:
    """x -> F(x, y*(x)) for flat numpy arrays."""

    def __init__(self, blueprint):
        self.blueprint, self.problem = blueprint, blueprint.exact
        self.shape, self.x0, self.y = blueprint.x0.shape, blueprint.x0.reshape(-1), double(blueprint.y0)

    def tensor(self, x):
        """The point that x stands for: its projection, where X is a ball, so that every x may be tried."""
        x = double(x).reshape(self.shape)
        return self.problem.x_set.project(x) if isinstance(self.problem.x_set, L2Ball) else x

    def respond(self, x):
        """y*(x) by the blueprint's closed form, or from the last one on."""
        self.y = self.blueprint.response(x) if self.blueprint.response is not None else minimiser(self.problem, x, self.y)
        return self.y

    def value(self, x):
        x = self.tensor(x)
        with torch.no_grad():
            return float(self.problem.upper(x, self.respond(x)))

    def gradient(self, x):
        """F_x - d/dx <v, grad_y (f + g)>, where v = s P^T (I - P (I - s f_yy))^{-T} F_y and P is the derivative of prox."""
        free, x = double(x).reshape(self.shape), self.tensor(x).requires_grad_()
        y = self.respond(x.detach()).clone()
        there = Linearised(self.problem, x.detach(), y)
        y = y.requires_grad_()
        upper_x, upper_y = torch.autograd.grad(self.problem.upper(x, y), (x, y), allow_unused=True)
        adjoint = least_squares(there.slope.T, upper_y.reshape(-1))
        v = there.step * (there.shrink.T @ adjoint).reshape(y.shape)
        total = self.problem.lower(x, y) + self.problem.g.value(x, y)
        (inner,) = torch.autograd.grad(total, y, create_graph=True)
        (mixed,) = torch.autograd.grad((inner * v).sum(), x, allow_unused=True)
        parts = [part for part in (upper_x, None if mixed is None else -mixed) if part is not None]
        total = sum(parts).detach()
        if isinstance(self.problem.x_set, L2Ball) and (size := free.norm()) > self.problem.x_set.radius:
            unit = free / size
            total = (total - unit * (unit * total).sum()) * self.problem.x_set.radius / size
        return total.numpy().reshape(-1)

    def both(self, x):
        return self.value(x), self.gradient(x)


def bounds_of(hyper):
    domain, n = hyper.problem.x_set, hyper.x0.size
    if isinstance(domain, Box):
        ends = [np.broadcast_to(np.asarray(end, dtype=float), hyper.shape).reshape(-1) for end in (domain.low, domain.high)]
        return np.stack(ends, axis=1)
    if isinstance(domain, NonNegative):
        return np.tile([0.0, np.inf], (n, 1))
    if isinstance(domain, Simplex):
        return np.tile([0.0, domain.total], (n, 1))
    return np.tile([-np.inf, np.inf], (n, 1))


def starts_of(hyper, bounds, count, rng):
    yield hyper.x0
    for _ in range(count - 1):
        if np.isfinite(bounds).all():
            x = rng.uniform(*bounds.T)
        else:
            x = np.clip(hyper.x0 * np.exp(rng.normal(size=hyper.x0.size)) + 0.3 * rng.normal(size=hyper.x0.size), *bounds.T)
        domain = hyper.problem.x_set
        yield x if domain is None else domain.project(hyper.tensor(x)).numpy().reshape(-1)


def line(hyper, low, high):
    """All local minima of a grid, refined."""
    grid = np.linspace(low, high, 301)
    values = np.array([hyper.value([t]) for t in grid])
    padded = np.concatenate([[np.inf], values, [np.inf]])
    found = []
    for i in np.flatnonzero((values <= padded[:-2]) & (values <= padded[2:])):
        ends = grid[max(i - 1, 0)], grid[min(i + 1, 300)]
        best = optimize.minimize_scalar(lambda t: hyper.value([t]), bounds=ends, method="bounded", options={"xatol": 1e-13})
        found.append(min(((best.fun, best.x), (values[i], grid[i]))))
    return [np.array([x]) for _, x in sorted(found)]


def plane(hyper, bounds, kept=3):
    """The best points of a grid, refined by the method of Nelder and Mead, and then once more from where it ended."""
    axes = [np.r_[0.0, np.geomspace(1e-3, 1, 13)] if np.isinf(high) else np.linspace(low, high, 15) for low, high in bounds]
    grid = sorted(([a, b] for a in axes[0] for b in axes[1]), key=hyper.value)
    options = {"xatol": 1e-12, "fatol": 1e-16, "maxiter": 300}
    found = []
    for x in grid[:kept]:
        for _ in range(2):
            x = optimize.minimize(hyper.value, x, method="Nelder-Mead", bounds=bounds, options=options).x
        found.append(x)
    return found


def descend(hyper, x, bounds):
    domain = hyper.problem.x_set
    if isinstance(domain, Simplex):
        rule = {"type": "eq", "fun": lambda x: x.sum() - domain.total, "jac": np.ones_like}
        for _ in range(3):
            options = {"ftol": 1e-16, "maxiter": 2000}
            x = optimize.minimize(hyper.both, x, jac=True, bounds=bounds, method="SLSQP", constraints=rule, options=options).x
            x = domain.project(hyper.tensor(x)).numpy().reshape(-1)
        return x
    options = {"ftol": 1e-17, "gtol": 1e-12, "maxiter": 300, "maxcor": 30}
    for _ in range(2):
        x = optimize.minimize(hyper.both, x, jac=True, bounds=bounds, method="L-BFGS-B", options=options).x
    return x


def kinked(hyper, x, bounds):
    """Whether a gradient is left where the descent ended."""
    if isinstance(hyper.problem.x_set, Simplex):
        return False
    gradient = hyper.gradient(x)
    return np.abs(gradient[free_of(gradient, x, bounds)]).max(initial=0) > 1e-7


def sample(hyper, x, bounds, rng, radius=1e-2, floor=1e-10):
    """Gradient sampling: along the shortest convex combination of gradients from a neighbourhood, which shrinks when that
    is nearly zero or no step helps. It goes along kinks, where L-BFGS-B stops.
    """
    value, gradient = hyper.both(x)
    while radius > floor:
        free = free_of(gradient, x, bounds)
        points = [np.clip(x + free * radius * rng.uniform(-1, 1, size=x.size), *bounds.T) for _ in range(2 * free.sum() + 2)]
        gradients = np.array([gradient, *map(hyper.gradient, points)])[:, free]
        weight = 1e3 * np.abs(gradients).max()
        shares, _ = optimize.nnls(
            np.vstack([gradients.T, np.full(len(gradients), weight)]), np.r_[np.zeros(free.sum()), weight]
        )
        direction = np.zeros_like(x)
        direction[free] = -shares @ gradients
        size, step = np.linalg.norm(direction), 1.0
        while size > 0 and step * size > 1e-2 * radius:
            new = np.clip(x + step * direction, *bounds.T)
            if hyper.value(new) < value - 1e-4 * step * size**2:
                break
            step /= 4
        else:
            radius /= 4
            continue
        x, (value, gradient) = new, hyper.both(new)
    return x


def free_of(gradient, x, bounds):
    low, high = bounds.T
    return ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))


def curvature(hyper, x, free):
    rows = []
    for i in np.flatnonzero(free):
        h = 1e-5 * max(1.0, abs(x[i]))
        e = np.eye(x.size)[i] * h
        rows.append((hyper.gradient(x + e) - hyper.gradient(x - e))[free] / (2 * h))
    return np.array(rows)


def polish(hyper, x, bounds):
    """Newton steps on the free coordinates, each kept only if the gradient gets smaller and F no larger."""
    value, gradient = hyper.both(x)
    for _ in range(6):
        free = free_of(gradient, x, bounds)
        if not free.any():
            break
        step = np.zeros_like(x)
        step[free] = -np.linalg.lstsq(curvature(hyper, x, free), gradient[free], rcond=1e-12)[0]
        new = np.clip(x + step, *bounds.T)
        new_value, new_gradient = hyper.both(new)
        smaller = np.linalg.norm(new_gradient[free]) < 0.7 * np.linalg.norm(gradient[free])
        if not (smaller and new_value <= value + 1e-13 * (1 + abs(value))):
            break
        x, value, gradient = new, new_value, new_gradient
    return x


def reference(blueprint, starts, rng):
    hyper = FlatHyperObjective(blueprint)
    bounds = bounds_of(hyper)
    simplex = isinstance(hyper.problem.x_set, Simplex)
    if hyper.x0.size == 1 and np.isfinite(bounds).all():
        found = line(hyper, *bounds[0])
    elif hyper.x0.size == 2 and np.isfinite(bounds[:, 0]).all():
        found = plane(hyper, bounds)
    else:
        found = [descend(hyper, x, bounds) for x in starts_of(hyper, bounds, starts, rng)]
        for x in sorted(found, key=hyper.value)[:3]:
            if kinked(hyper, x, bounds):
                found.append(sample(hyper, x, bounds, rng))
    first = hyper.value(found[0])
    found.sort(key=hyper.value)
    best = found[0] if simplex else polish(hyper, found[0], bounds)
    best = hyper.tensor(best).numpy().reshape(-1)
    values = np.array([hyper.value(x) for x in [best, *found]])
    gain = hyper.value(hyper.x0) - values.min()
    levels = 1 + int((np.diff(np.sort(values)) > 1e-6 * gain).sum())
    gradient = hyper.gradient(best)
    free = free_of(gradient, best, bounds)
    sharp = np.nan
    if not simplex and free.any():
        sharp = np.linalg.eigvalsh(0.5 * (lambda c: c + c.T)(curvature(hyper, best, free))).min() * (best @ best) / gain
    y = blueprint.respond(hyper.tensor(best))
    print(
        f"    F {values[0]:.12g}, start {hyper.value(hyper.x0):.6g}, free {free.sum()} of {best.size}, gradient"
        f" {np.abs(gradient[free]).max(initial=0):.1e}, sharpness {sharp:.1e}, |x| {np.linalg.norm(best):.3g},"
        f" x {np.array2string(best[:6], precision=3)}"
    )
    others = np.unique(np.round((values - values[0]) / gain, 9))
    print(
        f"    excess of the end from x0: {(first - values[0]) / gain:.1e}; from all starts:",
        np.array2string(others, precision=1, max_line_width=120),
    )
    return {"x": best.tolist(), "y": y.reshape(-1).tolist(), "optima": levels}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names, or the beginnings of names")
    parser.add_argument("--starts", type=int, default=12)
    options = parser.parse_args()
    for name, make in (pair for family in BLUEPRINTS.values() for pair in family.items()):
        if options.only and not any(name.startswith(start) for start in options.only):
            continue
        blueprint = make()
        if blueprint.x_star is not None:
            continue
        print(name, flush=True)
        begin = time.perf_counter()
        found = reference(blueprint, options.starts, np.random.default_rng(0))
        print(f"    {time.perf_counter() - begin:.1f} s", flush=True)
        stored = json.loads(PATH.read_text(encoding="utf-8"))
        stored[name] = found
        lines = [f"{json.dumps(key)}: {json.dumps(stored[key])}" for key in sorted(stored)]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
