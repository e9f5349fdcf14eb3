"""The table of assumptions in docs/how-to-choose.md against the classes, and against what their runs count."""

import dataclasses
import pathlib
import re

import pytest
import torch

import meha
import meha.methods
from meha.methods import Method, Uniform

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "how-to-choose.md").read_text(encoding="utf-8")
ENGINES = ("Default", "ImplicitNewton", "PenaltyContinuation", "ActiveSets")
YES = {"yes": True, "no": False}


def table():
    """The rows by method: the cells after the name."""
    lines = TEXT.split("## What the theory assumes")[1].split("Where the assumptions of six")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {name: row[1:] for row in cells for name in re.findall(r"`(\w+)`", row[0])}


KINDS = {
    name: kind
    for part in (meha.methods, meha.contrib)
    for name in part.__all__
    if isinstance(kind := getattr(part, name), type) and issubclass(kind, Method) and kind is not Method
}


def test_every_method_has_a_row():
    assert set(table()) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_the_columns_hold(name):
    *_, free, single, nonsmooth, constraints = table()[name]
    kind = KINDS[name]
    assert YES[nonsmooth] == (not kind.refuses_nonsmooth)
    assert YES[constraints] == (not kind.refuses_y_set)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    inner = defaults.get("inner_steps", None if name not in ENGINES else 2)  # they solve the lower level at each x
    assert YES[single] == (inner in (None, 1))
    assert YES[free] == (products(name, kind) == 0)


def products(name, kind):
    """Hessian-vector products in two steps."""
    problem = meha.Problem(
        lambda x, y: (y - 1).square().sum() / 2 + x.square().sum() / 2,
        lambda x, y: (y - x).square().sum() / 2 + y.pow(4).sum() / 12,
    )
    if name in ("LVHBA", "BiCGAFFA"):
        problem = dataclasses.replace(
            problem, lower_constraints=meha.constraints.Linear(-torch.eye(2), torch.eye(2), torch.ones(2))
        )
    options = {"space": Uniform(-1.0, 1.0)} if "Search" in name or name == "TPE" else {}
    zero = torch.zeros(2, dtype=torch.float64)
    run = kind(**options).start(problem, zero, zero)
    before = run.counts.hvp if name == "LVHBA" else 0  # those that choose its numbers
    run.step()
    run.step()
    return run.counts.hvp - before


def test_the_rows_of_the_paper():
    """Table 1 of the paper without SLM: upper level, lower level, Hessian-free, single loop, non-asymptotic."""
    paper = {
        "IAPTT": ("smooth", "L-smooth, compact", "no", "no", False),
        "GALET": ("L-smooth, bounded gradient", "PL, L-smooth", "no", "no", True),
        "BOME": ("L-smooth, bounded, bounded gradient", "PL, L-smooth", "yes", "no", True),
        "VPBGD": ("L-smooth, bounded gradient", "PL, L-smooth", "yes", "no", True),
        "MEHA": ("L-smooth", "L-smooth, and a weakly convex non-smooth part", "yes", "yes", True),
    }
    rows = table()
    for name, (upper, lower, free, single, bound) in paper.items():
        F, f, guarantee, hessian_free, single_loop, *_ = rows[name]
        assert (F, f, hessian_free, single_loop, guarantee == "non-asymptotic") == (upper, lower, free, single, bound)
    assert sorted(re.findall(r"^\| `(\w+)` \*", TEXT, re.M)) == sorted(paper)


def test_what_was_not_looked_up_says_so():
    """The second table: a source and how it was checked, for methods of the first one that are not the paper's."""
    lines = TEXT.split("Where the assumptions of six")[1].split("\nThe paper marks")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert len(rows) == 6
    for name, source, shown, checked in rows:
        assert name.strip("`") in table()
        assert re.search(r"\b20\d\d\b", source)
        assert re.match("summary|remembered", checked), checked
        bound = table()[name.strip("`")][2]
        assert (bound == "none") == bool(re.search("^no |not shown", shown))
