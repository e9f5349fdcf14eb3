"""Weights of text sources for a small language model, beside every control: each source alone, pairs, equal weights, trials.

    python -m meha_lab.benchmarks.domain_weights --measure --device cuda --out out/domains   # resumes where it stopped
    python -m meha_lab.benchmarks.domain_weights --measure --case "reference, small" --seeds 0 1
    python -m meha_lab.benchmarks.domain_weights --measure --quick --out out/quick           # seconds, on a CPU
    python -m meha_lab.benchmarks.domain_weights --draw                                      # the tables and the figure

The texts are those of ``domain_texts``, the protocol is on the page docs/domain-weights.md. A search is a call of
``meha.solve`` with its default. New models are then trained on as many tokens, drawn by each of the weightings. They are
trained together, as one batched model, with the same start and the same random numbers. Records: a line of
domain_weights.jsonl for each search and each training, in lab/records or in the folder of ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from meha_lab import pages
from meha_lab.benchmarks import domain_texts
from meha_lab.benchmarks.domain_texts import KIB, OWN, SOURCES, VALIDATION, Target
from meha_lab.paths import DOCS, RECORDS
from meha_lab.store import Record, Store
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import meha

VERSION = 1
"""Of the protocol; a part of the key of every record."""

BYTES, LENGTH = 128, 128
"""Tokens that there are, and tokens of a window."""

WINDOWS = 64
"""Windows of a batch, of each level in a search."""

LOOKS = 10
"""Points of a training at which validation and test are measured, evenly spaced."""

WARMUP, DECAY = 0.05, 0.1
"""Share of the steps in which the rate of AdamW rises, before it falls to zero, and its weight decay."""

TAUGHT, ONE_SIDED = "found by the small model", "found with differences on one side"
"""The names of trainings at the weights of the case that is the teacher, and of a search by a step as it was once."""

SEEDS = (2, 3, 4)
"""Those that are measured. A failure on 0 and 1 led to differences on both sides, which were tried on 10 and 11."""

EQUAL_WORK = 4
"""Trainings that take the work of a search and of the training at its weights, rounded up."""


@dataclass(frozen=True)
class Size:
    """A size of the transformer.

    Attributes:
        rate: the highest rate of AdamW.
        together: how many are trained at once.
    """

    width: int
    layers: int
    heads: int
    rate: float
    together: int

    @property
    def work(self) -> int:
        """Multiplications of a token in the matrices and in attention, which is what a gradient costs, up to a factor."""
        return self.layers * (12 * self.width**2 + 2 * LENGTH * self.width) + BYTES * self.width


SIZES = {"tiny": Size(16, 1, 2, 3e-3, 80), "small": Size(64, 2, 4, 3e-3, 80), "large": Size(192, 4, 4, 1e-3, 20)}


@dataclass(frozen=True)
class DomainCase:
    """A target, a size and a budget.

    Attributes:
        trials: random weightings that are trained, too.
        title: a line about it, for the page.
        teacher: the case whose weights are tried here as well.
        one_sided: whether there is a second search, with differences on one side.
    """

    target: str
    size: str
    steps: int
    trials: int
    title: str
    teacher: str = ""
    one_sided: bool = False

    @property
    def searches(self) -> tuple[str, ...]:
        """The names of the weightings that searches of this case find."""
        return ("found", ONE_SIDED) if self.one_sided else ("found",)

    @property
    def found(self) -> tuple[str, ...]:
        """The names of all weightings that searches find."""
        return (*self.searches, TAUGHT) if self.teacher else self.searches


CASES = {
    "reference, small": DomainCase(
        "reference", "small", 1000, 32, "The language reference, width 64, 2 layers", one_sided=True
    ),
    "reference, large": DomainCase(
        "reference", "large", 1000, 8, "The language reference, width 192, 4 layers", "reference, small"
    ),
    "reference, short": DomainCase("reference", "small", 125, 32, "The language reference, width 64, an eighth of the steps"),
    "docstrings, small": DomainCase("docstrings", "small", 1000, 32, "Docstrings of other modules, width 64, 2 layers"),
}
QUICK = {
    "reference, tiny": DomainCase("reference", "tiny", 2, 2, "Quick", one_sided=True),
    "reference, tiny again": DomainCase("reference", "tiny", 2, 2, "Quick, with the weights of the other", "reference, tiny"),
}


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, z: Tensor) -> Tensor:
        parts = self.mix(self.first(z)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        z = z + self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))
        return z + self.think(self.second(z))


class Network(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, size.width), nn.Embedding(LENGTH, size.width)
        self.blocks = nn.Sequential(*(TransformerBlock(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        z = self.tokens(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(z)))


def losses(network: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """The mean loss of each window."""
    logits = network(windows[:, :-1])
    return cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(dim=1)


def build(size: Size, seed: int, device: str) -> Network:
    torch.manual_seed(seed)
    return Network(size).to(device)


class TextPool:
    """Texts on the device, from which windows are drawn by weights, given random numbers in [0, 1)."""

    def __init__(self, texts: Iterable[Tensor], device: str) -> None:
        parts = list(texts)
        sizes = torch.tensor([len(part) for part in parts])
        self.text, self.sizes, self.begins = (z.to(device) for z in (torch.cat(parts), sizes, sizes.cumsum(0) - sizes))
        self.window = torch.arange(LENGTH + 1, device=device)

    def draw(self, weights: Tensor, which: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """The source of each window, and the windows."""
        ends = weights.cumsum(-1)
        source = torch.searchsorted(ends, which * ends[..., -1:], right=True).clamp(max=len(self.sizes) - 1)
        begin = self.begins[source] + (where * (self.sizes[source] - LENGTH)).long()
        return source, self.text[begin[..., None] + self.window]


class WindowDraws:
    """Batches without end: random numbers, which say which windows of the sources and of the target a step takes."""

    def __init__(self, windows: int, seed: int, device: str) -> None:
        self.shape, self.generator = (3, windows), torch.Generator(device).manual_seed(seed)

    def __iter__(self) -> Any:
        while True:
            yield torch.rand(self.shape, generator=self.generator, device=self.generator.device)


@dataclass(frozen=True)
class Texts:
    """What a case learns from and is judged by, on the device."""

    sources: TextPool
    everything: TextPool  # the sources, own text of as much as the upper level has, all of the own text
    target: TextPool
    held: Mapping[str, Tensor]

    @classmethod
    def of(cls, sources: Mapping[str, Tensor], target: Target, kib: int, device: str) -> Texts:
        parts = list(sources.values())
        own = [target.own[: VALIDATION * kib], target.own]
        held = {name: getattr(target, name).unfold(0, LENGTH + 1, LENGTH).to(device) for name in ("validation", "test")}
        return cls(*(TextPool(texts, device) for texts in (parts, [*parts, *own], [target.validation])), held)


# A search, and trainings


def search(name: str, case: DomainCase, texts: Texts, seed: int, options: argparse.Namespace) -> Record:
    """Find weights by ``meha.solve``; the record has their curve."""
    n = len(SOURCES)

    def lower(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        """f: the mean of the sources by x; half of the windows are drawn by x, so that what x repeats is repeated."""
        chances = (x.detach() + 1 / n) / 2
        source, windows = texts.sources.draw(chances, batch[0], batch[1])
        return (x[source] / chances[source] * losses(y, windows)).mean()

    def upper(x: Tensor, y: nn.Module, batch: Tensor) -> Tensor:
        """F: the mean over the validation text of the target."""
        return losses(y, texts.target.draw(torch.ones(1, device=batch.device), batch[0], batch[2])[1]).mean()

    curve: list[tuple[int, Tensor]] = []
    spacing = max(case.steps // 50, 1)

    def look(run: meha.Run, info: meha.StepInfo) -> None:
        if not curve or info.step >= curve[-1][0] + spacing or info.step == case.steps:
            curve.append((info.step, run.x.detach().clone()))

    begin = time.perf_counter()
    solution = meha.solve(
        meha.Problem(upper, lower, x_set=meha.sets.Simplex()),
        torch.full((n,), 1 / n, device=options.device),
        build(SIZES[case.size], 1000 + seed, options.device),
        meha.stochastic.NetworkSOBA(both_sides=False) if name == ONE_SIDED else None,
        batches=WindowDraws(options.windows, 1000 + seed, options.device),
        max_steps=case.steps,
        tol=None,
        callbacks=[look, meha.observers.Recorder(every=case.steps)],
        compile=options.device == "cuda" and not options.eager,
    )
    x = solution.x.tolist()
    with torch.no_grad():
        judged = {name: float(losses(solution.y, windows).mean()) for name, windows in texts.held.items()}
    return {
        "status": solution.status.value,
        "weights": dict(zip(SOURCES, map(digits, x), strict=True)),
        "curve": {
            "step": [0, *(step for step, _ in curve)],
            "weights": [[1 / n] * n, *([*map(digits, z.tolist())] for _, z in curve)],
        },
        "network": {name: [digits(loss)] for name, loss in judged.items()},
        "work": (solution.counts.upper + solution.counts.lower) / case.steps,
        "seconds": digits(time.perf_counter() - begin),
    }


def digits(number: float) -> float:
    return float(f"{number:.6g}")


def rate(step: int, steps: int) -> float:
    """The share of the highest rate: it rises for some steps, and falls to 0."""
    first = max(WARMUP * steps, 1)
    return min((step + 1) / first, (steps - step) / (steps - first + 1))


def train(size: Size, weights: Tensor, texts: Texts, steps: int, seed: int, options: argparse.Namespace) -> list[Record]:
    """Train a model for each row of weights, all at once: the same start, the same random numbers; their losses on the way."""
    network, device, number = build(size, seed, options.device), options.device, len(weights)
    parameters = {
        name: leaf.detach().expand(number, *leaf.shape).clone().requires_grad_() for name, leaf in network.named_parameters()
    }

    def one(parameters: dict[str, Tensor], windows: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the one that vmap knows on all devices
            return losses(lambda text: functional_call(network, parameters, (text,)), windows)

    each, alike = vmap(one), vmap(one, in_dims=(0, None))
    optimizer = torch.optim.AdamW(parameters.values(), lr=size.rate, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    generator, looks = torch.Generator(device).manual_seed(seed), {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    found: dict[str, list[Tensor]] = {name: [] for name in texts.held}
    weights, begin = weights.to(device), time.perf_counter()
    for step in range(1, steps + 1):
        which, where = torch.rand(2, options.windows, generator=generator, device=device)
        _, windows = texts.everything.draw(weights, which.repeat(number, 1), where.repeat(number, 1))
        optimizer.zero_grad()
        each(parameters, windows).mean(dim=1).sum().backward()
        optimizer.step()
        scheduler.step()
        if step in looks:
            with torch.no_grad():
                for name, held in texts.held.items():
                    parts = [alike(parameters, part).sum(dim=1) for part in held.split(options.windows)]
                    found[name].append(torch.stack(parts).sum(dim=0) / len(held))
            spent = time.perf_counter() - begin
            print(f"  {number} models, {step} of {steps} steps, {spent:.1f} s", flush=True)
    curves = {name: torch.stack(values, dim=1).tolist() for name, values in found.items()}
    return [{name: [digits(loss) for loss in curve[i]] for name, curve in curves.items()} for i in range(number)]


# What is measured


def weightings(case: DomainCase, seed: int, found: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The weights of all trainings, by name: of the sources, and of own text, as much as the upper level has, or all of it."""
    n = len(SOURCES)
    alone = {name: [float(i == k) for k in range(n)] for i, name in enumerate(SOURCES)}
    rows = {f"{name} alone": weights for name, weights in alone.items()}
    for a, b in itertools.combinations(SOURCES, 2):
        rows[f"{a} + {b}"] = [(p + q) / 2 for p, q in zip(alone[a], alone[b], strict=True)]
    rows["equal"] = [1 / n] * n
    rows["in proportion to size"] = [size / sum(SOURCES.values()) for size in SOURCES.values()]
    rows |= {name: list(weights) for name, weights in found.items()}
    chances = torch.distributions.Dirichlet(torch.ones(n))
    torch.manual_seed(10_000 + seed)
    rows |= {f"random {i}": chances.sample().tolist() for i in range(case.trials)}
    rows = {name: [*weights, 0.0, 0.0] for name, weights in rows.items()}
    rows["own"], rows["more own"] = [*[0.0] * n, 1.0, 0.0], [*[0.0] * n, 0.0, 1.0]
    for name in ("equal", "found"):
        rows[f"half own, half {name}"] = [*(weight / 2 for weight in rows[name][:n]), 0.5, 0.0]
    return rows


