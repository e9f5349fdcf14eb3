"""The work of ``meha reproduce``: settings, runs and the report."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from meha import methods
from meha.tensors.checks import RefusalError
from meha_lab.baselines import VFiDCA
from meha_lab.datasets import DataError
from meha_lab.reproduce import report
from meha_lab.reproduce.cells import Cell
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.display import Display, print_summary
from meha_lab.reproduce.experiments import EXPERIMENTS, Options
from meha_lab.reproduce.runner import WorkerDiedError
from meha_lab.reproduce.runner import run as run_cells
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

__all__ = ["Asked", "list_experiments", "run"]


@dataclass(frozen=True)
class Asked:
    """The arguments of ``meha reproduce``."""

    names: list[str]
    quick: bool
    seeds: int | None
    methods: str
    limit: float | None
    out: Path
    records: Path
    jobs: int | None
    tune: bool
    draw: bool
    full: bool = False
    home: str = ""

    @property
    def workers(self) -> int:
        """The number of parallel runs."""
        return self.jobs or (os.cpu_count() or 1 if self.quick else 1)


def list_experiments() -> list[tuple[str, str]]:
    """The names of the experiments, and what each is about."""
    rest = " (with --quick only when named)"
    return [(each.name, each.about + ("" if each.in_quick else rest)) for each in EXPERIMENTS.values()]


def run(asked: Asked, quiet: bool = False) -> dict[str, Any]:
    """Measure the cells that have no record yet, write the report, and return its claims."""
    console = Console(quiet=quiet)
    names = asked.names or [name for name, each in EXPERIMENTS.items() if each.in_quick or not asked.quick]
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise RefusalError(f"NAME: there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}.")
    options, store = _options(asked), Store(asked.records)
    choice = _choice(console, asked, names, options, store)
    cells = {name: EXPERIMENTS[name].cells(options, choice) for name in names}
    if not any(cells.values()):
        raise RefusalError(f"--methods: none of {asked.methods} takes part in {', '.join(names)}.")
    if asked.draw:
        done = 0
        if not any(store.get(cell) for found in cells.values() for cell in found):
            raise RefusalError(f"--draw: {asked.records} has no records of {', '.join(names)} with these options.")
    else:
        done = _work(console, _possible(console, asked, cells, options, store), store, asked.workers)
    command = shlex.join(["meha", *sys.argv[1:]])
    page, claims = report.draw(store, options, choice, asked.out, command, names, asked.home)
    print_summary(console, claims, done, page)
    return {"page": str(page), "measured": done, "claims": [dataclasses.asdict(claim) for claim in claims]}


def _options(asked: Asked) -> Options:

    spelled = {name.lower(): name for name in CONTENDERS}
    wanted = [method.strip().lower() for method in asked.methods.split(",") if method.strip()]
    strange = [method for method in wanted if method not in spelled]
    if strange:
        raise RefusalError(f"--methods: there is no method {strange[0]!r}; there are {', '.join(CONTENDERS)}.")
    return Options(asked.quick, asked.seeds, frozenset(spelled[method] for method in wanted), asked.limit, asked.full)


def _choice(console: Console, asked: Asked, names: Sequence[str], options: Options, store: Store) -> Tuning:
    """The settings: chosen now, chosen earlier in the same folder, or shipped."""
    choice = Tuning.shipped()
    if asked.tune and not asked.draw:
        cells = {name: EXPERIMENTS[name].trials(options, choice) for name in names}
        possible = _possible(console, asked, cells, options, store)
        _work(console, {f"settings for {name}": found for name, found in possible.items()}, store, asked.workers)
        for name in possible:
            choice = choice.updated(EXPERIMENTS[name].chosen(options, choice, store))
        choice.save(asked.out)
    elif (asked.out / "tuning.json").exists():
        try:
            choice = Tuning.load(asked.out)
        except ValueError as error:
            raise RefusalError(str(error)) from error
        console.print(f"Using the settings of {asked.out / 'tuning.json'}.", highlight=False)
    return choice


def _possible(
    console: Console, asked: Asked, cells: dict[str, list[Cell]], options: Options, store: Store
) -> dict[str, list[Cell]]:
    """The experiments that can be measured here; refuse one that was named and cannot."""
    possible = {}
    for name, found in cells.items():
        reason = EXPERIMENTS[name].lacks(options) if store.missing(found) else ""
        if reason and asked.names:
            raise RefusalError(f"{name}: {reason}")
        if reason:
            console.print(f"Without {name}: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        else:
            possible[name] = found
    return possible


def _work(console: Console, cells: dict[str, list[Cell]], store: Store, jobs: int) -> int:
    """Measure the missing cells, with a display; returns the number of runs."""
    display = Display(cells, store, jobs)
    if not display.total:
        return 0
    _check_extras(cells)
    store.folder.mkdir(parents=True, exist_ok=True)
    with Live(display, console=console, refresh_per_second=2, transient=True):
        try:
            return run_cells([cell for found in cells.values() for cell in found], store, jobs, display.watch)
        except (WorkerDiedError, DataError) as error:
            raise RefusalError(str(error)) from error


def _check_extras(cells: dict[str, list[Cell]]) -> None:
    """Refuse at the start, and not after an hour, if a package is missing."""
    flat = [cell for found in cells.values() for cell in found]
    arguments = [dict(cell.case.arguments) for cell in flat]
    data = {given["protocol"].task["data"] if "protocol" in given else given.get("data") for given in arguments}
    kinds = {cell.contender.kind for cell in flat}
    needs = [("optuna", methods.TPE in kinds), ("cvxpy", VFiDCA in kinds)]
    for package, needed in [*needs, ("sklearn", "digits" in data), ("PIL", "omniglot" in data)]:
        if needed and find_spec(package) is None:
            raise ImportError(f"{package} is missing", name=package)
