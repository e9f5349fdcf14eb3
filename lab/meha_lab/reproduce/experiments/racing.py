"""How races are shown: a table of time and work to the target, curves over seeds, and who came first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from meha_lab.reproduce.cells import OWN_ENDS, Record
from meha_lab.reproduce.contenders import AUTOMATIC
from meha_lab.reproduce.experiments.base import PAPER, Claim, Records, Spread, number, spread
from meha_lab.reproduce.figures import Curve, Panel, curves
from meha_lab.reproduce.page import Item, Mark, Picture, Table

__all__ = [
    "OWN",
    "TWICE",
    "compared",
    "ends_table",
    "error_at",
    "first",
    "last_error",
    "own_end",
    "panel",
    "picture",
    "race_table",
    "reached",
    "shown",
    "times",
]


NAMES = {"GridSearch": "Grid search", "RandomSearch": "Random search", "VFiDCA": "VF-iDCA"}
"""Methods whose name on the page is not that of their class."""

OWN = ("MEHA", PAPER, *AUTOMATIC)
"""MEHA in all its forms: what the others are compared with is the first, with the settings that were chosen."""

TWICE = "AdaptiveMEHA and automatic have no settings; automatic runs from several starts, and its best point so far is drawn."
"""A sentence for captions of curves."""


def shown(method: str) -> str:
    """The name of a method on the page."""
    return NAMES.get(method, method)


def reached(records: Sequence[Record], column: str) -> Spread:
    """A column at the moment when the target was reached for good, over the seeds."""
    return spread([record["reached"] and record["reached"][column] for record in records])


def failure(records: Sequence[Record]) -> str:
    """What happened to the runs that missed the target, in a few words."""
    missed = [record for record in records if not record["reached"]]
    kind = Counter(record["outcome"].partition(":")[0] for record in missed).most_common(1)[0][0]
    error = last_error([record for record in missed if record["outcome"].startswith(kind)])
    words = {
        "diverged": "diverges",
        "non-finite": "diverges",
        "optimum at infinity": f"goes to infinity, {error}",
        "broke down": f"breaks down, {error}",
        "refused": "refuses the problem",
        "settled": f"settles elsewhere, {error}",
        "work": f"{error} at the end of the budget",
        "time": f"{error} when time is up",
        "finished": f"{error} with nothing left to try",
        "converged": f"ends elsewhere, {error}",
        "rule met": f"ends elsewhere, {error}",
        "local": f"ends at a local solution, {error}",
    }
    return words.get(kind, error)


def last_error(records: Sequence[Record]) -> str:
    """The larger of the errors of x and y at the end, in the median."""
    error = spread([error_at(record["last"]) for record in records]).middle
    return f"error {number(float(f'{error:.2g}'))}" if error is not None and error < 1e4 else "error grows"


def error_at(now: Mapping[str, float | None]) -> float | None:
    """The larger of the errors of x and y; None where one is not known."""
    x, y = now.get("error x"), now.get("error y")
    return None if x is None or y is None else max(x, y)


def race_table(
    results: Records,
    cases: Sequence[tuple[str, str]],
    *,
    name: str,
    caption: str,
    paper: Mapping[str, Mapping[str, float]],
    note: str = "",
) -> Table:
    """A row for each method of each case.

    Args:
        cases: names of cases and the headings under which their rows stand (none when empty).
        paper: its seconds by case and method.
    """
    columns = ["method", "seconds to target", "relative to MEHA", "gradients", "Hessian products"]
    if any(paper.values()):
        columns += ["paper: seconds", "paper: relative to MEHA"]
    rows: list[list[Item]] = []
    for case, heading in cases:
        if heading and results.methods(case):
            rows.append([Mark(heading, "head")])
        base, fastest = reached(results.get(case, "MEHA"), "seconds").middle, _fastest(results, case)
        for method in results.methods(case):
            records = results.get(case, method)
            seconds, gradients = reached(records, "seconds"), reached(records, "gradients")
            row: list[Item] = [shown(method)]
            if seconds.middle is None:
                partly = f"{seconds.hits} of {seconds.seeds} reach it; else " if seconds.hits else "not reached: "
                row += [Mark(partly + failure(records), "failed"), None, None, None]
            else:
                row.append(Mark(seconds.text(), "best", seconds.middle) if method == fastest else seconds.cell())
                row.append(None if base is None else Mark(times(seconds.middle / base), "number", seconds.middle / base))
                row += [gradients.cell(band=False), spread(_products(records)).cell(band=False)]
            if any(paper.values()):
                row += compared(paper.get(case, {}), method)
            rows.append(row)
    return Table(name, caption, columns, rows, note)


def ends_table(results: Records, cases: Sequence[tuple[str, str]], name: str) -> list[Table]:
    """Where the runs without settings stop, for the same cases; no table where there are none."""
    rows: list[list[Item]] = []
    for case, heading in cases:
        found: list[list[Item]] = [[m, *own_end(results.get(case, m))] for m in AUTOMATIC if results.get(case, m)]
        rows += [[Mark(heading, "head")], *found] if heading and found else found
    caption = "Without settings: time and work until a run stops, and the larger of the errors of x and y there."
    return [Table(f"{name}-ends", caption, ["method", "seconds", "gradients", "error"], rows)] if rows else []


def own_end(records: Sequence[Record]) -> list[Item]:
    """Time, gradients and error where runs stopped; runs that were cut off have none."""
    ended = [record["last"] if record["outcome"] in OWN_ENDS else {} for record in records]
    columns = [[last.get(name) for last in ended] for name in ("seconds", "gradients")]
    return [spread(column).cell(band=False) for column in (*columns, [error_at(last) for last in ended])]


def compared(published: Mapping[str, float], method: str) -> list[Item]:
    """The paper's number for a method as printed there, and its ratio to MEHA's."""
    value, own = published.get(method), published.get("MEHA")
    if value is None:
        return [None, None]
    return [Mark(f"{value:,}", "paper", value), None if own is None else Mark(times(value / own), "paper", value / own)]


def _products(records: Sequence[Record]) -> list[float | None]:
    return [r["reached"] and r["reached"]["work"] - r["reached"]["gradients"] for r in records]


def times(ratio: float) -> str:
    """A factor, to two digits.

    >>> times(0.004671), times(213.7)
    ('×\xa00.0047', '×\xa0210')
    """
    return f"×\N{NO-BREAK SPACE}{number(float(f'{ratio:.2g}'))}"


def _fastest(results: Records, case: str) -> str:
    times = {
        method: reached(results.get(case, method), "seconds").middle for method in results.methods(case) if method != PAPER
    }
    known = {method: seconds for method, seconds in times.items() if seconds is not None}
    return min(known, key=lambda method: known[method]) if known else ""


def first(results: Records, case: str, claim: str, kind: str = "race") -> Claim:
    """Whether MEHA was first to the target on a case, and by what factor."""
    others = [method for method in results.methods(case, kind) if method not in OWN]
    if not results.get(case, "MEHA", kind) or not others:
        return Claim(claim, "nothing to compare with" if others or results.get(case, "MEHA", kind) else "not measured", "open")
    own = reached(results.get(case, "MEHA", kind), "seconds")
    times = {method: reached(results.get(case, method, kind), "seconds") for method in others}
    rivals = {method: took.middle for method, took in times.items() if took.middle is not None}
    best = min(rivals, key=lambda method: rivals[method]) if rivals else ""
    if own.middle is None:
        return Claim(claim, "MEHA does not reach the target" + (f"; {shown(best)} does" if best else ""), "does not hold")
    never = [shown(method) for method, took in times.items() if not took.hits]
    seldom = [f"{shown(m)} on {took.hits} of {took.seeds} starts" for m, took in times.items() if took.hits and m not in rivals]
    rest = f"; {_listed(never)} {'does' if len(never) == 1 else 'do'} not reach it" if never else ""
    rest += f"; {_listed(seldom)} only" if seldom else ""
    if not rivals:
        measured = "the only one that reaches the target from most starts" if seldom else "the only one that reaches the target"
        return Claim(claim, measured + rest, "holds")
    if _overlap(own, times[best]):
        measured = f"level with {shown(best)}: {number(own.middle)} s against {number(rivals[best])} s, and the bands overlap"
        return Claim(claim, measured + rest, "in part")
    if rivals[best] > own.middle:
        return Claim(claim, f"first, {number(rivals[best] / own.middle)} times faster than {shown(best)}{rest}", "holds")
    ahead = sorted((method for method in rivals if rivals[method] < own.middle), key=lambda method: rivals[method])
    measured = ", ".join(f"{shown(method)} {number(own.middle / rivals[method])} times" for method in ahead)
    return Claim(claim, f"not first; faster than MEHA: {measured}{rest}", "does not hold")


def _overlap(one: Spread, other: Spread) -> bool:
    """Whether the bands have points in common."""
    ends = [math.inf if end is None else end for end in (one.low, one.high, other.low, other.high)]
    return ends[0] <= ends[3] and ends[2] <= ends[1]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def panel(results: Records, case: str, title: str, x: str, y: str, *, xlabel: str, ylabel: str, target: float | None) -> Panel:
    """The curves of all methods on a case."""
    drawn = []
    for method in results.methods(case):
        runs = [_series(record["curve"], x, y) for record in results.get(case, method) if y in record["curve"]]
        if runs:
            drawn.append(Curve(shown(method), runs, best=method == "automatic"))
    return Panel(title, xlabel, ylabel, drawn, target=target)


def _series(curve: Mapping[str, list[float | None]], x: str, y: str) -> tuple[list[float], list[float | None]]:
    pairs = [(a, b) for a, b in zip(curve[x], curve[y], strict=True) if a is not None and a > 0]
    return [a for a, _ in pairs], [b for _, b in pairs]


def picture(name: str, caption: str, alt: str, panels: Sequence[Panel], columns: int = 2) -> Picture:
    """Panels side by side, and one above the other for a phone."""
    return Picture(name, caption, curves(panels, columns), alt, narrow=curves(panels, 1))
