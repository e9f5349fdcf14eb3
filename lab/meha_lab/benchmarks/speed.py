"""How fast MEHA is, beside the peers and beside what the machine allows: ratios with their spread, measured in one run.

    make bench                                        # everything; the peers get environments of their own
    python -m meha_lab.benchmarks.speed --quick       # a minute, without peers and without large problems
    python -m meha_lab.benchmarks.speed --part sine --part lasso
    python -m meha_lab.benchmarks.speed --gpu         # on a CUDA device, with torch and meha alone

One thread for everyone, float64 on the toys, and the same numbers (preset "recipe"). Contenders take turns, so that a change of
the machine's speed hits all; a ratio is one of two times of the same turn, as median and 20-80 % range. On a CPU the clock
is that of the processor, which other programs do not delay; compilation, group lasso and GPUs are on the clock on the wall.
Times of a step are without tracing and compilation, which are measured by themselves. Iterates are compared before anything is
timed.

Each part is a record of lab/records/speed.jsonl (speed-gpu.jsonl); the tables go to docs/speed.md, the figure to
out/pages/speed.png. What was measured on another machine or with other versions than the last part is not shown.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import torch
from meha_lab import pages
from meha_lab.benchmarks.bare import FewShotPasses, Passes, loop
from meha_lab.benchmarks.peers.environments import Peer
from meha_lab.datasets import Images
from meha_lab.paths import RECORDS, ROOT
from meha_lab.reproduce import learning
from meha_lab.reproduce.cells import Cell
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.race import measure, processor
from meha_lab.store import Record, Store
from meha_lab.tasks import HyperCleaning, few_shot, hyper_cleaning
from meha_lab.tasks.few_shot import FewShot
from torch import Tensor

import meha
from meha.analysis.theory import TheoryWarning
from meha.problem.loaders import Endless
from meha.problems import KnownProblem, sine, strong_convex
from meha.running.compiled import CompileWarning, Recorded

DIMENSIONS = (1, 10, 100, 1000, 10_000, 100_000)
LARGE = (10_000, 100_000, 1_000_000, 10_000_000)
TARGETS = {5e-2: 500, 2e-2: 4000}
"""Relative errors of x and of y on the sine toy (``meha reproduce`` has the first), and steps in which they are reached."""

IMAGES: tuple[Literal["digits", "mnist"], ...] = ("digits", "mnist")
CLEANING: dict[str, Any] = {"alpha": 0.1, "beta": 0.15, "eta": 0.1, "gamma": 100.0, "c": 0.2}

FILES = {"cpu": "speed", "cuda": "speed-gpu"}
"""Kinds of records, by the device."""

PICTURE = ROOT / "out/pages/speed.png"

Times = dict[str, list[float]]
Goal = tuple[str, float]
Contender = Callable[[], float]
"""Runs once, and tells the seconds of a step."""


class Ratio(TypedDict):
    """A ratio: 20 % quantile, median and 80 % quantile; the median seconds of both; and the goal, such as [">=", 10]."""

    what: str
    ratio: list[float]
    seconds: list[float]
    goal: list[Any]


@dataclass
class Bench:
    """What is measured where, with whom, and what came out.

    Attributes:
        rounds: turns of each contender.
        boat, jax: the peers, or None.
        rows: by the title of a part.
        curves: what the figure shows of the part that was measured last.
    """

    device: str
    rounds: int
    quick: bool
    boat: Peer | None = None
    jax: Peer | None = None
    rows: dict[str, list[Ratio]] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)

    def alternate(self, contenders: Mapping[str, Contender], rounds: int | None = None) -> Times:
        """The times of all contenders, which take turns."""
        times: Times = {name: [] for name in contenders}
        for _ in range(rounds or self.rounds):
            for name, once in contenders.items():
                times[name].append(once())
        return times

    def compare(
        self, part: str, what: str, times: Times, slow: str, fast: str, target: tuple[str, float] | None = None
    ) -> None:
        """A row with the ratio of two contenders, if both are there."""
        if slow in times and fast in times:
            ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
            self.add(part, what, ratios, times[slow], times[fast], target)

    def add(
        self,
        part: str,
        what: str,
        ratios: list[float],
        slow: list[float] | None = None,
        fast: list[float] | None = None,
        target: Goal | None = None,
    ) -> None:
        seconds = [three_digits(statistics.median(spent)) for spent in (slow, fast) if spent]
        row: Ratio = {"what": what, "ratio": spread(ratios), "seconds": seconds, "goal": list(target or ())}
        if part not in self.rows:
            print(f"\n{part}")
        self.rows.setdefault(part, []).append(row)
        print(printed(row), flush=True)


def spread(values: list[float]) -> list[float]:
    """The 20 % quantile, the median and the 80 % quantile: members of the list but for the median."""
    ordered = sorted(values)
    cut = len(ordered) // 5
    return [three_digits(value) for value in (ordered[cut], statistics.median(ordered), ordered[-1 - cut])]


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def clock(device: str) -> float:
    """Seconds of the processor; on a GPU those on the wall when it has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds(action: Callable[[], object], device: str) -> float:
    begin = clock(device)
    action()
    return clock(device) - begin


