"""Architecture search on CIFAR-10: the paper's two tables, random search, and MEHA on P-DARTS and PC-DARTS."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from meha_lab.datasets.cifar10 import FOLDERS, PUBLISHED
from meha_lab.datasets.fetch import find
from meha_lab.datasets.sources import SOURCES
from meha_lab.reproduce.architecture import FULL, LONGER, QUICK, REDUCED, ROWS, Protocol
from meha_lab.reproduce.cells import Case, Cell, Record
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.experiments import paper
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Records, holds, mean_of, plus_minus, prose
from meha_lab.reproduce.experiments.racing import picture
from meha_lab.reproduce.figures import Curve, Panel
from meha_lab.reproduce.page import Block, Details, Item, Mark, Picture, Section, Table
from meha_lab.reproduce.tuning import Tuning
from meha_lab.tasks.architecture_search import FinalNetwork, Genotype, architecture_search

__all__ = ["ArchitectureSearchExperiment"]


KIND: Literal["architecture"] = "architecture"
SEEDS = 2
QUICK_ROWS = ("DARTS, order 1", "PC-DARTS", "MEHA", "MEHA on P-DARTS", "Random search")
RANDOM = "Random search"
PUBLISHED_CELL = "the cell published with MEHA"
IN_LONGER = ("MEHA", "DARTS, order 1")
"""Rows whose cells are trained longer: those that seed 0 of the reduced protocol found."""


def _case(protocol: Protocol) -> Case:
    return Case(protocol.name, architecture_search, (("protocol", protocol),), data=True)


@cache
def genotypes() -> dict[str, dict[str, Any]]:
    """Cells by name: those that the reduced protocol found with seed 0, and the one that the paper's authors published."""
    found: dict[str, dict[str, Any]] = json.loads((files("meha_lab.reproduce") / "genotypes.json").read_text())
    return found


