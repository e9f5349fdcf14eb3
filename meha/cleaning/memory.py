"""Checks before ``meha clean`` starts: no file is overwritten, and the data fit in memory."""

from __future__ import annotations

import math
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np

from meha.cleaning.files import LONGEST, UNREADABLE
from meha.tensors.memory import available

# Measured by meha_lab.tools.clean_memory on tables and arrays of up to 10^6 rows or 12 million numbers: estimates by these
# constants were 1.0 to 2 times the true peak.

BASE = 150 * 2**20  # bytes for any data: libraries that are not yet loaded, the network, the picture
PER_CELL = 25  # most bytes per number of a table: as text, as a double, and scaled
SCALING, SCALING_BYTES = 16, 8  # bytes per number of an array in addition to its own, for other types and for uint8
PER_ROW = 300  # bytes per row for its label, its weight, its rank and its line in the output
PER_LETTER = 12  # bytes per letter of a label (measured: 10.8): numpy stores four for each, in given and in suggested labels
SAMPLE = 1000  # lines of a table from which the mean length of all lines is estimated


def printable(text: str) -> str:
    """Return the text with control characters, such as escape sequences of terminals, written out.

    >>> printable("cat\\x1b[31m")
    'cat\\\\x1b[31m'
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def check_outputs(data: Path, outputs: list[Path], *, force: bool) -> None:
    """Raise if an output is the data, or if it exists and must not be overwritten."""
    for path in outputs:
        if path.exists() and data.exists() and path.samefile(data):
            raise ValueError(f"--out: {path} is the data, which would be overwritten; give another folder.")
        if path.exists() and not force:
            raise ValueError(f"--out: {path} exists already; give another folder, or overwrite it with --force.")


def check_memory(path: Path, free: int | None = None) -> None:
    """Raise if cleaning a file needs more than the free bytes, by default those of the machine."""
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
        return 0  # the reader explains what is wrong with the file


def _needed_by_arrays(path: Path) -> int:
    """Estimate the bytes for the arrays of an NPZ file from their headers, without unpacking them."""
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
    """Estimate the bytes for a table from its size and its first lines."""
    with path.open("rb") as file:
        lines = list(islice(file, SAMPLE + 1))
    rows = path.stat().st_size / max(1.0, sum(map(len, lines)) / max(1, len(lines)))
    sign = max((b",", b";", b"\t"), key=lines[0].count) if lines else b","
    columns = 1 + lines[0].count(sign) if lines else 0
    letters = max((len(cell) for line in lines[1:] for cell in line.split(sign)), default=0)  # no label is longer
    return BASE + int(rows * (columns * PER_CELL + PER_ROW + PER_LETTER * min(letters, LONGEST)))
