"""The learning tasks: data hyper-cleaning and few-shot classification."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from meha_lab.datasets.fetch import find
from meha_lab.datasets.sources import SOURCES
from meha_lab.reproduce import learning
from meha_lab.reproduce.cells import TUNING_SEEDS, Case, Cell, Record
from meha_lab.reproduce.contenders import CONTENDERS, Contender, Setting
from meha_lab.reproduce.experiments import paper
from meha_lab.reproduce.experiments.base import (
    PAPER,
    Answer,
    Claim,
    Experiment,
    Options,
    Records,
    holds,
    mean_of,
    number,
    plus_minus,
    prose,
    spread,
)
from meha_lab.reproduce.experiments.racing import OWN, compared, first, picture, reached, shown, times
from meha_lab.reproduce.figures import Curve, Panel
from meha_lab.reproduce.page import Block, Details, Item, Mark, Section, Table
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store
from meha_lab.tasks import few_shot, hyper_cleaning

__all__ = ["FewShotLearning", "HyperCleaningExperiment", "lacking"]


METHODS = ("MEHA", "RHG", "BDA", "IAPTT", "CG", "BAMM", "BOME", "F2SA", "VPBGD")

NAMES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "digits": "digits"}

WORK, LARGE_WORK = 3600, 7200

COLUMNS = ("test accuracy, %", "F1, %", "validation loss", "seconds")

CLEANING = {
    data: Case(f"hyper-cleaning, {name}", hyper_cleaning, (("data", data),), work=WORK, seconds=3600.0, looks=18, data=True)
    for data, name in NAMES.items()
}

ANNEALED = 0.025
"""Exponent of the paper's inverse power annealing of alpha and beta, 1/40; the paper states none."""

PRINTED: Setting = {
    "alpha": {"InversePower": [0.1 / 5000, ANNEALED]},
    "beta": {"InversePower": [0.15, ANNEALED]},
    "eta": 0.001,
    "gamma": 100.0,
    "c": 0.2,
    "p": 0.25,
}
"""MEHA with the numbers of the paper's table, and its annealing."""

SINGLE = "MEHA, single loop"
"""MEHA with one inner step, and the best setting of those."""

FASTER: Setting = {**learning.chosen("hyper-cleaning", "MEHA"), "beta": {"Power": [0.075, 0.1667]}, "eta": 0.06}
"""Steps of y and theta that fit networks without a sigmoid."""

LARGER: Setting = {**FASTER, "alpha": {"Power": [0.45, 0.1667]}, "eta": 0.03}
"""Weights that settle early, and a slower theta, for longer runs."""

HALVED: Setting = {**learning.chosen("hyper-cleaning", "MEHA"), "beta": {"Power": [0.15, 0.1667]}}
"""Half the step of y."""

VARIANTS: Mapping[str, tuple[tuple[str, ...], str, int, Setting]] = {
    "MEHA, half the step of y": (("fashion-mnist",), "sigmoid", WORK, HALVED),
    "MEHA, ReLU": (("mnist",), "relu", WORK, FASTER),
    "MEHA, linear": (("mnist",), "none", WORK, FASTER),
    "MEHA, ReLU, more work": (("mnist",), "relu", LARGE_WORK, LARGER),
}
"""MEHA beyond the comparison: data sets, activation, work and setting."""


def _variants(data: str) -> dict[str, Case]:
    """The cases of the variants on a data set, by label."""
    case = CLEANING[data]
    return {
        label: replace(case, name=f"{case.name}, {label}", arguments=(*case.arguments, ("activation", activation)), work=work)
        for label, (where, activation, work, _) in VARIANTS.items()
        if data in where
    }


def lacking(names: Sequence[str], options: Options) -> str:
    """Which data are not on this machine; the quick forms need none."""
    try:
        for source in [] if options.quick else [SOURCES[name] for name in names]:
            find(source, [name for name in source.files if not name.startswith("t10k")], None, False)
    except FileNotFoundError as error:
        return str(error)
    return ""