def measure(options: argparse.Namespace, store: Store) -> None:
    """Run what has no record."""
    kib, begin = KIB // 32 if options.quick else KIB, time.perf_counter()
    sources, targets = domain_texts.sources(kib), {name: domain_texts.target(name, kib) for name in domain_texts.TARGETS}
    parts = [*sources.values(), *(part for target in targets.values() for part in vars(target).values())]
    texts = {name: Texts.of(sources, target, kib, options.device) for name, target in targets.items()}
    made = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "texts": domain_texts.checksum(parts),
        "version": VERSION,
    }
    for seed, name in itertools.product(options.seeds, options.case):
        print(f"{name}, seed {seed}, after {time.perf_counter() - begin:.0f} s", flush=True)
        measure_case(name, seed, texts[options.cases[name].target], made, options, store)
    print(f"all is measured after {time.perf_counter() - begin:.0f} s", flush=True)


def measure_case(name: str, seed: int, texts: Texts, made: Record, options: argparse.Namespace, store: Store) -> None:
    """The searches and the trainings of a case, as far as they have no records."""
    case, known = options.cases[name], {record["key"]: record for record in store.records("domain_weights")}

    def key(row: str, name: str = name) -> str:
        steps = options.cases[name].steps
        return f"{name}, {steps} steps of {options.windows}, texts {made['texts']} v{VERSION}, seed {seed}: {row}"

    def keep(row: str, record: Record) -> None:
        common = {"case": name, "seed": seed, "row": row, "steps": case.steps, "windows": options.windows}
        store.add("domain_weights", key(row), {**common, **record, "made with": made})
        known[key(row)] = record

    teacher = known.get(key("search: found", case.teacher)) if case.teacher else None
    if case.teacher and teacher is None:
        raise ValueError(f"{name}: needs the search of {case.teacher!r} with seed {seed}; measure that case before.")
    for search_of in case.searches:
        if key(f"search: {search_of}") not in known:
            record = search(search_of, case, texts, seed, options)
            keep(f"search: {search_of}", record)
            weights = ", ".join(f"{source} {weight:.2f}" for source, weight in record["weights"].items())
            print(f"  {search_of} ({record['status']}, {record['seconds']:.1f} s): {weights}", flush=True)
    found = {each: known[key(f"search: {each}")] for each in case.searches}
    if teacher is not None:
        found[TAUGHT] = teacher
    rows = weightings(case, seed, {each: [*record["weights"].values()] for each, record in found.items()})
    missing, size = [row for row in rows if key(row) not in known], SIZES[case.size]
    for begin in range(0, len(missing), size.together):
        part = missing[begin : begin + size.together]
        results = train(size, torch.tensor([rows[row] for row in part]), texts, case.steps, seed, options)
        for row, result in zip(part, results, strict=True):
            keep(row, {"weights": [*map(digits, rows[row])], **result})


