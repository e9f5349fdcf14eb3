"""Algorithm 1 as one ``jax.lax.scan``, with gradients by ``jax.grad``, compiled: the practical limit for small problems."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from worker import serve

jax.config.update("jax_enable_x64", True)


def sine(n: int) -> tuple[Any, ...]:
    def F(x, y):
        return jnp.sum((x - 2) ** 2) + jnp.sum((y - 4) ** 2)

    def f(x, y):
        return jnp.sum(jnp.sin(x + y - 2))

    return F, f, jnp.full(1, -6.0), jnp.zeros(n)


def strong_convex(n: int) -> tuple[Any, ...]:
    def F(x, y):
        return 0.5 * jnp.sum((x - 1) ** 2) + 0.5 * jnp.sum(y**2)

    def f(x, y):
        return 0.5 * jnp.sum(y**2) - jnp.sum(x * y)

    return F, f, jnp.full(n, 2.0), jnp.full(n, 2.0)


PROBLEMS = {"sine": sine, "strong convex": strong_convex}


@cache
def compiled(problem: str, n: int, steps: int, numbers: tuple[tuple[str, float], ...]) -> tuple[Any, float]:
    """The whole loop as one function of (x0, y0), and the seconds that it took to compile."""
    F, f, x0, y0 = PROBLEMS[problem](n)
    given = dict(numbers)
    alpha, beta, eta, gamma, c0, p = (given[name] for name in ("alpha", "beta", "eta", "gamma", "c", "p"))

    def step(point, k):
        x, y, theta = point
        c = c0 * (k + 1.0) ** p
        theta = theta - eta * (jax.grad(f, 1)(x, theta) + (theta - y) / gamma)
        x = x - alpha * jax.grad(lambda x: F(x, y) / c + f(x, y) - f(x, theta))(x)
        y = y - beta * (jax.grad(lambda y: F(x, y) / c + f(x, y))(y) - (y - theta) / gamma)
        return (x, y, theta), None

    @jax.jit
    def loop(x, y):
        (x, y, _), _ = jax.lax.scan(step, (x, y, y), jnp.arange(steps))
        return x, y

    begin = time.perf_counter()
    ready = loop.lower(x0, y0).compile()
    return partial(ready, x0, y0), time.perf_counter() - begin


def answer(
    problem: str, n: int, steps: int, numbers: dict[str, float], point: bool = False, total: bool = False
) -> dict[str, Any]:
    """Seconds of a step or of all, seconds to compile, and the last iterate where it is asked for."""
    loop, took = compiled(problem, n, steps, tuple(sorted(numbers.items())))
    begin = time.process_time()
    x, y = jax.block_until_ready(loop())
    seconds = time.process_time() - begin
    last = {"x": x.tolist(), "y": y.tolist()} if point else {}
    return {"seconds": seconds if total else seconds / steps, "compile": took, **last}


if __name__ == "__main__":
    serve(answer, jax=jax.__version__)
