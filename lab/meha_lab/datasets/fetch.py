"""Find the files of a data set on this machine, or download them."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from meha_lab.datasets.sources import Folder, Source, cache_folder, path_of, source_of

__all__ = ["download", "find"]


Report = Callable[[str, int, int | None], None]
"""Called with the address, the bytes received so far, and the total if the server states it."""

TIMEOUT = 30.0  # seconds without data
CHUNK = 2**16
LIMIT = 2**28  # more than the largest file has unpacked; a server that sends more sends something else


def download(name: str, folder: Folder | None = None, progress: bool = True) -> Path:
    """Download the published files of a data set, and return their folder.

    A file is stored only if it is complete and has the published checksum. An existing file is never replaced: if it is the
    published one, it is not downloaded again; otherwise an error is raised.

    Args:
        name: "mnist", "fashion-mnist", "omniglot" or "cifar10".
        folder: the parent of the subfolder ``mnist``, ``fashion_mnist``, ``omniglot`` or ``cifar10``; the cache by default.
        progress: show a bar, or one line per file if rich is missing or stderr is not a terminal.

    Returns:
        The folder with the files.

    >>> download("imagenet")
    Traceback (most recent call last):
    ValueError: name: must be one of 'mnist', 'fashion-mnist', 'omniglot', 'cifar10', got 'imagenet'.
    """
    source = source_of(name)
    return _fetch(source, source.files, folder, progress)


def find(
    source: Source, names: Sequence[str], folder: Folder | None, may_download: bool, instead: Sequence[str] = ()
) -> list[Path]:
    """Return the paths of these files, all in one folder; a file may be there without ``.gz``.

    Files ``instead`` are taken where the others are in no folder; they cannot be downloaded.
    """
    places = _places(source, folder)
    choices = [choice for choice in (names, instead) if choice]
    for choice in choices:
        for place in places:
            paths = [_present(place, name) for name in choice]
            present = [path for path in paths if path is not None]
            if len(present) == len(choice):
                return present
    if may_download:
        place = _fetch(source, names, folder, progress=True)
        return [place / name for name in names]
    plain = " (or without .gz)" if any(name.endswith(".gz") for name in names) else ""
    raise FileNotFoundError(
        f"{source.name}: {' or '.join(map(' and '.join, choices))}{plain} not found in {' or '.join(map(str, places))}. "
        f"Download {' and '.join(names) if instead else 'them'} with download=True or the command meha download {source.name}, "
        f"or pass folder=... (or set MEHA_DATA) with a subfolder {source.subfolder!r} that has them."
    )


def _places(source: Source, folder: Folder | None) -> list[Path]:
    if folder is not None:
        return [path_of(folder) / source.subfolder, path_of(folder)]
    roots = [cache_folder()]
    if data := os.environ.get("MEHA_DATA"):
        roots.insert(0, path_of(data))
    return [root / source.subfolder for root in roots]


def _present(place: Path, name: str) -> Path | None:
    return next((path for path in (place / name, place / name.removesuffix(".gz")) if path.exists()), None)


def _fetch(source: Source, names: Iterable[str], folder: Folder | None, progress: bool) -> Path:
    """Download the missing files of ``source``, and return their folder."""
    place = (cache_folder() if folder is None else path_of(folder)) / source.subfolder
    missing = []
    for name in names:
        path = place / name
        if not path.exists():
            missing.append(name)
        elif not path.is_file() or _checksum(path, source.files[name]) != source.files[name]:
            raise FileExistsError(f"{path}: exists, but is not the published file. Move it away, or choose another folder.")
    if missing:
        place.mkdir(parents=True, exist_ok=True)
        with _reporter(progress) as report:
            for name in missing:
                _transfer(source.address + name, place / name, source.files[name], report)
    return place


def _digest(published: str) -> hashlib._Hash:
    """A new digest of the kind of a published checksum, which its length tells."""
    return hashlib.sha256() if len(published) == 2 * hashlib.sha256().digest_size else hashlib.md5(usedforsecurity=False)


def _checksum(path: Path, published: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: _digest(published)).hexdigest()


def _transfer(address: str, path: Path, published: str, report: Report) -> None:
    """Download ``address`` to ``path``, and check its checksum."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    digest = _digest(published)
    try:
        with part.open("wb") as file:
            for chunk in _chunks(address, path, report):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != published:
            raise ValueError(
                f"{address}: the download has the checksum {digest.hexdigest()}, the published file {published}; it was"
                f" discarded. Try again later, or save the file as {path} yourself."
            )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _chunks(address: str, path: Path, report: Report) -> Iterator[bytes]:
    try:
        with urlopen(address, timeout=TIMEOUT) as answer:
            done, total = 0, answer.length
            report(address, done, total)
            while chunk := answer.read(CHUNK):
                yield chunk
                done += len(chunk)
                report(address, done, total)
                if done > LIMIT:
                    raise HTTPException(f"the server sends more than {LIMIT:,} bytes")
            if total is not None and done != total:
                raise HTTPException(f"the connection ended after {done:,} of {total:,} bytes")
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # it keeps the connection open
        raise ConnectionError(
            f"{address}: the download failed ({error or type(error).__name__}); nothing was saved. "
            f"Check the network and try again, or save the file as {path} yourself."
        ) from error


@contextmanager
def _reporter(progress: bool) -> Iterator[Report]:
    """Show a bar on a terminal, a line per file elsewhere, or nothing without ``progress``."""
    if not progress:
        yield lambda address, done, total: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    except ImportError:
        yield _line
        return
    if not sys.stderr.isatty():
        yield _line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar_of = {}

        def move(address: str, done: int, total: int | None) -> None:
            if address not in bar_of:
                bar_of[address] = bars.add_task(address.rpartition("/")[2], total=total)
            bars.update(bar_of[address], completed=done)

        yield move


def _line(address: str, done: int, total: int | None) -> None:
    if done == 0:
        sys.stderr.write(f"downloading {address}" + (f" ({total / 1e6:.1f} MB)\n" if total else "\n"))
