"""Base of all experiments: options, cells from cases, and numbers over seeds."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import ClassVar, Literal

import numpy as np
from markupsafe import Markup

from meha_lab.reproduce.cells import Case, Cell, Record
from meha_lab.reproduce.contenders import AUTOMATIC, CONTENDERS, Setting
from meha_lab.reproduce.page import Mark, Prose, Section
from meha_lab.reproduce.tuning import Tuning
from meha_lab.reproduce.tuning import cells as trials
from meha_lab.store import Store

__all__ = [
    "PAPER",
    "Answer",
    "Claim",
    "Experiment",
    "Options",
    "Race",
    "Records",
    "Spread",
    "holds",
    "mean_of",
    "number",
    "plus_minus",
    "prose",
    "short",
    "spread",
]


PAPER = "MEHA, paper's values"
"""MEHA with the numbers of the paper's table, in the text and in files."""

QUICK_SECONDS, QUICK_LOOKS = 2.0, 2


@dataclass(frozen=True)
class Options:
    """The options of a report.

    Attributes:
        quick: the smallest cases, two seeds, and a few seconds for each run.
        seeds: number of seeds that are reported; by default two when quick, otherwise five, and fewer for learning tasks.
        methods: the methods to run; all when empty.
        limit: seconds for a run, instead of those that its case allows.
        full: the paper's whole protocol where the default is a reduced one.
    """

    quick: bool = False
    seeds: int | None = None
    methods: frozenset[str] = field(default=frozenset())
    limit: float | None = None
    full: bool = False

    @property
    def reported(self) -> range:
        """The seeds that are reported."""
        return range(self.seeds if self.seeds is not None else 2 if self.quick else 5)

    @property
    def trained(self) -> range:
        """The seeds that are reported for learning tasks: by default one when quick, otherwise three."""
        return self.reported if self.seeds is not None else range(1 if self.quick else 3)

    def wants(self, method: str) -> bool:
        return not self.methods or method in self.methods

    def adapt(self, case: Case) -> Case:
        """The case with these limits."""
        seconds = self.limit or (QUICK_SECONDS if self.quick else case.seconds)
        return replace(case, seconds=seconds, looks=QUICK_LOOKS if self.quick else case.looks)


Race = tuple[Case, Sequence[str]]
"""A case and the methods that run on it."""


Answer = Literal["holds", "in part", "does not hold", "open"]


@dataclass(frozen=True)
class Claim:
    """A line of the summary: a claim of the paper, what was measured, and whether the claim holds ("open": not decided)."""

    claim: str
    measured: str
    answer: Answer


def holds(condition: bool) -> Answer:
    """Say in a word whether a claim holds."""
    return "holds" if condition else "does not hold"


def prose(name: str, part: str) -> Prose:
    """A paragraph of the page, from the file ``prose/<name>.html``, where ``<!-- part -->`` goes before each."""
    text = (files("meha_lab.reproduce") / "prose" / f"{name}.html").read_text(encoding="utf-8")
    parts = re.split(r"<!-- (.+) -->\n", text)
    return Prose(Markup(dict(zip(parts[1::2], parts[2::2], strict=True))[part].strip()))


class Records:
    """The records of some cells, by case, method and kind."""

    def __init__(self, store: Store, cells: Iterable[Cell]) -> None:
        self._records: dict[tuple[str, str, str], list[Record]] = {}
        self.count = self.missing = 0
        for cell in cells:
            record = store.get(cell)
            self.count += record is not None
            self.missing += record is None
            if record is not None:
                self._records.setdefault((cell.case.name, cell.name, cell.kind), []).append(record)

    def get(self, case: str, method: str, kind: str = "race") -> list[Record]:
        """The records of all seeds; an empty list where nothing was measured."""
        return self._records.get((case, method, kind), [])

    def all(self) -> list[Record]:
        """All records."""
        return [record for records in self._records.values() for record in records]

    def methods(self, case: str, kind: str = "race") -> list[str]:
        """The methods that were measured on a case, in their order."""
        return [method for name, method, what in self._records if name == case and what == kind]


