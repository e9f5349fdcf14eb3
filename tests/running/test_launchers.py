"""The snippets of docs/distributed.md for Lightning Fabric and Accelerate, where these are installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meha

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "distributed.md"
STEPS = 40

BEFORE = """
import torch, torch.distributed as dist, meha
from torch.utils.data import DataLoader, DistributedSampler
from test_launchers import data, problem, start
x0, net = start()
"""


def problem():
    clean = torch.randn(64, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return meha.Problem(
        lambda x, y, batch: cross_entropy(y(clean), (clean[:, 0] > 0).long()),
        lambda x, y, batch: (torch.sigmoid(x[batch[0]]) * cross_entropy(y(batch[1]), batch[2], reduction="none")).mean(),
    )


def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(torch.arange(64), inputs, (inputs[:, 0] > 0).long() ^ (torch.arange(64) < 16))


def start():
    torch.manual_seed(0)
    return torch.zeros(64, dtype=torch.float64), torch.nn.Linear(4, 2).double()


def snippet(title):
    text = PAGE.read_text().split(f"### {title}\n", 1)[1]
    return text.split("```python\n", 1)[1].split("```", 1)[0]


def expected():
    """One process with the batches of both."""
    loaders = [DataLoader(data(), 8, sampler=DistributedSampler(data(), 2, rank)) for rank in range(2)]
    batches = []
    for epoch in range(STEPS // 4):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        batches += [[torch.cat(parts) for parts in zip(*pair, strict=True)] for pair in zip(*loaders, strict=True)]
    return meha.solve(problem(), *start(), batches=batches, max_steps=STEPS).x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "package", "launcher"),
    [
        ("Lightning Fabric", "lightning_fabric", []),  # it starts the other process
        ("Accelerate", "accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
    ],
)
def test_snippets_end_where_one_process_does(title, package, launcher, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    code = BEFORE + "data, problem = data(), problem()\n" + snippet(title).replace("max_steps=1000", f"max_steps={STEPS}")
    script, end = tmp_path / "script.py", tmp_path / "end.pt"
    script.write_text(code + f"\nif dist.get_rank() == 0:\n    torch.save(solution.x, {str(end)!r})\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"finished after {STEPS} steps" in done.stdout
    reference = expected()
    assert float(reference.abs().max()) > 1e-2
    torch.testing.assert_close(torch.load(end), reference, rtol=1e-10, atol=1e-12)
