"""The joints: what the code as a whole must keep to.

The budgets below are today's figures of ``python -m meha_lab.house``. They may fall, and are then lowered here. A rise needs a
line in the changelog that says for what, and the new figure here; so does a fall of the comments.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from meha_lab import house

import meha
from meha.methods import Method

ROOT = Path(meha.__file__).parents[1]
NAMES = [path.relative_to(ROOT).as_posix() for path in house.proper(ROOT)]

LINES = 31_680
LAYERS = 12
SINGLE_IMPORTERS = 21
PUBLIC_NAMES = 183
REPEATED_CLASSES = 0
NAMED_NUMBERS = 122
COMMENTS = 8.0  # per 100 lines of code, at least
CHANGE = "Stay within it, or say in CHANGELOG.md what the change is for and set the new figure here."

HOOKS = {"init", "step", "terminate", "report", "check", "resolve", "advice"}

PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w|from torch[\w.]* import [^\n]*\b_[a-z]|torch\.fx\.experimental\.symbolic")


def methods():
    found, waiting = [], [Method]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("meha.")]


@pytest.mark.parametrize("name", NAMES)
def test_private_names_of_torch_are_in_one_file(name):
    text = "\n".join(line.partition("#")[0] for line in (ROOT / name).read_text().splitlines())
    assert bool(PRIVATE.search(text)) == (name == "meha/tensors/torch_private.py")


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


@pytest.mark.parametrize(
    ("figure", "budget", "measure"),
    [
        ("lines of the library", LINES, lambda: house.lines(house.shipped(ROOT))),
        ("import layers", LAYERS, lambda: len(house.layers(ROOT))),
        ("modules with one importer", SINGLE_IMPORTERS, lambda: len(house.single_importers(ROOT))),
        ("public names", PUBLIC_NAMES, lambda: len(house.public_names(ROOT))),
        ("class names used twice or more", REPEATED_CLASSES, lambda: len(house.repeated_classes(ROOT))),
        ("named numbers of the automatic methods", NAMED_NUMBERS, lambda: len(house.named_numbers(ROOT))),
    ],
)
def test_the_library_keeps_to_its_budgets(figure, budget, measure):
    assert (found := measure()) <= budget, f"{figure}: {found}, and the budget is {budget}. {CHANGE}"


def test_comments_do_not_become_fewer():
    comments, code = house.comments(ROOT)
    found = 100 * comments / code
    assert found >= COMMENTS, f"comments per 100 lines of code: {found:.2f}, and the budget is {COMMENTS}. {CHANGE}"


def test_a_method_has_seven_hooks_and_two_are_required():
    own = {name for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert own - {"start", "describe"} == HOOKS
    assert Method.__abstractmethods__ == {"init", "step"}
    base = set(dir(Method))
    for kind in methods():
        overridden = {name for name in vars(kind) if name in base and not name.startswith("__")}
        functions = {name for name in overridden if callable(getattr(kind, name)) or isinstance(vars(kind)[name], property)}
        assert kind is Method or functions - {"_abc_impl"} <= HOOKS, kind


def test_solve_has_fourteen_parameters():
    assert len(inspect.signature(meha.solve).parameters) <= 14


def test_the_default_method_is_decided_in_one_place():
    """Nothing but the policy builds the three defaults."""
    for name in NAMES:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            built = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", ""))
            defaults = ("Default", "StochasticMEHA", "AdaptiveSOBA", "NetworkSOBA")
            assert built not in defaults or name == "meha/methods/default.py", f"{name}:{node.lineno}"


def test_the_library_does_not_import_its_laboratory():
    """The contract of the imports says so of the package; this also looks at the command beside it."""
    assert "meha_cli.py" in NAMES
    for name in NAMES:
        assert not re.search(r"^\s*(from|import) meha_lab", (ROOT / name).read_text(), re.MULTILINE), name
