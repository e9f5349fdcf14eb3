"""The joints: what the code as a whole must keep to."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import meha
from meha.methods import Method

PACKAGE = Path(meha.__file__).parent
PROPER = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not {"problems", "tasks", "datasets", "reproduce"} & set(path.relative_to(PACKAGE).parts)
]
HOOKS = {"init", "step", "terminate", "report", "check", "resolve", "advice"}

PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w|from torch[\w.]* import [^\n]*\b_[a-z]|torch\.fx\.experimental\.symbolic")


def methods():
    found, waiting = [], [Method]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("meha.")]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_in_one_file(path):
    text = "\n".join(line.partition("#")[0] for line in path.read_text().splitlines())
    assert bool(PRIVATE.search(text)) == (path.name == "_torch.py")


def test_the_pattern_finds_private_names():
    for line in (
        "torch._foreach_add_(a, b)",
        "import torch._inductor",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "torch.ops.aten._foreach_norm.Scalar",
    ):
        assert PRIVATE.search(line), line
    assert not PRIVATE.search("from torch.utils.data import DataLoader; torch.nn.functional.relu_(x)")


@pytest.mark.parametrize("path", PROPER, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


def test_a_method_has_seven_hooks_and_two_are_required():
    own = {name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert own - {"start", "describe"} == HOOKS
    assert Method.__abstractmethods__ == {"init", "step"}
    base = set(dir(Method))
    for kind in methods():
        overridden = {name for name in vars(kind) if name in base and not name.startswith("__")}
        functions = {name for name in overridden if callable(getattr(kind, name)) or isinstance(vars(kind)[name], property)}
        assert kind is Method or functions - {"_abc_impl"} <= HOOKS, kind


def test_solve_has_twelve_parameters():
    assert len(inspect.signature(meha.solve).parameters) <= 12


def test_the_default_method_is_decided_in_one_place():
    """Nothing but the function that decides, and the methods themselves, builds the two defaults without arguments."""
    allowed = {"_default.py"}
    for path in PROPER:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            built = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", ""))
            if built in ("Continuation", "StochasticMEHA"):
                assert path.name in allowed, f"{path}: {node.lineno}"


def test_the_library_proper_does_not_know_the_experiments():
    for path in PROPER:
        if path.name != "cli.py" and "cli" not in path.relative_to(PACKAGE).parts:
            assert "meha_lab.reproduce" not in path.read_text(), path
