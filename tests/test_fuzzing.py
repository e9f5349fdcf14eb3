"""Nonsense in constructors, objectives, starts, checkpoints and files: every error names the argument and says what to do.

``MEHA_FUZZ=2000 pytest -s tests/test_fuzzing.py`` tries that many of each, and prints how many were accepted and refused.
"""

import collections
import dataclasses
import io
import os
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import meha
from meha import Checkpoint
from meha.cleaning.files import read

FEW = settings(
    max_examples=int(os.environ.get("MEHA_FUZZ", "25")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**30), 10**30),
    st.sampled_from([10**400, Fraction(1, 3), 0, -0.0, np.float64("nan"), np.float32(-1), True, 1j]),
)
NONSENSE = st.one_of(
    NUMBERS,
    st.none(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.sampled_from([object(), print, torch.ones(2), torch.tensor(-1.0), np.zeros(2), b"x"]),
)

KINDS = [getattr(meha.methods, name) for name in meha.methods.__all__]
METHODS = [
    kind
    for kind in KINDS
    if isinstance(kind, type)
    and dataclasses.is_dataclass(kind)
    and hasattr(kind, "step")
    and all(field.default is not dataclasses.MISSING for field in dataclasses.fields(kind))
]
FIELDS = [(kind, field.name) for kind in METHODS for field in dataclasses.fields(kind)]


def told(error, name):
    """Whether an error is one of ours: it names the argument, and what was wrong with it or what would be right."""
    message = str(error)
    words = r"(?i)must|expected|give|pass|use|need|leave|cannot|check|write|allow|make|start|fill|fix|save|remove|name|add"
    return isinstance(error, TypeError | ValueError | OSError) and name in message and re.search(words, message) is not None


COUNTS = collections.Counter()
"""Calls of each test by what they ended in."""


def refused(name, call):
    """Make a call: it works, or raises an error that tells."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].split()[0]
    COUNTS[test, "bare"] += 1  # until the end is known
    try:
        found = call()
        COUNTS[test, "accepted"] += 1
    except Exception as error:
        if not told(error, name):
            raise
        COUNTS[test, "refused in words"] += 1
        found = None
    COUNTS[test, "bare"] -= 1
    return found


@FEW
@given(st.sampled_from(FIELDS), NONSENSE)
def test_methods(field, value):
    kind, name = field
    refused(name, lambda: kind(**{name: value}))


SWITCHES = [(kind, field.name) for kind in METHODS for field in dataclasses.fields(kind) if field.type == "bool"]


@pytest.mark.parametrize(("kind", "name"), SWITCHES)
def test_switches(kind, name):
    """Text such as "False" would count as true."""
    with pytest.raises((TypeError, ValueError), match=f"{name}: must be .*True or False.*, got 'False'"):
        kind(**{name: "False"}).start(quadratic(), torch.ones(2), torch.ones(2))


CALLS = [
    ("every", lambda value: Checkpoint("never.pt", every=value)),
    ("checkpoint", lambda value: Checkpoint(value) if not isinstance(value, str) else None),
    ("Recorder: every", lambda value: meha.observers.Recorder(every=value)),
    ("limit", lambda value: meha.observers.DivergenceGuard(limit=value)),
    ("limit", lambda value: meha.observers.SkipBadBatches(limit=value)),
    ("patience", lambda value: meha.observers.Validate(max, patience=value)),
    ("Accumulated: n", lambda value: meha.loaders.Accumulated([1], value)),
]


@FEW
@given(st.sampled_from(CALLS), NONSENSE)
def test_observers_and_loaders(monkeypatch, tmp_path, call, value):
    monkeypatch.chdir(tmp_path)
    name, make = call
    refused(name, lambda: make(value))


def quadratic(**parts):
    return meha.Problem(**{"upper": lambda x, y: (x * y).sum(), "lower": lambda x, y: (y - x).square().sum(), **parts})


QUICK = meha.RHG(alpha=0.1, beta=0.1, inner_steps=2)

RETURNS = st.sampled_from(
    [
        *(None, 1.0, 3, "text", [], np.float64(2.0), object(), torch.ones(2), torch.ones(1, 1), torch.ones(0)),
        *(torch.tensor(1), torch.tensor(True), torch.tensor(1.0), torch.tensor(1j), torch.tensor(torch.nan)),
    ]
)


@FEW
@given(st.sampled_from(["upper", "lower"]), RETURNS)
def test_return_values_of_objectives(level, value):
    solution = refused(
        level, lambda: meha.solve(quadratic(**{level: lambda x, y: value}), torch.ones(2), torch.ones(2), QUICK, max_steps=2)
    )
    assert solution is None or level == "upper"


STARTS = st.one_of(
    st.sampled_from([None, 1.0, "text", [], {}, {"a": 1}, np.ones(2), object(), torch.nn.Identity()]),
    st.sampled_from([torch.int64, torch.bool, torch.complex64, torch.float32, torch.float16]).map(
        lambda d: torch.ones(2, dtype=d)
    ),
    st.sampled_from([torch.nan, torch.inf]).map(lambda number: torch.full((2,), number)),
    st.sampled_from([torch.ones(0), [torch.ones(2), "b"], {"a": torch.ones(2), "b": None}]),
)


@FEW
@given(st.sampled_from(["x", "y"]), STARTS)
def test_starts(name, value):
    start = {"x": torch.ones(2), "y": torch.ones(2), name: value}
    problem = meha.Problem(lambda x, y: (flat(x) * flat(y)).sum(), lambda x, y: (flat(y) - flat(x)).square().sum())
    refused(name, lambda: meha.solve(problem, start["x"], start["y"], QUICK, max_steps=1))


def flat(value):
    return value if isinstance(value, torch.Tensor) else value["a"] if isinstance(value, dict) else value[0]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "run.pt"
    meha.solve(quadratic(), torch.ones(2), torch.ones(2), QUICK, max_steps=2, tol=None, checkpoint=path)
    return path.read_bytes()


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just(torch.zeros(3)), st.just({"a": 1}))


@FEW
@given(st.sampled_from(["cut", "flip", "bytes", "value"]), st.integers(0, 10**6), st.binary(max_size=50), VALUES)
def test_checkpoints(good, tmp_path, kind, at, other, value):
    """Cut, changed or foreign files are refused, never used."""
    path, at = tmp_path / "run.pt", at % len(good)
    content = torch.load(io.BytesIO(good), weights_only=True)
    if kind == "value":
        name = sorted(content)[at % len(content)]
        assume(repr(content[name]) != repr(value))  # it may have been None
        torch.save({**content, name: value}, path)
    else:
        changed = {"cut": good[:at], "flip": good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :], "bytes": other}
        path.write_bytes(changed[kind])
    found = refused("checkpoint", Checkpoint(path).read)
    assert found is None or (kind == "flip" and found.keys() == content.keys() - {"version", "checksum"})


CELLS = st.one_of(st.text(max_size=4), st.floats().map(str), st.sampled_from(["", "1", "=A1", "1_0", "\x1b[3m", '"']))


@FEW
@given(st.lists(st.lists(CELLS, min_size=2, max_size=4), min_size=1, max_size=5), st.binary(max_size=30), st.booleans())
def test_files_of_examples(tmp_path, cells, content, table):
    path = tmp_path / ("t.csv" if table else "t.npz")
    path.write_bytes(
        "\n".join(["a,b,label", *(",".join(row) for row in cells)]).encode("utf-8", "replace") if table else content
    )
    refused(path.name, lambda: read(path, clean_fraction=0.5))


def test_the_counts(capsys):
    """Comes last: prints what the tests before it met."""
    with capsys.disabled():
        if "MEHA_FUZZ" in os.environ:
            print(*(f"{name}: {end} {number}" for (name, end), number in sorted(COUNTS.items())), sep="\n")  # noqa: T201
    assert not any(number for (_, end), number in COUNTS.items() if end == "bare")
