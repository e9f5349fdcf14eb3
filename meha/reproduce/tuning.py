"""Settings chosen among the declared ones, on seeds that are not reported.

The choice comes with the package (``tuning.json``), so that a report need not repeat it; ``meha reproduce --tune`` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from meha._files import write_atomically
from meha.reproduce.cells import TUNING_SEEDS, Case, Cell
from meha.reproduce.contenders import CONTENDERS, Contender, Setting
from meha.reproduce.race import Record
from meha.reproduce.store import Store

__all__ = ["Tuning", "cells"]

Result = list[float | None]
"""Work until the target (None if it was not reached), and the error at the end (None if it is not finite)."""


def cells(races: Iterable[tuple[Case, Sequence[str]]]) -> list[Cell]:
    """Every declared setting of the methods on the cases where settings are chosen."""
    return [
        Cell("race", case, CONTENDERS[name], setting, seed)
        for case, names in races
        if not case.tuned_at
        for name in names
        for setting in CONTENDERS[name].settings()
        for seed in TUNING_SEEDS
    ]


class Tuning:
    """What each setting did: ``results[case][method]`` has a list of seeds for each setting.

    >>> tuning = Tuning({"toy": {"CG": [[[12, 1e-3], [None, 0.2]], [[20, 1e-3], [30, 1e-3]]] + 6 * [[[None, None]] * 2]}})
    >>> tuning.best("toy", "CG")
    1
    """

    def __init__(self, results: dict[str, dict[str, list[list[Result]]]]) -> None:
        self.results = results

    @classmethod
    def shipped(cls) -> Tuning:
        """The one that comes with the package."""
        return cls(json.loads((files("meha.reproduce") / "tuning.json").read_text()))

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """What :meth:`save` wrote.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            results = json.loads(path.read_text())
            found = cls(results)
            for case, methods in results.items():
                for name in methods:
                    CONTENDERS[name].settings()[found.best(case, name)]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} is not a choice of settings ({error!r}); remove it, or choose again with --tune."
            ) from error
        return found

    @classmethod
    def of(cls, store: Store, races: Iterable[tuple[Case, Sequence[str]]]) -> Tuning:
        """From stored results; cases and methods that lack some are left out."""
        found: dict[str, dict[str, list[list[Result]]]] = {}
        for case, names in races:
            for name in names:
                records = [store.get(cell) for cell in cells([(case, [name])])]
                if records and None not in records:
                    results = [_result(record) for record in records if record is not None]
                    seeds = len(TUNING_SEEDS)
                    found.setdefault(case.name, {})[name] = [results[i : i + seeds] for i in range(0, len(results), seeds)]
        return cls(found)

    def updated(self, other: Tuning) -> Tuning:
        """These results, or those of the other where it has them."""
        cases = dict.fromkeys([*self.results, *other.results])
        return Tuning({case: {**self.results.get(case, {}), **other.results.get(case, {})} for case in cases})

    def save(self, path: Path) -> None:
        """Write the results, a line for each method."""
        blocks = []
        for case, methods in self.results.items():
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(settings)}" for name, settings in methods.items())
            blocks.append(f" {json.dumps(case)}: {{\n{lines}\n }}")
        write_atomically(path, "{\n" + ",\n".join(blocks) + "\n}\n")

    def best(self, case: str, name: str) -> int:
        """The setting that reached the target on the most seeds, with the least work; else the one that came closest."""
        return min(range(len(self.results[case][name])), key=lambda i: _rank(self.results[case][name][i]))

    def setting(self, case: Case, contender: Contender) -> Setting:
        """The chosen setting; an automatic method has none to choose."""
        if contender.automatic:
            return {}
        where = case.tuned_at or case.name
        if contender.name not in self.results.get(where, {}):
            raise KeyError(f"No settings were chosen for {contender.name} on {where}; run meha reproduce with --tune.")
        return contender.settings()[self.best(where, contender.name)]


def _result(record: Record) -> Result:
    reached, last = record["reached"], record.get("last", {})
    errors = [last.get("error x"), last.get("error y")]
    return [reached and reached["work"], None if None in errors else max(errors)]


def _rank(seeds: list[Result]) -> tuple[Any, ...]:
    missed = sum(work is None for work, _ in seeds)
    work = sum(work for work, _ in seeds if work is not None)
    error = max(math.inf if error is None else error for _, error in seeds)
    return missed, work if not missed else error
