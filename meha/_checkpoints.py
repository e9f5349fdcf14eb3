"""Checkpoints: a file that always holds the last whole state of a run."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import default_restore_location

from meha._checks import check_count
from meha._verdicts import TrainingWarning

__all__ = ["Checkpoint"]

VERSION = 4
"""Of what the file holds; another one is refused."""

WRITING = 600.0
"""Seconds in which a file is written; one that is older was left by a killed process."""

REMEDY = "give another path, or delete the file to start over"


class Checkpoint:
    """A file for ``solve(..., checkpoint=...)`` that always holds the last complete state of a run, also when it is killed.

    The file before it is kept beside it, with ``.previous`` after its name. It takes over when the last one is damaged; to go
    back to it yourself, rename it.

    Args:
        path: of the file. Its folder is made if need be, and what a killed process left unfinished there is removed.
        every: ``solve`` writes the file after this many steps, and at the end.

    Raises:
        OSError: no file can be written there.

    >>> import tempfile
    >>> file = Checkpoint(tempfile.mkdtemp() + "/run.pt")
    >>> file.read() is None
    True
    >>> file.write({"k": 3})
    >>> file.read()["k"]
    3
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1000) -> None:
        check_count("Checkpoint: every", every)
        self.every = every
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"checkpoint: expected the path of a file, got {path!r}.")
        try:
            self.path = Path(path).expanduser().resolve()
            self.path.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, links in a circle
            raise OSError(
                f"checkpoint: {str(path)[:100]!r} cannot be the path of a file ({error}); give another path."
            ) from error
        if self.path.is_dir():
            raise IsADirectoryError(f"checkpoint: {self.path} is a folder; give a file, such as {self.path / 'run.pt'}.")
        if self.path.exists() and not self.path.is_file():
            raise OSError(
                f"checkpoint: {self.path} is a device or a pipe, which cannot be read again; give the path of a file."
            )
        self._part = self.path.with_name(f"{self.path.name}.{os.getpid()}-{threading.get_ident()}.part")
        self.previous = self.path.with_name(f"{self.path.name}.previous")
        self._proven = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            left_over = re.compile(re.escape(self.path.name) + r"\.(\d+)(-\d+)?(\.previous)?\.part")
            for file in self.path.parent.iterdir():
                found = left_over.fullmatch(file.name)
                if found is not None and not _at_work(int(found[1]), file):
                    file.unlink(missing_ok=True)
            self._part.touch()
            self._part.unlink(missing_ok=True)
        except OSError as error:
            raise OSError(f"checkpoint: {self.path} cannot be written ({error}); give a path in a folder that can.") from error

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        return self.path.exists()

    def write(self, state: Mapping[str, Any]) -> None:
        """Put ``state`` into the file: tensors, numbers, text, and lists and dicts of them.

        Raises:
            OSError: it cannot be written; the file is as it was.
            TypeError: it could not be read again; the file is as it was.
        """
        try:
            with self._part.open("wb") as file:
                torch.save({"version": VERSION, "checksum": checksum(state), **state}, file)
                file.flush()
                os.fsync(file.fileno())
            if not self._proven:  # a state that cannot be read is noticed with the first file
                found = torch.load(self._part, weights_only=True, map_location="cpu")
                if checksum({name: found[name] for name in state}) != found["checksum"]:
                    raise TypeError("what is read is not what was written")
                self._proven = True
            self._keep()
            os.replace(self._part, self.path)
        except (AttributeError, TypeError, pickle.PickleError) as error:
            raise TypeError(
                f"checkpoint: the state cannot be saved and read again ({_first_line(error)}); state_dict() of batches and"
                " callbacks may hold tensors, numbers and text, and lists and dicts of them."
            ) from error
        except (OSError, RuntimeError) as error:
            raise OSError(f"checkpoint: {self.path} could not be written ({error}); what it held before is kept.") from error
        finally:
            self._part.unlink(missing_ok=True)

    def _keep(self) -> None:
        """Give the file that is to be replaced a second name; it stays under its own until then."""
        if not self.path.exists():
            self.previous.unlink(missing_ok=True)  # of a run that was started over
            return
        second = self._part.with_name(self._part.name.removesuffix("part") + "previous.part")
        try:
            try:
                os.link(self.path, second)
            except OSError:  # a file system without links
                shutil.copyfile(self.path, second)
            os.replace(second, self.previous)
        finally:
            second.unlink(missing_ok=True)

    def read(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Read the file; None when there is none. Tensors that were on a GPU are put on ``device``.

        If it is damaged, the one before it is read instead, after a warning.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is damaged, or no checkpoint, and there is none before it.
        """
        if not self.path.exists():
            return None
        try:
            return self._read(self.path, device)
        except ValueError as error:
            if not self.previous.exists():
                raise
            found = self._read(self.previous, device)
            warnings.warn(f"{error} Going on from the one before it, {self.previous.name}.", TrainingWarning, stacklevel=3)
            return found

    def _read(self, path: Path, device: torch.device | str) -> dict[str, Any]:
        """Read a file that is there."""

        def place(storage: Any, location: str) -> Any:
            return storage if location == "cpu" else default_restore_location(storage, str(device))

        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not look at the checksums
            if damaged is not None:
                raise zipfile.BadZipFile(f"checksum of {damaged}")
            found = torch.load(path, weights_only=True, map_location=place)
        except OSError as error:
            raise OSError(f"checkpoint: {path} cannot be opened ({error}); {REMEDY}.") from error
        except Exception as error:  # what a damaged file raises is up to torch
            raise ValueError(f"checkpoint: {path} is damaged or not a checkpoint ({_first_line(error)}); {REMEDY}.") from error
        if not isinstance(found, dict) or repr(found.pop("version", None)) != repr(VERSION):
            raise ValueError(f"checkpoint: {path} was not written by this version of meha.solve; {REMEDY}.")
        if repr(found.pop("checksum", None)) != repr(checksum(found)):
            raise ValueError(f"checkpoint: {path} was changed after it was written (its checksum is wrong); {REMEDY}.")
        return found


def checksum(value: Any) -> str:
    """A digest of tensors, numbers and text, and of dicts, lists and tuples of them: another one for any other content.

    >>> checksum({"k": 3}) == checksum({"k": 3}), checksum({"k": 3}) == checksum({"k": 3.0})
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        digest.update(part if isinstance(part, memoryview) else f"{part}\0".encode())
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[str | memoryview]:
    """What a digest is made of: kinds, sizes and contents, in their order."""
    yield type(value).__name__
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        yield str(len(value))
        for key, item in value.items():
            yield from _parts(key)
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield str(len(value))
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value)


def _at_work(process: int, file: Path) -> bool:
    """Whether a process may still be writing a file; a killed one is not."""
    try:
        if os.name == "posix":
            os.kill(process, 0)  # sends nothing
        return time.time() - file.stat().st_mtime < WRITING
    except (ProcessLookupError, FileNotFoundError, OverflowError):
        return False
    except OSError:  # a process of somebody else
        return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
