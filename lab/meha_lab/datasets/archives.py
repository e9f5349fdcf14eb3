"""Read files and tar archives that may be packed, damaged or hostile; nothing is extracted to disk."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from meha_lab.datasets.sources import DataError, Source, damaged

__all__ = ["check_file", "files_in", "open_packed"]


UNPACKED = 2**28  # bytes of an archive; half as much again as CIFAR-10, the largest
MEMBERS = 2**17  # files and folders of an archive; twice those of CIFAR-10 as images
PIECE = 2**13  # bytes that are read at once, and so the largest header with a long name
SHOWN = 100  # characters of a name in a message


def check_file(path: Path, source: Source) -> None:
    """Refuse a folder or a device in place of a file, and a file that is larger than any unpacked one."""
    if not path.is_file():
        raise damaged(path, source, "is a folder or a device, not a file")
    if (size := path.stat().st_size) > UNPACKED:
        raise damaged(path, source, f"has {size:,} bytes, more than {UNPACKED:,}")


def open_packed(path: Path) -> io.BufferedIOBase:
    """Open a file, and unpack it if it is packed, whatever its name."""
    file = path.open("rb")
    packed = file.peek(2)[:2] == b"\x1f\x8b"
    if not packed:
        return file
    file.close()
    return gzip.open(path)


def files_in(
    path: Path, source: Source, wanted: Callable[[PurePosixPath], bool], largest: int
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield name and content of each wanted file of a tar archive, in the order of the archive.

    An archive is refused with a :class:`DataError` if it cannot be read to its end, unpacks to more than ``UNPACKED`` bytes, or
    has more than ``MEMBERS`` members, a wanted file of more than ``largest`` bytes, a link, a device, a file with holes, or a
    name that leads out of the archive.
    """
    try:
        with open_packed(path) as file, _Forward(file) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for number, member in enumerate(archive):
                if number == MEMBERS:
                    raise damaged(path, source, f"has more than {MEMBERS:,} members")
                name = PurePosixPath(member.name)
                is_wanted = member.isfile() and wanted(name)
                if fault := _fault(member, name, largest if is_wanted else UNPACKED):
                    raise damaged(path, source, f"its member {member.name[:SHOWN]!r} {fault}")
                if is_wanted:
                    yield name, stream.content(member.offset_data, member.size)
            while stream.read(PIECE):  # up to the checksum at the end
                pass
    except DataError:
        raise
    except Exception as error:  # gzip and tarfile raise many kinds of errors
        raise damaged(path, source, f"is not a readable tar archive ({error})") from error


def _fault(member: tarfile.TarInfo, name: PurePosixPath, largest: int) -> str | None:
    """Say why an archive with this member is refused."""
    if name.is_absolute() or ".." in name.parts:
        return "leads out of the archive"
    if member.issym() or member.islnk():
        return "is a link"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        return "is neither a plain file nor a folder"
    if member.issparse():
        return "is a file with holes"
    if not 0 <= member.size <= largest:
        return f"has {member.size:,} bytes, more than {largest:,}" if member.size > 0 else "has a negative size"
    return None


class _Forward(io.BufferedIOBase):
    """A file that is read forward only, in small pieces, up to ``UNPACKED`` bytes, whatever a header says."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self.file, self.position = file, 0

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= PIECE:
            raise ValueError(f"it has a header of {size} bytes, not 0 to {PIECE:,}")
        data = self.file.read(size)
        self.position += len(data)
        if self.position > UNPACKED:
            raise ValueError(f"it unpacks to more than {UNPACKED:,} bytes")
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET or offset < self.position:
            raise ValueError("it has a member of negative size")
        while self.position < offset and self.read(min(PIECE, offset - self.position)):
            pass
        return self.position

    def tell(self) -> int:
        return self.position

    def content(self, start: int, size: int) -> bytes:
        """Read ``size`` bytes from ``start`` on."""
        self.seek(start)
        data = b"".join(self.read(min(PIECE, size - done)) for done in range(0, size, PIECE))
        if len(data) != size:
            raise EOFError(f"it ends after {len(data):,} of {size:,} bytes of a file")
        return data
