"""Tables in the documentation: each lies between two comments that name it, and is drawn from the records, never by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from meha_lab.paths import DOCS, RECORDS
from meha_lab.store import Store

__all__ = ["Tables", "current", "draw", "markdown", "placed"]

Tables = Mapping[str, tuple[str, Callable[[Store], Sequence[str]]]]
"""By the name of a table: the page that has it, and its lines from the records."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown.

    >>> markdown(["", "time"], [["a", "1 s"]])
    ['| | time |', '|---|---|', '| a | 1 s |']
    """
    titles = "|" + "|".join(f" {title} " if title else " " for title in head) + "|"
    return [titles, "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def placed(text: str, name: str, lines: Sequence[str]) -> str:
    """The text of a page with these lines as the table of this name."""
    begin, end = f"<!-- {name}: drawn by python -m meha_lab.benchmarks --draw -->", f"<!-- end of {name} -->"
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{name}: the page needs a line {begin!r} before the table and a line {end!r} after it.")
    return "\n".join([before + begin, *lines, end]) + after


def current(tables: Tables, store: Store) -> dict[str, str]:
    """The pages of these tables, as the records have them."""
    texts = {page: (DOCS / page).read_text(encoding="utf-8") for page, _ in tables.values()}
    for name, (page, lines_of) in tables.items():
        texts[page] = placed(texts[page], name, lines_of(store))
    return texts


def draw(tables: Tables) -> None:
    """Write these tables into their pages."""
    for page, text in current(tables, Store(RECORDS)).items():
        (DOCS / page).write_text(text, encoding="utf-8")
