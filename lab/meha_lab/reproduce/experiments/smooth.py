"""The smooth synthetic problems: strongly convex, merely convex and non-convex lower levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meha_lab.reproduce.cells import Cell
from meha_lab.reproduce.contenders import AUTOMATIC, CONTENDERS
from meha_lab.reproduce.experiments import paper
from meha_lab.reproduce.experiments.base import PAPER, Claim, Experiment, Options, Race, Records, holds, prose
from meha_lab.reproduce.experiments.cases import HIGH_DIMENSION, MERELY_CONVEX, SINE, STRONG_CONVEX
from meha_lab.reproduce.experiments.racing import OWN, TWICE, compared, ends_table, first, panel, picture, race_table
from meha_lab.reproduce.figures import Panel
from meha_lab.reproduce.page import Item, Mark, Section, Table
from meha_lab.reproduce.tuning import Tuning

__all__ = ["HighDimension", "LargeScale", "MerelyConvex", "NonConvex", "StrongConvex"]


ALL = ("RHG", "BDA", "IAPTT", "CG", "NS", "BRC", "BOME", "F2SA", "BAMM", "MEHA")

WORK = "gradients + Hessian products"


def _four(results: Records, case: str, target: float) -> list[Panel]:
    """Errors of x and of y, against seconds and against work."""
    return [
        panel(
            results,
            case,
            f"{name} against {what}",
            column,
            f"error {name}",
            xlabel=label,
            ylabel=f"error of {name}",
            target=target,
        )
        for column, what, label in (("seconds", "time", "seconds"), ("work", "work", WORK))
        for name in ("x", "y")
    ]


def _memory_table(
    results: Records,
    cases: Sequence[tuple[str, str]],
    *,
    name: str,
    caption: str,
    published: Mapping[str, Mapping[str, float]],
) -> Table:
    """Peak bytes of each method of each case, and how many times x and y that is."""
    rows: list[list[Item]] = []
    for case, heading in cases:
        if heading and results.methods(case, "memory"):
            rows.append([Mark(heading, "head")])
        for method in results.methods(case, "memory"):
            (record,) = results.get(case, method, "memory")
            known = record["peak"] is not None
            row: list[Item] = (
                [method, Mark(f"{record['peak']:,}", "number", record["peak"]), record["peak"] / record["size"]]
                if known
                else [method, None, None]
            )
            rows.append(row + compared(published.get(case, {}), method) if published else row)
    columns = ["method", "peak bytes", "multiple of x and y"]
    return Table(name, caption, columns + (["paper: bytes", "paper: relative to MEHA"] if published else []), rows)


class StrongConvex(Experiment):
    """Curves, time and memory."""

    name = "strong-convex"
    title = "Strongly convex lower level"
    about = "error curves, time and memory of ten methods, n = 100"

    def races(self, quick: bool = False) -> list[Race]:
        return [(STRONG_CONVEX, ALL)]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        races = self.raced(options, tuning)
        memory = [
            Cell("memory", STRONG_CONVEX, cell.contender, cell.setting, 0)
            for cell in races
            if cell.seed == 0 and cell.label != PAPER
        ]
        return races + memory

    def section(self, results: Records) -> Section:
        case = STRONG_CONVEX.name
        table = race_table(
            results,
            [(case, "")],
            name="strong-convex",
            caption="Strongly convex lower level, n = 100: time and work until the errors of x and y are at most 1 %.",
            paper={case: {method: seconds for method, (seconds, _) in paper.STRONG_CONVEX.items()}},
        )
        memory = _memory_table(
            results,
            [(case, "")],
            name="strong-convex-memory",
            caption="Strongly convex lower level, n = 100: peak memory.",
            published={case: {method: bytes_ for method, (_, bytes_) in paper.STRONG_CONVEX.items()}},
        )
        return Section(
            self.name,
            self.title,
            [
                prose(self.name, "about"),
                picture(
                    "strong-convex",
                    f"Relative errors of x and y on the strongly convex problem: median and 20–80 % band over seeds. {TWICE}",
                    "Four panels of error curves, one line for each method.",
                    _four(results, case, 1e-2),
                ),
                table,
                *ends_table(results, [(case, "")], self.name),
                memory,
                prose(self.name, "why"),
            ],
        )

    def claims(self, results: Records) -> list[Claim]:
        claims = [first(results, STRONG_CONVEX.name, "Strongly convex, n = 100: MEHA is fastest")]
        case = STRONG_CONVEX.name
        peaks = {method: results.get(case, method, "memory")[0]["peak"] for method in results.methods(case, "memory")}
        peaks = {method: peak for method, peak in peaks.items() if peak is not None}
        others = [method for method in peaks if method not in OWN]
        if "MEHA" in peaks and others:
            best = min(others, key=lambda method: peaks[method])
            least = peaks["MEHA"] <= peaks[best]
            measured = f"MEHA {peaks['MEHA']:,} bytes, the least of the others {peaks[best]:,} ({best})"
            if "BAMM" in peaks:
                measured += f"; {peaks['MEHA'] / peaks['BAMM']:.0%} of BAMM's (paper: 10 %)"
            claims.append(Claim("Strongly convex, n = 100: MEHA takes the least memory", measured, holds(least)))
        return claims


class HighDimension(Experiment):
    """Time by dimension."""

    name = "high-dimension"
    title = "High dimension"
    about = "time on the strongly convex problem for n = 10^4, 3 x 10^4 and, beyond the paper, 10^6"

    def races(self, quick: bool = False) -> list[Race]:
        return [(case, ("RHG", "CG", "NS", "BAMM", "MEHA")) for case in HIGH_DIMENSION[: 1 if quick else None]]

    def tuned(self, options: Options) -> list[Race]:
        return [(STRONG_CONVEX, [name for name in self.races()[0][1] if options.wants(name)])]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        races = self.raced(options, tuning)
        memory = [
            Cell("memory", case, CONTENDERS[name], tuning.setting(case, CONTENDERS[name]), 0)
            for case, names in self.races(options.quick)
            for name in (*names, *AUTOMATIC)
            if options.wants(name)
        ]
        return [cell for cell in races if cell.case.name != HIGH_DIMENSION[-1].name or cell.label != PAPER] + memory

    def section(self, results: Records) -> Section:
        cases = [(case.name, f"n = {dict(case.arguments)['n']:,}") for case in HIGH_DIMENSION]
        table = race_table(
            results,
            cases,
            name="high-dimension",
            caption="Strongly convex lower level in high dimension: time and work until the errors of x and y are at most 1 %.",
            paper={case.name: paper.HIGH_DIMENSION.get(dict(case.arguments)["n"], {}) for case in HIGH_DIMENSION},
        )
        memory = _memory_table(results, cases, name="high-dimension-memory", caption="The same: peak memory.", published={})
        return Section(
            self.name,
            self.title,
            [
                prose(self.name, "about"),
                table,
                *ends_table(results, cases, self.name),
                memory,
                prose(self.name, "why"),
            ],
        )

    def claims(self, results: Records) -> list[Claim]:
        return [
            first(results, case.name, f"Strongly convex, n = {dict(case.arguments)['n']:,}: MEHA is fastest")
            for case in HIGH_DIMENSION
            if results.methods(case.name)
        ]


class MerelyConvex(Experiment):
    """Curves and time where the lower level leaves half of y open."""

    name = "merely-convex"
    title = "Merely convex lower level"
    about = "error curves and time of ten methods where f leaves half of y open, n = 10"

    def races(self, quick: bool = False) -> list[Race]:
        return [(MERELY_CONVEX, ALL)]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        return self.raced(options, tuning)

    def section(self, results: Records) -> Section:
        case = MERELY_CONVEX.name
        return Section(
            self.name,
            self.title,
            [
                prose(self.name, "about"),
                picture(
                    "merely-convex",
                    f"Relative errors of x and y on the merely convex problem: median and 20–80 % band over seeds. {TWICE}",
                    "Four panels of error curves, one line for each method.",
                    _four(results, case, 1e-3),
                ),
                race_table(
                    results,
                    [(case, "")],
                    name="merely-convex",
                    caption="Merely convex lower level, n = 10: time and work until the errors of x and y are at most 0.1 %.",
                    paper={},
                    note="The paper shows curves only.",
                ),
                *ends_table(results, [(case, "")], self.name),
                prose(self.name, "why"),
            ],
        )

    def claims(self, results: Records) -> list[Claim]:
        return [first(results, MERELY_CONVEX.name, "Merely convex, n = 10: MEHA is fastest, some others fail")]


RIVALS = ("BVFIM", "BOME", "IAPTT", "MEHA")


def _sine_tables(results: Records, dimensions: Sequence[int], name: str, caption: str) -> list[Table]:
    cases = [(SINE[n].name, f"n = {n}") for n in dimensions]
    published = {SINE[n].name: paper.SINE[n] for n in dimensions}
    return [race_table(results, cases, name=name, caption=caption, paper=published), *ends_table(results, cases, name)]


class NonConvex(Experiment):
    """Curves and time for small and medium dimensions."""

    name = "non-convex"
    title = "Non-convex lower level"
    about = "a lower level with infinitely many valleys: curves for n = 1, 10, 50, 100, 200, time for n = 1 to 100"

    def races(self, quick: bool = False) -> list[Race]:
        return [(SINE[n], RIVALS) for n in ((1, 10) if quick else (1, 10, 50, 100, 200))]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        return self.raced(options, tuning)

    def section(self, results: Records) -> Section:
        one = SINE[1].name
        measures = (("direction", "‖d_x‖", None), ("F", "F(x, y)", None), ("error x", "error of x", 5e-2))
        single = [
            panel(results, one, f"{label}, n = 1", "work", column, xlabel=WORK, ylabel=label, target=target)
            for column, label, target in measures
        ]
        several = [
            panel(results, SINE[n].name, f"n = {n}", column, "error x", xlabel=label, ylabel="error of x", target=5e-2)
            for n in (10, 50, 100, 200)
            if results.methods(SINE[n].name)
            for column, label in (("seconds", "seconds"), ("work", WORK))
        ]
        return Section(
            self.name,
            self.title,
            [
                prose(self.name, "about"),
                picture(
                    "non-convex-one",
                    "n = 1: length of the direction in which x moves, ‖x_new − x‖ / alpha (of another scale for every method,"
                    " unknown where alpha is not set); upper objective, which is 0.254 at the solution; relative error of x.",
                    "Three panels of curves, one line for each method.",
                    single,
                ),
                picture(
                    "non-convex",
                    "Relative error of x by dimension, against time and against work: median and 20–80 % band over seeds."
                    f" {TWICE}",
                    "Panels of error curves for n = 10, 50, 100 and 200.",
                    several,
                ),
                *_sine_tables(
                    results,
                    (1, 10, 50, 100),
                    "non-convex",
                    "Non-convex lower level: time and work until the errors of x and y are at most 5 %.",
                ),
                prose(self.name, "why"),
            ],
        )

    def claims(self, results: Records) -> list[Claim]:
        return _sine_claims(results, (1, 10, 50, 100))


class LargeScale(Experiment):
    """Time for large dimensions."""

    name = "large-scale"
    title = "Non-convex lower level, large scale"
    about = "the same for n = 200, 300, 500 and 1000"

    def races(self, quick: bool = False) -> list[Race]:
        return [(SINE[n], RIVALS) for n in ((200,) if quick else (200, 300, 500, 1000))]

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        return self.raced(options, tuning)

    def section(self, results: Records) -> Section:
        tables = _sine_tables(
            results,
            (200, 300, 500, 1000),
            "large-scale",
            "Non-convex lower level, large n: time and work until the errors of x and y are at most 5 %.",
        )
        return Section(
            self.name,
            self.title,
            [prose(self.name, "about"), *tables, prose(self.name, "why")],
        )

    def claims(self, results: Records) -> list[Claim]:
        return _sine_claims(results, (200, 300, 500, 1000))


def _sine_claims(results: Records, dimensions: Sequence[int]) -> list[Claim]:
    return [
        first(results, SINE[n].name, f"Non-convex, n = {n}: MEHA is fastest")
        for n in dimensions
        if results.methods(SINE[n].name)
    ]
