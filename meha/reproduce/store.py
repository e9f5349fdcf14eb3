"""Results on disk: one JSON file a cell, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from meha.reproduce.cells import Cell
from meha.reproduce.race import Record

__all__ = ["Store", "write_atomically"]


class Store:
    """Results by cell, under a folder.

    >>> import tempfile
    >>> from meha.problems import lasso
    >>> from meha.reproduce.cells import Case
    >>> from meha.reproduce.contenders import CONTENDERS
    >>> cell = Cell("race", Case("lasso, n = 2", lasso, (("n", 2),)), CONTENDERS["MEHA"], {"c": 3}, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     before = store.get(cell)
    ...     store.put(cell, {"outcome": "target"})
    ...     before, store.get(cell)
    (None, {'outcome': 'target'})
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Record] = {}

    def get(self, cell: Cell) -> Record | None:
        """The result, or None where there is none that can be read: the cell is then measured again."""
        key = cell.key
        if key not in self._read:
            try:
                found = json.loads(self._path(key).read_text())
            except (OSError, ValueError):
                return None
            if not isinstance(found, dict) or "outcome" not in found:
                return None
            self._read[key] = found
        return self._read[key]

    def put(self, cell: Cell, record: Record) -> None:
        """Keep a result."""
        path = self._path(cell.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, allow_nan=False) + "\n")
        self._read[cell.key] = json.loads(json.dumps(record))

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells without a result, each once."""
        return list({cell.key: cell for cell in cells if self.get(cell) is None}.values())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name first, so that a reader never meets half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    os.replace(part, path)
