"""A report as HTML pages, its tables as CSV and Markdown, and its figures as PNG and SVG."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from meha.running.loggers import write_atomically
from meha_lab.reproduce.figures import DASH, MINUS, render, three_digits

__all__ = []


@dataclass(frozen=True)
class Mark:
    """A table entry with a meaning: a number with text of its own, the best of its column, a failure in words, a published
    value, or the heading of the rows below.

    ``value`` is the number for the CSV file; an empty ``text`` shows it.
    """

    text: str
    kind: Literal["number", "best", "failed", "paper", "head"]
    value: float | None = None


Item = str | int | float | None | Mark


@dataclass(frozen=True)
class Table:
    """Rows under columns; a row of a single Mark of kind "head" spans them all."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Item]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure; ``narrow`` is the same in one column, shown in its place on a phone."""

    name: str
    caption: str
    figure: Figure
    alt: str
    narrow: Figure | None = None


@dataclass(frozen=True)
class Prose:
    """A paragraph: plain text, or trusted HTML as Markup."""

    text: str | Markup


@dataclass(frozen=True)
class Details:
    """Blocks that are shown on demand."""

    summary: str
    blocks: Sequence[Block]


Block = Table | Picture | Prose | Details


@dataclass(frozen=True)
class Section:
    """A part of the report, on a page of its own.

    Attributes:
        anchor: the name of its file.
        title: its heading.
        blocks: what it shows.
        source: where the paper has it, such as "Table 2".
        answers: how many claims of the paper hold, hold in part, do not hold, and are open.
        finding: the main result in a sentence.
    """

    anchor: str
    title: str
    blocks: Sequence[Block]
    source: str = ""
    answers: tuple[int, ...] = (0, 0, 0, 0)
    finding: str = ""

    @property
    def mark(self) -> str:
        """Whether its claims hold: "all", "some", "none", or nothing where there are none."""
        held, partly, *_ = self.answers
        if not sum(self.answers):
            return ""
        return "all" if held == sum(self.answers) else "some" if held or partly else "none"


@dataclass(frozen=True)
class Page:
    """The report: its conclusion, a line for each section and all claims; the sections; the facts of the run.

    ``home`` is the address of a page to link to.
    """

    title: str
    lead: Sequence[str | Markup]
    summary: Table
    sections: Sequence[Section]
    facts: Mapping[str, str]
    home: str = ""

    @property
    def answers(self) -> tuple[int, ...]:
        """The number of claims that hold, hold in part, do not hold, and are open."""
        return tuple(sum(section.answers[i] for section in self.sections) for i in range(4))

    @property
    def conclusion(self) -> str:
        """How many claims hold, in a sentence; empty without claims."""
        held, partly, failed, undecided = self.answers
        if not sum(self.answers):
            return ""
        last = f", and {undecided} {'is' if undecided == 1 else 'are'} open" if undecided else ""
        return f"Of {sum(self.answers)} claims of the paper, {held} hold, {partly} hold in part, {failed} do not{last}."


def write(page: Page, folder: Path) -> Path:
    """Write index.html, a page per section, tables/*.csv, *.md and figures/*.png, *.svg; returns the path of index.html."""
    blocks = list(flat([page.summary, *(block for section in page.sections for block in section.blocks)]))
    tables = [block for block in blocks if isinstance(block, Table)]
    pictures = [block for block in blocks if isinstance(block, Picture)]
    ids = [f"{kind}-{table.name}" for kind in ("table", "caption") for table in tables] + [f"figure-{p.name}" for p in pictures]
    _check_names([table.name for table in tables], "name of a table")
    _check_names([picture.name for picture in pictures], "name of a picture")
    _check_names([section.anchor for section in page.sections], "anchor of a section", taken=["facts", "index", *ids])
    files = {f"tables/{table.name}.csv": comma_separated(table).encode() for table in tables}
    files |= {f"tables/{table.name}.md": markdown(table).encode() for table in tables}
    drawings = {}
    for picture in pictures:
        svg = render(picture.figure, "svg")
        files |= {f"figures/{picture.name}.svg": svg, f"figures/{picture.name}.png": render(picture.figure, "png")}
        drawings[picture.name] = inline(svg, picture.name, picture.alt, "wide" if picture.narrow else "any")
        if picture.narrow:
            drawings[picture.name] += inline(render(picture.narrow, "svg"), f"{picture.name}.narrow", picture.alt, "narrow")
    template = _environment().get_template("page.html")
    for section in (None, *page.sections):
        text = template.render(page=page, section=section, drawings=drawings)
        files[f"{section.anchor if section else 'index'}.html"] = text.encode("utf-8", "replace")
    for name, content in files.items():
        write_atomically(folder / name, content)
    return folder / "index.html"


