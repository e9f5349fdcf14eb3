"""Change 40 rules and numbers of the library, one at a time, and record which test notices.

``python -m meha_lab.mutants measure`` makes each change of ``mutants.txt`` in a copy of the package, runs the tests of its room
there, and appends one line to ``lab/records/mutants.jsonl``; it continues where it was interrupted.
``python -m meha_lab.mutants draw`` prints the table. A change that no test notices is a rule without a test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from meha_lab.paths import RECORDS, ROOT

__all__ = ["TESTS", "Mutant", "copied", "failure", "mutants", "outcome"]

OUT = RECORDS / "mutants.jsonl"
LIMIT = 120.0  # seconds for the tests of one mutant
MOST_FAILING = 4  # tests that may fail without a change, and are left out
COPIED = ("meha", "lab/meha_lab", "tests", "meha_cli.py", "pyproject.toml")

TESTS = {
    "newton": ("engines/test_engines.py", "engines/test_implicit_newton.py", "evidence/test_multistart.py"),
    "passes": ("engines/test_penalty_continuation.py", "evidence/test_trust.py"),
    "coupled": ("engines/test_active_sets.py",),
    "lower": ("lower/test_lower.py", "engines/test_implicit_newton.py", "evidence/test_multistart.py"),
    "search": ("lower/test_lower.py", "evidence/test_multistart.py", "evidence/test_trust.py"),
    "nearest": ("lower/test_lower.py", "evidence/test_hollow.py"),
    "evidence": ("evidence/test_multistart.py", "evidence/test_trust.py"),
}
"""The test files of each room, the quickest first."""


class Mutant(NamedTuple):
    """A change: the file in meha, the text there and what replaces it, the key of its tests, and the rule, in words."""

    file: str
    old: str
    new: str
    tests: str
    rule: str

    def apply(self, folder: Path) -> int:
        """Change the copy of the package in a folder; returns the line. The old text must be there exactly once."""
        path = folder / "meha" / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"mutants.txt: {self.rule!r} changes {self.old!r}, which is {count} times in meha/{self.file}.")
        path.write_text(text.replace(self.old, self.new))
        return self.line(text)

    def line(self, text: str) -> int:
        """The number of the line that it changes."""
        return text[: text.index(self.old)].count("\n") + 1


def mutants() -> list[Mutant]:
    """All mutants of ``mutants.txt``."""
    found = []
    for block in Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n"):
        head, old, new = block.split("\n")
        file, tests, rule = head.split(" | ")
        found.append(Mutant(file, old.removeprefix("- "), new.removeprefix("+ "), tests, rule))
    return found


def copied(source: Path, folder: Path) -> Path:
    """Copy package, laboratory and tests; pytest refuses to run there if another copy of the package is imported."""
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
        else:
            shutil.copy2(source / name, folder / name)
    check = "import meha\nimport meha_lab\n\nfor package in (meha, meha_lab):\n"
    (folder / "conftest.py").write_text(f"{check}    assert package.__file__.startswith({str(folder)!r})\n")
    return folder


def failure(folder: Path, tests: list[str], left_out: list[str], limit: float = LIMIT) -> str:
    """The first test that fails in a copy; empty if all pass, "over time" if that is not known after ``limit`` seconds."""
    paths = os.pathsep.join([str(folder), str(folder / "lab")])  # before the installed package
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    command += [f"--deselect={test}" for test in left_out]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "over time"
    if run.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if found is None or run.returncode not in (1, 2):  # 2: a file of tests cannot be imported
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}")
    return found[1]


def outcome(mutant: Mutant, plain: Path, failing: list[str]) -> dict[str, Any]:
    """Run the tests of a mutant in a copy of its own: what became of it, by which test, after how many seconds.

    Args:
        plain: an unchanged copy. A test that fails there as well says nothing, and joins ``failing``.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(plain, Path(folder).resolve())
        mutant.apply(copy)
        tests = [f"tests/{name}" for name in TESTS[mutant.tests]]
        while True:
            begin = time.perf_counter()
            test = failure(copy, tests, failing)
            seconds = round(time.perf_counter() - begin, 1)
            if not test or test == "over time" or not failure(plain, [test], []):
                break
            failing.append(test)
            if len(set(failing)) > MOST_FAILING:
                raise RuntimeError(f"the package fails its tests without a change: {sorted(set(failing))}")
    ended = "survived" if not test else test if test == "over time" else "killed"
    return mutant._asdict() | {"outcome": ended, "test": test if ended == "killed" else "", "seconds": seconds}


def _records(out: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The last record of each mutant."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {(row["file"], row["old"], row["new"]): row for row in rows}


app = typer.Typer(add_completion=False)


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="the file of the records")] = OUT,
    again: Annotated[bool, typer.Option(help="also those that are recorded")] = False,
    only: Annotated[str, typer.Option(help="those whose file or rule contains this text")] = "",
    jobs: Annotated[int, typer.Option(help="mutants at a time")] = 2,
) -> None:
    """Run the mutants that are not recorded yet."""
    done, failing = _records(out), list[str]()
    waiting = [m for m in mutants() if (again or m[:3] not in done) and (only in m.file or only in m.rule)]

    def run(mutant: Mutant) -> None:
        row = outcome(mutant, plain, failing)
        with out.open("a") as file:
            print(json.dumps(row), file=file)
        typer.echo(f"{row['outcome']} after {row['seconds']} s: {mutant.file}, {mutant.rule} {row['test']}")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        plain = copied(ROOT, Path(folder).resolve())  # all from one state of the checkout
        list(pool.map(run, waiting))
    for test in sorted(set(failing)):
        typer.echo(f"left out, since it fails without a change: {test}")


@app.command()
def draw(out: Annotated[Path, typer.Option(help="the file of the records")] = OUT) -> None:
    """Print the table: rule, place, and which test noticed the change."""
    done, killed = _records(out), 0
    typer.echo("| rule | place | killed by |\n|---|---|---|")
    for mutant in mutants():
        row = done.get(mutant[:3], {"outcome": "not run", "test": ""})
        killed += row["outcome"] == "killed"
        line = mutant.line((ROOT / "meha" / mutant.file).read_text())
        by = f"`{row['test'].rpartition('::')[2]}`, {row['seconds']:.0f} s" if row["test"] else row["outcome"]
        typer.echo(f"| {mutant.rule} | `{mutant.file}:{line}` | {by} |")
    typer.echo(f"\n{killed} of {len(mutants())} were killed.")


if __name__ == "__main__":
    app()
