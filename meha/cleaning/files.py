"""Read and write the files of ``meha clean``: examples (NPZ, CSV, Parquet), weights (CSV) and suspicious examples (PNG)."""

from __future__ import annotations

import csv
import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from meha.cleaning.network import LIMIT, Cleaning, as_images, check_features, check_labels, check_trusted

Array = NDArray[Any]

FEATURES = ("features", "images", "x", "X", "data")
LABELS = ("labels", "label", "y")
TRUSTED = "trusted"
MISSING = ("", "?", "na", "n/a", "#na", "#n/a", "<na>", "nan", "null", "none")  # in any case
LONGEST = 200  # letters of a label in a table: numpy needs as much memory for each label as for the longest
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets run cells that begin with one of these (CSV injection)
YES, NO = ("1", "true", "yes"), ("0", "false", "no")

UNREADABLE = (
    *(ValueError, EOFError, KeyError, SyntaxError, MemoryError, RuntimeError),  # RuntimeError: encrypted, or nested too deeply
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)
"""Exceptions that numpy and zipfile raise for damaged or malicious files."""

INK, FAINT, RED = "#222222", "#767676", "#b3261e"
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#555555", "#b2a000")
RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a label is a dollar sign
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
}


@dataclass(frozen=True, eq=False)
class Examples:
    """Features (n, ...), labels (n,), a mask of the trusted examples, and the column names of a table."""

    features: Array
    labels: Array
    trusted: NDArray[np.bool_]
    columns: tuple[str, ...] = ()


