"""Loggers: observers that write the numbers of a run to a CSV file or to TensorBoard."""

from __future__ import annotations

import csv
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO

from meha.method.method import Run, StepInfo
from meha.running.observers import work
from meha.tensors.checks import check_count

__all__ = ["CSVLogger", "TensorBoardLogger"]


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file under another name and rename it, so that a reader never sees half of it; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # in the same folder: renaming is atomic in one file system only
    try:
        part.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class _Logger(ABC):
    """Base class of loggers that write every n-th step and notice a new run; of several processes, only the first writes."""

    agrees: ClassVar[bool] = True  # it never stops a run

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        check_count(f"{type(self).__name__}: every", every)
        self.path, self.every = Path(path), every
        self._step: int | None = None

    def __call__(self, run: Run, info: StepInfo) -> None:
        if not run.main:
            return
        if self._step is None or info.step <= self._step:  # step numbers that do not grow: a new run, or one that went back
            self.close()
            self._open(info.step)
        self._step = info.step
        if info.due(self.every):
            self._write(info.step, {**info, **work(run)})

    @abstractmethod
    def _open(self, step: int) -> None:
        """Prepare for writing from ``step`` on."""

    @abstractmethod
    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step to disk at once."""

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        self._step = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_step"):  # not where the constructor raised
            self.close()


class CSVLogger(_Logger):
    """Log to a CSV file, one row per step: the step, its numbers, and the gradients computed so far.

    Args:
        path: the file; its folder is created if needed.
        every: log the steps that are multiples of this number.

    >>> import tempfile, torch
    >>> from meha.methods import MEHA
    >>> from meha.problem.problem import Problem
    >>> problem = Problem(lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    >>> run = MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0).start(problem, torch.zeros(1), torch.zeros(1))
    >>> path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> with CSVLogger(path) as logger:
    ...     for _ in range(2):
    ...         logger(run, run.step())
    >>> rows = list(csv.DictReader(path.read_text().splitlines()))
    >>> rows[1]["step"], float(rows[0]["upper"]), rows[1]["gradients_lower"]
    ('2', 1.0, '8')
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(path, every)
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def _open(self, step: int) -> None:
        rows = self._rows()  # a resumed run keeps the rows before its checkpoint, and writes those after it again
        kept = [row for row in rows[1:] if row[0].isdigit() and int(row[0]) < step]
        self._columns = rows[0] if kept else []
        self._rewrite(kept)

    def _rows(self) -> list[list[str]]:
        """Return the header and the complete rows of the file, if it exists."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        if text and not text.startswith("step,"):
            raise ValueError(f"path: {self.path} was not written by CSVLogger and would be overwritten; give another path.")
        # A process that was killed may have left half a row, which has no line break.
        return [row for row in csv.reader(io.StringIO(text[: text.rfind("\n") + 1])) if row]

    def _rewrite(self, rows: list[list[str]]) -> None:
        """Write the whole file, with empty cells in missing columns, and open it for appending."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([row + [""] * (len(self._columns) - len(row)) for row in [self._columns, *rows] if row])
        write_atomically(self.path, text.getvalue())
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step, **numbers}
        assert self._file is not None
        if new := [name for name in row if name not in self._columns]:  # an observer records it from now on
            rows = self._rows()[1:]
            self._columns += new  # the header must name it
            self._file.close()
            self._rewrite(rows)
        csv.writer(self._file, lineterminator="\n").writerow([row.get(name, "") for name in self._columns])
        self._file.flush()  # so that the log can be followed, and survives a kill

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLogger(_Logger):
    """Log to TensorBoard: one curve for each number of a step, and for the gradients computed so far.

    Needs tensorboard: ``pip install "meha[tensorboard]"``. View the curves with ``tensorboard --logdir folder``.

    Args:
        folder: the folder of the event files. TensorBoard shows each folder as one run.
        every: log the steps that are multiples of this number.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(folder, every)
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                'TensorBoardLogger needs tensorboard; install it with: pip install "meha[tensorboard]"'
            ) from error
        self._kind = SummaryWriter

    def _open(self, step: int) -> None:
        self._writer = self._kind(str(self.path), purge_step=step)  # hides what a killed process logged from this step on

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        super().close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