# The page

WITH_OWN = {
    "half own, half equal": f"half own text ({VALIDATION} KiB), half equal",
    "half own, half found": f"half own text ({VALIDATION} KiB), half found",
    "own": f"own text ({VALIDATION} KiB) alone",
    "more own": f"own text ({OWN} KiB) alone",
}
"""Trainings that see text of the target, and their names in the table."""

FOUND, NETWORK = "**found**", "the network of the search"
"""Rows of the table: a training at the weights that were found, and y of the search, which learns from the upper level, too."""

Runs = Mapping[str, Record]
Outcome = Callable[[Record], tuple[float, float]]
"""The loss of a training on the validation text, which choices are made by, and on the test text."""


def at_the_end(record: Record) -> tuple[float, float]:
    return record["validation"][-1], record["test"][-1]


def stopped(record: Record) -> tuple[float, float]:
    """Where the validation loss was least, as with early stopping."""
    return min(zip(record["validation"], record["test"], strict=True))


def best_of(pairs: Sequence[tuple[float, float]], trials: int) -> float:
    """The mean test loss of the trial with the least validation loss, over all choices of this number of trials.

    >>> best_of([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)], 1), best_of([(3.0, 30.0), (1.0, 10.0), (2.0, 20.0)], 3)
    (20.0, 10.0)
    """
    ordered, n = sorted(pairs), len(pairs)
    return sum(test * math.comb(n - 1 - i, trials - 1) for i, (_, test) in enumerate(ordered)) / math.comb(n, trials)


