"""Peak memory and time of `meha clean` by rows and columns, from which the limits in meha/cleaning/memory.py are set.

python -m meha_lab.tools.clean_memory 100000x10 400000x10 100000x60 1000000x10
python -m meha_lab.tools.clean_memory --kind npz-float32 20000x784
python -m meha_lab.tools.clean_memory --letters 40 200000x2

A third of the labels is random, so that many rows are suspicious. With three sizes or more, a least-squares fit gives what a
number and a row take besides what the process takes in any case.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CHUNK = 10_000
"""Rows that are made at a time, so that this process stays smaller than the one that it measures."""


def chunks(rows: int, columns: int):
    """Numbers, two classes, a third of them random, and a tenth of trusted rows; a part at a time."""
    rng = np.random.default_rng(0)
    for first in range(0, rows, CHUNK):
        numbers = rng.normal(size=(min(CHUNK, rows - first), columns)).round(6)
        trusted = np.arange(len(numbers)) % 10 == 0
        labels = (numbers[:, 0] > 0).astype(int)
        wrong = ~trusted & (rng.random(len(numbers)) < 1 / 3)
        yield numbers, np.where(wrong, rng.integers(0, 2, len(numbers)), labels), trusted.astype(int)


def write(folder: Path, kind: str, rows: int, columns: int, letters: int) -> Path:
    """A file of that kind; labels of a table have this number of letters, or are 0 and 1."""
    if kind == "csv":
        path = folder / "data.csv"
        with path.open("w") as file:
            file.write(",".join([*(f"c{i}" for i in range(columns)), "label", "trusted"]) + "\n")
            for part in chunks(rows, columns):
                names = ["ab"[i] * letters if letters else str(i) for i in (0, 1)]
                for row, label, mark in zip(*part, strict=True):
                    file.write(",".join([*map(str, row), names[label], str(mark)]) + "\n")
        return path
    code = f"""
import sys, numpy as np
from meha_lab.tools.clean_memory import chunks
numbers, labels, trusted = map(np.concatenate, zip(*chunks({rows}, {columns})))
kind = np.dtype({kind.removeprefix("npz-")!r})
numbers = (40 * numbers + 128).clip(0, 255).astype(kind) if kind.kind == "u" else numbers.astype(kind)
np.savez({str(folder / "data.npz")!r}, features=numbers, labels=labels, trusted=trusted)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder / "data.npz"


def measure(kind: str, rows: int, columns: int, letters: int) -> tuple[int, float]:
    """Bytes that a process needs at most, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), kind, rows, columns, letters)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "meha", "clean", str(path), "--out", f"{folder}/out"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"meha clean failed with {status}.")
    return 1024 * usage.ru_maxrss, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", help="such as 100000x10: rows x columns")
    parser.add_argument("--kind", default="csv", choices=["csv", "npz-float64", "npz-float32", "npz-uint8"])
    parser.add_argument("--letters", type=int, default=0, help="of the labels of a table; 0: they are 0 and 1")
    options = parser.parse_args()
    terms, peaks = [], []
    for size in options.sizes:
        rows, columns = map(int, size.split("x"))
        used, seconds = measure(options.kind, rows, columns, options.letters)
        print(f"{options.kind}, {rows:,} rows, {columns} columns: {used / 2**20:,.0f} MiB, {seconds:.0f} s", flush=True)
        terms.append((1, rows, rows * columns))
        peaks.append(used)
    if len(terms) >= 3:
        base, row, number = np.linalg.lstsq(np.array(terms, dtype=float), np.array(peaks, dtype=float), rcond=None)[0]
        print(f"about {base / 2**20:,.0f} MiB, {row:.0f} bytes a row and {number:.1f} a number")


if __name__ == "__main__":
    main()
