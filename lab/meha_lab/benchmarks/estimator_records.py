"""Records of python -m meha_lab.benchmarks.estimators: one JSON object a line, written when it is measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def key(record: Record) -> tuple[str, str, int, str]:
    """What a record measures; a later record replaces an earlier one with the same key."""
    return record["part"], record["set"], record["split"], record["method"]


def append(path: Path, record: Record) -> None:
    """Add a line in a single write, so that several processes can share the file."""
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(finite) + "\n").encode())
    finally:
        os.close(descriptor)
    print(*key(record), *(f"{name}={value}" for name, value in list(finite.items())[4:]), flush=True)


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of files that exist, sorted by what they measure."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    table = {key(record): record for record in map(json.loads, lines)}
    return [table[entry] for entry in sorted(table)]


def store(path: Path, records: Iterable[Record]) -> None:
    """Write all records as a whole file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