def flat(blocks: Iterable[Block]) -> Iterator[Block]:
    """All blocks, those within details too."""
    for block in blocks:
        yield block
        if isinstance(block, Details):
            yield from flat(block.blocks)


def show(entry: Item) -> str:
    """A table entry as text: floats to three significant digits, None as a dash.

    >>> show(0.012345), show(2), show(None), show(Mark("diverged", "failed"))
    ('0.0123', '2', '–', 'diverged')
    """
    match entry:
        case Mark(text, _, value):
            return text or show(value)
        case None:
            return DASH
        case bool():
            return "yes" if entry else "no"
        case int():
            return str(entry).replace("-", MINUS)
        case float():
            return three_digits(entry)
    return entry


def raw(entry: Item) -> str | int | float | None:
    """A table entry as a value for the CSV file."""
    if isinstance(entry, Mark):
        return entry.text if entry.value is None else entry.value
    return entry


def numeric(table: Table) -> list[bool]:
    """Which columns of a table hold numbers."""
    rows = [[isinstance(raw(entry), int | float) for entry in row] for row in table.rows if not spans(row)]
    return [any(column) for column in zip(*rows, strict=True)] or [False] * len(table.columns)


def comma_separated(table: Table) -> str:
    """A table as CSV, with all digits; a heading is one entry."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        if len(row) != len(table.columns) and not spans(row):
            raise ValueError(f"a row of table {table.name!r} has {len(row)} cells, expected {len(table.columns)}")
        writer.writerow([raw(entry) for entry in row])
    return file.getvalue()


def markdown(table: Table) -> str:
    """A table as Markdown, with the best entries in bold.

    >>> print(markdown(Table("t", "Two rows.", ["", "work"], [["CG", Mark("12", "best", 12)], ["a|b", None]], "A note.")))
    Two rows.
    <BLANKLINE>
    | | work |
    |---|---|
    | CG | **12** |
    | a\\|b | – |
    <BLANKLINE>
    A note.
    <BLANKLINE>
    """

    def line(entries: Iterable[str]) -> str:
        return "|" + "|".join(f" {text} " if text else " " for text in entries) + "|"

    def text(entry: Item) -> str:
        bold = isinstance(entry, Mark) and entry.kind in ("best", "head")
        return f"**{show(entry)}**" if bold else show(entry).replace("|", "\\|")

    rows = [[text(entry) for entry in row] + [""] * (len(table.columns) - len(row)) for row in table.rows]
    lines = [table.caption, "", line(table.columns), "|---" * len(table.columns) + "|", *map(line, rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def spans(row: Sequence[Item]) -> bool:
    """Whether a row is the head of those below it."""
    return len(row) == 1 and isinstance(row[0], Mark) and row[0].kind == "head"


def inline(svg: bytes, prefix: str, label: str, kind: str) -> Markup:
    """A drawing of matplotlib as an element of a page: ids of its own, no namespaces, coordinates to hundredths of a point."""
    root = ET.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            value = re.sub(r"url\(#", f"url(#{prefix}.", value)
            match key.rpartition("}")[2]:
                case "id":
                    value = f"{prefix}.{value}"
                case "href":
                    value = value.replace("#", f"#{prefix}.", 1)
                case "d" | "transform" | "x" | "y" | "points":
                    value = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", value).replace("\n", "")
            element.set(key.rpartition("}")[2], value)
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    inches = float(root.attrib.pop("width").removesuffix("pt")) / 72
    del root.attrib["height"]
    size = f"max-width: {7 * inches:.1f}rem" + (f"; min-width: {4.4 * inches:.1f}rem" if kind == "any" else "")
    root.attrib |= {"class": kind, "role": "img", "aria-label": label, "style": size}
    return Markup(ET.tostring(root, encoding="unicode"))


def _check_names(names: Sequence[str], what: str, taken: Sequence[str] = ()) -> None:
    seen = {name.lower() for name in taken}
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError(f"{what}: {name!r} needs to be made of letters, digits, - and _")
        if name.lower() in seen:
            raise ValueError(f"{what}: {name!r} is taken; give each its own")
        seen.add(name.lower())


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("meha_lab.reproduce", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kinds = {"table": Table, "picture": Picture, "prose": Prose, "details": Details, "mark": Mark}
    environment.tests |= {name: lambda block, kind=kind: isinstance(block, kind) for name, kind in kinds.items()}
    environment.filters |= {"show": show}
    environment.globals |= {"numeric": numeric, "spans": spans, "raw": raw}
    return environment