class ArchitectureSearchExperiment(Experiment):
    """Test accuracy of the architectures that twelve searches find with the same number of passes."""

    name = "architecture-search"
    title = "Architecture search: the operations of a network's cells"
    about = "CIFAR-10: test accuracy, size, time and memory of the paper's eight searches and of ours (--full: its protocol)"

    def lacks(self, options: Options) -> str:
        try:
            if not options.quick:
                find(SOURCES["cifar10"], [f"{PUBLISHED}.tar.gz"], None, False, instead=[f"{FOLDERS}.tar.gz"])
        except FileNotFoundError as error:
            return str(error)
        return ""

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        protocol = QUICK if options.quick else FULL if options.full else REDUCED
        seeds = range(options.seeds if options.seeds is not None else 1 if options.quick else SEEDS)
        rows = {label: row for label, row in ROWS.items() if label in QUICK_ROWS or not options.quick}
        cells = [
            Cell(KIND, _case(protocol), CONTENDERS[row.method], {"row": label}, seed, label)
            for label, row in rows.items()
            if options.wants(row.method)
            for seed in seeds
        ]
        if protocol is REDUCED and options.wants("MEHA"):
            own = {"genotype": genotypes()[PUBLISHED_CELL]}
            cells.append(Cell(KIND, _case(REDUCED), CONTENDERS["MEHA"], own, 0, PUBLISHED_CELL))
        for label in IN_LONGER if protocol is REDUCED else ():
            if label in genotypes() and options.wants(ROWS[label].method):
                setting = {"genotype": genotypes()[label]}
                cells.append(Cell(KIND, _case(LONGER), CONTENDERS[ROWS[label].method], setting, 0, label))
        return cells

    def section(self, results: Records) -> Section:
        blocks: list[Block] = [prose(self.name, "about"), prose(self.name, "protocol")]
        for protocol in (REDUCED, FULL, QUICK):
            methods = results.methods(protocol.name, KIND)
            if methods:
                blocks += [self._accuracies(results, protocol, methods), self._levels(results, protocol, methods)]
                blocks += [prose(self.name, "levels"), self._curves(results, protocol, methods)]
                blocks += self._cells(results, protocol, methods)
        if results.methods(LONGER.name, KIND):
            blocks += [self._longer(results), prose(self.name, "longer")]
        blocks += [prose(self.name, part) for part in ("why", "courses", "speed", "care")]
        return Section(self.name, self.title, blocks)

    def _accuracies(self, results: Records, protocol: Protocol, methods: Sequence[str]) -> Table:
        """Test accuracy and size of the final networks, and the cost of the searches."""
        scores = {m: mean_of(_scores(results.get(protocol.name, m, KIND))) for m in methods}
        best = max((m for m in methods if m in ROWS), key=lambda m: scores[m][0], default="")
        rows: list[list[Item]] = []
        for method in methods:
            records = results.get(protocol.name, method, KIND)
            theirs = _theirs(protocol, method)
            row: list[Item] = [method + _ended(records)]
            row.append(plus_minus(scores[method], "best" if method == best else "number", digits=2))
            row.append(plus_minus(mean_of([_size(record) for record in records]), digits=2))
            row.append(plus_minus(mean_of([100 * _genotype(record).skips for record in records]), digits=0))
            row += _costs(records)
            row += (
                [None, None]
                if theirs is None
                else [Mark(f"{theirs[4]:.2f}", "paper", theirs[4]), Mark(f"{theirs[5]:.2f}", "paper", theirs[5])]
            )
            rows.append(row)
        final = protocol.final
        columns = ["search", "test accuracy, %", "parameters, M", "skips, %", "steps", "search, s", "search, GiB"]
        return Table(
            _name(protocol),
            f"Test accuracy of the architectures found, after {final['epochs']} epochs of final training"
            f" ({final['channels']} channels, {final['cells']} cells){_seeds(results, protocol, methods)}.",
            [*columns, "paper: test, %", "paper: parameters, M"],
            rows,
            "Parameters are those of the cell in the paper's final network (8 cells, 36 channels), without the auxiliary head."
            " Skips: share of skip connections in the normal cell. Time and memory of the search alone, from runs with the GPU"
            " to themselves.",
        )

    def _levels(self, results: Records, protocol: Protocol, methods: Sequence[str]) -> Table:
        """Accuracies during the search, and of the final network on its training images."""
        rows: list[list[Item]] = []
        for method in methods:
            records = results.get(protocol.name, method, KIND)
            theirs = _theirs(protocol, method)
            row: list[Item] = [method]
            for part, name in (("search", "train accuracy"), ("search", "accuracy"), ("final", "train accuracy")):
                values = [100 * record[part][name] for record in records if record[part]]
                row.append(plus_minus(mean_of(values), digits=1) if values else None)
            row += [None] * 3 if theirs is None else [Mark(f"{value:.1f}", "paper", value) for value in theirs[:3]]
            rows.append(row)
        columns = ["search", "search: train, %", "search: valid, %", "final: train, %"]
        paper_columns = ["paper: search train", "paper: search valid", "paper: final train"]
        caption = "Accuracy of the super-network at the end of the search, and of the final network on its training images."
        return Table(f"{_name(protocol)}-levels", caption, [*columns, *paper_columns], rows)

    def _curves(self, results: Records, protocol: Protocol, methods: Sequence[str]) -> Picture:
        def panel(title: str, name: str, label: str) -> Panel:
            curves = []
            for method in methods:
                runs = [record["curve"] for record in results.get(protocol.name, method, KIND) if record["curve"]]
                if runs:
                    curves.append(Curve(method, [(_progress(run), run[name]) for run in runs]))
            return Panel(title, "share of the steps, %", label, curves, logx=False, logy=False)

        panels = [
            panel("Loss on validation batches", "upper", "cross entropy"),
            panel("Entropy of the mixtures", "entropy", "nats"),
        ]
        caption = "The course of the searches: median over the seeds."
        return picture(f"{_name(protocol)}-course", caption, "Two panels of curves, one line for each search.", panels)

    def _cells(self, results: Records, protocol: Protocol, methods: Sequence[str]) -> list[Block]:
        """Pictures of the cells that the first seed found: MEHA's and those of DARTS at once, others on demand."""
        pictures = {}
        for method in methods:
            genotype = _genotype(results.get(protocol.name, method, KIND)[0])
            name = f"{_name(protocol)}-{method.lower().replace(', ', '-').replace(' ', '-')}"
            pictures[method] = Picture(name, f"{method}: the cells found, first seed.", genotype.draw(), str(genotype))
        first = [pictures.pop(method) for method in ("MEHA", "DARTS, order 1") if method in pictures]
        return [*first, Details("The cells of the other searches", list(pictures.values()))]

    def _longer(self, results: Records) -> Table:
        rows: list[list[Item]] = []
        for method in results.methods(LONGER.name, KIND):
            record = results.get(LONGER.name, method, KIND)[0]
            final, theirs = record["final"], paper.ARCHITECTURE_SEARCH.get(method)
            row: list[Item] = [method, 100 * final["accuracy"], 100 * final["train accuracy"], final["parameters"] / 1e6]
            alone = final["seconds"] if record["jobs"] == 1 else None
            rows.append([*row, alone, None if theirs is None else Mark(f"{theirs[4]:.2f}", "paper", theirs[4])])
        epochs = LONGER.final["epochs"]
        return Table(
            "architecture-search-longer",
            f"The cells of seed 0, trained for {epochs} epochs with 36 channels, cutout and the auxiliary head.",
            ["search", "test accuracy, %", "train accuracy, %", "parameters, M", "training, s", "paper, 600 epochs: test, %"],
            rows,
        )

    def claims(self, results: Records) -> list[Claim]:
        claims = []
        for protocol in (REDUCED, FULL):
            scores = {
                m: _scores(results.get(protocol.name, m, KIND)) for m in results.methods(protocol.name, KIND) if m in ROWS
            }
            if "MEHA" not in scores:
                continue
            mine, where = scores.pop("MEHA"), f"CIFAR-10 ({protocol.name.partition(', ')[2]})"
            others = {m: found for m, found in scores.items() if m in paper.ARCHITECTURE_SEARCH and not m.startswith("MEHA")}
            if others:
                best = max(others, key=lambda m: mean_of(others[m])[0])
                claims.append(_better(f"{where}: MEHA finds the best architecture", mine, others[best], best))
            if RANDOM in scores:
                claims.append(_better(f"{where}: MEHA's search beats random search", mine, scores[RANDOM], RANDOM.lower()))
        return claims