def read(
    path: Path,
    *,
    label: str | None = None,
    trusted: str | None = None,
    ignore: Sequence[str] = (),
    clean_fraction: float | None = None,
) -> Examples:
    """Read and check the examples of a file; errors name the options of the command.

    Args:
        path: an NPZ file with arrays, or a CSV (with a header) or Parquet table.
        label: the name of the array or column of labels, if not a usual one.
        trusted: the name of the array or column that marks trusted labels, if not "trusted".
        ignore: columns of a CSV file that are not features.
        clean_fraction: the share of the examples to trust, from the first row on, instead of an array or column.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name an NPZ or CSV file in it.")
    if not path.exists():
        raise ValueError(f"{path}: does not exist; check the path.")
    kind = path.suffix.lower()
    if kind not in (".npz", ".csv", ".tsv", ".parquet"):
        raise ValueError(f"{path}: must be an NPZ file (.npz) or a table (.csv, .tsv, .parquet).")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty; name a file with examples.")
    if kind == ".npz":
        if ignore:
            raise ValueError(f"--ignore: works only with CSV files, but {path.name} is an NPZ file; leave it out.")
        features, labels, marks = _npz(path, label, trusted)
        columns: tuple[str, ...] = ()
    else:
        features, labels, marks, columns = _table(path, label or "label", trusted, ignore)
    try:
        features = check_features(features)
        labels = check_labels(labels, len(features))
        _check_missing(labels)
        return Examples(features, labels, _trusted(marks, clean_fraction, len(labels), trusted or TRUSTED), columns)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_missing(labels: Array) -> None:
    """Raise if labels stand for missing ones: they would become a class of their own."""
    if labels.dtype.kind == "U":
        for row, label in enumerate(labels.tolist()):
            try:
                label.encode()
            except UnicodeEncodeError:  # a half of a pair of UTF-16
                raise ValueError(f"labels: that of row {row} (counted from 0), {label!a}, is no text; mend it.") from None
    missing = np.isin(np.strings.lower(labels), MISSING) if labels.dtype.kind in "US" else np.zeros(0, dtype=bool)
    if missing.any():
        row, count = int(missing.argmax()), int(missing.sum())
        name = repr(str(labels[row])) if labels[row] else "empty"
        raise ValueError(
            f"labels: {count} of {len(labels)} are missing, such as that of row {row} (counted from 0), which is {name}; fill"
            " them in, remove the rows, or give the class another name."
        )


def _trusted(marks: Array | None, fraction: float | None, count: int, name: str) -> NDArray[np.bool_]:
    """Return the mask of trusted examples from exactly one of marks and fraction."""
    if marks is not None and fraction is not None:
        raise ValueError(f"both {name!r} in the file and --clean-fraction say which labels to trust; leave one of them out.")
    if marks is not None:
        return check_trusted(marks, count)
    if fraction is None:
        raise ValueError(f"no labels are marked as trusted; give --clean-fraction, or put {name!r} into the file.")
    if not 0 < fraction < 1:
        raise ValueError(f"--clean-fraction: must be between 0 and 1, got {fraction}.")
    return check_trusted(np.arange(count) < round(fraction * count), count)


def _npz(path: Path, label: str | None, trusted: str | None) -> tuple[Array, Array, Array | None]:
    try:
        with zipfile.ZipFile(path) as file:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in file.infolist()}  # not unpacked yet
    except zipfile.BadZipFile as error:
        how = "write one with numpy.savez(path, features=..., labels=...)"
        raise ValueError(f"{path}: is not an NPZ file, or is damaged ({error}); {how}.") from error

    def find(what: str, names: Sequence[str]) -> Array:
        name = next((name for name in names if name in sizes), None)
        if name is None:
            arrays = ", ".join(sizes) or "none"
            raise ValueError(f"{path}: has no array of {what} ({' or '.join(map(repr, names))}); its arrays: {arrays}.")
        if sizes[name] > 8 * LIMIT:  # a zip bomb: small files can unpack to terabytes
            raise ValueError(f"{path}: {name!r} has {sizes[name]:,} bytes, too many for memory; clean a part of it.")
        try:
            with np.load(path, allow_pickle=False) as file:  # a pickle could run any code
                return file[name]
        except UNREADABLE as error:
            remedy = "save plain numbers or strings, such as numpy.asarray(labels, dtype=str)" if "pickle" in str(error) else ""
            raise ValueError(f"{path}: {name!r} cannot be read ({error}); {remedy or 'write the file again'}.") from error

    marks = find("trusted examples", [trusted or TRUSTED]) if trusted or TRUSTED in sizes else None
    return find("features", FEATURES), find("labels", [label] if label else LABELS), marks


def _text(path: Path) -> TextIO:
    """Open a table as CSV text."""
    if path.suffix.lower() != ".parquet":
        return path.open(encoding="utf-8-sig", newline="")  # without the byte order mark that spreadsheets write
    try:
        from pyarrow import csv as writer
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet files needs pyarrow; install it with: pip install pyarrow") from error
    file = io.BytesIO()
    try:
        writer.write_csv(parquet.read_table(path), file)  # so that all tables pass the same checks
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{path}: is not a Parquet table of numbers and text ({error}).") from error
    return io.StringIO(file.getvalue().decode())


def _table(
    path: Path, label: str, trusted: str | None, ignore: Sequence[str]
) -> tuple[Array, Array, Array | None, tuple[str, ...]]:
    values, labels, marks = array("d"), [], []  # 8 bytes a number; Python floats in a list take 32
    try:
        with _text(path) as file:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count))  # spreadsheets may write semicolons
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, label, trusted, ignore)
            trusted = trusted or (TRUSTED if TRUSTED in header and TRUSTED not in ignore else None)
            columns = {name: place for place, name in enumerate(header) if name not in {label, trusted, *ignore}}
            if not columns:
                raise ValueError(f"{path}: no column is left for the features; its columns are {', '.join(map(repr, header))}.")
            for cells in filter(None, reader):  # without blank lines, often at the end
                if len(cells) != len(header):
                    raise ValueError(
                        f"{path}: line {reader.line_num} has {len(cells)} cells, the header has {len(header)}; fix the line."
                    )
                try:
                    values.extend([_number(name, cells[place]) for name, place in columns.items()])
                    labels.append(_label(label, cells[header.index(label)].strip()))
                    if trusted is not None:
                        marks.append(_mark(trusted, cells[header.index(trusted)]))
                except ValueError as error:
                    raise ValueError(f"{path}: line {reader.line_num}, column {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8.") from error
    except csv.Error as error:
        raise ValueError(f"{path}: is not a table ({error}); save it as CSV.") from error
    if not labels:
        raise ValueError(f"{path}: has a header but no rows; add examples.")
    features = np.frombuffer(values).reshape(len(labels), len(columns))
    strange = np.argwhere(~np.isfinite(features))  # float() also reads "nan" and "inf"
    if len(strange):
        row, place = strange[0]
        name = list(columns)[place]
        raise ValueError(
            f"{path}: row {row} (counted from 0), column {name!r} is {features[row, place]}; fill in a number, or leave out the"
            f" column with --ignore {name!r}."
        )
    return features, np.array(labels), np.array(marks) if trusted is not None else None, tuple(columns)


def _check_header(path: Path, header: list[str], label: str, trusted: str | None, ignore: Sequence[str]) -> None:
    columns = ", ".join(map(repr, header[:20])) + (", ..." if len(header) > 20 else "")
    for option, name in (("--label", label), ("--trusted", trusted), *(("--ignore", name) for name in ignore)):
        if name is not None and name not in header:
            raise ValueError(f"{option}: {path} has no column {name!r}; the header (first line) has {columns}.")
    counts, left_out = Counter(header), set(ignore)
    for place, name in enumerate(header):
        if not name and "" not in left_out:
            raise ValueError(f"{path}: column {place + 1} has no name; give it one, or leave it out with --ignore ''.")
        if name and name not in left_out and counts[name] > 1:
            raise ValueError(f"{path}: {counts[name]} columns are named {name!r}; give them different names.")
    if label in ignore or trusted in ignore or label == trusted:
        raise ValueError("--label, --trusted, --ignore: must name different columns.")


# Each reads a cell, or raises an error that continues a sentence after "column".


def _number(column: str, cell: str) -> float:
    """Return the number in a cell; unlike float(), refuse underscores and digits of other scripts."""
    try:
        return float(cell if cell.isascii() and "_" not in cell else "")
    except ValueError:
        content = f"{cell[:40]!r}, not a number" if cell.strip() else "empty"
        raise ValueError(
            f"{column!r} is {content}. Convert the column to numbers, or leave it out with --ignore {column!r}."
        ) from None


def _label(column: str, cell: str) -> str:
    if len(cell) > LONGEST:
        raise ValueError(
            f"{column!r} has {len(cell):,} letters, and a label at most {LONGEST}; name the column of the classes with --label,"
            " or shorten them."
        )
    return cell


def _mark(column: str, cell: str) -> bool:
    word = cell.strip().lower()
    if word not in YES + NO:
        raise ValueError(f"{column!r} must be 1 or 0, true or false, yes or no, got {cell[:40]!r}.")
    return word in YES


def table(labels: Array, cleaning: Cleaning) -> str:
    """Return the weights as CSV, one line per example in the order of the data.

    >>> cleaning = Cleaning(np.array([1.0, 0.25]), np.array([1, 0]), np.array(["cat", "dog"]), np.array([True, False]))
    >>> table(np.array(["cat", "cat"]), cleaning).splitlines()
    ['row,label,weight,rank,suggested', '0,cat,1,2,cat', '1,cat,0.25,1,dog']
    """
    ranks = 1 + np.argsort(cleaning.order)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("row", "label", "weight", "rank", "suggested"))
    for row, (label, better) in enumerate(zip(labels, cleaning.suggested, strict=True)):
        writer.writerow((row, _plain(label), f"{cleaning.weights[row]:.6g}", ranks[row], _plain(better)))
    return file.getvalue()


def _plain(label: Any) -> str:
    """Return a label as text that a spreadsheet does not take for a formula.

    >>> _plain("=1+1"), _plain("-1"), _plain("cat")
    ("'=1+1", '-1', 'cat')
    """
    text = str(label)
    if not text.startswith(FORMULA):
        return text
    try:
        float(text)  # a negative number is no formula
    except ValueError:
        return f"'{text}"
    return text


def picture(examples: Examples, cleaning: Cleaning, top: int | None = None) -> bytes:
    """Draw the ``top`` most suspicious examples as PNG: 50 images with labels, or 20 rows with weights and unusual features."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    images = as_images(examples.features)
    suspicious = cleaning.suspicious()
    rows, total = suspicious[: top or (20 if images is None else 50)], len(suspicious)
    which = f"the {len(rows)} most suspicious of {total:,}" if len(rows) < total else f"all {total:,}"
    file = io.BytesIO()
    with rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of letters that the font lacks, the picture shows a box
        figure = Figure(layout="constrained")
        title = f"Labels that look wrong ({which}): given → suggested" if total else "No label looks wrong"
        figure.suptitle(title, fontsize=11)
        if images is None:
            _sheet(figure, examples, cleaning, rows)
        else:
            _gallery(figure, images, examples, cleaning, rows)
        # No version of matplotlib in the file: the same data give the same bytes.
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None}, facecolor="white")
    return file.getvalue()