# Contenders on the toys


def median_step(problem: KnownProblem, method: meha.MEHA, steps: int) -> float:
    """The median of the first steps of a run, each timed by itself, as BOAT's are."""
    run = method.start(problem, problem.x0, problem.y0)
    spent = []
    for _ in range(steps):
        begin = time.process_time()
        run.step()
        spent.append(time.process_time() - begin)
    return statistics.median(spent)


def stepped(problem: KnownProblem, method: meha.MEHA, steps: int) -> tuple[Tensor, Tensor]:
    run = method.start(problem, problem.x0, problem.y0)
    for _ in range(steps):
        run.step()
    return run.x, run.y


def solved(problem: KnownProblem, method: meha.MEHA, steps: int, **options: Any) -> tuple[Tensor, Tensor]:
    solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=steps, tol=None, **options)
    assert solution.steps == steps, solution
    return solution.x, solution.y


compiled = functools.partial(solved, compile=True)


def compiled_step(problem: KnownProblem, method: meha.MEHA, steps: int) -> float:
    """Seconds of a compiled step in ``solve``: of all groups but the first, before which there is the compilation."""
    device = problem.x0.device.type
    marks: list[tuple[int, float]] = []
    compiled(problem, method, steps, callbacks=lambda run, info: marks.append((run.k, clock(device))))
    groups = [(t - s, k - j) for (j, s), (k, t) in itertools.pairwise(marks) if k > j + 1][1:]
    return sum(spent for spent, _ in groups) / sum(count for _, count in groups)


def enough(run: Callable[[int], float], least: int) -> int:
    """As many steps as take a time that can be measured, of which what comes once a run is a small part."""
    steps = least
    while run(steps) * steps < 0.1 and steps < 100_000:
        steps *= 4
    return steps


def numbers(method: meha.MEHA) -> dict[str, float]:
    return {name: getattr(method, name) for name in ("alpha", "beta", "eta", "gamma", "c", "p")}


def agree(problem: KnownProblem, points: Mapping[str, tuple[Tensor, Tensor]], tol: float) -> None:
    """Raise unless all are at the same point."""
    (first, (x, y)), *others = points.items()
    for name, (u, v) in others:
        away = max(float((u - x).abs().max()), float((v - y).abs().max()))
        if not away <= tol * (1 + float(y.abs().max())):
            raise AssertionError(f"{problem.name}: {name} is {away:.1e} away from {first}; they must take the same steps.")


def in_its_order(problem: KnownProblem, method: meha.MEHA, steps: int) -> tuple[Tensor, Tensor]:
    """What BOAT's MESO does: theta, then y, then x, its own c_k, and a pull of y to theta that knows how theta follows y."""
    F, f = problem.upper, problem.lower
    alpha, beta, eta, gamma, c0 = (numbers(method)[name] for name in ("alpha", "beta", "eta", "gamma", "c"))
    x, y, theta = (t.clone().requires_grad_() for t in (problem.x0, problem.y0, problem.y0))
    for k in range(steps):
        c = c0 * (k + 1) ** 0.25 if k else 0.2
        (d,) = torch.autograd.grad(f(x, theta), theta)
        theta.data -= eta * (d + (theta.data - y.data) / gamma)
        (d,) = torch.autograd.grad(F(x, y) / c + f(x, y), y)
        y.data -= beta * (d - (1 - eta / gamma) * (y.data - theta.data) / gamma)
        (d,) = torch.autograd.grad(F(x, y) / c + f(x, y) - f(x, theta), x)
        x.data -= alpha * d
    return x.detach(), y.detach()


