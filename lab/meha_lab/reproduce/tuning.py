"""Settings chosen among the declared ones, on seeds that are not reported.

The package contains the results of all trials, and so the choice: ``tuning.json`` for races, ``learning.json`` for learning
tasks. ``meha reproduce --tune`` measures them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from meha.running.loggers import write_atomically
from meha_lab.reproduce import learning
from meha_lab.reproduce.cells import Case, Cell, Record
from meha_lab.reproduce.contenders import CONTENDERS, Contender, Setting
from meha_lab.store import Store

__all__ = ["Tuning", "cells"]


Score = list[float | None]
"""Work until the target (None if it was not reached), and the error at the end (None if it is not finite)."""

Scores = dict[str, dict[str, list[list[Score] | None]]]
"""By case and method: for each setting, its scores on the seeds for choosing; None where they were not kept."""


def cells(races: Iterable[tuple[Case, Sequence[str]]]) -> list[Cell]:
    """Every declared setting of the methods on the cases where settings are chosen."""
    return [
        Cell("race", case, CONTENDERS[name], setting, seed)
        for case, names in races
        if not case.tuned_at
        for name in names
        for setting in CONTENDERS[name].settings()
        for seed in case.tuning_seeds
    ]


class Tuning:
    """The results of all trials: ``scores`` of races, and ``attempts`` at learning tasks (:mod:`meha_lab.reproduce.learning`).

    >>> tuning = Tuning({"toy": {"CG": [[[12, 1e-3], [None, 0.2]], [[20, 1e-3], [30, 1e-3]], None]}})
    >>> tuning.best("toy", "CG")
    1
    """

    def __init__(self, scores: Scores, attempts: learning.Attempts | None = None) -> None:
        self.scores, self.attempts = scores, attempts or {}

    @classmethod
    def shipped(cls) -> Tuning:
        """The trials that come with the package."""
        return cls(json.loads((files("meha_lab.reproduce") / "tuning.json").read_text()), learning.shipped())

    @classmethod
    def load(cls, folder: Path) -> Tuning:
        """Read the files that :meth:`save` wrote.

        Raises:
            ValueError: a file cannot be read.
        """
        path = folder / "tuning.json"
        try:
            tuning = cls(json.loads(path.read_text()), json.loads((folder / "learning.json").read_text()))
            for case, methods in tuning.scores.items():
                for name in methods:
                    CONTENDERS[name].settings()[tuning.best(case, name)]
            for task, tried in tuning.attempts.items():
                for name in tried:
                    tuning.trained(task, name)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{path} and learning.json beside it are not a choice of settings ({error!r}); remove them, or choose again"
                " with --tune."
            ) from error
        return tuning

    @classmethod
    def of(cls, store: Store, races: Iterable[tuple[Case, Sequence[str]]]) -> Tuning:
        """The trials of these races; methods with missing records are left out."""
        scores: Scores = {}
        for case, names in races:
            for name in names:
                records = [store.get(cell) for cell in cells([(case, [name])])]
                if records and None not in records:
                    single = [_score(record) for record in records if record is not None]
                    seeds = len(case.tuning_seeds)
                    scores.setdefault(case.name, {})[name] = [single[i : i + seeds] for i in range(0, len(single), seeds)]
        return cls(scores)

    def updated(self, other: Tuning) -> Tuning:
        """These trials, or those of the other where it has them."""
        return Tuning(_merged(self.scores, other.scores), _merged(self.attempts, other.attempts))

    def save(self, folder: Path) -> None:
        """Write ``tuning.json`` and ``learning.json``, with a line for each method, or for each attempt."""
        rows = {case: {name: json.dumps(of) for name, of in methods.items()} for case, methods in self.scores.items()}
        write_atomically(folder / "tuning.json", _blocks(rows))
        write_atomically(folder / "learning.json", _blocks(learning.lines(self.attempts)))

    def best(self, case: str, name: str) -> int:
        """The setting that reached the target on the most seeds, with the least work; else the one that came closest."""
        scores = self.scores[case][name]
        return min(range(len(scores)), key=lambda i: _rank(scores[i]))

    def setting(self, case: Case, contender: Contender) -> Setting:
        """The chosen setting for a race; an automatic method has none to choose."""
        if contender.automatic:
            return {}
        where = case.tuned_at or case.name
        if contender.name not in self.scores.get(where, {}):
            raise KeyError(f"No settings were chosen for {contender.name} on {where}; run meha reproduce with --tune.")
        return contender.settings()[self.best(where, contender.name)]

    def trained(self, task: str, name: str, *, single_loop: bool = False) -> Setting:
        """The chosen setting for a learning task; of those with one inner step, if ``single_loop``."""
        return learning.best(task, self.attempts[task][name], single_loop=single_loop)


def _merged(one: Mapping[str, dict[str, Any]], other: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {**one.get(key, {}), **other.get(key, {})} for key in dict.fromkeys([*one, *other])}


def _blocks(rows: Mapping[str, Mapping[str, str]]) -> str:
    """A JSON object of objects whose values are texts of JSON."""
    blocks = []
    for key, texts in rows.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {text}" for name, text in texts.items())
        blocks.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _score(record: Record) -> Score:
    reached, last = record["reached"], record.get("last", {})
    errors = [last.get("error x"), last.get("error y")]
    return [reached and reached["work"], None if None in errors else max(errors)]


def _rank(seeds: list[Score] | None) -> tuple[float, float]:
    if seeds is None:
        return math.inf, math.inf
    missed = sum(work is None for work, _ in seeds)
    work = sum(work for work, _ in seeds if work is not None)
    error = max(math.inf if error is None else error for _, error in seeds)
    return missed, work if not missed else error