def _short(name: Any, most: int = 16) -> str:
    """Return a name on one line, of at most this number of letters."""
    text = " ".join(str(name).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def _gallery(figure: Figure, images: Array, examples: Examples, cleaning: Cleaning, rows: Array) -> None:
    pairs = [(_short(examples.labels[row], 13), _short(cleaning.suggested[row], 13)) for row in rows]
    long = any(len(given) + len(better) > 8 for given, better in pairs)  # titles need two lines
    across = min(10, max(len(rows), 4))
    down = max(1, math.ceil(len(rows) / across))
    figure.set_size_inches(max(across, 6), down * (1.45 if long else 1.3) + 0.4)
    shown = images[rows].astype(np.float64)
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)  # one scale, so that images compare
    for place in range(across * down):
        ax = figure.add_subplot(down, across, place + 1)
        ax.axis("off")
        if place < len(rows):
            ax.imshow((shown[place] - low) / ((high - low) or 1), cmap="gray", vmin=0, vmax=1)
            title = ("\n→ " if long else " → ").join(pairs[place])
            ax.set_title(title, fontsize=7.5 if long else 9, color=RED, pad=11)
            ax.text(0.5, 1.04, f"row {rows[place]}", transform=ax.transAxes, ha="center", fontsize=6.5, color=FAINT)


