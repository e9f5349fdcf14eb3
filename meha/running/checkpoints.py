"""Checkpoints: files that hold a run, in one process or shared by several."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
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
import torch.distributed as dist
from torch import Tensor
from torch.serialization import default_restore_location

from meha.method.status import TrainingWarning, first_line
from meha.tensors.checks import check_count
from meha.tensors.distributed import Group, is_dtensor
from meha.tensors.torch_private import LazyModule

VERSION = 5  # of what the file holds; another one is refused
WRITING = 600.0  # seconds in which a file is written; one that is older was left by a killed process

REMEDY = "give another path, or delete the file to start over"
UNREADABLE = (AttributeError, TypeError, pickle.PickleError)  # what torch raises about objects that it cannot save or load


class Checkpoint:
    """A file for ``solve(..., checkpoint=...)`` that always holds the last complete state of a run, also when it is killed.

    The file before it is kept beside it, with ``.previous`` after its name. It takes over when the last one is damaged; to go
    back to it yourself, rename it.

    Args:
        path: the file. Its folder is made if need be, and files that a killed process left unfinished there are removed.
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
            self.path = Path(path).expanduser().resolve()  # a later chdir must not move the file
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
        # Several processes and threads may share a checkpoint; each writes under a name of its own.
        self._part = self.path.with_name(f"{self.path.name}.{os.getpid()}-{threading.get_ident()}.part")
        self.previous = self.path.with_name(f"{self.path.name}.previous")
        self._proven = False
        if self.previous.exists() and not _may_be_ours(self.previous):
            raise FileExistsError(
                f"checkpoint: {self.previous} exists and is no checkpoint, but the file before the last one is kept under this"
                " name; move it away, or give another path."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            left_over = re.compile(re.escape(self.path.name) + r"\.(\d+)(-\d+)?(\.previous)?\.part")
            for file in self.path.parent.iterdir():
                match = left_over.fullmatch(file.name)
                if match is not None and not _at_work(int(match[1]), file):
                    file.unlink(missing_ok=True)
            self._part.touch()  # a folder that cannot be written is an error now, not after thousands of steps
            self._part.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @property
    def exists(self) -> bool:
        """Return whether there is a file."""
        return self.path.exists()

    def write(self, state: Mapping[str, Any]) -> None:
        """Write ``state`` to the file: tensors, numbers, text, and lists and dicts of them.

        Raises:
            OSError: it cannot be written; the file is as it was.
            TypeError: it could not be read again; the file is as it was.
        """
        try:
            with self._part.open("wb") as file:
                torch.save({"version": VERSION, "checksum": checksum(state), **state}, file)
                file.flush()
                os.fsync(file.fileno())  # before the renaming: after a power failure, the name must not lead to half a file
            if not self._proven:  # a state that cannot be read is noticed with the first file
                written = torch.load(self._part, weights_only=True, map_location="cpu", mmap=True)  # takes no memory
                if checksum({name: written[name] for name in state}) != written["checksum"]:
                    raise TypeError("what is read is not what was written")
                del written  # which maps the file
                self._proven = True
            self._keep()
            os.replace(self._part, self.path)  # atomic: a kill leaves the old file or the new one
        except UNREADABLE as error:
            raise _unreadable(error) from error
        except (OSError, RuntimeError) as error:
            raise OSError(f"checkpoint: {self.path} could not be written ({error}); what it held before is kept.") from error
        finally:
            self._part.unlink(missing_ok=True)

    def _keep(self) -> None:
        """Save the file that is to be replaced as the previous one; it also keeps its own name until then."""
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

        If it is damaged, the previous one is read instead, after a warning.

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
            state = self._read(self.previous, device)  # raises if it is damaged too, before anything is promised
            warnings.warn(f"{error} Going on from the one before it, {self.previous.name}.", TrainingWarning, stacklevel=3)
            return state

    def _read(self, path: Path, device: torch.device | str) -> dict[str, Any]:
        """Read an existing file, and raise unless it is a checkpoint and unchanged."""

        def place(storage: Any, location: str) -> Any:
            # What was on the CPU stays there, as random states must; a run from a GPU may continue without one.
            return storage if location == "cpu" else default_restore_location(storage, str(device))

        try:
            with zipfile.ZipFile(path) as archive:
                if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:  # torch does not compress
                    raise zipfile.BadZipFile("its parts are larger than the file")
                damaged = archive.testzip()  # torch.load does not look at the checksums
            if damaged is not None:
                raise zipfile.BadZipFile(f"checksum of {damaged}")
            state = torch.load(path, weights_only=True, map_location=place)  # a file must not be able to run code
        except OSError as error:
            raise OSError(f"checkpoint: {path} cannot be opened ({error}); {REMEDY}.") from error
        except Exception as error:  # what a damaged file raises is up to torch
            raise ValueError(f"checkpoint: {path} is damaged or not a checkpoint ({first_line(error)}); {REMEDY}.") from error
        # Compared as text, since a damaged file may hold anything in their place, such as a tensor.
        if not isinstance(state, dict) or repr(state.pop("version", None)) != repr(VERSION):
            raise ValueError(f"checkpoint: {path} was not written by this version of meha.solve; {REMEDY}.")
        if repr(state.pop("checksum", None)) != repr(checksum(state)):
            raise ValueError(f"checkpoint: {path} was changed after it was written (its checksum is wrong); {REMEDY}.")
        return state


def _may_be_ours(path: Path) -> bool:
    """Whether a file begins as checkpoints do, or is empty after an accident."""
    try:
        with path.open("rb") as file:
            return file.read(len(ZIP)) in (ZIP, b"")
    except OSError:
        return False


ZIP = b"PK"
"""The first bytes of every file that torch writes."""


def checksum(value: Any) -> str:
    """Return a digest of tensors, numbers and text, and of dicts, lists and tuples of them; it differs if the content does.

    >>> checksum({"k": 3}) == checksum({"k": 3}), checksum({"k": 3}) == checksum({"k": 3.0})
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        digest.update(part if isinstance(part, memoryview) else f"{part}\0".encode())  # \0: "ab", "c" is not "a", "bc"
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[str | memoryview]:
    """Yield what a digest is made of: kinds, sizes and contents, in their order."""
    yield type(value).__name__  # so that 3, 3.0 and "3" differ
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        flat = value.detach().cpu().reshape(-1)
        # A tensor of no or one number may have any stride, and counts as contiguous all the same.
        flat = flat.contiguous() if len(flat) > 1 else torch.empty(len(flat), dtype=flat.dtype).copy_(flat)
        yield flat.view(torch.uint8).numpy().data
    elif isinstance(value, Mapping | list | tuple):
        yield str(len(value))
        for item in itertools.chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
            yield from _parts(item)
    else:
        yield repr(value)


def _unreadable(error: Exception) -> TypeError:
    return TypeError(
        f"checkpoint: the state cannot be saved and read again ({first_line(error)}); state_dict() of batches and callbacks may"
        " hold tensors, numbers and text, and lists and dicts of them."
    )


def _unwritable(path: Path, error: Exception) -> OSError:
    return OSError(f"checkpoint: {path} cannot be written ({error}); give a path in a folder that can.")


def _at_work(process: int, file: Path) -> bool:
    """Return whether a process may still be writing a file."""
    try:
        if os.name == "posix":  # elsewhere, os.kill would end the process
            os.kill(process, 0)  # sends nothing; raises if there is no such process
        return time.time() - file.stat().st_mtime < WRITING  # the number may belong to another process by now
    except (ProcessLookupError, FileNotFoundError, OverflowError):
        return False
    except OSError:  # a process of somebody else
        return True


SHARED_VERSION = 2  # of what the folder holds; another one is refused
KEPT = 2  # complete states that stay in the folder: the last one, and the one before it in case that is damaged
PRIVATE = frozenset({"random", "place"})  # parts of a loop's state that differ between processes

dcp: Any = LazyModule("torch.distributed.checkpoint")  # takes a second to import


class SharedCheckpoint:
    """A folder for ``solve(..., checkpoint=..., group=...)`` that always holds the last complete state of a run.

    Each process writes its parts of what is divided, and what it has alone: random states, the place in its batches, buffers of
    its module. What all have in common is written once. Another number of processes can read it; then batches and random
    numbers start over, with a warning. The state before the last one is kept, and takes over when the last one is damaged.

    Args:
        path: the folder; it is made if need be.
        every: ``solve`` writes a state after this many steps, and at the end.
        asynchronous: write in the background, from a copy in host memory, while the run goes on.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1000, *, asynchronous: bool = False) -> None:
        check_count("SharedCheckpoint: every", every)
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"checkpoint: expected the path of a folder, got {path!r}.")
        self.path, self.every, self.asynchronous = Path(path).resolve(), every, asynchronous
        if self.path.is_file():
            raise NotADirectoryError(
                f"checkpoint: {self.path} is a file, and several processes need a folder; give another path."
            )
        self._pending: Any = None
        self._proven = False

    def open(self, group: Group) -> None:
        """Prepare the folder for the processes of a run; all of them must call it.

        Raises:
            OSError: the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.group, self._pending, self._writers = group, None, group.everyone
        if self.asynchronous:  # messages of a thread in the background must not mix with those of the run
            ranks = dist.get_process_group_ranks(group.everyone)
            # Local synchronization: processes outside the run do not take part in this call, and must not be waited for.
            self._writers = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    @property
    def exists(self) -> bool:
        """Return whether there is a complete state."""
        return bool(self._complete_states())

    def _complete_states(self) -> list[Path]:
        """Return the folders of complete states, oldest first."""
        # torch writes .metadata last, after the parts of all processes.
        return sorted(folder for folder in self.path.glob("step-*") if (folder / ".metadata").exists())

    def write(self, state: Mapping[str, Any]) -> None:
        """Write ``state`` to the folder; all processes must call it.

        Raises:
            OSError: it cannot be written; the states before are kept.
            TypeError: it could not be read again.
        """
        self.finish()  # one state at a time: the one before is complete, or has failed, before another is begun
        tensors: dict[str, Tensor] = {}
        parts = {name: part if name in PRIVATE else _take(part, name, tensors) for name, part in state.items()}
        # Tensors that are sharded, or the same in all processes, are written once. Checksums are sent, as tensors may be large.
        sums = {name: None if is_dtensor(tensor) else _checksum(tensor) for name, tensor in tensors.items()}
        others = self.group.gather(sums)
        common = [name for name, mine in sums.items() if all(name in other and other[name] == mine for other in others)]
        shared = {name: tensors.pop(name) for name in common}
        content = {"version": SHARED_VERSION, "processes": self.group.count, "own": tensors, "parts": parts}
        shared[f"process.{self.group.rank}"] = self._packed(content)
        folder = self.path / self.group.first(self._name(state["steps"]))  # one name for all processes
        arguments: dict[str, Any] = {"storage_writer": dcp.FileSystemWriter(folder), "process_group": self._writers}
        with self._saving():
            if self.asynchronous:
                self._pending = dcp.async_save(shared, **arguments)
            else:
                dcp.save(shared, **arguments)
                self._clean()

    def finish(self) -> None:
        """Wait for the state that is being written in the background, if there is one.

        Raises:
            OSError: it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._saving():
                pending.result()
            self._clean()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turn the errors of torch into one that says that the states before are kept."""
        try:
            yield
        except (dcp.CheckpointException, OSError, RuntimeError) as error:
            cause = "".join(str(error).strip().splitlines()[-1:])  # dcp puts it into the last line
            reason = f"{type(error).__name__}: {cause}"
            raise OSError(f"checkpoint: {self.path} could not be written ({reason}); what it held before is kept.") from error

    def _name(self, k: int) -> str:
        """Return a folder name that sorts after all others and is not in use: overwriting could damage a complete state."""
        same = len(list(self.path.glob(f"step-{k:012d}-*"))) if self.group.main else 0
        return f"step-{k:012d}-{same:03d}"

    def _clean(self) -> None:
        """Remove old states, and those that killed processes left unfinished."""
        if self.group.main:
            kept = self._complete_states()[-KEPT:]
            for folder in self.path.glob("step-*"):
                if folder not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _packed(self, content: Any) -> Tensor:
        """Return the part of the state that only this process has, as a tensor of bytes."""
        buffer = io.BytesIO()
        try:
            torch.save(content, buffer)
            if not self._proven:  # a state that cannot be read is noticed with the first one
                torch.load(io.BytesIO(buffer.getvalue()), weights_only=True, map_location="cpu")
                self._proven = True
        except UNREADABLE as error:
            raise _unreadable(error) from error
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def read(self, like: Mapping[str, Any], moments: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Read the last complete state; None when there is none. All processes must call it.

        Args:
            like: a state of the run, which shows how tensors are sharded now.
            moments: leaves by the prefix under which an optimizer saves what belongs to them; a new optimizer has none yet.

        Raises:
            ValueError: the states are damaged, or not checkpoints.
        """
        names = self.group.first([folder.name for folder in self._complete_states()])  # the same list in all processes
        failures: list[str] = []
        for name in reversed(names):
            try:
                state = self._read(self.path / name, like, moments)
            except (dcp.CheckpointException, OSError, RuntimeError, EOFError, KeyError, pickle.PickleError) as error:
                failures.append(f"{name}: {type(error).__name__}")
                continue
            if failures and self.group.main:
                warnings.warn(
                    f"checkpoint: {self.path} holds damaged states ({', '.join(failures)}); going on from {name}.",
                    TrainingWarning,
                    stacklevel=3,
                )
            return state
        if failures:
            raise ValueError(f"checkpoint: {self.path} is damaged or not a checkpoint ({', '.join(failures)}); {REMEDY}.")
        return None

    def _read(self, folder: Path, like: Mapping[str, Any], moments: Mapping[str, Tensor]) -> dict[str, Any]:
        """Read one state, with its tensors sharded as the run has them now."""
        reader = dcp.FileSystemReader(folder)
        known: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        processes = sum(name.startswith("process.") for name in known)
        # With another number of processes, all take what the first one had; random numbers and batches then start over.
        own = f"process.{self.group.rank if processes == self.group.count else 0}"
        box = {own: torch.empty(known[own].size, dtype=torch.uint8)}
        dcp.load(box, storage_reader=reader, process_group=self.group.everyone)
        content = torch.load(io.BytesIO(box[own].numpy().tobytes()), weights_only=True, map_location="cpu")
        if content["version"] != SHARED_VERSION:
            raise ValueError(f"checkpoint: {folder} was not written by this version of meha.solve; {REMEDY}.")
        now: dict[str, Tensor] = {}
        for name, part in like.items():
            if name not in PRIVATE:
                _take(part, name, now)
        tensors = {}
        for name, saved in known.items():
            if not name.startswith("process."):
                owner = next((leaf for prefix, leaf in moments.items() if name.startswith(prefix)), None)  # of a moment
                tensors[name] = _room(saved, now.get(name, owner))
        dcp.load(tensors, storage_reader=reader, process_group=self.group.everyone)
        state: dict[str, Any] = {name: _put(part, {**tensors, **content["own"]}) for name, part in content["parts"].items()}
        return {**state, "processes": processes}