@dataclass(frozen=True)
class Spread:
    """A number over seeds: its median, its 20 and 80 % quantiles, and for how many of the seeds there is one."""

    middle: float | None
    low: float | None
    high: float | None
    hits: int
    seeds: int

    def cell(self, band: bool = True) -> Mark:
        """The same for a table, with the median as its number."""
        return Mark(self.text(band), "number", self.middle)

    def text(self, band: bool = True) -> str:
        """The median, its band, and how many of the seeds have a value if not all do."""
        if self.middle is None:
            return "none"
        ends = ["–" if end is None else number(end) for end in (self.low, self.high)]
        around = f" [{ends[0]}, {ends[1]}]" if band and self.seeds > 1 else ""
        share = f" ({self.hits} of {self.seeds})" if self.hits < self.seeds else ""
        return number(self.middle) + around + share


def spread(values: Sequence[float | None]) -> Spread:
    """A missing value counts as infinite, and an infinite quantile is None; so is the median where half of the seeds miss.

    >>> spread([1.0, 3.0, 2.0])
    Spread(middle=2.0, low=1.4, high=2.6, hits=3, seeds=3)
    >>> spread([1.0, None, None]).middle is None
    True
    """
    known = sorted(value for value in values if value is not None)
    if 2 * len(known) <= len(values):
        return Spread(None, None, None, len(known), len(values))
    middle, low, high = (_quantile(known, len(values), q) for q in (0.5, 0.2, 0.8))
    return Spread(middle, low, high, len(known), len(values))


def _quantile(known: Sequence[float], total: int, q: float) -> float | None:
    """Of sorted values, after which come others that are infinite, up to ``total``; None for infinity."""
    place = round(q * (total - 1), 9)
    below, above = math.floor(place), math.ceil(place)
    if above >= len(known):
        return None
    return round(known[below] + (place - below) * (known[above] - known[below]), 12)


def mean_of(values: Sequence[float | None]) -> tuple[float, float]:
    """Mean and standard deviation; NaN if a value is missing."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
    return float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0


def plus_minus(number: Sequence[float], kind: Literal["number", "best"] = "number", digits: int = 1) -> Mark:
    """A mean and its deviation, for a table."""
    around = f" ± {number[1]:.{digits}f}" if number[1] else ""
    return Mark(f"{number[0]:.{digits}f}{around}", kind, number[0])


def number(value: float) -> str:
    """Three digits, in full.

    >>> number(0.012345), number(130.4), number(12345.6)
    ('0.0123', '130', '12,300')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def short(error: float) -> str:
    """An error as a power of ten.

    >>> short(0.00123), short(0.0)
    ('1e-03', '0')
    """
    return f"{error:.0e}" if error else "0"


class Experiment(ABC):
    """An experiment of the paper, or beyond it: its cells, and its part of the page.

    Attributes:
        in_quick: whether ``meha reproduce --quick`` includes it when it is not named.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    in_quick: ClassVar[bool] = True

    def races(self, quick: bool = False) -> list[Race]:
        """The cases and the methods that run on them with settings that are chosen."""
        return []

    def tuned(self, options: Options) -> list[Race]:
        """The races in which settings are chosen."""
        races = [(case, [name for name in names if options.wants(name)]) for case, names in self.races(options.quick)]
        return [(case, names) for case, names in races if names and not case.tuned_at]

    def trials(self, options: Options, tuning: Tuning) -> list[Cell]:
        """The runs from which settings are chosen."""
        return trials(self.tuned(options))

    def chosen(self, options: Options, tuning: Tuning, store: Store) -> Tuning:
        """The results of the trials."""
        return Tuning.of(store, self.tuned(options))

    def lacks(self, options: Options) -> str:
        """Why it cannot be measured on this machine, and what to do; empty when it can."""
        return ""

    @abstractmethod
    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        """The cells to measure."""

    @abstractmethod
    def section(self, results: Records) -> Section:
        """Its section of the page."""

    @abstractmethod
    def claims(self, results: Records) -> list[Claim]:
        """Its lines in the summary."""

    def raced(self, options: Options, tuning: Tuning) -> list[Cell]:
        """The cells of the races: each method with its chosen setting, MEHA with the paper's values, and the automatic ones."""
        cells: list[Cell] = []
        for case, names in self.races(options.quick):
            limited = options.adapt(case)
            entries: list[tuple[str, str, Setting]] = [
                (name, "", tuning.setting(case, CONTENDERS[name])) for name in names if options.wants(name)
            ]
            if options.wants("MEHA"):
                entries.append(("MEHA", PAPER, {"preset": "paper"}))
            entries += [(name, "", {}) for name in AUTOMATIC if options.wants(name)]
            for name, label, setting in entries:
                cells += [Cell("race", limited, CONTENDERS[name], setting, seed, label) for seed in options.reported]
        return cells
