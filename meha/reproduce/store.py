"""Results on disk: one JSON file a cell, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from meha._files import write_atomically
from meha.reproduce.cells import Cell
from meha.reproduce.race import Record

__all__ = ["Store"]

FIELDS = {
    "race": {"reached", "last", "curve", "at weights"},
    "memory": {"peak", "size"},
    "rates": {"curve"},
    "training": {"reached", "last", "curve"},
}
"""What a result must have, besides what all have."""

COMMON = {"case", "method", "setting", "seed", "outcome", "took", "machine", "torch", "jobs"}

REACHED = {"step", "seconds", "work", "gradients"}


class Store:
    """Results by cell, under a folder.

    >>> import tempfile
    >>> from meha.problems import lasso
    >>> from meha.reproduce.cells import Case
    >>> from meha.reproduce.contenders import CONTENDERS
    >>> from meha.reproduce.race import measure
    >>> cell = Cell("race", Case("lasso, n = 2", lasso, (("n", 2),), target=0.5), CONTENDERS["MEHA"], {"c": 3}, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     before = store.get(cell)
    ...     store.put(cell, {**measure(cell), "jobs": 1})
    ...     before, store.get(cell)["outcome"]
    (None, 'target')
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
            if not _whole(found, cell):
                return None
            self._read[key] = found
        return self._read[key]

    def put(self, cell: Cell, record: Record) -> None:
        """Keep a result."""
        write_atomically(self._path(cell.key), json.dumps(record, allow_nan=False) + "\n")
        self._read.pop(cell.key, None)

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells without a result, each once."""
        return list({cell.key: cell for cell in cells if self.get(cell) is None}.values())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _whole(found: object, cell: Cell) -> bool:
    """Whether a file holds a result of this cell."""
    if not isinstance(found, dict) or not COMMON | FIELDS[cell.kind] <= set(found) or found["seed"] != cell.seed:
        return False
    reached = found.get("reached")
    return reached is None or (isinstance(reached, dict) and set(reached) >= REACHED)