def _take(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` with its tensors replaced by their names, and collect the tensors in ``tensors``."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {key: _take(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _sequence(value, [_take(item, f"{path}.{i}", tensors) for i, item in enumerate(value)])
    return value


def _put(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo :func:`_take`."""
    if isinstance(value, Mapping):
        if set(value) == {"tensor"} and isinstance(value["tensor"], str):
            return tensors[value["tensor"]]
        return {key: _put(item, tensors) for key, item in value.items()}
    return _sequence(value, [_put(item, tensors) for item in value]) if isinstance(value, list | tuple) else value


def _sequence(like: Any, items: list[Any]) -> Any:
    return items if isinstance(like, list) else tuple(items)


def _checksum(tensor: Tensor) -> list[int]:
    """Return the shape of a tensor, and sums of its bits as integers, which differ if the tensor does (almost surely)."""
    if not tensor.numel():
        return list(tensor.shape)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.contiguous().reshape(-1)
    words = flat.view(torch.float64 if flat.is_complex() else flat.dtype).view(kinds[min(flat.element_size(), 8)])
    # Several strides, because a plain sum is the same when entries trade places.
    return [*tensor.shape, *torch.stack([words[::stride].sum(dtype=torch.int64) for stride in (1, 2, 3, 7)]).tolist()]


def _room(saved: Any, like: Tensor | None) -> Tensor:
    """Allocate memory for a tensor of a checkpoint, sharded as ``like`` is if it has the same shape."""
    if like is not None and like.shape == saved.size:
        return torch.empty_like(like, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype)