class LearningExperiment(Experiment):
    """An experiment whose settings are chosen among those of ``learning.json``, on one case and one seed."""

    @abstractmethod
    def tried_on(self, options: Options) -> Case:
        """The case on which settings are chosen."""

    def trials(self, options: Options, tuning: Tuning) -> list[Cell]:
        return [cell for cells in self._trials(options, tuning).values() for cell in cells]

    def chosen(self, options: Options, tuning: Tuning, store: Store) -> Tuning:
        attempts: dict[str, list[learning.Attempt]] = {}
        for method, cells in self._trials(options, tuning).items():
            records = [store.get(cell) for cell in cells]
            attempts[method] = [
                learning.attempted(self.name, cell.setting, record)
                for cell, record in zip(cells, records, strict=True)
                if record is not None
            ]
            known = [attempt for attempt in tuning.attempts[self.name][method] if len(attempt) > 1]
            if len(known) < len(tuning.attempts[self.name][method]):
                attempts[method] = [*known, *attempts[method]]
        return Tuning({}, {self.name: {method: rows for method, rows in attempts.items() if rows}})

    def _trials(self, options: Options, tuning: Tuning) -> dict[str, list[Cell]]:
        """The cells of every method's attempts; where some are declared and not yet tried, of these alone."""
        case, cells = self.tried_on(options), {}
        for method, attempts in tuning.attempts[self.name].items():
            if options.wants(method):
                fresh = [attempt for attempt in attempts if len(attempt) == 1] or attempts
                cells[method] = [Cell("training", case, CONTENDERS[method], row[0], TUNING_SEEDS[0]) for row in fresh]
        return cells


class HyperCleaningExperiment(LearningExperiment):
    """Accuracy, F1 and validation loss of nine methods with the same work."""

    name = "hyper-cleaning"
    title = "Data hyper-cleaning: a weight for each unverified example"
    about = "MNIST and FashionMNIST with half of the labels random: test accuracy, F1 and validation loss of nine methods"

    def lacks(self, options: Options) -> str:
        return lacking(("mnist", "fashion-mnist"), options)

    def tried_on(self, options: Options) -> Case:
        return replace(CLEANING["digits"], work=600, looks=8) if options.quick else CLEANING["mnist"]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells: list[Cell] = []

        def add(case: Case, contender: Contender, setting: Setting, label: str = "") -> None:
            if options.wants(contender.name):
                limited = replace(case, seconds=options.limit or case.seconds)
                cells.extend(Cell("training", limited, contender, setting, s, label) for s in options.trained)

        for data in ("digits",) if options.quick else ("mnist", "fashion-mnist"):
            case = self.tried_on(options) if options.quick else CLEANING[data]
            for method in METHODS:
                add(case, CONTENDERS[method], tuning.trained(self.name, method))
            add(case, CONTENDERS["MEHA"], tuning.trained(self.name, "MEHA", single_loop=True), SINGLE)
            add(case, CONTENDERS["automatic"], {})
            if not options.quick:
                add(case, CONTENDERS["MEHA"], PRINTED, PAPER)
            for label, variant in ({} if options.quick else _variants(data)).items():
                add(variant, CONTENDERS["MEHA"], VARIANTS[label][3], label)
        return cells

    def section(self, results: Records) -> Section:
        shown_data = [data for data in NAMES if results.methods(CLEANING[data].name, "training")]
        blocks: list[Block] = [prose(self.name, "about")]
        for data in shown_data:
            blocks += [self._table(results, data), self._picture(results, data)]
        rows = [
            [f"{NAMES[data]}: {label}", *_scores(results.get(case.name, label, "training"))]
            for data in NAMES
            for label, case in _variants(data).items()
            if results.get(case.name, label, "training")
        ]
        if rows:
            caption = "MEHA beyond the comparison: a smaller step of y, other networks, more work."
            note = f"{WORK:,} units of work, {LARGE_WORK:,} where there is more."
            blocks.append(Table("hyper-cleaning-variants", caption, ["", *COLUMNS], rows, note))
        blocks += [prose(self.name, part) for part in ("why", "level", "automatic", "care")]
        blocks += [Details("Which settings were tried", [_settings(self.name)])]
        return Section(self.name, self.title, blocks)

    def _table(self, results: Records, data: str) -> Table:
        case, theirs = CLEANING[data].name, paper.HYPER_CLEANING.get(data, {})
        methods = results.methods(case, "training")
        scores = {m: [mean_of(_last(results.get(case, m, "training"), n))[0] for n in ("accuracy", "f1")] for m in methods}
        best = [max(methods, key=lambda m: scores[m][i]) for i in (0, 1)]
        rows: list[list[Item]] = []
        for method in methods:
            records = results.get(case, method, "training")
            row = [
                shown(method) + _inner(method, records) + _ended(records),
                *_scores(records, [method == name for name in best]),
            ]
            if theirs:
                printed = theirs.get(method)
                row.append(None if printed is None else Mark(f"{printed[0]:.2f} / {printed[1]:.2f}", "paper", printed[0]))
            rows.append(row)
        columns = ["method", *COLUMNS]
        seeds = max((len(results.get(case, m, "training")) for m in methods), default=0)
        return Table(
            f"hyper-cleaning-{data}",
            f"{NAMES[data]}: after as many gradients of F and f and Hessian-vector products as a run may take"
            + (f"; mean ± standard deviation over {seeds} seeds." if seeds > 1 else "."),
            [*columns, "paper: accuracy / F1, %"] if theirs else columns,
            rows,
        )

    def _picture(self, results: Records, data: str) -> Any:
        case = CLEANING[data].name
        methods = list(results.methods(case, "training"))

        def panel(title: str, x: str, y: str, ylabel: str, better: Any, factor: float) -> Panel:
            lines = []
            for method in methods:
                runs = [r["curve"] for r in results.get(case, method, "training")]
                lines.append(Curve(shown(method), [(c[x][1:], [v and factor * v for v in c[y][1:]]) for c in runs]))
            xlabel = "gradients and products" if x == "work" else "seconds"
            return Panel(title, xlabel, ylabel, lines, logx=x == "seconds", logy=y == "validation loss", better=better)

        panels = [
            panel("Test accuracy against work", "work", "accuracy", "%", "high", 100),
            panel("F1 against work", "work", "f1", "%", "high", 100),
            panel("Validation loss against work", "work", "validation loss", "cross entropy", "low", 1),
            panel("Test accuracy against time", "seconds", "accuracy", "%", "high", 100),
        ]
        caption = f"{NAMES[data]}: median and 20–80 % band over seeds."
        return picture(f"hyper-cleaning-{data}", caption, "Four panels of learning curves, one line for each method.", panels)

    def claims(self, results: Records) -> list[Claim]:
        claims = []
        for data, name in NAMES.items():
            case = CLEANING[data].name
            own = results.get(case, "MEHA", "training")
            if not own:
                continue
            scores = {m: _percent(results.get(case, m, "training")) for m in results.methods(case, "training")}
            mine = scores.pop("MEHA")
            if data in paper.HYPER_CLEANING:
                theirs = paper.HYPER_CLEANING[data]["MEHA"]
                measured = f"{mine[0]:.2f} % and {mine[1]:.2f} % over {len(own)} seed{'s' if len(own) > 1 else ''}"
                answer = holds(mine[0] >= theirs[0] and mine[1] >= theirs[1])
                claim = f"{name}: MEHA has an accuracy of {theirs[0]} % and an F1 of {theirs[1]} %"
                claims.append(Claim(claim, measured, answer))
            others = {m: s for m, s in scores.items() if m not in (*OWN, SINGLE)}
            claim = f"{name}: MEHA has the best accuracy and F1 for the same work"
            short = [m for m in ("MEHA", *others) if any(r["outcome"] == "time" for r in results.get(case, m, "training"))]
            if short:
                claims.append(Claim(claim, f"time was up for {', '.join(map(shown, short))}", "open"))
            elif others:
                claims.append(_best_claim(claim, mine, others))
        return claims


