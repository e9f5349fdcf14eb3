"""Environments for the peers, made with venv and pip under .peers, and a line to the programs that run in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from meha_lab.paths import ROOT

HERE = Path(__file__).parent
FOLDER = ROOT / ".peers"


class Environment(NamedTuple):
    """A program, what it needs, and what is installed without what that asks for in turn."""

    program: str
    needs: tuple[str, ...]
    alone: tuple[str, ...] = ()


ENVIRONMENTS = {
    # BOAT asks for torchvision, which it does not import
    "boat": Environment(
        "boat.py",
        (f"torch=={torch.__version__.partition('+')[0]}", "numpy==1.26.4", "matplotlib>=3.8", "setuptools"),
        ("higher==0.2.1", "boat-torch==1.1.1"),
    ),
    "betty": Environment(
        "weighing_betty.py",
        (f"torch=={torch.__version__.partition('+')[0]}", "numpy==1.26.4", "setuptools"),
        ("betty-ml==0.1.1",),
    ),
    "jax": Environment("jax_scan.py", ("jax==0.10.2", "jaxlib==0.10.2")),
}

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


def install(name: str) -> Path:
    """The Python of an environment, which is made when it is not there or is another one."""
    wanted, folder = ENVIRONMENTS[name], FOLDER / name
    python, ready = folder / "bin" / "python", folder / "ready"
    contents = json.dumps([sys.version, wanted.needs, wanted.alone])
    if not ready.exists() or ready.read_text() != contents:
        print(f"Making an environment for {name}: {', '.join(wanted.needs + wanted.alone)}", flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([*pip, *wanted.needs], check=True)
            if wanted.alone:
                subprocess.run([*pip, "--no-deps", *wanted.alone], check=True)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"{name}: its environment could not be made ({error}); see what pip says above, or measure without peers:"
                " python -m meha_lab.benchmarks.speed --quick"
            ) from error
        ready.write_text(contents)
    return python


class Peer:
    """A peer's program at work, or another one in its environment: ``peer.ask(n=10, steps=100, ...)`` returns its answer.

    The environment ``""`` is the one at hand.
    """

    def __init__(self, name: str, program: str = "") -> None:
        self.name = name or program
        command = [str(install(name)) if name else sys.executable, str(HERE / (program or ENVIRONMENTS[name].program))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **ONE_THREAD})
        self.versions: dict[str, str] = self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its program ended with {self._process.wait()}; see its message above.")
        return dict(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
