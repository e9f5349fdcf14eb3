"""The lasso toy, and how MEHA's numbers matter there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from meha.methods import Uniform
from meha.problems import lasso
from meha_lab.reproduce.cells import Cell, Record
from meha_lab.reproduce.contenders import AUTOMATIC, CONTENDERS, Setting
from meha_lab.reproduce.experiments import paper
from meha_lab.reproduce.experiments.base import Answer, Claim, Experiment, Options, Race, Records, prose
from meha_lab.reproduce.experiments.cases import LASSO
from meha_lab.reproduce.experiments.racing import TWICE, ends_table, first, last_error, own_end, picture, race_table, reached
from meha_lab.reproduce.figures import Curve, Panel
from meha_lab.reproduce.page import Block, Item, Mark, Section, Table
from meha_lab.reproduce.tuning import Tuning

__all__ = ["LassoToy", "Sensitivity"]


CANDIDATES = 100
"""What a search may try."""


def _search(name: str, seed: int) -> Setting:
    """A search on [0, 1]^n."""
    if name == "GridSearch":
        return {"shared": False, "space": Uniform(0.0, 1.0), "points": 10}
    return {"shared": False, "space": Uniform(0.0, 1.0), "trials": CANDIDATES, "seed": seed}


class LassoToy(Experiment):
    """Time against the searches, and MEHA's curves."""

    name = "lasso-toy"
    title = "Non-smooth lower level: a lasso with one weight for each coefficient"
    about = "time for n = 2, 100, 1000 against grid search, random search and TPE; curves for n = 100 to 2000"

    def races(self, quick: bool = False) -> list[Race]:
        return [(LASSO[n], ("MEHA",)) for n in ((2, 100) if quick else (2, 100, 500, 1000, 2000))]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells = self.raced(options, tuning)
        for n in (2, 100) if options.quick else (2, 100, 1000):
            names = ("GridSearch", "RandomSearch", "TPE") if n == 2 else ("RandomSearch", "TPE")
            for name in names:
                if options.wants(name):
                    case, contender = options.adapt(LASSO[n]), CONTENDERS[name]
                    cells += [Cell("race", case, contender, _search(name, seed), seed) for seed in options.reported]
        return cells

    def section(self, results: Records) -> Section:
        drawn = {f"n = {n}": results.get(LASSO[n].name, "MEHA") for n in (100, 500, 1000, 2000)}
        largest = next((n for n in reversed(LASSO) if any(results.get(LASSO[n].name, method) for method in AUTOMATIC)), 0)
        drawn |= {method: results.get(LASSO[largest].name, method) for method in AUTOMATIC if largest}
        drawn = {label: records for label, records in drawn.items() if records}
        panels = [
            Panel(
                f"{name} against work",
                "gradients",
                f"error of {name}",
                [
                    Curve(label, [(r["curve"]["work"][1:], r["curve"][f"error {name}"][1:]) for r in records])
                    for label, records in drawn.items()
                ],
                target=5e-2,
            )
            for name in ("x", "y")
        ]
        cases = [(LASSO[n].name, f"n = {n}") for n in (2, 100, 1000)]
        blocks: list[Block] = [
            prose(self.name, "about"),
            race_table(
                results,
                cases,
                name="lasso-toy",
                caption="Lasso toy: time and work until x and y are within 5 % of the solution set.",
                paper={LASSO[n].name: paper.LASSO[n] for n in (2, 100, 1000)},
            ),
            *ends_table(results, cases, self.name),
        ]
        if drawn:
            blocks.append(
                picture(
                    "lasso-toy",
                    "MEHA on the lasso toy by dimension: distance of x to its solution set, and error of y; median and 20–80 %"
                    " band over seeds, with zero at the bottom. The curves of the chosen settings coincide."
                    + (f" For n = {largest}: {TWICE}" if largest else ""),
                    "Two panels of falling curves, one line for each n.",
                    panels,
                )
            )
        blocks.append(prose(self.name, "why"))
        return Section(self.name, self.title, blocks)

    def claims(self, results: Records) -> list[Claim]:
        return [
            first(results, LASSO[n].name, f"Lasso toy, n = {n}: MEHA is fastest")
            for n in (2, 100, 1000)
            if results.methods(LASSO[n].name)
        ]


BASES = {"printed": "paper", "recipe": "recipe"}
"""The presets around which rows are built: the paper's first row as printed, and numbers that are known to work."""

NUMBERS = ("alpha", "beta", "eta", "gamma", "c", "p")