def _best_claim(claim: str, mine: Sequence[float], others: Mapping[str, Sequence[float]]) -> Claim:
    """MEHA against the best of the others, by accuracy and by F1; differences of a tenth of a percent are level."""
    measured, ahead = [], []
    for i, what in enumerate(("accuracy", "F1")):
        best = max(others, key=lambda m: others[m][i])
        ahead.append(mine[i] - others[best][i])
        measured.append(f"{what} {mine[i]:.2f} % against {others[best][i]:.2f} % of {shown(best)}")
    answer: Answer = "holds" if min(ahead) >= -0.1 else "in part" if max(ahead) >= -0.1 else "does not hold"
    if answer == "holds" and min(ahead) < 0.1:
        measured.append("level with the best")
    return Claim(claim, "; ".join(measured), answer)


def _inner(method: str, records: Sequence[Record]) -> str:
    """What the name of a row adds for MEHA beyond the single loop: the number of its inner steps, and gamma."""
    settings = [ast.literal_eval(record["setting"]) for record in records] if method == "MEHA" else []
    found = sorted({(setting.get("inner_steps", 1), setting["gamma"]) for setting in settings if "gamma" in setting})
    return "".join(f", {steps} inner steps, γ = {gamma:,.0f}" for steps, gamma in found if steps > 1)


