"""The SOBA step of ``meha_lab.benchmarks.steps`` as one ``jax.lax.scan``, on data of the same size and such batches."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from worker import serve

EXAMPLES, FEATURES, SIZE = (10_000, 50_000), 22, 64


@cache
def prepared(steps: int) -> tuple[Any, tuple[Any, ...]]:
    """The compiled loop and its inputs, the indices of all batches among them."""
    generator = np.random.default_rng(0)
    truth = generator.normal(size=FEATURES)
    levels, indices = [], []
    for count in EXAMPLES:
        features = generator.normal(size=(count, FEATURES))
        signs = np.sign(features @ truth + generator.normal(size=count))
        levels.append(jnp.asarray(-features * signs[:, None], jnp.float32))
        passes = [generator.permutation(count) for _ in range(steps * SIZE // count + 1)]
        indices.append(jnp.asarray(np.concatenate(passes)[: steps * SIZE].reshape(steps, SIZE)))
    far, near = levels

    def upper(y, i):
        return jax.nn.softplus(far[i] @ y).mean()

    def lower(x, y, i):
        return jax.nn.softplus(near[i] @ y).mean() + 0.5 * jnp.sum(jnp.exp(x) * y * y)

    def step(point, batch):
        x, y, v = point
        value, F_y = jax.value_and_grad(upper)(y, batch[0])
        gradient, products = jax.vjp(lambda x, y: jax.grad(lower, 1)(x, y, batch[1]), x, y)
        cross, curved = products(v)
        return (x - 0.1 * cross, y - 0.1 * gradient, v - 0.1 * (F_y + curved)), value

    @jax.jit
    def loop(x, y, v, batches):
        point, values = jax.lax.scan(step, (x, y, v), batches)
        return point, values[-1]

    zero = jnp.zeros(FEATURES, jnp.float32)
    inputs = (zero - 3, zero, zero, tuple(indices))
    return loop.lower(*inputs).compile(), inputs


def answer(steps: int) -> dict[str, Any]:
    """Seconds of a step."""
    loop, inputs = prepared(steps)
    begin = time.process_time()
    jax.block_until_ready(loop(*inputs))
    return {"seconds": (time.process_time() - begin) / steps}


if __name__ == "__main__":
    serve(answer, jax=jax.__version__)