def rows_of(case: DomainCase, runs: Runs, teacher: Runs, outcome: Outcome) -> dict[str, tuple[float, float]]:
    """The rows of the table for one seed: the work to get there, in trainings, and the test loss."""
    own = {name: outcome(record) for name, record in runs.items() if not name.startswith("search")}
    pairs = [own[f"{a} + {b}"] for a, b in itertools.combinations(SOURCES, 2)]
    trials = [own[f"random {i}"] for i in range(case.trials)]
    few, work = min(EQUAL_WORK, case.trials), runs["search: found"]["work"]
    rows = {f"`{name}` alone": (1.0, own[f"{name} alone"][1]) for name in SOURCES}
    rows |= {name: (1.0, own[name][1]) for name in ("equal", "in proportion to size")}
    rows["best source alone"] = float(len(SOURCES)), min(own[f"{name} alone"] for name in SOURCES)[1]
    rows["best pair"] = float(len(pairs)), min(pairs)[1]
    rows[f"best of {few} pairs"] = float(few), best_of(pairs, few)
    rows[f"best of {few} random weights"] = float(few), best_of(trials, few)
    rows[f"best of {case.trials} random weights"] = float(case.trials), min(trials)[1]
    rows[FOUND] = 1 + work, own["found"][1]
    if case.teacher:
        share = SIZES[CASES[case.teacher].size].work / SIZES[case.size].work
        seen = [(outcome(teacher[f"random {i}"])[0], own[f"random {i}"][1]) for i in range(case.trials)]
        rows[f"best of {few} random weights, by the small model"] = 1 + few * share, best_of(seen, few)
        rows[f"**{TAUGHT}**"] = 1 + teacher["search: found"]["work"] * share, own[TAUGHT][1]
    if case.one_sided:
        rows[ONE_SIDED] = 1 + work, own[ONE_SIDED][1]
    rows[NETWORK] = work, runs["search: found"]["network"]["test"][0]
    rows |= {label: (1.0, own[name][1]) for name, label in WITH_OWN.items() if name != "half own, half found"}
    rows[WITH_OWN["half own, half found"]] = 1 + work, own["half own, half found"][1]
    return rows


