"""Atomic writing of files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file under another name and rename it, so a reader never sees half of it; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
