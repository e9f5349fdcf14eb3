"""What `solve` keeps in memory, and whether a long run grows.

    python -m meha_lab.benchmarks.solve_memory [--part copies|steps] [--steps 100000]

copies: the most memory that a process takes during `solve` above what it had before, in copies of y, each case in a process of
its own, with and without a checkpoint. x is small, and so are activations. "tensors" counts those that torch makes
(``meha_lab.reproduce.memory``), "process" is what the system says (Linux only), y0 itself not counted in both.

steps: the memory of a process after a tenth of a run and at its end.
"""

import argparse
import multiprocessing
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from meha_lab.reproduce.memory import peak
from torch import nn

import meha
from meha.running.observers import Recorder

MIB = 2**20


def resident(what="VmRSS"):
    """Bytes of this process: VmRSS now, VmHWM at most since the last call of `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


# --- copies of y -----------------------------------------------------------------------------------------------------------


def smooth(n):
    """A smooth lower level in n unknowns, whose Hessian is no multiple of the identity; x is one number."""
    scale = torch.linspace(1.0, 3.0, n, dtype=torch.float64)

    def lower(x, y):
        return (scale * (y - x).square() + 0.1 * y.pow(4)).sum() / n

    problem = meha.Problem(lambda x, y: (y - 1).square().sum() / n + 0.1 * (x - 1).square().sum(), lower)
    zero = torch.zeros(1, dtype=torch.float64)
    return {"problem": problem, "x0": zero, "y0": torch.zeros(n, dtype=torch.float64)}


def sparse(n):
    """The same with an L1 norm."""
    found = smooth(n)
    problem = meha.Problem(found["problem"].upper, found["problem"].lower, nonsmooth=meha.nonsmooth.L1(0.1 / n))
    return {**found, "problem": problem}


def network(n, **options):
    """A linear layer with about n weights, and batches of two examples; x is their two weights."""
    width = round(n**0.5)
    torch.manual_seed(0)
    y = nn.Linear(width, width, bias=False)
    batches = [(torch.randn(2, width), torch.randn(2, width)) for _ in range(3)]

    def upper(x, y, batch):
        return (y(batch[0]) - batch[1]).square().mean()

    def lower(x, y, batch):
        return (x.sigmoid()[:, None] * (y(batch[0]) - batch[1]).square()).mean()

    return {
        "problem": meha.Problem(upper, lower),
        "x0": torch.zeros(2),
        "y0": y,
        "batches": batches,
        "max_steps": 12,
        **options,
    }


MEHA = meha.MEHA(alpha=0.1, beta=0.01, eta=0.01, gamma=10.0, c=2.0)

CASES = {
    "the default, smooth f": smooth,
    "the default, L1": sparse,
    "`StochasticMEHA`": partial(network, method=meha.StochasticMEHA()),
    "`StochasticMEHA(warm_start=True)`": partial(network, method=meha.StochasticMEHA(warm_start=True)),
    "`MEHA`": partial(network, method=MEHA),
    "`MEHA()`, which chooses its numbers": partial(network, method=meha.MEHA()),
    "`F2SA()`, which chooses its numbers": partial(network, method=meha.F2SA()),
    "`MEHA`, Adam for y": partial(
        network, method=meha.MEHA(alpha=0.1, eta=0.01, gamma=10.0, c=2.0, y_optimizer=partial(torch.optim.Adam, lr=1e-3))
    ),
}


def size(y):
    """Bytes of y."""
    return sum(leaf.numel() * leaf.element_size() for leaf in meha.tensors.variables.named_leaves(y).values())


def copies(name, n, saved, tracked):
    """Copies of y that `solve` takes at most."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:

        def work(n, place):
            found = CASES[name](n)
            options = {"checkpoint": meha.Checkpoint(f"{folder}/{place}.pt", every=5)} if saved else {}
            if tracked:
                return peak(lambda: meha.solve(**found, **options)) / size(found["y0"])
            forget_peak()
            before = resident()
            meha.solve(**found, **options)
            return (resident("VmHWM") - before) / size(found["y0"])

        work(400, "small")  # what is imported on the way
        return work(n, "large")


def alone(call, *arguments):
    """Call a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, arguments)


def show_copies(sizes):
    print("| | numbers in y | tensors | process | with a checkpoint |")
    print("|---|---|---|---|---|")
    for name in CASES:
        for n in sizes if "default" in name else [4_000_000]:
            found = [
                alone(copies, name, n, saved, tracked) for saved, tracked in ((False, True), (False, False), (True, False))
            ]
            print(f"| {name} | {n:,} | " + " | ".join(f"{value:.1f}" for value in found) + " |", flush=True)


# --- long runs -------------------------------------------------------------------------------------------------------------

LONG = {
    "`MEHA`, history of all steps (the default)": lambda steps: (MEHA, []),
    "`MEHA`, `Recorder(every=1, limit=10**9)`": lambda steps: (MEHA, [Recorder(every=1, limit=10**9)]),
    "`MEHA`, `Recorder(every=1000)`": lambda steps: (MEHA, [Recorder(every=1000)]),
    "`StochasticMEHA`, batches": lambda steps: (meha.StochasticMEHA(), []),
}


def growth(name, steps):
    """Bytes after a tenth of the run and at its end, of the checkpoint, and seconds."""
    warnings.simplefilter("ignore")
    method, callbacks = LONG[name](steps)
    seen = {}

    def look(run, info):
        if info.step == steps // 10:
            seen["early"] = resident()

    data = [torch.randn(4, dtype=torch.float64) for _ in range(5)]
    problem = meha.Problem(
        lambda x, y, batch: (y - batch).square().sum(), lambda x, y, batch: (y - x).square().sum() + 0.1 * (y * batch).sum()
    )
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        solution = meha.solve(
            problem,
            torch.zeros(4, dtype=torch.float64),
            torch.zeros(4, dtype=torch.float64),
            method,
            max_steps=steps,
            tol=None,
            batches=data,
            callbacks=[*callbacks, look],
            checkpoint=meha.Checkpoint(f"{folder}/run.pt", every=steps // 10),
        )
        assert solution.steps == steps
        return seen["early"], resident(), Path(f"{folder}/run.pt").stat().st_size, time.perf_counter() - begin


def show_growth(steps):
    print(f"| {steps:,} steps | MiB after a tenth | at the end | checkpoint | seconds |")
    print("|---|---|---|---|---|")
    for name in LONG:
        early, late, file, seconds = alone(growth, name, steps)
        print(f"| {name} | {early / MIB:.0f} | {late / MIB:.0f} | {file / MIB:.1f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="all", choices=["all", "copies", "steps"])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 1_000_000], help="of y, for the default on tensors")
    options = parser.parse_args()
    if options.part != "steps":
        show_copies(options.sizes)
    if options.part != "copies":
        show_growth(options.steps)