def peers_agree(bench: Bench, name: str, problem: KnownProblem, method: meha.MEHA) -> None:
    """All contenders at the same point after some steps; BOAT at that of a loop in its order."""
    n, steps = problem.y0.numel(), 100
    points = {"bare loop": loop(problem, method, steps), "Run.step": stepped(problem, method, steps)}
    points |= {"solve": solved(problem, method, steps), "compiled": compiled(problem, method, steps)}
    if bench.jax is not None:
        points["JAX"] = point(bench.jax.ask(problem=name, n=n, steps=steps, numbers=numbers(method), point=True))
    agree(problem, points, 1e-9)
    if bench.boat is not None and name == "sine":
        found = point(bench.boat.ask(n=n, steps=steps, numbers=numbers(method), history=False))
        agree(problem, {"loop in its order": in_its_order(problem, method, steps), "BOAT": found}, 1e-9)


def point(answer: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    x, y = (torch.tensor(answer[name], dtype=torch.float64) for name in ("x", "y"))
    return x, y


# The parts


def sine_part(bench: Bench) -> None:
    """Time of a step against the dimension, for everyone."""
    part = "Sine toy, time of a step"
    for n in DIMENSIONS[:4:3] if bench.quick else DIMENSIONS:
        problem, contenders = sine(n), dict[str, Contender]()
        method = problem.preset("recipe")
        if n in (1, 1000):
            peers_agree(bench, "sine", problem, method)
        steps = 1000 if n <= 1000 else 100
        if bench.boat is not None:
            question: dict[str, Any] = {"n": n, "steps": steps, "numbers": numbers(method)}
            contenders["BOAT, no file"] = functools.partial(asked_for, bench.boat, history=False, **question)
            contenders["median step"] = functools.partial(median_step, problem, method, steps)
            if n == 10:
                contenders["BOAT"] = functools.partial(asked_for, bench.boat, history=True, **question)
        contenders |= timed(problem, method, {"Run.step": stepped, "bare loop": loop, "solve": solved})
        contenders["compiled"] = compiled_contender(problem, method)
        if bench.jax is not None:
            contenders["JAX scan"] = scan(bench.jax, "sine", problem, method)
        times = bench.alternate(contenders)
        bench.curves.setdefault("sine", {})[str(n)] = {name: spread(spent) for name, spent in times.items()}
        label = f"n = {n:,}: "
        if n == 10:
            bench.compare(part, label + "BOAT's MESO / Run.step", times, "BOAT", "median step", (">=", 10))
            what = label + "BOAT's MESO without its file of losses / Run.step"
            bench.compare(part, what, times, "BOAT, no file", "median step")
        if n in (1, 1000):
            bench.compare(part, label + "Run.step / bare loop", times, "Run.step", "bare loop")
            bench.compare(part, label + "eager solve / bare loop", times, "solve", "bare loop")
            aim = 100 if n == 1 else 15
            bench.compare(part, label + "Run.step / compiled", times, "Run.step", "compiled", (">=", aim))
            bench.compare(part, label + "compiled / JAX scan", times, "compiled", "JAX scan", ("<=", 3) if n == 1000 else None)


def asked_for(peer: Peer, **question: Any) -> float:
    """Seconds of a peer's step."""
    return float(peer.ask(**question)["seconds"])


def timed(problem: KnownProblem, method: meha.MEHA, runs: Mapping[str, Callable[..., object]]) -> dict[str, Contender]:
    """Contenders that take some steps from the start, as many as make a time that can be measured."""

    def once(run: Callable[..., object], steps: int) -> float:
        return whole(run, problem, method, steps) / steps

    found: dict[str, Contender] = {}
    for name, run in runs.items():
        found[name] = functools.partial(once, run, enough(functools.partial(once, run), least=3))
    return found


def compiled_contender(problem: KnownProblem, method: meha.MEHA) -> Contender:
    once = functools.partial(compiled_step, problem, method)
    return functools.partial(once, enough(once, least=48))  # a first group, which compiles, and another


def scan(jax: Peer, name: str, problem: KnownProblem, method: meha.MEHA) -> Contender:
    question = {"problem": name, "n": problem.y0.numel(), "numbers": numbers(method)}

    def once(steps: int) -> float:
        return asked_for(jax, steps=steps, **question)

    steps = enough(once, least=8)
    once(steps)  # to compile
    return functools.partial(once, steps)


def target_part(bench: Bench) -> None:
    """Time until x and y are close to the solution, the same number of steps for everyone."""
    part = "Sine toy, time to a target"
    for error in [5e-2] if bench.quick else TARGETS:
        for n in (1, 1000) if error == 5e-2 else DIMENSIONS[:5]:
            problem = sine(n)
            method = problem.preset("recipe")
            steps = steps_to_target(problem, method, error)
            compiled(problem, method, steps)  # to compile
            runs: dict[str, Callable[..., object]] = {"Run.step": stepped, "bare loop": loop, "compiled": compiled}
            contenders: dict[str, Contender] = {
                name: functools.partial(whole, run, problem, method, steps) for name, run in runs.items()
            }
            if bench.jax is not None:
                question = {"problem": "sine", "n": n, "steps": steps, "numbers": numbers(method)}
                bench.jax.ask(**question)  # to compile
                contenders["JAX scan"] = functools.partial(asked_for, bench.jax, **question, total=True)
            times = bench.alternate(contenders)
            if error == 2e-2:
                bench.curves.setdefault("target", {})[str(n)] = {name: spread(spent) for name, spent in times.items()}
            if n in (1, 1000):
                label = f"n = {n:,}, to {error:.0%} in {steps:,} steps: "
                bench.compare(part, label + "Run.step / compiled", times, "Run.step", "compiled")
                bench.compare(part, label + "compiled / JAX scan", times, "compiled", "JAX scan")


def whole(run: Callable[..., object], problem: KnownProblem, method: meha.MEHA, steps: int) -> float:
    """Seconds of a run."""
    return seconds(lambda: run(problem, method, steps), problem.x0.device.type)


def steps_to_target(problem: KnownProblem, method: meha.MEHA, error: float) -> int:
    """After how many steps x and y are within the target, and stay there."""
    run, reached = method.start(problem, problem.x0, problem.y0), 1
    for k in range(TARGETS[error]):
        run.step()
        if max(problem.distance(run.x, run.y)) > error:
            reached = k + 2
    assert reached <= TARGETS[error], f"{problem.name}: the error is still above {error} after {TARGETS[error]} steps"
    return reached


def large_part(bench: Bench) -> None:
    """Cost against the dimension on the strong convex toy, and against the speed of memory."""
    part = "Strong convex toy, compiled"
    medians: dict[int, float] = {}
    for n in LARGE:
        problem = strong_convex(n)
        method = problem.preset("recipe")
        if n == LARGE[0]:
            peers_agree(bench, "strong convex", problem, method)
        contenders = {"compiled": compiled_contender(problem, method), **timed(problem, method, {"Run.step": stepped})}
        if bench.jax is not None:
            contenders["JAX scan"] = scan(bench.jax, "strong convex", problem, method)
        contenders["copy"] = copying(n)
        times = bench.alternate(contenders)
        medians[n] = statistics.median(times["compiled"])
        bench.curves.setdefault("strong convex", {})[str(n)] = {name: spread(spent) for name, spent in times.items()}
        label = f"n = {n:,}: "
        bench.compare(part, label + "Run.step / compiled", times, "Run.step", "compiled")
        bench.compare(part, label + "compiled / JAX scan", times, "compiled", "JAX scan")
        if n == LARGE[-1]:
            # a copy moves 2 arrays; theta, x and y each read all three and write one: 12 arrays, or 6 if it is done in one pass
            for arrays, how in ((12, "12 arrays: each update reads 3, writes 1"), (6, "6 arrays: all in one pass")):
                ratios = [arrays / 2 * a / b for a, b in zip(times["copy"], times["compiled"], strict=True)]
                bench.add(part, f"{label}bytes a second / a copy's ({how})", ratios, target=(">=", 0.5))
        del problem
    ends = min(medians), max(medians)
    growth = medians[ends[1]] / medians[ends[0]] / (ends[1] / ends[0])
    bench.add(part, f"time of an entry, n = {ends[1]:,} / n = {ends[0]:,} (1: linear)", [growth])


def copying(n: int) -> Contender:
    """Seconds to copy an array of n numbers to another."""
    source, to = torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    times = max(1, 10**7 // n)

    def once() -> float:
        return seconds(lambda: [to.copy_(source) for _ in range(times)], "cpu") / times

    return once


def shared_part(bench: Bench) -> None:
    """Steps that share gradients, beside the paper's step."""
    part = "Shared gradients, time of a step"
    aims = {3: (">=", 1.25), 2: (">=", 1.6)}

    def rows(what: str, contenders: dict[str, Contender], network: bool) -> None:
        times = bench.alternate(contenders, 3 * bench.rounds)
        for gradients, aim in aims.items():
            bench.compare(part, f"{what}: 4 / {gradients} gradients of f", times, "4", str(gradients), aim if network else None)

    for data in IMAGES[:1] if bench.quick else IMAGES:
        task, label = cleaning(data, bench.device)
        runs = {k: meha.MEHA(**CLEANING, p=0.0, gradients=k).start(task.problem, *task.start()) for k in (4, 3, 2)}
        for run in runs.values():
            run.step()
        if bench.device == "cuda":
            rows(f"hyper-cleaning, {label}, recorded", {str(k): recorded(run, None, "cuda") for k, run in runs.items()}, True)
        rows(
            f"hyper-cleaning, {label}",
            {
                str(k): functools.partial(several, run.step, 20 if data == "digits" else 1, bench.device)
                for k, run in runs.items()
            },
            network=True,
        )
    for problem in (sine(1000), strong_convex(1000 if bench.quick else 1_000_000)) if bench.device == "cpu" else ():
        methods = {k: replace(problem.preset("recipe"), gradients=k) for k in (4, 3, 2)}
        found = {str(k): timed(problem, method, {"": stepped})[""] for k, method in methods.items()}
        rows(f"{problem.name}, Run.step", found, network=False)


def several(step: Callable[[], object], times: int, device: str) -> float:
    return seconds(lambda: [step() for _ in range(times)], device) / times


def cleaning(data: Literal["digits", "mnist"], device: str) -> tuple[HyperCleaning, str]:
    """The task, and what its data are: images drawn at random, of the same size, where the data set is not at hand."""
    name, sizes, side = {"digits": ("digits", (600, 600, 597), 8), "mnist": ("MNIST", (5000, 5000, 10_000), 28)}[data]
    try:
        return hyper_cleaning(data, device=device), name
    except (FileNotFoundError, ImportError):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (sum(sizes), side, side), generator=generator, dtype=torch.uint8)
        drawn = Images(images, torch.randint(10, (sum(sizes),), generator=generator), tuple("0123456789"))
        return hyper_cleaning(drawn, sizes=sizes, device=device), f"random images of the size of {name}"


def passes_part(bench: Bench) -> None:
    """Steps on networks, beside the bare forward and backward passes that they are made of."""
    part, device = "Networks, Run.step (recorded: compile=True) / bare passes", bench.device
    aim = ("<=", 1.15) if device == "cuda" else None
    for data in IMAGES[:1] if bench.quick else IMAGES:
        task, label = cleaning(data, device)
        bare = Passes(task.problem.upper, task.problem.lower, CLEANING, *task.start())
        run = meha.MEHA(**CLEANING, p=0.0).start(task.problem, *task.start())
        several(bare.step, 3, device)
        several(run.step, 3, device)
        same_network(run.y, bare.y)
        count = 100 if device == "cuda" else 20 if data == "digits" else 1
        contenders: dict[str, Contender] = {
            "Run.step": functools.partial(several, run.step, count, device),
            "bare": functools.partial(several, bare.step, count, device),
        }
        if device == "cuda":
            contenders["recorded"] = recorded(run, None, device)
        times = bench.alternate(contenders, 3 * bench.rounds)
        bench.compare(part, f"hyper-cleaning, {label}", times, "Run.step", "bare", aim)
        bench.compare(part, f"hyper-cleaning, {label}: recorded", times, "recorded", "bare", aim)

    shown, label = shots(bench.quick, device)
    setting = learning.chosen("few-shot", "MEHA")
    few = FewShotPasses(shown, setting, setting["lr"], setting["inner_steps"])
    run = learning.build(meha.MEHA, setting).start(shown.problem, *shown.start())
    batches = Endless(shown.batches())
    for _ in range(3):
        batch = next(batches)
        few.step(batch)
        run.step(batch)
    same_network(run.x, few.x)
    count = 50 if device == "cuda" else 1
    contenders = {
        "Run.step": lambda: several(lambda: run.step(batch), count, device),
        "bare": lambda: several(lambda: few.step(batch), count, device),
    }
    if device == "cuda":
        contenders["recorded"] = recorded(run, batch, device)
    times = bench.alternate(contenders)
    bench.compare(part, f"few-shot, {label}", times, "Run.step", "bare", aim)
    bench.compare(part, f"few-shot, {label}: recorded", times, "recorded", "bare", aim)


def recorded(run: meha.Run, batch: Any, device: str) -> Contender:
    """Steps of a run as ``solve(compile=True)`` does them on a GPU, where they are recorded as a graph."""
    recorded = Recorded(run)
    recorded.compile()
    group = [(batch, None, "")] * recorded.unit
    recorded.fit(group)
    return lambda: several(lambda: recorded(group), 10, device) / recorded.unit


def same_network(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Raise unless the parameters are the same in single precision, of which Adam's first steps leave two digits."""
    u, v = (torch.nn.utils.parameters_to_vector(network.parameters()).detach() for network in (a, b))
    assert float((u - v).norm() / u.norm()) <= 1e-2, "the two loops must take the same steps"


def shots(quick: bool, device: str) -> tuple[FewShot, str]:
    """Omniglot with 10 classes a task, or images drawn at random of the same size where it is not at hand."""
    if quick:
        return few_shot("digits", ways=5, tasks=4, width=8, device=device), "digits, 4 tasks"
    try:
        return few_shot("omniglot", device=device), "Omniglot, 16 tasks of 10 classes"
    except (FileNotFoundError, ImportError):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (200, 20, 28, 28), generator=generator, dtype=torch.uint8).to(device)
        return FewShot(images, images, ways=10), "random images, 16 tasks of 10 classes"


RIVALS: Mapping[str, tuple[str, Mapping[str, Any], float]] = {
    "TPE, a weight for each group": ("TPE", {"shared": False, "trials": 100, "lower_tol": 1e-6, "seed": 0}, 20),
    "TPE, one weight for all": ("TPE", {"shared": True, "trials": 100, "lower_tol": 1e-6, "seed": 0}, 20),
    "VF-iDCA, its defaults": ("VFiDCA", {}, 5),
    "VF-iDCA, better numbers": ("VFiDCA", {"radii": 0.05, "rho": 0.1, "beta": 10, "tol": 1e-4, "iterations": 300}, 5),
}
"""Rivals of MEHA on group lasso: method, setting, and how many times faster MEHA should be."""


def lasso_part(bench: Bench) -> None:
    """Group lasso with m = 3600: time to the validation error of a rival's best weights, and until MEHA's are as good.

    Weights are judged by the validation error of the lower solution at them, which is found outside of the clock.
    """
    from meha_lab.reproduce.experiments.cases import GROUP_LASSO

    part = "Group lasso, m = 3600, time to the same validation error"
    case = replace(GROUP_LASSO[3600], seconds=40.0, looks=12)

    def race(method: str, setting: Mapping[str, Any]) -> list[dict[str, float]]:
        return list(measure(Cell("race", case, CONTENDERS[method], setting, seed=0))["at weights"])

    own, found = [], {}
    for i, (name, (method, setting, _)) in enumerate(RIVALS.items()):
        if i != 1:
            own.append(race("MEHA", {"preset": "recipe"}))
        found[name] = race(method, setting)
    keep = ("seconds", "F")
    for name, looks in {**found, "MEHA": own[-1]}.items():
        bench.curves.setdefault("group lasso", {})[name] = [[three_digits(look[key]) for key in keep] for look in looks]
    for name, looks in found.items():
        best = min(looks, key=lambda look: look["F"])
        ours = [next((look["seconds"] for look in run if look["F"] <= best["F"]), None) for run in own]
        reached = [spent for spent in ours if spent is not None]
        if reached:
            label, took = f"{name} (validation error {best['F']:.1f}) / MEHA", best["seconds"]
            bench.add(part, label, [took / spent for spent in reached], [took], reached, (">=", RIVALS[name][2]))
        else:
            print(f"MEHA does not get to the validation error {best['F']:.1f} of {name}", flush=True)


def compile_part(bench: Bench) -> None:
    """What a first compiled run costs: in a new process with nothing kept from earlier ones, and with it; and what a second one
    in the same process costs, which is traced again. All have 200 steps."""
    part = "First runs, sine toy with n = 10, 200 steps, seconds on the wall"
    program = (
        "import time, meha; p = meha.problems.sine(10)\n"
        "for _ in range(2):\n"
        "    begin = time.perf_counter()\n"
        "    meha.solve(p, p.x0, p.y0, p.preset('recipe'), compile=True, max_steps=200, tol=None)\n"
        "    print(time.perf_counter() - begin)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        options: dict[str, Any] = {"env": environment, "check": True, "capture_output": True, "text": True}
        new, kept = (subprocess.run([sys.executable, "-c", program], **options).stdout.split() for _ in range(2))
    cold, warm, again = float(new[0]), float(kept[0]), float(kept[1])
    bench.curves["compile"] = {"compiled": three_digits(cold - again)}
    bench.add(part, "compiled from nothing / with what an earlier process kept", [cold / warm], [cold], [warm])
    bench.add(part, "with what an earlier process kept / in the same process again", [warm / again], [warm], [again])
    if bench.jax is not None:
        method = sine(10).preset("recipe")
        jax = bench.jax.ask(problem="sine", n=10, steps=201, numbers=numbers(method))["compile"]
        bench.curves["compile"]["JAX scan"] = three_digits(jax)
        bench.add(part, "compiled from nothing / compilation of the JAX scan", [cold / jax], [cold], [jax])


def small_part(bench: Bench) -> None:
    """Small problems on a GPU, where a step is a chain of launches."""
    for n in (1, 10, 1000):
        problem = sine(n, device=bench.device)
        method = problem.preset("recipe")
        agree(problem, {"Run.step": stepped(problem, method, 100), "compiled": compiled(problem, method, 100)}, 1e-9)
        contenders = timed(problem, method, {"Run.step": stepped})
        contenders["compiled"] = compiled_contender(problem, method)
        times = bench.alternate(contenders)
        what = f"n = {n:,}: Run.step / compiled"
        bench.compare("Sine toy, time of a step", what, times, "Run.step", "compiled", (">=", 10))


PARTS: dict[str, Callable[[Bench], None]] = {
    "sine": sine_part,
    "target": target_part,
    "large": large_part,
    "shared": shared_part,
    "passes": passes_part,
    "compile": compile_part,
    "lasso": lasso_part,
}
GPU_PARTS: dict[str, Callable[[Bench], None]] = {"small": small_part, "passes": passes_part, "shared": shared_part}
QUICK = ("sine", "target", "shared", "passes")


# The table


def met(row: Ratio) -> bool | None:
    """Whether the median meets the goal; None without one."""
    if not row["goal"]:
        return None
    sense, number = row["goal"]
    return bool(row["ratio"][1] >= number if sense == ">=" else row["ratio"][1] <= number)


def number(value: float) -> str:
    """Three digits, in full.

    >>> number(0.5123), number(12.34), number(2463.9)
    ('0.512', '12.3', '2,460')
    """
    digits = float(f"{value:.3g}")
    return f"{digits:,.0f}" if digits >= 100 else f"{digits:#.3g}"


def duration(seconds: float) -> str:
    """Seconds in a unit that fits.

    >>> duration(1.234e-7), duration(0.00456), duration(78.9)
    ('0.123 us', '4.56 ms', '78.9 s')
    """
    unit, scale = next((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 0.0)) if seconds >= scale)
    return f"{number(seconds / (scale or 1e-6))} {unit}"


def cells(row: Ratio) -> list[str]:
    """What, the two times, the ratio, its spread, and the goal."""
    low, middle, high = row["ratio"]
    aim = "{} {:g}".format(*row["goal"]) if row["goal"] else ""
    verdict = {True: ", met", False: ", missed", None: ""}[met(row)]
    around = "" if low == high else f"{number(low)} to {number(high)}"
    return [row["what"], " / ".join(map(duration, row["seconds"])), number(middle), around, aim + verdict]


def printed(row: Ratio) -> str:
    """A row for the terminal."""
    what, seconds, ratio, around, aim = cells(row)
    return f"{what:<72} {seconds:>19} {ratio:>7}  {around:<16} {aim}".rstrip()


HEAD = ("", "time of each", "ratio", "20-80 %", "goal")
HEADINGS = {"cpu": "One thread of a CPU", "cuda": "A GPU"}


def measured(store: Store, device: str) -> list[Record]:
    """The parts that were measured on the same machine and with the same versions as the last one."""
    return store.records(FILES[device], alike="about")


def tables(store: Store) -> list[str]:
    """For each device the machine, and a table for each part."""
    lines: list[str] = []
    for device, heading in HEADINGS.items():
        found = measured(store, device)
        if found:
            label = found[-1]["about"].items()
            machine = ", ".join(value if name in ("processor", "gpu") else f"{name} {value}" for name, value in label)
            lines += ["", f"## {heading}", "", f"{machine}."]
        for record in found:
            lines += ["", f"### {record['key']}", "", *pages.markdown(HEAD, map(cells, record["rows"]))]
    return lines[1:]


TABLES: pages.Tables = {"speed": ("speed.md", tables)}


# The figure


LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "BOAT": ("BOAT (MESO)", dict(color="#555555", marker="s", linestyle="none")),
    "BOAT, no file": ("BOAT, no file of losses", dict(color="#555555", marker="s", linestyle=":")),
    "bare loop": ("bare torch loop", dict(color="#0072b2", marker="^", linestyle="--")),
    "Run.step": ("MEHA, eager step", dict(color="#e69f00", marker="o")),
    "compiled": ("MEHA, compiled", dict(color="#d55e00", marker="o", linewidth=2.4)),
    "JAX scan": ("JAX lax.scan", dict(color="#009e73", marker="D", linestyle="--")),
    "copy": ("copy of one array", dict(color="#555555", linestyle=":")),
}
"""Contenders as they are drawn: label and style, the same in all panels."""