def _sheet(figure: Figure, examples: Examples, cleaning: Cleaning, rows: Array) -> None:
    figure.set_size_inches(11, max(3.2, 0.24 * len(rows) + 1.2))
    left, right = figure.subplots(1, 2, width_ratios=(2, 5))
    _histogram(left, examples, cleaning)
    right.axis("off")
    right.set(xlim=(0, 1), ylim=(len(rows) + 0.5, -1))
    heads = ((0.0, "row"), (0.09, "given → suggested"), (0.38, "most unusual for the given label"))
    for x, head in heads:
        right.text(x, -0.4, head, color=FAINT, va="center")
    for place, row in enumerate(rows):
        pair = f"{_short(examples.labels[row], 14)} → {_short(cleaning.suggested[row], 14)}"
        cells = (str(row), pair, _unusual(examples, cleaning, row))
        for (x, _), cell, color in zip(heads, cells, (INK, RED, INK), strict=True):
            right.text(x, place + 0.6, cell, color=color, va="center", fontsize=8.5)


def _histogram(ax: Axes, examples: Examples, cleaning: Cleaning) -> None:
    """Draw the weights of the unverified examples, by label if there are few labels."""
    unverified = ~cleaning.trusted
    labels, weights = examples.labels[unverified], cleaning.weights[unverified]
    names = np.unique(examples.labels)
    named = len(names) <= len(HUES)
    parts = [weights[labels == name] for name in names] if named else [weights]
    colors = list(HUES[: len(names)]) if named else [HUES[0]]
    ax.hist(parts, bins=20, range=(0, 1), stacked=True, color=colors, label=[_short(name) for name in names] if named else None)
    ax.axvline(0.5, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    ax.set(xlabel="weight (below 0.5: looks wrong)", ylabel="unverified examples", xlim=(0, 1))
    if named:
        ax.legend(title="given label", edgecolor="white", framealpha=1, fontsize=8, loc="upper center")


def _unusual(examples: Examples, cleaning: Cleaning, row: int, most: int = 2) -> str:
    """Return the features of a row that differ most from examples of the same label that look right, in words."""
    values = examples.features.reshape(len(examples.features), -1)
    kept = values[(examples.labels == examples.labels[row]) & (cleaning.weights > 0.5)].astype(np.float64)
    if len(kept) < 2:
        return ""
    spread = kept.std(axis=0)
    far = (values[row] - kept.mean(axis=0)) / np.where(spread > 0, spread, np.inf)  # constant features: 0
    worst = np.argsort(-np.abs(far), kind="stable")[:most]
    names = examples.columns or [f"feature {i}" for i in range(values.shape[1])]
    return ",  ".join(f"{_short(names[i], 20)} {values[row, i]:.4g} ({far[i]:+.1f} sd)" for i in worst if far[i])
