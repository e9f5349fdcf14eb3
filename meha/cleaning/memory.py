"""What ``meha clean`` refuses before it starts: files that it would overwrite, and data that memory cannot hold."""

from __future__ import annotations

import math
import os
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np

from meha.cleaning.files import LONGEST, UNREADABLE

__all__ = ["check_memory", "check_outputs", "printable"]


# Measured by tools/clean_memory.py on tables and arrays of up to 10^6 rows or 12 million numbers: what is needed by these
# numbers was 1.0 to 2 times the true peak.

BASE = 150 * 2**20
"""Bytes that the work takes in any case: libraries that are not yet loaded, the network, the picture."""

PER_CELL = 25
"""Bytes that a number of a table takes at most: as it is read, as a double, and scaled."""

SCALING, SCALING_BYTES = 16, 8
"""Bytes that a number of an array takes besides its own, and one that is a byte."""

PER_ROW = 300
"""Bytes that a row takes besides: its label, its weight, its rank and its line in the output."""

PER_LETTER = 12
"""Bytes that a letter of a label takes (measured: 10.8): numpy has four for each, in the labels and in those suggested."""

SAMPLE = 1000
"""Lines of a table whose length is taken for that of all."""


def printable(text: str) -> str:
    """The text with control characters, such as escape sequences of terminals, written out.

    >>> printable("cat\\x1b[31m")
    'cat\\\\x1b[31m'
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def check_outputs(data: Path, outputs: list[Path], *, force: bool) -> None:
    """Raise if a file that is there would be overwritten.

    Raises:
        ValueError: it is the data, or there is one and ``force`` is False.
    """
    for path in outputs:
        if path.exists() and data.exists() and path.samefile(data):
            raise ValueError(f"--out: {path} is the data, which would be overwritten; give another folder.")
        if path.exists() and not force:
            raise ValueError(f"--out: {path} exists already; give another folder, or overwrite it with --force.")


def check_memory(path: Path, free: int | None = None) -> None:
    """Raise if a file holds more than memory can; files that cannot be read are left to the reader.

    Args:
        free: bytes that can be used; by default what the machine has left.

    Raises:
        ValueError: it is too large.
    """
    free = available() if free is None else free
    needed = _needed(path)
    if free is not None and needed > free:
        raise ValueError(
            f"{path}: needs about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are left; clean a part of it,"
            " or leave out columns."
        )


def _needed(path: Path) -> int:
    try:
        return _needed_by_arrays(path) if path.suffix.lower() == ".npz" else _needed_by_table(path)
    except (OSError, *UNREADABLE):
        return 0


def _needed_by_arrays(path: Path) -> int:
    total, rows = BASE, 0
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as file:
                major, _ = np.lib.format.read_magic(file)
                header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = header(file)
            more = PER_LETTER * dtype.itemsize // 4 if dtype.kind in "US" else SCALING if dtype != np.uint8 else SCALING_BYTES
            total += math.prod(shape) * (dtype.itemsize + more)
            rows = max(rows, shape[0] if shape else 0)
    return total + rows * PER_ROW


def _needed_by_table(path: Path) -> int:
    with path.open("rb") as file:
        lines = list(islice(file, SAMPLE + 1))
    rows = path.stat().st_size / max(1.0, sum(map(len, lines)) / max(1, len(lines)))
    sign = max((b",", b";", b"\t"), key=lines[0].count) if lines else b","
    columns = 1 + lines[0].count(sign) if lines else 0
    letters = max((len(cell) for line in lines[1:] for cell in line.split(sign)), default=0)  # no label is longer
    return BASE + int(rows * (columns * PER_CELL + PER_ROW + PER_LETTER * min(letters, LONGEST)))


def available() -> int | None:
    """Bytes of memory that can still be used: what the machine has, or what a container allows; None if it is not known."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    except (OSError, ValueError, StopIteration):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(0, limit - used))
    except (OSError, ValueError):
        pass
    return min(found, default=None)
