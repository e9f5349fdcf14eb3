"""Default goes on bit for bit from a checkpoint, wherever it was cut."""

import io
import math
import os
import random
import signal
from functools import partial

import pytest
import torch
from meha_lab.problems import collection

import meha
from meha.methods import Default

CACHES = {"clock", "_exact_at", "_x", "_free_at", "_residual_at", "_size_at", "response", "rates", "oracle", "levels", "limit"}
"""Attributes that need not be restored: times, what is computed again from the rest, and the problem itself."""


def differences(a, b, path=""):
    """Where two objects differ in what they hold, as far as later steps could see it."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    if callable(a) and not hasattr(a, "state_dict"):
        return []
    if isinstance(a, dict):
        return [d for k in a for d in (differences(a[k], b[k], f"{path}.{k}") if k in b else [f"{path}.{k}"])]
    if isinstance(a, list | tuple):
        if not isinstance(b, list | tuple) or len(a) != len(b):
            return [path]
        return [d for i, (u, v) in enumerate(zip(a, b, strict=True)) for d in differences(u, v, f"{path}[{i}]")]
    if type(a).__module__.startswith("meha.methods") and hasattr(a, "__dict__"):
        if type(a) is not type(b):
            return [path]
        names = [name for name in vars(a) if name not in CACHES]
        if type(a).__name__ == "Judgement":
            names.remove("pairs")  # set again before each use
        if type(a).__name__ == "EnvelopePoint":
            names.remove("seen")  # computed again
        if type(a).__name__ == "Pairs":
            names = ["rows", "weight", "_prepared"]
        return [d for name in names for d in differences(vars(a)[name], vars(b).get(name), f"{path}.{name}")]
    same = a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
    return [] if same is True or not isinstance(a, bool | int | float | str | type(None)) else [f"{path}: {a} {b}"]


def saved(run):
    file = io.BytesIO()
    torch.save(run.state_dict(), file)
    return file.getvalue()


def restored(method, problem, state):
    run = method.start(problem, problem.x0, problem.y0)
    run.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
    return run


def named(name):
    groups = [collection(), *(collection(group=group) for group in ("rugged", "simple", "hollow"))]
    return next(entry for group in groups for entry in group if entry.name == name).make()


METHODS = {
    "default": Default(),
    "first order": Default(second_order=False),
    "few gradients": Default(max_gradients=300),
}
NAMES = ["one-sided", "tilted well", "shares", "ray to a ring"]
"""Small problems: bounded, with several basins, without x, with a response."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_forgotten(name, method):
    """After each step, a run that was saved and restored holds all that the run itself holds."""
    problem, method = named(name), METHODS[method]
    run = method.start(problem, problem.x0, problem.y0)
    steps = 0
    while run.verdict is None and steps < 12:
        run.step()
        steps += 1
        if steps % 2 and steps > 3:
            continue
        other = restored(method, problem, saved(run))
        assert differences(run.state.course, other.state.course, "course") == []
        assert run.counts == other.counts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_cut_at_random_steps(name, method):
    """From some of its steps on, a restored run takes the same steps to the same end."""
    problem, method, rng = named(name), METHODS[method], random.Random(name)
    run, infos, states = method.start(problem, problem.x0, problem.y0), [], []
    while run.verdict is None and len(infos) < 30:
        states.append(saved(run))
        infos.append(dict(run.step()))
    for cut in rng.sample(range(len(infos)), min(2, len(infos))):
        other = restored(method, problem, states[cut])
        assert str([dict(other.step()) for _ in infos[cut:]]) == str(infos[cut:])  # as text, since NaN is not itself
        assert all(map(torch.equal, other.state.x.leaves + other.state.y.leaves, run.state.x.leaves + run.state.y.leaves))
        assert other.counts == run.counts
        assert other.verdict == run.verdict
        reports = [{name: text for name, text in method.report(one).items() if name != "time"} for one in (run, other)]
        assert reports[0] == reports[1]


def killed_at(step, run, info):
    if info.step == step:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a process of its own")
def test_killed_processes(tmp_path):
    """A process that is killed several times on its way ends as one that was not."""
    problem, method, rng = named("one-sided"), METHODS["first order"], random.Random(0)
    whole = meha.solve(problem, problem.x0, problem.y0, method)
    file = meha.Checkpoint(tmp_path / "run.pt", every=2)
    for step in sorted(rng.sample(range(1, whole.steps), 3)):
        pid = os.fork()
        if pid == 0:
            meha.solve(problem, problem.x0, problem.y0, method, checkpoint=file, callbacks=partial(killed_at, step))
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    resumed = meha.solve(problem, problem.x0, problem.y0, method, checkpoint=file)
    assert torch.equal(resumed.x, whole.x)
    assert torch.equal(resumed.y, whole.y)
    assert resumed.counts == whole.counts
    assert resumed.message == whole.message
    histories = [{key: str(column) for key, column in one.history.items() if key != "seconds"} for one in (resumed, whole)]
    assert histories[0] == histories[1]