class Sensitivity(Experiment):
    """Both tables of how MEHA's numbers matter."""

    name = "sensitivity"
    title = "How much MEHA's numbers matter"
    about = "both sensitivity tables: the lasso toy with one number changed at a time, n = 1000"

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        case = replace(options.adapt(LASSO[100 if options.quick else 1000]), work=2_500 if options.quick else 5_000)
        n = dict(case.arguments)["n"]
        cells = {}
        rows = paper.SENSITIVITY["main"][::3] if options.quick else itertools.chain(*paper.SENSITIVITY.values())
        for change, _, _ in rows if options.wants("MEHA") else ():
            for base in BASES:
                numbers = _row(base, change, n)
                cell = Cell("race", case, CONTENDERS["MEHA"], {"numbers": numbers}, 0, _label(base, change))
                cells[cell.key] = cell
        return [*cells.values(), *(Cell("race", case, CONTENDERS[name], {}, 0) for name in AUTOMATIC if options.wants(name))]

    def section(self, results: Records) -> Section:
        titles = {"main": "Sensitivity", "additional": "Sensitivity, additional rows"}
        tables = [
            Table(
                f"sensitivity-{name}",
                f"{titles[name]}: steps until x and y are within 5 % of the solution set, with 5,000 gradients at most.",
                ["changed", "as printed", "around the recipe", "seconds (recipe)", "paper: steps", "paper: seconds"],
                [line for row in rows if any((line := self._line(results, *row))[1:3])],
                "As printed: alpha 0.1, beta 1e-5, eta 0.1, gamma 10, c 2, p 0.49. Recipe: numbers that we know to work, with"
                " beta 0.1 and c = 2n instead, changed by the same factors. The quick form stops at 2,500 gradients.",
            )
            for name, rows in paper.SENSITIVITY.items()
            if any(results.get(case.name, _label("recipe", change)) for change, _, _ in rows[1:] for case in LASSO.values())
        ]
        return Section(
            self.name,
            self.title,
            [
                prose(self.name, "about"),
                *tables,
                *self._without(results),
                prose(self.name, "why"),
            ],
        )

    def _without(self, results: Records) -> list[Table]:
        """The automatic forms, which have no numbers."""
        rows: list[list[Item]] = []
        for case, method in itertools.product(LASSO.values(), AUTOMATIC):
            if records := results.get(case.name, method):
                there = [reached(records, name).cell(band=False) for name in ("step", "gradients", "seconds")]
                rows.append([method, *there, *own_end(records)[1:]])
        columns = ["", "steps", "gradients", "seconds", "own end: gradients", "own end: error"]
        caption = "Without numbers: steps and work until x and y are within 5 % of the solution set, and at the run's own end."
        return [Table("sensitivity-without", caption, columns, rows)] if rows else []

    def _line(self, results: Records, change: Mapping[str, float], steps: int, seconds: float) -> list[Item]:
        cells: dict[str, list[Record]] = {}
        for base in BASES:
            cells[base] = next(
                (found for case in LASSO.values() if (found := results.get(case.name, _label(base, change)))), []
            )
        row: list[Item] = [", ".join(f"{name} {value:g}" for name, value in change.items()) or "nothing"]
        for base in BASES:
            steps_taken = reached(cells[base], "step") if cells[base] else None
            if steps_taken is None:
                row.append(None)
            elif steps_taken.middle is None:
                row.append(Mark(f"no, {last_error(cells[base])}", "failed"))
            else:
                row.append(steps_taken.cell(band=False))
        took = reached(cells["recipe"], "seconds")
        row.append(took.cell(band=False) if took.middle is not None else None)
        return [*row, Mark(f"{steps}", "paper", steps), Mark(f"{seconds}", "paper", seconds)]

    def claims(self, results: Records) -> list[Claim]:
        changes = [change for rows in paper.SENSITIVITY.values() for change, _, _ in rows]
        good, total = dict.fromkeys(BASES, 0), 0
        for base in BASES:
            lines = sorted({_label(base, change) for change in changes})
            runs = [of_seeds for line in lines for case in LASSO.values() if (of_seeds := results.get(case.name, line))]
            total, good[base] = len(runs), sum(reached(records, "step").middle is not None for records in runs)
        if not total:
            return []
        measured = f"{good['recipe']} of {total} rows converge around the recipe, {good['printed']} with the printed numbers"
        most = {base: hits > total / 2 for base, hits in good.items()}
        answer: Answer = "holds" if most["printed"] else "in part" if most["recipe"] else "does not hold"
        return [Claim("MEHA converges for many choices of its numbers", measured, answer)]


def _label(base: str, change: Mapping[str, float]) -> str:
    return f"MEHA, {base}: " + (", ".join(f"{name} {value:g}" for name, value in change.items()) or "as it is")


def _row(base: str, change: Mapping[str, float], n: int) -> dict[str, float]:
    """The six numbers of a row: what the paper changes, by the same factor around a base."""
    problem = lasso(n)
    printed, numbers = ({name: getattr(problem.preset(BASES[b]), name) for name in NUMBERS} for b in ("printed", base))
    for name, value in change.items():
        numbers[name] = value if name == "p" else numbers[name] * (value / printed[name])
    return numbers