def _better(claim: str, mine: Sequence[float], others: Sequence[float], name: str) -> Claim:
    """Compare test accuracies: a claim is decided where all seeds agree."""
    measured = f"{mean_of(mine)[0]:.2f} % against {mean_of(others)[0]:.2f} % of {name}"
    if min(mine) > max(others) or max(mine) < min(others):
        return Claim(claim, measured, holds(min(mine) > max(others)))
    return Claim(claim, f"{measured}, and the seeds overlap", "open")


def _name(protocol: Protocol) -> str:
    return protocol.name.replace(", reduced", "").replace(", ", "-").replace(" ", "-")


def _theirs(protocol: Protocol, method: str) -> tuple[float, ...] | None:
    """The paper's values, which have no meaning beside the quick form."""
    return None if protocol is QUICK else paper.ARCHITECTURE_SEARCH.get(method)


def _seeds(results: Records, protocol: Protocol, methods: Sequence[str]) -> str:
    seeds = max(len(results.get(protocol.name, method, KIND)) for method in methods)
    return f"; mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""


def _genotype(record: Record) -> Genotype:
    return Genotype.from_dict(record["genotype"])


def _size(record: Record) -> float:
    """Millions of parameters in the paper's final network."""
    return FinalNetwork(_genotype(record)).parameter_count / 1e6


def _scores(records: Sequence[Record]) -> list[float]:
    """The test accuracy of each seed, in percent."""
    return [100 * record["final"]["accuracy"] for record in records]


def _costs(records: Sequence[Record]) -> list[Item]:
    """Steps, time and memory of the search; times only from runs that had the machine to themselves."""
    searches = [(record["search"], record["jobs"]) for record in records if record["search"]]
    if not searches:
        return [None, None, None]
    times = [search["seconds"] for search, jobs in searches if jobs == 1]
    memory = [search["memory"] / 2**30 for search, _ in searches if search["memory"]]
    return [
        searches[0][0]["steps"],
        plus_minus((mean_of(times)[0], 0.0), digits=0) if times else None,
        plus_minus((mean_of(memory)[0], 0.0), digits=1) if memory else None,
    ]


def _ended(records: Sequence[Record]) -> str:
    """How searches ended early, in a few words."""
    words = {"diverged": "diverges", "non-finite": "diverges", "broke down": "breaks down"}
    kinds = {record["outcome"].partition(":")[0] for record in records} & set(words)
    return f" ({', '.join(words[kind] for kind in sorted(kinds))})" if kinds else ""


def _progress(run: Mapping[str, Sequence[float]]) -> list[float]:
    """The steps of all stages one after the other, as a share of all."""
    count = len(run["step"])
    return [100 * (i + 1) / count for i in range(count)]
