"""The example of text sources: one process, adapters on a frozen base, and FSDP2 started by torchrun."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

PATH = Path(__file__).parent.parent / "examples/llm_domain_weights.py"
QUICK = ["--steps", "2", "--windows", "1"]


@pytest.fixture(scope="module")
def example():
    mpl.use("Agg")
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.texts = functools.cache(module.texts)  # they are read once
    return module


def shown(output, example):
    """The weights and the losses that were printed."""
    weights = [float(re.search(rf"{name} ([\d.]+)", output)[1]) for name in example.SOURCES]
    losses = dict(reversed(line.split("  ", 2)[-2:]) for line in re.findall(r"^ +[\d.]+  .+$", output, re.MULTILINE))
    return weights, {name: float(loss) for name, loss in losses.items() if not name.startswith("best pair")}


ROWS = [
    "docstrings alone",
    "comments alone",
    "code alone",
    "shuffled alone",
    "numbers alone",
    "equal",
    "in proportion to size",
    "found",
]


@pytest.mark.parametrize("form", [[], ["--lora"]], ids=["one process", "adapters"])
def test_forms_in_one_process(form, example, capsys):
    results = example.main([*QUICK, *form])
    weights, losses = shown(capsys.readouterr().out, example)
    assert sum(weights) == pytest.approx(1.0, abs=0.03)
    assert max(weights) > min(weights)
    assert list(losses) == ROWS
    assert len(results) == len(ROWS) + 10
    assert all(losses[name] == pytest.approx(results[name][1], abs=1e-3) for name in ROWS)
    assert 4.0 < losses["equal"] < 5.5


def test_adapters_alone_are_trained_and_begin_as_the_base(example):
    base, text = example.build(), torch.arange(2 * 65).view(2, 65) % 128
    before = {name: leaf.clone() for name, leaf in base.state_dict().items()}
    model = example.build(base=base)
    assert torch.equal(model(text[:, :-1]), base(text[:, :-1]))
    example.train(model, {"one": text.flatten()}, torch.ones(1), 3, 2, seed=0)
    trained = {name for name, leaf in model.named_parameters() if leaf.requires_grad}
    assert {name.split(".")[-2] for name in trained} == {"down", "up"}
    assert (
        sum(leaf.numel() for leaf in model.parameters() if leaf.requires_grad)
        < sum(leaf.numel() for leaf in base.parameters()) / 5
    )
    assert not torch.equal(model(text[:, :-1]), base(text[:, :-1]))
    after = {name.replace(".base.", "."): leaf for name, leaf in model.state_dict().items()}
    assert all(torch.equal(leaf, before[name]) and torch.equal(leaf, after[name]) for name, leaf in base.state_dict().items())


@pytest.mark.parametrize("form", [[], pytest.param(["--lora"], marks=pytest.mark.slow)], ids=["FSDP2", "FSDP2, adapters"])
def test_forms_of_torchrun(form, example):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*launcher, str(PATH), *QUICK, *form], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    weights, losses = shown(done.stdout, example)
    assert sum(weights) == pytest.approx(1.0, abs=0.03)
    assert list(losses) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--lora"]], ids=["one process", "adapters"])
def test_the_weights_found_are_better_than_equal_ones(form, example):
    results = example.main(form)
    assert results["found"][1] < results["equal"][1]
    assert results["found"][1] < results["numbers alone"][1] - 0.5
