"""Heuristic numbers have names: the bodies of functions hold no others than 0, 1, 2 and 1/2."""

import ast
from pathlib import Path

import pytest

import meha

PACKAGE = Path(meha.__file__).parent
NAMED = (
    "engines/*.py",
    "evidence/*.py",
    "lower/curvature.py",
    "lower/flat_problem.py",
    "lower/multistart.py",
    "lower/nearest.py",
    "lower/newton_on_faces.py",
    "lower/batched_newton.py",
    "lower/quadratic_model.py",
    "lower/constrained.py",
    "numerics/extrapolation.py",
    "numerics/limited_memory.py",
    "numerics/sqp.py",
    "methods/default.py",
    "methods/stochastic_meha.py",
    "methods/stochastic/adaptive_soba.py",
    "methods/contrib/adaptive_meha.py",
)
PATHS = [path for pattern in NAMED for path in sorted(PACKAGE.glob(pattern))]
PLAIN = {0, 1, 2, 0.5}


def bare_numbers(source):
    """Line and value of each number in a function that has no name; a subscript may hold any whole number."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    defaults = [part for function in functions for part in (*function.args.defaults, *function.args.kw_defaults) if part]
    parts = [part for function in functions for part in (function.body if isinstance(function.body, list) else [function.body])]
    indices = {id(leaf) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for leaf in ast.walk(node.slice)}
    numbers = {node for part in parts + defaults for node in ast.walk(part) if isinstance(node, ast.Constant)}
    return sorted(
        (node.lineno, node.value)
        for node in numbers
        if isinstance(node.value, int | float)
        and node.value not in PLAIN
        and not (isinstance(node.value, int) and id(node) in indices)
    )


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_numbers_have_names(path):
    assert not bare_numbers(path.read_text())


def test_bare_numbers_are_found():
    source = """
LIMIT: float = 7.0
def f(z, step=0.3, *, keep=5):
    half, last, two = 0.5 * z[-3:], z[4], z ** 2
    def g(x): return 1e-4 * x
    return min(half, key=lambda u: 9 * u) if last > 3 else LIMIT
"""
    assert [value for _, value in bare_numbers(source)] == [0.3, 5, 1e-4, 3, 9]
    assert len(PATHS) > len(NAMED)
