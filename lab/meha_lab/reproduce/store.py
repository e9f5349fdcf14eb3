"""Records on disk: one line of JSON for each cell, in one file for each kind of cell."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meha_lab.reproduce.cells import Cell, Record

__all__ = ["Store"]


FIELDS = {
    "race": {"reached", "last", "curve", "at weights"},
    "memory": {"peak", "size"},
    "rates": {"curve"},
    "training": {"reached", "last", "curve"},
    "solve": {"error", "gradients", "steps", "seconds"},
    "starts": {"ends"},
    "architecture": {"search", "curve", "genotype", "final"},
    "task": {"returned", "fresh", "references", "curve"},
}
"""The fields that a record of each kind must have, besides the common ones."""

COMMON = {"case", "method", "setting", "seed", "outcome", "took", "machine", "torch", "jobs"}

REACHED = {"step", "seconds", "work", "gradients"}


class Store:
    """Records by cell, in the files ``<kind>.jsonl`` of a folder; the last line of a cell counts.

    Every record is one appended line. A line that a crash cut short is ignored, and its cell is measured again.

    >>> import tempfile
    >>> from meha.problems import lasso
    >>> from meha_lab.reproduce.cells import Case
    >>> from meha_lab.reproduce.contenders import CONTENDERS
    >>> from meha_lab.reproduce.race import measure
    >>> cell = Cell("race", Case("lasso, n = 2", lasso, (("n", 2),), target=0.5), CONTENDERS["MEHA"], {"c": 3}, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     before = store.get(cell)
    ...     store.put(cell, {**measure(cell), "jobs": 1})
    ...     before, store.get(cell)["outcome"], Store(Path(folder)).get(cell)["outcome"]
    (None, 'target', 'target')
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kinds: dict[str, dict[str, Record]] = {}

    def get(self, cell: Cell) -> Record | None:
        """The record of a cell; None if there is none, or if it is damaged."""
        record = self._records(cell.kind).get(cell.key)
        return record if record is not None and _whole(record, cell) else None

    def put(self, cell: Cell, record: Record) -> None:
        """Keep a record."""
        records, path = self._records(cell.kind), self._path(cell.kind)
        line = json.dumps({"key": cell.key, **record}, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read() == b"\n" else f"\n{line}"  # after a line that was cut short
            file.write(f"{line}\n".encode())
        records[cell.key] = json.loads(line)

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells without a record, each once."""
        return list({cell.key: cell for cell in cells if self.get(cell) is None}.values())

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}.jsonl"

    def _records(self, kind: str) -> dict[str, Record]:
        if kind not in self._kinds:
            try:
                lines = self._path(kind).read_bytes().splitlines()
            except FileNotFoundError:
                lines = []
            records = [record for line in lines if isinstance(record := _parsed(line), dict) and "key" in record]
            self._kinds[kind] = {record["key"]: record for record in records}
        return self._kinds[kind]


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; None if it is damaged."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _whole(record: Record, cell: Cell) -> bool:
    """Whether a record has the fields of this cell."""
    if not COMMON | FIELDS[cell.kind] <= set(record) or record["seed"] != cell.seed:
        return False
    reached = record.get("reached")
    return reached is None or (isinstance(reached, dict) and set(reached) >= REACHED)
