"""Where the laboratory reads and writes: the repository, its records and its documentation."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DOCS", "RECORDS", "ROOT"]

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "lab" / "records"
DOCS = ROOT / "docs"
