"""Random kills over methods, optimizers, loaders, compiled and automatic runs: the repeated call ends bit for bit the same.

``python tests/running/test_kills.py 500`` counts that many, of which every fifth is a SIGKILL in a process of its own.
"""

import dataclasses
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from meha_lab.problems import collection
from test_checkpoints import ADAM, FALLING, LOADERS, KillError, assert_same, network, shuffled
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, SequentialLR

import meha
from meha import methods
from meha.methods import LogUniform, Uniform
from meha.problem.constraints import Linear
from meha.problem.loaders import Accumulated
from meha.problem.sets import Box

SIGKILLS = 5
"""Every so many kills is a signal that ends a process."""

REAL = {"kills": 0}
"""How many signals have ended a process."""

STEPS = 24
"""Steps of a run without an end of its own."""

SMALL = {"alpha": 0.05, "beta": 0.1}


def smooth(seed, method, **options):
    """A smooth problem with a start that the seed decides."""
    start = torch.Generator().manual_seed(seed)
    a = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(3, 4).sin()

    def upper(x, y):
        return (x - 0.3).square().sum() + (y - a[0]).square().sum() + 0.1 * (x @ a @ y)

    def lower(x, y):
        return y.square().sum() + 0.05 * y.pow(4).sum() - x @ a @ y

    x0, y0 = (0.1 * torch.randn(n, generator=start, dtype=torch.float64) for n in (3, 4))
    problem = meha.Problem(upper, lower, x_set=Box(-2.0, 2.0))
    return {"problem": problem, "x0": x0, "y0": y0, "method": method, "max_steps": STEPS, "tol": None, **options}


def known(seed, make, method, **options):
    """A problem of the library, from its start moved by noise."""
    problem = make()
    noise = 1e-3 * torch.randn(problem.x0.shape, generator=torch.Generator().manual_seed(seed), dtype=problem.x0.dtype)
    x0 = problem.x0 + noise.abs()
    return {"problem": problem, "x0": x0, "y0": problem.y0, "method": method, "max_steps": STEPS, **options}


def coupled(seed, method):
    """A problem whose lower level has an inequality in x and y."""
    options = smooth(seed, method)
    rows = torch.linspace(0.5, 1.5, 7, dtype=torch.float64)
    problem = dataclasses.replace(options["problem"], lower_constraints=[Linear(rows[None, :3], rows[None, 3:], [0.2])])
    return {**options, "problem": problem}


def trained(seed, method, batches=shuffled, **options):
    """A network with dropout and batch norm on batches."""
    return {**network(seed, batches=batches), "method": method, "max_steps": STEPS, **options}


def entry(name, **group):
    return next(entry for entry in collection(**group) if entry.name == name).make()


lasso = partial(meha.problems.group_lasso, 30, groups=3)

FIRST_ORDER = {
    "MEHA": meha.MEHA(**SMALL, eta=0.1, gamma=2.0, c=2.0, p=0.3),
    "RHG": methods.RHG(**SMALL, inner_steps=4),
    "RHG, truncated": methods.RHG(**SMALL, inner_steps=4, terms=2, warm_start=False),
    "BDA": methods.BDA(**SMALL, inner_steps=4),
    "IAPTT": methods.IAPTT(**SMALL, eta=0.05, inner_steps=4),
    "CG": methods.CG(**SMALL, inner_steps=3),
    "NS": methods.NS(**SMALL, inner_steps=3, terms=5),
    "GALET": methods.GALET(**SMALL, inner_steps=3, terms=4),
    "BAMM": methods.BAMM(),
    "BAMM, line search": methods.BAMM(line_search=True),
    "DARTS, order 1": methods.DARTS(**SMALL, order=1),
    "DARTS, order 2": methods.DARTS(**SMALL, order=2),
    "BOME": methods.BOME(**SMALL, eta=0.1, inner_steps=3),
    "F2SA": methods.F2SA(**SMALL, eta=0.1, c=2.0, inner_steps=2),
    "VPBGD": methods.VPBGD(**SMALL, eta=0.1, c=2.0, inner_steps=2),
    "BVFIM": methods.BVFIM(),
    "StochasticMEHA": methods.StochasticMEHA(),
}

OPTIMIZERS = {
    "SGD with momentum": meha.Optimizer(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "Adam": ADAM,
    "Adam, cosine, clipped": FALLING,
    "AdamW, one cycle": meha.Optimizer(
        torch.optim.AdamW, lr=0.01, scheduler=partial(OneCycleLR, max_lr=0.02, total_steps=STEPS + 2)
    ),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003),
    "Adagrad, in stages": meha.Optimizer(
        torch.optim.Adagrad,
        lr=0.02,
        scheduler=lambda o: SequentialLR(o, [ExponentialLR(o, 0.9), ExponentialLR(o, 0.99)], milestones=[9]),
    ),
}

PLAIN = {"alpha": 0.05, "beta": 0.05, "eta": 0.05, "gamma": 5.0, "c": 2.0, "p": 0.2}

