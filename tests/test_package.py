"""The package: what importing it needs, and that it says what it is."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import meha

ROOT = Path(__file__).parent.parent


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_import_needs_torch_and_numpy_only():
    """With every other installed extra made unimportable, the core works, and what needs an extra names it."""
    code = """
import sys
for name in ("matplotlib", "rich", "sklearn", "optuna", "cvxpy", "typer", "tensorboard", "hypothesis", "pytest"):
    sys.modules[name] = None
import torch, meha
p = meha.problems.sine(1)
solution = meha.solve(p, p.x0, p.y0, max_steps=3)
print(solution)
for call in (solution.plot, meha.observers.Progress):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert 'pip install "meha[plot]"' in result.stdout
    assert 'pip install "meha[progress]"' in result.stdout


def test_import_changes_no_global_state():
    code = "import torch; a = torch.random.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(); import meha;"
    code += "b = torch.random.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads();"
    code += "assert torch.equal(a[0], b[0]) and a[1:] == b[1:]"
    assert python(code).returncode == 0


def test_version_and_public_names():
    assert meha.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (Path(meha.__file__).parent / "py.typed").exists()
    for name in meha.__all__:
        assert hasattr(meha, name)


@pytest.mark.parametrize("module", ["nonsmooth", "sets", "schedules", "stopping", "theory", "diagnostics", "problems"])
def test_modules_list_what_they_offer(module):
    part = getattr(meha, module)
    for name in part.__all__:
        assert getattr(part, name) is not None, name
