"""Records on disk: one line of JSON each, in one file for each kind; experiments and benchmarks share the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

__all__ = ["Measurement", "Record", "Store"]

Record = dict[str, Any]
"""What a measurement gave: plain values, as JSON has them."""


class Measurement(Protocol):
    """What has a record: the name of its file, its key there, and a test whether a record is whole."""

    @property
    def kind(self) -> str: ...

    @property
    def key(self) -> str: ...

    def accepts(self, record: Record) -> bool: ...


M = TypeVar("M", bound=Measurement)


class Store:
    """Records by key, in the files ``<kind>.jsonl`` of a folder; the last line of a key counts.

    Every record is one appended line. A line that a crash cut short is ignored, and what it had is measured again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder))
    ...     for key, machine, seconds in [("a", 1, 9.0), ("b", 1, 3.0), ("a", 1, 2.0)]:
    ...         store.add("speed", key, {"machine": machine, "seconds": seconds})
    ...     both = [record["seconds"] for record in store.records("speed")]
    ...     store.add("speed", "b", {"machine": 2, "seconds": 1.0})
    ...     both, [record["seconds"] for record in Store(Path(folder)).records("speed", alike="machine")]
    ([2.0, 3.0], [1.0])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kinds: dict[str, dict[str, Record]] = {}
        self._last: dict[str, Record] = {}

    def records(self, kind: str, alike: str = "") -> list[Record]:
        """The records of a kind, in the order of their first lines; with ``alike``, a field, only those that agree there with
        the record that was written last."""
        found = list(self._by_key(kind).values())
        return [record for record in found if record[alike] == self._last[kind][alike]] if alike else found

    def add(self, kind: str, key: str, record: Record) -> None:
        """Append a record; numbers that are not finite become None, since JSON does not have them."""
        records, path = self._by_key(kind), self.folder / f"{kind}.jsonl"
        line = json.dumps(_finite({"key": key, **record}), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read() == b"\n" else f"\n{line}"  # after a line that was cut short
            file.write(f"{line}\n".encode())
        records[key] = self._last[kind] = json.loads(line)

    def get(self, cell: Measurement) -> Record | None:
        """The record of a cell; None if there is none, or if it is damaged."""
        record = self._by_key(cell.kind).get(cell.key)
        return record if record is not None and cell.accepts(record) else None

    def put(self, cell: Measurement, record: Record) -> None:
        """Keep the record of a cell."""
        self.add(cell.kind, cell.key, record)

    def missing(self, cells: Iterable[M]) -> list[M]:
        """The cells without a record, each once."""
        return list({cell.key: cell for cell in cells if self.get(cell) is None}.values())

    def _by_key(self, kind: str) -> dict[str, Record]:
        if kind not in self._kinds:
            try:
                lines = (self.folder / f"{kind}.jsonl").read_bytes().splitlines()
            except FileNotFoundError:
                lines = []
            records = [record for line in lines if isinstance(record := _parsed(line), dict) and "key" in record]
            self._kinds[kind] = {record["key"]: record for record in records}
            self._last[kind] = records[-1] if records else {}
        return self._kinds[kind]


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; None if it is damaged."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _finite(value: Any) -> Any:
    """The value with None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