def figure(store: Store) -> None:
    """Draw time of a step and time to the target against the dimension, and the race on group lasso."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    from meha_lab.reproduce.figures import RC, power_of_ten, render

    curves = {name: curve for record in measured(store, "cpu") for name, curve in record["curves"].items()}
    if not curves:
        return
    with rc_context(RC):
        drawing = Figure(figsize=(9.2, 7.4), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
        (step, target), (large, lasso) = drawing.subplots(2, 2)
        for ax in (step, target, large, lasso):
            ax.set(xscale="log", yscale="log")
            ax.grid(color="#e8e8e8", linewidth=0.7)
        _draw(step, curves.get("sine", {}), "Sine toy: a step", "seconds a step")
        _draw(target, curves.get("target", {}), "Sine toy: to within 2 % of the solution", "seconds")
        _draw(large, curves.get("strong convex", {}), "Strong convex toy: a step", "seconds a step")
        _draw_compilation(target, curves.get("target", {}), curves.get("compile", {}))
        _draw_lasso(lasso, curves.get("group lasso", {}))
        for axis in (axis for ax in (step, target, large, lasso) for axis in (ax.xaxis, ax.yaxis)):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(10, numticks=12))
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(round(math.log10(value)))))
        found = {
            label: line for ax in (step, target, large) for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, frameon=False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_bytes(render(drawing, "png"))


def _draw(ax: Any, curves: dict[str, Any], title: str, ylabel: str) -> None:
    ax.set(title=title, xlabel="dimension n", ylabel=ylabel)
    for name, (label, style) in LINES.items():
        points = [(int(n), found[name]) for n, found in curves.items() if name in found]
        if points:
            dimensions = [n for n, _ in points]
            low, middle, high = zip(*(label for _, label in points), strict=True)
            ax.plot(dimensions, middle, label=label, **{"markersize": 4.5, **style})
            ax.fill_between(dimensions, low, high, color=style["color"], alpha=0.16, linewidth=0)


def _draw_compilation(ax: Any, curves: dict[str, Any], compilation: dict[str, float]) -> None:
    for name, label in (("compiled", "MEHA, with compilation"), ("JAX scan", "JAX, with compilation")):
        points = [
            (int(n), label[name][1] + compilation[name]) for n, label in curves.items() if name in label and name in compilation
        ]
        if points:
            ax.plot(*zip(*points, strict=True), label=label, color=LINES[name][1]["color"], linestyle=(0, (1, 1.5)))


def _draw_lasso(ax: Any, curves: dict[str, Any]) -> None:
    ax.set(title="Group lasso, m = 3600", xlabel="seconds", ylabel="least validation error so far", yscale="linear")
    hues = dict(zip(curves, ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#d55e00"), strict=False))
    for name, looks in curves.items():
        best = [min(error for _, error in looks[: i + 1]) for i in range(len(looks))]
        ax.plot([spent for spent, _ in looks], best, label=name, color=hues[name], marker="o", markersize=3.5)
    if curves:
        ax.legend(frameon=False, fontsize=8)


# The command


def about(bench: Bench) -> dict[str, str]:
    """The machine and the versions."""
    gpu = {"gpu": torch.cuda.get_device_name()} if bench.device == "cuda" else {}
    peers = {name: label for peer in (bench.boat, bench.jax) if peer is not None for name, label in peer.versions.items()}
    return {**gpu, "processor": processor(), "python": platform.python_version(), "torch": str(torch.__version__), **peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute's version without peers; nothing is written")
    parser.add_argument("--gpu", action="store_true", help="what a CUDA device can do")
    parser.add_argument("--part", action="append", choices=[*PARTS, "small"], help="only this; may be given again")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", TheoryWarning)
    warnings.simplefilter("error", CompileWarning)  # what runs step by step must not be called compiled
    parts = GPU_PARTS if asked.gpu else {name: PARTS[name] for name in QUICK} if asked.quick else PARTS
    wanted = {name: measure for name, measure in parts.items() if asked.part is None or name in asked.part}
    store, device = Store(RECORDS), "cuda" if asked.gpu else "cpu"
    with ExitStack() as stack:
        bench = Bench(device, 3 if asked.quick else asked.rounds, asked.quick)
        if not (asked.quick or asked.gpu):
            bench.boat, bench.jax = (stack.enter_context(Peer(name)) for name in ("boat", "jax"))
        for measure_part in wanted.values():
            bench.rows, bench.curves = {}, {}
            measure_part(bench)
            if not asked.quick:
                for title, rows in bench.rows.items():
                    store.add(FILES[device], title, {"about": about(bench), "rows": rows, "curves": bench.curves})
    if not asked.quick:
        pages.draw(TABLES)
        figure(store)


if __name__ == "__main__":
    main()
