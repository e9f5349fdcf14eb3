"""The command: help without torch, its other names, output for programs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner

import meha
from meha_cli import app

ROOT = Path(__file__).parent.parent


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


def test_help_does_not_import_torch():
    """So that it takes a part of a second."""
    code = "import sys; sys.argv = ['meha', '-h']; import meha_cli\ntry: meha_cli.app()\nexcept SystemExit: pass\n"
    result = python("-c", code + "print('torch' in sys.modules, 'meha' in sys.modules)")
    assert "Bilevel optimization for PyTorch" in result.stdout
    assert result.stdout.split()[-2:] == ["False", "False"]


def test_the_package_is_the_command():
    result = python("-m", "meha", "--version")
    assert (result.returncode, result.stdout.strip()) == (0, meha.__version__)


def test_help_of_the_commands():
    for command in ("clean", "reproduce", "download", "info"):
        for option in ("-h", "--help"):
            result = CliRunner().invoke(app, [command, option])
            assert result.exit_code == 0
            assert "Usage" in result.output
    assert "--install-completion" in CliRunner().invoke(app, ["-h"]).output


def test_info():
    shown = json.loads(CliRunner().invoke(app, ["info", "--json"]).output)
    assert shown["meha"] == meha.__version__
    assert shown["torch"] == torch.__version__.partition("+")[0] or shown["torch"] == torch.__version__
    assert "data" in CliRunner().invoke(app, ["info"]).output


def test_experiments_as_json():
    listed = json.loads(CliRunner().invoke(app, ["reproduce", "--list", "--json"]).output)
    assert "lasso-toy" in [experiment["name"] for experiment in listed]


def test_clean_as_json_with_one_thread(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 60)
    features = rng.normal(size=(120, 3)) + 4 * labels[:, None]
    trusted = np.tile([True, False], 60)
    given = labels.copy()
    given[1] = 1  # which is wrong
    np.savez(tmp_path / "d.npz", features=features, labels=given, trusted=trusted)
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, ["clean", str(tmp_path / "d.npz"), "--out", str(tmp_path / "out"), "--json"])
    found = json.loads(result.output)
    assert (found["unverified"], found["trusted"], found["classes"]) == (60, 60, 2)
    assert found["suspicious"][0]["row"] == 1
    assert found["suspicious"][0]["suggested"] == "0"
    assert Path(found["weights"]).exists()
    assert torch.get_num_threads() == threads