def _ended(records: Sequence[Record]) -> str:
    """How runs ended that did not use up their work, in a few words."""
    words = {"time": "time was up", "diverged": "diverges", "non-finite": "diverges", "broke down": "breaks down"}
    kinds = {record["outcome"].partition(":")[0] for record in records} & set(words)
    return f" ({', '.join(words[kind] for kind in sorted(kinds))})" if kinds else ""


def _last(records: Sequence[Record], name: str) -> list[float | None]:
    return [record["last"].get(name) for record in records]


def _percent(records: Sequence[Record]) -> list[float]:
    return [100 * mean_of(_last(records, name))[0] for name in ("accuracy", "f1")]


def _scores(records: Sequence[Record], best: Sequence[bool] = (False, False)) -> list[Item]:
    """Accuracy, F1, validation loss and time."""
    row: list[Item] = []
    for name, mark in zip(("accuracy", "f1"), best, strict=True):
        middle, deviation = mean_of(_last(records, name))
        row.append(plus_minus((100 * middle, 100 * deviation), "best" if mark else "number", digits=2))
    row.append(plus_minus(mean_of(_last(records, "validation loss")), digits=3))
    return [*row, spread(_last(records, "seconds")).cell(band=False)]


def _settings(task: str) -> Table:
    """The chosen settings."""
    rows: list[list[Item]] = []
    for method, tried in learning.shipped()[task].items():
        setting = ", ".join(f"{name} {_shown_value(value)}" for name, value in learning.chosen(task, method).items())
        measured = sum(len(attempt) > 1 for attempt in tried)  # others are declared
        rows.append([shown(method), measured, setting])
    note = "Choice on seed 1000, which is not reported; learning.json in the package lists every trial and its result."
    return Table(f"{task}-settings", "What was tried and chosen.", ["method", "settings tried", "chosen"], rows, note)


def _shown_value(value: Any) -> str:
    if isinstance(value, Mapping):
        ((name, arguments),) = value.items()
        return f"{name}({', '.join(f'{a:g}' for a in arguments)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


TARGET = 0.9

PRINTED_FEW_SHOT: Setting = {
    "lr": {"InversePower": [0.08, ANNEALED]},
    "beta": {"InversePower": [0.05, ANNEALED]},
    "eta": 0.001,
    "gamma": 100.0,
    "c": 0.067,
    "p": 0.08,
    "pool": 200,
}
"""MEHA with the numbers of the paper's table, and its annealing: x moves by Adam, and a pool of tasks keeps its heads, as a
single loop needs it."""

FRESH: Setting = {"warm_start": False}
"""Heads belong to the tasks of a batch; that is part of the problem, and the only setting of the automatic method."""

FEW_SHOT = {
    ways: Case(
        f"few-shot, {ways}-way",
        few_shot,
        (("data", "omniglot"), ("ways", ways)),
        target=TARGET,
        steps=400,
        seconds=3600.0,
        looks=80,
        data=True,
    )
    for ways in (10, 20)
}

QUICK_FEW_SHOT = Case(
    "few-shot, 5-way, digits",
    few_shot,
    (("data", "digits"), ("ways", 5), ("tasks", 4), ("width", 8), ("test_tasks", 40)),
    target=0.6,
    steps=40,
    seconds=20.0,
    looks=10,
    data=True,
)


