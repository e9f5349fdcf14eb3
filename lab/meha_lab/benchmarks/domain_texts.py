"""Text that every Python has, for a small language model: eight sources, and two targets that are not among them.

The sources are cut to the sizes of ``SOURCES``, so that a source that helps is soon repeated:

- ``docstrings`` and ``comments`` of modules of the standard library: prose about functions, and notes of programmers.
- ``code`` of the same modules, without both; ``messages``, the strings of that code that have three words or more.
- ``names`` of characters, and the modules of ``encodings``, which are ``tables``: neither noise nor of much use.
- ``shuffled``, the letters of the docstrings in random order, and ``numbers``, random ones.

The target ``reference`` is the language reference, in prose with pieces of code and grammar. A paragraph that several of its
topics repeat is there once. The target ``docstrings`` are those of other modules, so that one source is of its kind.
"""

from __future__ import annotations

import ast
import io
import random
import sys
import sysconfig
import tokenize
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["KIB", "OWN", "SOURCES", "TARGETS", "VALIDATION", "Target", "as_bytes", "checksum", "sources", "target"]

KIB = 1024
SOURCES = {
    "docstrings": 128,
    "comments": 128,
    "code": 512,
    "messages": 64,
    "names": 256,
    "tables": 256,
    "shuffled": 128,
    "numbers": 512,
}
"""The sources, and their sizes in KiB."""

TARGETS = ("reference", "docstrings")
VALIDATION, TEST, OWN = 64, 96, 192
"""KiB of a target for the upper level and all choices, for the tables, and to train on, to compare with."""

LEFT_OUT = frozenset((
    *("antigravity", "curses", "dbm", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "sqlite3"),
    *("test", "this", "tkinter", "turtledemo", "venv"),
))  # fmt: skip
"""What some installations lack, and what is no module like the others."""

TYPESET = str.maketrans("‘’“”–—…", "''\"\"--.")


@dataclass(frozen=True)
class Target:
    """The parts of a target, as vectors of bytes: for the upper level, for the tables, and to train on."""

    validation: Tensor
    test: Tensor
    own: Tensor


def modules() -> list[Path]:
    """The modules of the standard library, in an order that has nothing to do with what they are about."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = sorted(sys.stdlib_module_names - LEFT_OUT)
    found = [path for name in kept for path in (root / f"{name}.py", *(root / name).rglob("*.py")) if path.is_file()]
    return sorted(found, key=lambda path: zlib.crc32(path.relative_to(root).as_posix().encode()))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def documented(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """The nodes with a docstring, each with that."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield node, text


def docstrings(path: Path) -> str:
    return "\n".join(text for _, text in documented(ast.parse(read(path))))


def comments(path: Path) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(read(path)).readline)
    return "\n".join(token.string.lstrip("#! ") for token in tokens if token.type == tokenize.COMMENT)


def undocumented(path: Path) -> ast.Module:
    """The code of a module without its docstrings."""
    tree = ast.parse(read(path))
    for node, _ in list(documented(tree)):
        node.body[:1] = [] if len(node.body) > 1 else [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def code(path: Path) -> str:
    return ast.unparse(undocumented(path))


def messages(path: Path) -> str:
    strings = (node.value for node in ast.walk(undocumented(path)) if isinstance(node, ast.Constant))
    return "\n".join(text for text in strings if isinstance(text, str) and len(text.split()) > 2)


def collect(size: int, paths: Iterable[Path], reader: Callable[[Path], str]) -> str:
    """What the reader finds in these files, until the size is reached."""
    parts: list[str] = []
    found = 0
    for path in paths:
        parts += [text] if (text := reader(path).strip()) else []
        found += len(text) + 1
        if found > size:
            return "\n".join(parts)[:size]
    raise ValueError(
        f"{reader.__name__}: the standard library of this Python has {found:,} of {size:,} characters; take one with sources."
    )


def as_bytes(text: str) -> Tensor:
    """A text as numbers below 128; what is not ASCII is a question mark."""
    return torch.frombuffer(bytearray(text.translate(TYPESET).encode("ascii", errors="replace")), dtype=torch.uint8).long()


def sources(kib: int = KIB) -> dict[str, Tensor]:
    """The sources, by name; ``kib`` is the number of characters of a KiB."""
    size = {name: n * kib for name, n in SOURCES.items()}
    paths, draw = modules()[::2], random.Random(0)
    readers = {"docstrings": docstrings, "comments": comments, "code": code, "messages": messages}
    texts = {name: collect(size[name], paths, reader) for name, reader in readers.items()}
    texts["names"] = "\n".join(name for i in range(0x5000) if (name := unicodedata.name(chr(i), "")))
    pages = (Path(sysconfig.get_paths()["stdlib"]) / "encodings").glob("cp*.py")
    texts["tables"] = collect(size["tables"], sorted(pages), read)
    texts["shuffled"] = "".join(draw.sample(texts["docstrings"], len(texts["docstrings"])))
    texts["numbers"] = " ".join(str(draw.randrange(10**6)) for _ in range(size["numbers"] // 5))
    return {name: as_bytes(texts[name][: size[name]]) for name in SOURCES}


def reference() -> str:
    """The topics of the language reference, without paragraphs that were there before."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept: list[str] = []
    for name in sorted(topics, key=lambda name: zlib.crc32(name.encode())):
        for paragraph in topics[name].strip().split("\n\n"):
            words = " ".join(paragraph.split())
            kept += [] if words in seen else [paragraph]
            seen.add(words)
    return "\n\n".join(kept)


def target(name: str, kib: int = KIB) -> Target:
    """The parts of a target; ``kib`` is the number of characters of a KiB."""
    sizes = [n * kib for n in (VALIDATION, TEST, OWN)]
    text = reference() if name == "reference" else collect(sum(sizes), modules()[1::2], docstrings)
    if len(text) < sum(sizes):
        raise ValueError(
            f"target {name!r}: this Python has {len(text):,} of its {sum(sizes):,} characters; use another version."
        )
    return Target(*as_bytes(text[: sum(sizes)]).split(sizes))


def checksum(parts: Iterable[Tensor]) -> str:
    """Tells texts of one version of Python from those of another."""
    total = 0
    for part in parts:
        total = zlib.crc32(bytes(part.tolist()), total)
    return f"{total:08x}"