SETUPS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{name: partial(smooth, method=method) for name, method in FIRST_ORDER.items()},
    **{f"compiled {name}": partial(smooth, method=FIRST_ORDER[name], compile=True) for name in ("MEHA", "F2SA", "RHG")},
    **{
        f"{name} for x and y": partial(trained, method=meha.MEHA(eta=0.05, gamma=5.0, c=2.0, x_optimizer=o, y_optimizer=o))
        for name, o in OPTIMIZERS.items()
    },
    **{
        f"batches: {name}": partial(trained, method=meha.MEHA(**PLAIN), batches=loader)
        for name, loader in LOADERS.items()
        if name != "workers"
    },
    "batches: accumulated": partial(trained, method=meha.MEHA(**PLAIN), batches=lambda: Accumulated(shuffled(), 3)),
    "automatic on a network": partial(trained, method=None),
    "grid search": partial(known, make=lasso, method=methods.GridSearch(space=LogUniform(1e-2, 1.0), points=2)),
    "random search": partial(known, make=lasso, method=methods.RandomSearch(space=LogUniform(1e-2, 1.0), trials=9)),
    "TPE": partial(known, make=partial(meha.problems.lasso, n=2), method=methods.TPE(space=Uniform(0.0, 1.0), trials=14)),
    "adaptive": partial(
        known, make=partial(meha.problems.strong_convex, n=4), method=meha.contrib.AdaptiveMEHA(), max_steps=200
    ),
    "automatic, strong convex": partial(known, make=partial(meha.problems.strong_convex, n=4), method=None, max_steps=10_000),
    "automatic, sine": partial(known, make=partial(meha.problems.sine, n=1), method=None, max_steps=10_000),
    "automatic, one-sided": partial(known, make=partial(entry, "one-sided"), method=None, max_steps=10_000),
    "automatic, first order": partial(
        known, make=partial(entry, "one-sided"), method=methods.Default(second_order=False), max_steps=10_000
    ),
    "automatic, coupled": partial(coupled, method=None),
    "LV-HBA": partial(coupled, method=methods.LVHBA()),
    "BiC-GAFFA": partial(coupled, method=methods.BiCGAFFA()),
}


class Killer:
    """Ends a run at a step: by an exception, or by a signal, also while a checkpoint is written."""

    def __init__(self, step: int, real: bool, writing: bool) -> None:
        self.step, self.real, self.writing = step, real, writing

    def __call__(self, run, info):
        if info.step >= self.step:
            if not self.real:
                raise KillError
            if not self.writing:
                os.kill(os.getpid(), signal.SIGKILL)
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)


def killed(build: Callable[[], dict[str, Any]], killer: Killer, checkpoint: Any) -> bool:
    """Whether a run was killed; false where it ended before."""
    if not killer.real:
        try:
            meha.solve(**build(), callbacks=[killer], checkpoint=checkpoint)
        except KillError:
            return True
        return False
    child = os.fork()
    if not child:
        try:
            meha.solve(**build(), callbacks=[killer], checkpoint=checkpoint)  # built here: a fork seeds Python's generator anew
        finally:
            os._exit(0)
    ended = os.waitpid(child, 0)[1] == signal.SIGKILL
    REAL["kills"] += ended
    return ended


def repeated(name: str, kills: int, rng: random.Random, folder: Path, expected: Any) -> int:
    """Kill a run some times, and compare its end with ``expected``; returns how many kills there were."""
    file, done, build = folder / f"{rng.random()}.pt", 0, SETUPS[name]
    for i in range(kills):
        real = rng.randrange(SIGKILLS) == 0
        killer = Killer(rng.randint(1, expected.steps), real, writing=rng.random() < 0.3)
        done += killed(partial(build, i if file.exists() else 0), killer, meha.Checkpoint(file, every=rng.randint(1, 6)))
    assert_same(meha.solve(**build(99 if file.exists() else 0), checkpoint=file), expected)
    return done


def count(kills: int, say: Callable[..., None] = print) -> dict[str, int]:
    """Kill runs of all set-ups in turn until there were ``kills``; returns how many each had."""
    rng, counts, expected = random.Random(0), dict.fromkeys(SETUPS, 0), {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while sum(counts.values()) < kills:
            for name in SETUPS:
                if name not in expected:
                    expected[name] = meha.solve(**SETUPS[name](0))
                counts[name] += repeated(name, rng.randint(1, 4), rng, Path(folder), expected[name])
            say(f"{sum(counts.values())} kills, {REAL['kills']} of them signals, all equal bit for bit", flush=True)
    say(f"{len(counts)} set-ups: {counts}")
    return counts


@pytest.mark.slow
def test_500_random_kills(capsys):
    with capsys.disabled():
        assert min(count(500).values()) > 0


@pytest.mark.parametrize("name", list(SETUPS)[::7])
@pytest.mark.filterwarnings("ignore")
def test_random_kills(name, tmp_path):
    expected = meha.solve(**SETUPS[name](0))
    assert repeated(name, 3, random.Random(1), tmp_path, expected) > 0


if __name__ == "__main__":
    count(int(sys.argv[1]))