class FewShotLearning(LearningExperiment):
    """Time to 90 % test accuracy."""

    name = "few-shot"
    title = "Few-shot classification: features shared by tasks, a head for each"
    about = "Omniglot, 10-way and 20-way 1-shot: time to 90 % test accuracy of nine methods"
    cases: ClassVar[list[Case]] = [*FEW_SHOT.values(), QUICK_FEW_SHOT]

    def lacks(self, options: Options) -> str:
        return lacking(("omniglot",), options)

    def tried_on(self, options: Options) -> Case:
        return QUICK_FEW_SHOT if options.quick else FEW_SHOT[10]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells = []
        for case in [QUICK_FEW_SHOT] if options.quick else list(FEW_SHOT.values()):
            limited = replace(case, seconds=options.limit or case.seconds)
            entries = [(CONTENDERS[method], tuning.trained(self.name, method)) for method in METHODS]
            for contender, setting in [*entries, (CONTENDERS["automatic"], FRESH)]:
                if options.wants(contender.name):
                    cells += [Cell("training", limited, contender, setting, s) for s in options.trained]
            if options.wants("MEHA") and not options.quick:
                cells += [Cell("training", limited, CONTENDERS["MEHA"], PRINTED_FEW_SHOT, s, PAPER) for s in options.trained]
        return cells

    def section(self, results: Records) -> Section:
        shown_cases = [case for case in self.cases if results.methods(case.name, "training")]
        blocks: list[Block] = [prose(self.name, "about"), prose(self.name, "heads")]
        blocks += [self._table(results, case) for case in shown_cases]
        panels = [
            Panel(
                case.name.partition(", ")[2],
                x,
                "test accuracy, %",
                [
                    Curve(shown(m), [(_from_one(r["curve"], x), _from_one(r["curve"], "accuracy")) for r in records])
                    for m in results.methods(case.name, "training")
                    for records in [results.get(case.name, m, "training")]
                ],
                logx=False,
                logy=False,
                target=100 * (case.target or 0),
                better="high",
            )
            for case in shown_cases
            for x in ("seconds", "step")
        ]
        caption = "Test accuracy against training time and against batches, until the target; median and band over seeds."
        blocks.append(picture(self.name, caption, "Curves of accuracy that rise to the target, one for each method.", panels))
        parts = ("printed", "why", "automatic", "care") if self._printed(results) else ("why", "automatic", "care")
        blocks += [prose(self.name, part) for part in parts]
        blocks += [Details("Which settings were tried", [_settings(self.name)])]
        return Section(self.name, self.title, blocks)

    def _printed(self, results: Records) -> bool:
        """Whether a row has the paper's values."""
        return any(results.get(case.name, PAPER, "training") for case in self.cases)

    def _table(self, results: Records, case: Case) -> Table:
        ways = dict(case.arguments)["ways"]
        theirs = paper.FEW_SHOT.get(ways, {}) if case is not QUICK_FEW_SHOT else {}
        methods = results.methods(case.name, "training")
        seconds = {m: reached(results.get(case.name, m, "training"), "seconds") for m in methods}
        known = {m: s.middle for m, s in seconds.items() if s.middle is not None}
        fastest = min(known, key=lambda m: known[m]) if known else ""
        rows: list[list[Item]] = []
        for method in methods:
            records, took = results.get(case.name, method, "training"), seconds[method]
            row: list[Item] = [shown(method)]
            if took.middle is None:
                at = mean_of(_last(records, "accuracy"))[0]
                row += [Mark(f"not reached: {100 * at:.1f} % after {records[0]['last']['step']} batches", "failed"), None, None]
            else:
                base = known.get("MEHA")
                row.append(Mark(took.text(), "best", took.middle) if method == fastest else took.cell())
                row.append(None if base is None else Mark(times(took.middle / base), "number", took.middle / base))
                row.append(reached(records, "step").cell(band=False))
            pace = spread([1000 * r["last"]["seconds"] / max(r["last"]["step"], 1) for r in records])
            row.append(pace.cell(band=False))
            row.append(plus_minus([100 * value for value in mean_of(_last(records, "accuracy"))], digits=2))
            if theirs:
                row.append(Mark(f"{theirs[method][0]:.2f}", "paper", theirs[method][0]) if method in theirs else None)
                row += compared({m: printed[1] for m, printed in theirs.items()}, method)
            rows.append(row)
        target = f"{100 * (case.target or 0):.0f} %"
        columns = ["method", f"seconds to {target}", "relative to MEHA", "batches", "ms a batch", "test accuracy at the end, %"]
        columns += ["paper: accuracy, %", "paper: seconds", "paper: relative to MEHA"] if theirs else []
        return Table(
            f"few-shot-{'digits-' if not theirs else ''}{ways}",
            f"{case.name.partition(', ')[2]}, 1-shot: training time until the test accuracy is {target}.",
            columns,
            rows,
        )

    def claims(self, results: Records) -> list[Claim]:
        claims = []
        for case in self.cases:
            own, name = results.get(case.name, "MEHA", "training"), case.name.capitalize()
            if not own:
                continue
            took, target = reached(own, "step"), f"{100 * (case.target or 0):.0f} %"
            measured = "not from most seeds" if took.middle is None else f"after {number(took.middle)} batches"
            claims.append(Claim(f"{name}: MEHA reaches {target}", measured, holds(took.middle is not None)))
            claims.append(first(results, case.name, f"{name}: MEHA is fastest to {target}", "training"))
        return claims


def _from_one(curve: Mapping[str, Sequence[float]], name: str) -> list[float]:
    return [100 * v if name == "accuracy" else v for v in curve[name][1:]]
