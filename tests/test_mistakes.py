"""Mistakes of users: starts, objectives, callbacks, checkpoints and batches of a wrong kind end in a sentence with a remedy."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import meha
from meha import Checkpoint
from meha.running.observers import Recorder

F64 = torch.float64
QUICK = meha.MEHA(alpha=0.02, beta=0.05, eta=0.05, gamma=0.5, c=1.0)


def t(*values):
    return torch.tensor(values, dtype=F64)


def near(x, y):
    return (x - 1).square().sum() + (y - 2).square().sum()


def follow(x, y):
    return (y - x).square().sum()


def call(upper=near, lower=follow, x0=None, y0=None, **options):
    return meha.solve(meha.Problem(upper, lower), t(0.0) if x0 is None else x0, t(1.0) if y0 is None else y0, **options)


def through(y):
    return y(torch.ones(1, 1)).sum()


NETWORK = {"upper": lambda x, y: near(x, through(y)), "lower": lambda x, y: follow(x, through(y)), "x0": torch.zeros(1)}

STARTS = {
    "lazy": (nn.LazyLinear(1), r"y\['weight'\]: has no shape yet, as in a lazy module; call the module once"),
    "sparse": (t(1.0).to_sparse(), r"y: is a tensor of layout torch.sparse_coo; pass a dense one"),
    "float8": (
        torch.ones(1).to(torch.float8_e4m3fn),
        r"y: dtype torch.float8_e4m3fn cannot be computed with; pass y.float\(\)",
    ),
    "bfloat16": (torch.ones(1, dtype=torch.bfloat16), r"x0, y0: the default computes in single or double precision; pass"),
}


@pytest.mark.parametrize("name", STARTS)
def test_starts_without_values_are_refused(name):
    start, message = STARTS[name]
    with pytest.raises(TypeError, match=message):
        call(y0=start, **NETWORK if isinstance(start, nn.Module) else {})


def test_tensors_without_values_are_refused():
    empty = torch.ones(1, device="meta")
    with pytest.raises(TypeError, match=r"x: is on the meta device, and has no values; pass one on another device"):
        call(x0=empty, y0=empty)


@pytest.mark.filterwarnings("ignore")
def test_modules_of_jit_are_refused():
    with pytest.raises(TypeError, match=r"y: is compiled by torch.jit, .* pass the module itself"):
        call(y0=torch.jit.script(nn.Linear(1, 1)), **NETWORK)


def writes_into_y(x, y):
    y.data.mul_(0.9)
    return near(x, y)


OBJECTIVES = {
    "complex": (lambda x, y: near(x, y) + 0j, r"upper: must return a real number, got dtype torch.complex128; take its .real"),
    "numpy": (
        lambda x, y: np.square(y.numpy()).sum(),
        "upper: (calls|returns a number of) numpy, which gradients cannot pass; use the functions of torch",
    ),
    "a number of numpy": (lambda x, y: np.float64(1.0), "upper: returns a number of numpy"),
    "other precision": (
        lambda x, y: torch.ones(1, dtype=torch.float32) @ y,
        "upper: mixes tensors of other dtypes with x and y",
    ),
    "in place": (writes_into_y, r"upper: changes x or y in place; compute with a copy, such as y.clone\(\)"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("method", [None, QUICK, meha.RHG(alpha=0.1, beta=0.1, inner_steps=2)], ids=str)
def test_objectives(name, method):
    upper, message = OBJECTIVES[name]
    with pytest.raises(ValueError, match=message):
        call(upper, method=method, max_steps=5)


@pytest.mark.parametrize("method", [None, meha.ImplicitNewton(), meha.PenaltyContinuation()], ids=str)
@pytest.mark.parametrize("noise", [1.0, 1e-4])
@pytest.mark.parametrize("level", ["upper", "lower"])
def test_random_objectives_are_refused_by_engines(method, noise, level):
    """At y = 0, where all runs begin, the noise vanishes."""
    objectives = {"upper": near, "lower": lambda x, y: (y - x).square().sum()}
    exact = objectives[level]
    objectives[level] = lambda x, y: exact(x, y) + noise * torch.randn(()) * y.square().sum()
    with pytest.raises(ValueError, match=rf"{level}: is .*, and .* when it is called again .* compares values. Draw random"):
        meha.solve(meha.Problem(**objectives), t(0.0), t(0.0), method)


@pytest.mark.parametrize("method", [None, meha.MEHA(), meha.StochasticMEHA(), meha.F2SA()], ids=str)
def test_a_module_from_outside_in_place_of_y_is_refused(method):
    """The method's copies of y would be ignored, and x would never move."""
    net, data = nn.Linear(2, 1), torch.ones(4, 2)
    problem = meha.Problem(
        upper=lambda x, y, batch: (net(data) - 1).square().mean(),
        lower=lambda x, y, batch: (x.sigmoid() * net(data)[:, 0].square()).mean(),
    )
    with pytest.raises(ValueError, match=r"(upper|lower): gets a copy of the module y, and .* use the y that it gets, not the"):
        meha.solve(problem, torch.zeros(4), net, method, batches=[0], max_steps=3)


CALLBACKS = {
    "class": (Recorder, r"callbacks: Recorder is a class; make an observer of it, as in Recorder\(\)"),
    "one argument": (
        lambda run: None,
        r"callbacks: must be called as callback\(run, info\), but .* takes \(run\); write it so",
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name):
    callback, message = CALLBACKS[name]
    with pytest.raises(TypeError, match=message):
        call(method=QUICK, max_steps=5, callbacks=callback)


def test_callbacks_of_all_kinds_are_taken():
    seen = []

    class Counting:
        def __call__(self, run, info, more=None):
            seen.append(info.step)

    call(method=QUICK, max_steps=3, callbacks=[Counting(), Counting().__call__, lambda *both: seen.append(0), print])
    assert len(seen) == 9


@pytest.mark.parametrize("batches", ["abc", b"abc", {"images": t(1.0)}])
def test_texts_and_dicts_are_no_batches(batches):
    with pytest.raises(
        TypeError, match=r"batches: a \w+ yields its \w+, not batches; pass a list of batches, such as \[batch\]"
    ):
        call(lambda x, y, batch: near(x, y), lambda x, y, batch: follow(x, y), batches=batches, max_steps=3)


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "loop.pt"])
def test_paths_that_cannot_be(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.pt", "loop.pt")
    with pytest.raises(OSError, match=r"checkpoint: .*; give (another|a) path"):
        call(checkpoint=path)


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    call(checkpoint="~/run.pt", method=QUICK, max_steps=3)
    assert (tmp_path / "run.pt").is_file()


def test_two_threads_may_write_one_checkpoint(tmp_path):
    """The last one wins; none fails, and no part is left."""
    failed = []

    def work():
        file = Checkpoint(tmp_path / "run.pt", every=1)
        try:
            for k in range(30):
                file.write({"k": k, "x": torch.zeros(1000)})
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert Checkpoint(tmp_path / "run.pt").read()["k"] == 29
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.previous"]


def test_the_part_of_a_living_process_is_left_alone(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    part = tmp_path / f"run.pt.{sleeper.pid}-1.part"
    try:
        part.write_bytes(b"half")
        Checkpoint(tmp_path / "run.pt")
        assert part.exists()
        os.utime(part, (0, 0))
        Checkpoint(tmp_path / "run.pt")
        assert not part.exists()
        part.write_bytes(b"half")
    finally:
        sleeper.communicate()
    Checkpoint(tmp_path / "run.pt")
    assert not part.exists()
