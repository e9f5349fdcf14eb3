"""The dense baseline in JAX: Newton's method below and the implicit gradient as one compiled function, L-BFGS-B above."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from worker import serve

jax.config.update("jax_enable_x64", True)

STEPS, HALVINGS = 100, 27
TOL, ROUNDING, DECREASE, NOISE, FLOOR = 1e-10, 1e-6, 1e-4, 1e-14, 1e-8
OPTIONS = {"maxcor": 30, "maxiter": 1000, "ftol": 1e-14, "gtol": 1e-9}


def ridge(A, b, A_val, b_val) -> tuple[Callable, Callable]:
    def half_mean(M, t, y):
        return 0.5 * jnp.mean((M @ y - t) ** 2)

    return lambda x, y: half_mean(A_val, b_val, y), lambda x, y: half_mean(A, b, y) + 0.5 * jnp.sum(jnp.exp(x) * y * y)


def logistic(margin, margin2) -> tuple[Callable, Callable]:
    def loss(M, y):
        return jnp.mean(jax.nn.softplus(-(M @ y)))

    return lambda x, y: loss(margin2, y), lambda x, y: loss(margin, y) + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def kernel(squares, squares_val, b, b_val) -> tuple[Callable, Callable]:
    def upper(x, y):
        return 0.5 * jnp.mean((jnp.exp(-(squares_val @ jnp.exp(x))) @ y - b_val) ** 2)

    def lower(x, y):
        return 0.5 * y @ (jnp.exp(-(squares @ jnp.exp(x))) @ y) + 0.05 * y @ y - b @ y

    return upper, lower


def quadratic(H, B, b, s, t, rho) -> tuple[Callable, Callable]:
    def upper(x, y):
        return 0.5 * jnp.sum((y - t) ** 2) + 0.5 * rho * jnp.sum((x - s) ** 2)

    return upper, lambda x, y: 0.5 * y @ (H @ y) - y @ (B @ x + b)


PROBLEMS = {"ridge": ridge, "logistic": logistic, "kernel": kernel, "quadratic": quadratic}


def inverse(H, right):
    """H^-1 right; with the absolute eigenvalues of H where it is not positive definite."""

    def modified(_):
        values, vectors = jnp.linalg.eigh(H)
        sizes = jnp.abs(values)
        return vectors @ ((vectors.T @ right) / jnp.maximum(sizes, FLOOR * sizes.max()))

    factor = jnp.linalg.cholesky(H)
    definite = jnp.isfinite(factor).all()
    return jax.lax.cond(definite, lambda L: jax.scipy.linalg.cho_solve((L, True), right), modified, factor)


def hyper_objective(F: Callable, f: Callable) -> Callable:
    """(x, y) -> F, its gradient along the solutions of the lower level, and the solution, with Newton steps from y."""
    f_y, f_yy = jax.grad(f, 1), jax.hessian(f, 1)

    def direction(x, y):
        gradient = f_y(x, y)
        return gradient, inverse(f_yy(x, y), gradient)

    def search(x, y, gradient, step):
        value, slope = f(x, y), gradient @ step

        def rejected(state):
            length, k = state
            least = value - DECREASE * length * slope + NOISE * jnp.abs(value)
            return (f(x, y - length * step) > least) & (k < HALVINGS)

        length, _ = jax.lax.while_loop(rejected, lambda state: (state[0] / 2, state[1] + 1), (1.0, 0))
        return y - length * step

    def size(y, step):
        return jnp.linalg.norm(step) / (1 + jnp.linalg.norm(y))

    def solve(x, y):
        def unfinished(state):
            y, _, step, last, k = state
            length = size(y, step)
            return (length > TOL) & ((length > ROUNDING) | (length <= 0.5 * last)) & (k < STEPS)

        def advance(state):
            y, gradient, step, _, k = state
            last = size(y, step)
            y = search(x, y, gradient, step)
            return y, *direction(x, y), last, k + 1

        return jax.lax.while_loop(unfinished, advance, (y, *direction(x, y), jnp.inf, 0))[0]

    def value(x, y):
        y = solve(x, y)
        v = inverse(f_yy(x, y), jax.grad(F, 1)(x, y))
        through = jax.grad(lambda x: f_y(x, y) @ v)(x)
        return F(x, y), jax.grad(F)(x, y) - through, y

    return value


def answer(
    problem: str, data: dict[str, Any], x0: list[float], y0: list[float], limits: list[float] | None, rounds: int
) -> dict[str, Any]:
    """Processor seconds of the fastest of some runs, those of the compilation, and the end."""
    F, f = PROBLEMS[problem](**{name: jnp.asarray(part) for name, part in data.items()})
    x, y = jnp.asarray(x0), jnp.asarray(y0)
    begin = time.process_time()
    compiled = jax.jit(hyper_objective(F, f)).lower(x, y).compile()
    compilation = time.process_time() - begin
    bounds = None if limits is None else [tuple(limits)] * len(x0)

    def run() -> tuple[Any, Any]:
        last = [y]

        def value(x):
            F, gradient, last[0] = compiled(jnp.asarray(x), last[0])
            return float(F), np.asarray(gradient)

        return minimize(value, np.asarray(x0), jac=True, method="L-BFGS-B", bounds=bounds, options=OPTIONS), last[0]

    times = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        found, _ = run()
        times.append(time.process_time() - begin)
    return {"seconds": min(times[1:]), "compile": compilation, "F": float(found.fun), "evaluations": found.nfev}


if __name__ == "__main__":
    import scipy

    serve(answer, jax=jax.__version__, scipy=scipy.__version__)
