"""Peak memory of `meha clean` by rows and columns of a table, from which the limits in meha/tasks/_cleaning_limits.py are set.

python tools/clean_memory.py 20000x10 60000x10 20000x40
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def write(path: Path, rows: int, columns: int) -> None:
    """A table with numbers of six digits, two classes and a tenth of trusted rows."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(rows, columns)).round(6)
    labels = (numbers[:, 0] > 0).astype(int)
    names = [f"c{i}" for i in range(columns)]
    with path.open("w") as file:
        file.write(",".join([*names, "label", "trusted"]) + "\n")
        for i, row in enumerate(numbers):
            file.write(",".join(map(str, row)) + f",{labels[i]},{int(i % 10 == 0)}\n")


def peak(rows: int, columns: int) -> int:
    """Bytes that a process needs at most."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "data.csv", rows, columns)
        child = os.fork()
        if not child:
            command = [sys.executable, "-m", "meha", "clean", f"{folder}/data.csv", "--out", f"{folder}/out"]
            code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
            os._exit(code)
        _, status, usage = os.wait4(child, 0)
        if status:
            raise SystemExit(f"meha clean failed with {status}.")
    return 1024 * max(usage.ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


if __name__ == "__main__":
    for size in sys.argv[1:]:
        rows, columns = map(int, size.split("x"))
        used = peak(rows, columns)
        sys.stdout.write(f"{rows} rows, {columns} columns: {used / 2**20:.0f} MiB\n")
        sys.stdout.flush()