def shown(values: Sequence[float], n: int) -> str:
    """A mean with the half of its 95 % interval by Student's t, where there are several values.

    >>> shown([1.0, 2.0, 3.0], 1)
    '2.0 ± 2.5'
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.{n}f}"
    from scipy.stats import t  # here, since measuring needs torch alone

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{n}f} ± {half:.{n}f}"


def measured(store: Store) -> dict[str, dict[int, dict[str, Record]]]:
    """By case and seed: the records by row, of the machine and the texts of the last one; only seeds of which all is there."""
    found: dict[str, dict[int, dict[str, Record]]] = {}
    for record in store.records("domain_weights", alike="made with"):
        found.setdefault(record["case"], {}).setdefault(record["seed"], {})[record["row"]] = record
    for name, seeds in found.items():
        wanted = weightings(CASES[name], 0, dict.fromkeys(CASES[name].found, [1.0] * len(SOURCES)))
        found[name] = {seed: runs for seed, runs in seeds.items() if {*wanted} <= {*runs}}
    return found


def table(store: Store) -> list[str]:
    """The losses of each case, and the weights that were found."""
    found, lines, weights = measured(store), list[str](), list[list[str]]()
    for name, case in CASES.items():
        seeds = {s: runs for s, runs in found.get(name, {}).items() if not case.teacher or s in found.get(case.teacher, {})}
        if not seeds:
            continue
        columns = [
            [rows_of(case, runs, found[case.teacher][seed] if case.teacher else {}, outcome) for seed, runs in seeds.items()]
            for outcome in (at_the_end, stopped)
        ]
        rows = []
        for row in columns[0][0]:
            cells = [row, f"{statistics.fmean(each[row][0] for each in columns[0]):.1f}"]
            for column in columns:
                cells.append(f"{statistics.fmean(each[row][1] for each in column):.3f}")
                cells.append("" if row == FOUND else shown([each[row][1] - each[FOUND][1] for each in column], 3))
            rows.append([*cells[:4], "", ""] if row == NETWORK else cells)
        one = next(iter(seeds.values()))["found"]
        tokens = f"{one['steps'] * one['windows'] * LENGTH:,} tokens, {len(seeds)} seeds."
        head = ("", "work", "test loss", "above found", "with early stopping", "above found")
        lines += [f"### {case.title}", "", tokens, "", *pages.markdown(head, rows), ""]
        for each in case.searches:
            ends = [runs[f"search: {each}"]["weights"] for runs in seeds.values()]
            label = case.title + each.removeprefix("found")
            weights.append([label, *(shown([end[source] for end in ends], 2) for source in SOURCES)])
    if not lines:
        return ["There are no records yet."]
    made = store.records("domain_weights", alike="made with")[-1]["made with"]
    last = f"{made['device']}, torch {made['torch']}, texts of Python {made['python']}."
    head = ("", *(f"`{name}`" for name in SOURCES))
    return [*lines, "### The weights that were found", "", *pages.markdown(head, weights), "", last]


TABLES: pages.Tables = {"domain weights": ("domain-weights.md", table)}


def figure(store: Store, path: Path = DOCS / "_static" / "domain_weights.svg") -> None:
    """Draw the weights over the steps of the searches, a line for each seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from meha_lab.reproduce.figures import RC

    curves = {
        name + each.removeprefix("found"): [runs[f"search: {each}"]["curve"] for runs in seeds.values()]
        for name, seeds in measured(store).items()
        for each in CASES[name].searches
        if seeds
    }
    if not curves:
        return
    with rc_context(RC):
        drawing = Figure(figsize=(2.6 * len(curves), 3.4), layout="constrained")
        axes = drawing.subplots(1, len(curves), squeeze=False, sharey=True)[0]
        for axis, (name, several) in zip(axes, curves.items(), strict=True):
            for i, source in enumerate(SOURCES):
                for j, curve in enumerate(several):
                    weights = [each[i] for each in curve["weights"]]
                    axis.plot(curve["step"], weights, color=f"C{i}", linewidth=1.2, label="" if j else source)
            axis.set(xlabel="steps of the search", ylim=(-0.02, 1.02))
            axis.set_title("\n".join(textwrap.wrap(name, 26)), fontsize=9)
            axis.grid(color="#e8e8e8", linewidth=0.7)
        axes[0].set_ylabel("weight")
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False)
        drawing.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="run what has no record")
    parser.add_argument("--draw", action="store_true", help="draw the tables and the figure of docs/domain-weights.md")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", action="append", choices=[*CASES, *QUICK], help="only this; may be given again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps, one seed")
    parser.add_argument("--steps", type=int, help="of all cases, instead of theirs, for a trial")
    parser.add_argument("--windows", type=int, help=f"of a batch, instead of {WINDOWS}")
    parser.add_argument("--eager", action="store_true", help="do not record the steps of a search as a CUDA graph")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the records")
    options = parser.parse_args(arguments)
    options.cases = QUICK if options.quick else CASES
    if strange := [name for name in options.case or [] if name not in options.cases]:
        parser.error(f"--case {strange[0]!r}: with --quick {[*QUICK]}, without {[*CASES]}.")
    if options.steps:
        options.cases = {name: replace(case, steps=options.steps) for name, case in options.cases.items()}
    options.windows = options.windows or (4 if options.quick else WINDOWS)
    options.case, options.seeds = options.case or [*options.cases], options.seeds[: 1 if options.quick else None]
    store = Store(options.out)
    if options.measure:
        torch.set_float32_matmul_precision("high")  # TF32 on a GPU
        measure(options, store)
    if options.draw:
        pages.draw(TABLES)
        figure(store)


if __name__ == "__main__":
    main()
