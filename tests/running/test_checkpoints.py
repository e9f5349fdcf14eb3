"""Checkpoints: a run that was broken off goes on bit for bit; what is no checkpoint of it is refused."""

import io
import os
import pickle
import random
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import meha
from meha import Status
from meha.problem.loaders import Accumulated, Together
from meha.running.checkpoints import Checkpoint
from meha.running.observers import DivergenceGuard, Recorder
from meha.running.stopping import Gap

INPUTS = torch.linspace(-1, 1, 60).reshape(20, 3).sin()
TARGETS = INPUTS.sum(1, keepdim=True).cos()
ADAM = partial(torch.optim.Adam, lr=0.01)
FALLING = meha.Optimizer(torch.optim.Adam, lr=0.01, scheduler=partial(CosineAnnealingLR, T_max=30), clip=1.0)
METHODS = {
    "MEHA": meha.MEHA(alpha=0.1, eta=lambda k: 0.1 / (k + 1), y_optimizer=FALLING, gamma=10.0, c=1.0, p=0.2),
    "RHG": meha.RHG(x_optimizer=ADAM, beta=0.05, inner_steps=2),
    "BOME": meha.BOME(alpha=0.01, beta=0.05, eta=0.05, inner_steps=2),
    "F2SA": meha.F2SA(inner_steps=2, alpha=0.01, beta=0.05, eta=0.05, c=2.0),
    "IAPTT": meha.IAPTT(alpha=0.01, beta=0.05, eta=0.05, inner_steps=2),
}
MOMENT = {"alpha": 0.1, "beta": 0.1, "eta": 0.1, "gamma": 1.0, "c": 1.0}


class KillError(Exception):
    """What a test raises in the place of a kill."""


def shuffled(**options):
    return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=6, shuffle=True, **options)


def network(seed, method="MEHA", batches=shuffled):
    """A network with dropout and batch norm on shuffled batches; the seed decides its start and all that is drawn."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(*layers)

    def upper(x, y, batch):
        noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        return noise * (y(batch[0]) - batch[1]).square().mean() + 0.01 * x.square().sum()

    def lower(x, y, batch):
        return (x.exp() * (y(batch[0]) - batch[1]).square()).mean() + 0.01 * y[0].weight.square().sum()

    return dict(
        problem=meha.Problem(upper, lower), x0=torch.zeros(1), y0=model, method=METHODS[method], batches=batches(), tol=None
    )


def dies(*steps):
    def die(run, info):
        if info.step in steps:
            raise KillError

    return die


def broken(build, file, *steps, callbacks=(), **options):
    """The solution of a run that is broken off after each of these steps, with another start and seed after a checkpoint."""
    for i, step in enumerate(steps):
        with pytest.raises(KillError):
            solve(build(seed=i if file.exists() else 0), checkpoint=file, callbacks=[*callbacks, dies(step)], **options)
    return solve(build(seed=99), checkpoint=file, callbacks=callbacks, **options)


def solve(call, *, record=1, checkpoint=None, every=1000, callbacks=(), **options):
    listed = [callbacks] if callable(callbacks) else [*callbacks]
    if checkpoint is not None:
        options["checkpoint"] = Checkpoint(checkpoint, every)
    return meha.solve(**{**call, **options}, callbacks=[Recorder(record), *listed])


def tensors(value):
    return value.state_dict() if isinstance(value, torch.nn.Module) else {"": value}


def assert_same(found, expected):
    for place in ("x", "y"):
        a, b = tensors(getattr(found, place)), tensors(getattr(expected, place))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert (found.status, found.message, found.steps) == (expected.status, expected.message, expected.steps)
    assert (found.counts, found.constants) == (expected.counts, expected.constants)
    assert str(found.method) == str(expected.method)
    assert found.history.keys() == expected.history.keys()
    for name in found.history:
        if name != "seconds":
            np.testing.assert_array_equal(found.history[name], expected.history[name], err_msg=name)
    assert len(found.history["seconds"]) == len(expected.history["seconds"])


@pytest.mark.filterwarnings("ignore:y0. Dropout gives another value:meha.TrainingWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_broken_run_ends_as_an_unbroken_one(method, tmp_path):
    """Broken off at steps 1, 6, 11 with a checkpoint every second step, and record=3."""
    build = partial(network, method=method)
    expected = solve(build(seed=0), max_steps=14, record=3)
    found = broken(build, tmp_path / "run.pt", 1, 6, 11, max_steps=14, record=3, every=2)
    assert_same(found, expected)
    assert expected.history["step"] == [3, 6, 9, 12, 14]
    assert found.upper is not None
    assert all(a < b for a, b in zip(found.history["seconds"], found.history["seconds"][1:], strict=False))
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.previous"]


class Walk:
    """Batches whose order is drawn from numpy's and Python's generators, and whose content is drawn as they are taken."""

    def __iter__(self):
        for i in np.random.permutation(3):
            chosen = [(5 * i + random.randrange(5) + j) % 20 for j in range(6)]
            yield INPUTS[chosen] + 0.01 * torch.randn(6, 3), TARGETS[chosen]


class Counting:
    """A loader that keeps its own state, and ends after four batches."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while True:
            self.given += 1
            chosen = [(self.given * j) % 20 for j in range(1, 7)]
            yield INPUTS[chosen], TARGETS[chosen]
            if self.given % 4 == 0:
                return

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def together():
    own = torch.Generator().manual_seed(5)

    class Joined(Together):
        def __next__(self):
            batch = super().__next__()
            return torch.cat([batch.a[0], batch.b[0]]), torch.cat([batch.a[1], batch.b[1]])

    return Joined(a=shuffled(), b=DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=9, shuffle=True, generator=own))


def drawn_with_replacement():
    data, own = TensorDataset(INPUTS, TARGETS), torch.Generator().manual_seed(3)
    return DataLoader(data, batch_size=6, sampler=RandomSampler(data, replacement=True, num_samples=60, generator=own))


LOADERS = {
    "list": lambda: [(INPUTS[:9], TARGETS[:9]), (INPUTS[9:], TARGETS[9:]), (INPUTS[4:8], TARGETS[4:8])],
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(7)),
    "with replacement": drawn_with_replacement,
    "drawn": Walk,
    "state of its own": Counting,
    "together": together,
    "workers": lambda: shuffled(num_workers=2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_place_in_the_batches_is_found_again(name, tmp_path):
    build = partial(network, method="F2SA", batches=LOADERS[name])
    expected = solve(build(seed=0), max_steps=9)
    found = broken(build, tmp_path / "run.pt", 3, 5, max_steps=9, every=1)
    assert_same(found, expected)
    again = solve(build(seed=5), max_steps=9, checkpoint=tmp_path / "run.pt")
    assert torch.equal(again.batch[0], expected.batch[0])


def test_groups_of_batches_are_found_again(tmp_path):
    """Three batches a step and four in an epoch, so that a group reaches from one epoch into the next."""

    def build(seed):
        return network(seed, batches=lambda: Accumulated(shuffled(), 3))

    expected = solve(build(seed=0), max_steps=8)
    found = broken(build, tmp_path / "run.pt", 2, 6, max_steps=8, every=1)
    assert_same(found, expected)
    assert [len(part[0]) for part in found.batch] == [len(part[0]) for part in expected.batch]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found.batch, expected.batch, strict=True))


SCRIPT = """
import os, random, signal, sys, traceback
import torch
torch.set_num_threads(1)
from test_checkpoints import network, solve
from meha.running.loggers import CSVLogger

folder, steps = {folder!r}, 25

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def run(name, **options):
    logger = CSVLogger(folder + "/" + name + ".csv")
    found = solve(network(seed=0), max_steps=steps, record=7, every=1, callbacks=logger, **options)
    history = {{key: list(column) for key, column in found.history.items() if key != "seconds"}}
    rest = [history, str(found.status), found.message, found.counts.lower]
    torch.save([found.x, found.y.state_dict(), *rest], folder + "/result")
    os.rename(folder + "/result", folder + "/" + name)

def killed(prepare):
    "Whether a process that goes on with the run dies before it ends."
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            run("broken", checkpoint=folder + "/run.pt")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0

def dies_in(function, call):
    real, calls = getattr(os, function), []
    def counted(*args):
        calls.append(1)
        if len(calls) == call:
            kill()
        return real(*args)
    setattr(os, function, counted)

def dies_at(event):
    "Kill the process at this call or return of a function, in Python or C."
    events = 0
    def count(*args):
        nonlocal events
        events += 1
        if events == event:
            kill()
    sys.setprofile(count)

events = 0
def count(*args):
    global events
    events += 1
run("whole")
sys.setprofile(count)
run("counted", checkpoint=folder + "/counted.pt")
sys.setprofile(None)
for function, call in (("fsync", 1), ("fsync", 3), ("replace", 4)):  # while the n-th checkpoint is written
    assert killed(lambda: dies_in(function, call))
    assert any(name.endswith(".part") for name in os.listdir(folder)), (function, call)
draw, kills = random.Random({seed}), 0
for _ in range(8):
    event = draw.randrange(1, events // 3)  # so a process does less than a third of the run
    if not killed(lambda: dies_at(event)):
        break
    kills += 1
if not os.path.exists(folder + "/broken"):
    assert not killed(lambda: None)
print(kills)
"""


def test_killed_at_any_moment(tmp_path):
    """SIGKILL while files are written and at random calls, with a checkpoint each step; the logger's file is whole too."""
    tests = Path(__file__).parent
    script = SCRIPT.format(folder=str(tmp_path), seed=random.SystemRandom().randrange(1000))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tests.parents[1],
        env={**os.environ, "PYTHONPATH": str(tests)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
    whole, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "broken"))
    assert torch.equal(whole[0], found[0])
    assert all(torch.equal(whole[1][name], found[1][name]) for name in whole[1])
    assert whole[2:] == found[2:]
    assert (tmp_path / "whole.csv").read_text() == (tmp_path / "broken.csv").read_text()
    assert len((tmp_path / "whole.csv").read_text().splitlines()) == 26


def toy(seed=0):
    problem = meha.problems.merely_convex(4)
    method = meha.MEHA(alpha=0.12, beta=0.1, eta=0.9, gamma=5.0, c=0.167, p=0.49)
    return dict(problem=problem, x0=problem.x0 + 0.0 * seed, y0=problem.y0, method=method)


def test_a_finished_run_returns_at_once(tmp_path):
    file = tmp_path / "deep" / "run.pt"
    call = dict(max_steps=10, record=4, checkpoint=file, every=3)
    first = solve(network(seed=0), **call)
    before = file.read_bytes()
    calls = []
    again = solve(network(seed=1), callbacks=lambda run, info: calls.append(info.step), **call)
    assert_same(again, first)
    assert again.seconds == first.seconds
    assert again.history["seconds"] == first.history["seconds"]
    assert not calls
    assert file.read_bytes() == before
    longer = solve(network(seed=2), callbacks=lambda run, info: calls.append(info.step), **{**call, "max_steps": 15})
    assert calls == [11, 12, 13, 14, 15]
    assert_same(longer, solve(network(seed=0), max_steps=15, record=4))
    with pytest.raises(ValueError, match=r"max_steps: the run in the checkpoint .* has done 15 steps already, got 10"):
        solve(network(seed=1), **call)


def test_stopping_rules_go_on(tmp_path):
    """The rules ask for several steps in a row; the run is broken off in between, and once more after its end."""
    file = tmp_path / "run.pt"
    expected = solve(toy(), tol=1e-4)
    assert expected.status is Status.RULE_MET
    found = broken(toy, file, expected.steps, tol=1e-4, every=expected.steps - 1)
    assert_same(found, expected)
    assert_same(solve(toy(), tol=1e-4, checkpoint=file), expected)
    assert_same(solve(toy(), tol=1e-4, checkpoint=file, max_steps=20_000), expected)
    tighter = solve(toy(), tol=5e-5, checkpoint=file)
    assert tighter.status is Status.RULE_MET
    assert tighter.steps > expected.steps
    assert_same(tighter, solve(toy(), tol=5e-5))
    other = solve(toy(), tol=None, callbacks=Gap(1e-12), max_steps=tighter.steps + 2, checkpoint=file)
    assert other.steps > tighter.steps


def test_a_run_stopped_by_a_callback_goes_on(tmp_path):
    """All callbacks and rules see the step at which one asks to stop."""
    seen = []
    call = dict(checkpoint=tmp_path / "run.pt", record=7, max_steps=30)
    first = solve(toy(), callbacks=[lambda run, info: info.step == 10, lambda run, info: seen.append(info.step)], **call)
    assert first.status is Status.STOPPED
    assert first.history["step"] == [7, 10]
    assert seen == list(range(1, 11))
    assert_same(solve(toy(), **call), solve(toy(), record=7, max_steps=30))


def diverging(seed=0):
    problem = meha.problems.merely_convex(10)
    return dict(problem=problem, x0=problem.x0 + seed, y0=problem.y0 - seed, method=problem.preset("paper"))


def exploding(seed=0):
    problem = meha.Problem(lambda x, y: (x + y).square().sum(), lambda x, y: (y - x).pow(4).sum())
    method = meha.MEHA(alpha=0.1, beta=1.0, eta=1.0, gamma=1.0, c=1.0)
    return dict(problem=problem, x0=torch.zeros(2), y0=torch.full((2,), 3.0), method=method)


def breaking(seed=0):
    def lower(x, y):
        torch.linalg.cholesky(torch.eye(2) * (1 - x.sum()))
        return (y - x.sum()).square().sum()

    problem = meha.Problem(lambda x, y: (x - 3).square().sum() + y.square().sum(), lower)
    return dict(problem=problem, x0=torch.zeros(1), y0=torch.zeros(1), method=meha.MEHA(**MOMENT))


def searching(seed=0):
    problem = meha.Problem(lambda x, y: (y - 0.3).square().sum(), lambda x, y: (y - x).square().sum())
    method = meha.RandomSearch(space={"a": meha.Uniform(0.0, 1.0)}, to_x=lambda p: torch.tensor(p["a"]), trials=6, seed=4)
    return dict(problem=problem, x0=torch.tensor(0.5), y0=torch.zeros(()), method=method)


@pytest.mark.parametrize(
    ("build", "steps", "status"),
    [
        (diverging, (480,), Status.DIVERGED),
        (exploding, (1,), Status.NON_FINITE),
        (breaking, (1, 2), Status.BROKE_DOWN),
        (searching, (2, 5), Status.FINISHED),
    ],
)
def test_failed_and_finished_runs(build, steps, status, tmp_path):
    """The message with its advice is about the start of the whole run, wherever it was broken off."""
    options = dict(tol=None, every=1 if steps[0] < 100 else 90, max_steps=2000, record=10)
    options["callbacks"] = [DivergenceGuard(1e30)] if build is exploding else []
    expected = solve(build(), **options)
    assert expected.status is status
    assert_same(broken(build, tmp_path / "run.pt", *steps, **options), expected)
    assert_same(solve(build(seed=3), checkpoint=tmp_path / "run.pt", **options), expected)


class Patience:
    """Counts calls, and keeps the count in a checkpoint."""

    def __init__(self):
        self.calls, self.what = 0, {}

    def __call__(self, run, info):
        self.calls += 1
        return {"calls": self.calls}

    def state_dict(self):
        return {"calls": self.calls, **self.what}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_the_mode_of_a_module_is_saved(tmp_path):
    """A callback ends dropout and batch norm's statistics at step 3."""

    def freeze(run, info):
        if info.step == 3:
            run.y.eval()

    found = broken(network, tmp_path / "run.pt", 5, max_steps=8, every=2, callbacks=[freeze])
    assert_same(found, solve(network(seed=0), max_steps=8, callbacks=freeze))
    assert not found.y[2].training


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path):
    """Dropout draws from the GPU's generator; a CPU can go on from there, too."""

    def build(seed, device="cuda"):
        call = network(
            seed, batches=lambda: [(INPUTS.to(device), TARGETS.to(device)), (INPUTS[:9].to(device), TARGETS[:9].to(device))]
        )
        return {**call, "x0": call["x0"].to(device), "y0": call["y0"].to(device)}

    found = broken(build, tmp_path / "run.pt", 3, 7, max_steps=10, every=2)
    assert_same(found, solve(build(seed=0), max_steps=10))
    assert found.x.is_cuda
    further = solve(build(seed=1, device="cpu"), max_steps=12, checkpoint=tmp_path / "run.pt")
    assert further.steps == 12
    assert not further.x.is_cuda


def test_callbacks_are_saved(tmp_path):
    found = broken(toy, tmp_path / "run.pt", 6, max_steps=12, every=4, callbacks=[Patience(), Patience()])
    assert found.history["calls"] == list(range(1, 13))
    assert solve(toy(), checkpoint=tmp_path / "run.pt", max_steps=13).steps == 13  # without them


def test_a_state_that_cannot_be_read_is_noticed_with_the_first_checkpoint(tmp_path):
    for what in (Path("a"), lambda: 0):
        callback = Patience()
        callback.what = {"what": what}
        with pytest.raises(TypeError, match=r"checkpoint: the state cannot be saved and read again .* state_dict\(\) of"):
            solve(toy(), checkpoint=tmp_path / "run.pt", max_steps=5, every=1, callbacks=callback)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["step", "write"])
def test_an_interrupt_leaves_the_last_whole_checkpoint(where, tmp_path, monkeypatch):
    file = tmp_path / "run.pt"
    expected = solve(network(seed=0), max_steps=10)
    call = network(seed=0)
    if where == "step":
        inner = call["problem"].lower
        seen = []

        def lower(x, y, batch):
            seen.append(1)
            if len(seen) == 4 * 6 - 1:  # in the middle of the sixth step
                raise KeyboardInterrupt
            return inner(x, y, batch)

        call["problem"] = meha.Problem(call["problem"].upper, lower)
    else:
        seen, real = [], os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: seen.append(1) or (raising() if len(seen) == 3 else real(fd)))
    assert solve(call, max_steps=10, every=2, checkpoint=file).status is Status.INTERRUPTED
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.previous"]
    assert Checkpoint(file).read()["run"]["state"]["k"] == 4
    assert_same(solve(network(seed=1), max_steps=10, every=2, checkpoint=file), expected)


def raising():
    raise KeyboardInterrupt


def saved(tmp_path, call=None, **options):
    file = tmp_path / "run.pt"
    solve(call or network(seed=0), max_steps=4, checkpoint=file, **options)
    return file


class Code:
    """A pickle that would run code."""

    def __reduce__(self):
        return os.mkdir, ("hacked",)


def bad_files(good):
    inner = io.BytesIO()
    torch.save({"version": 1, "code": Code()}, inner)
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        for part in archive.infolist():
            at = good.index(archive.read(part)) + part.file_size // 2
            if part.filename.endswith(("data.pkl", "/data/0", "/data/7")):
                yield good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    plain = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, plain)
    yield from (
        good[: len(good) // 2],
        good[:-1],
        b"",
        b"some text\n",
        pickle.dumps(Code()),
        inner.getvalue(),
        plain.getvalue(),
    )


def test_bad_files_are_refused_and_change_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = saved(tmp_path)
    for content in bad_files(file.read_bytes()):
        file.write_bytes(content)
        call = network(seed=5)
        model, before = call["y0"], {name: t.clone() for name, t in call["y0"].state_dict().items()}
        states = torch.get_rng_state(), random.getstate()
        with pytest.raises(ValueError, match=r"checkpoint: .*run.pt .*; give another path, or delete the file to start over"):
            solve(call, max_steps=4, checkpoint=file)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert file.read_bytes() == content
    assert os.listdir(tmp_path) == ["run.pt"]


def places(value, path=()):
    """The ways to all numbers, texts and tensors of a state."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))
    else:
        yield path


def changed(value, path, rng):
    """A copy of a state with another value at one place."""
    if path:
        copied = dict(value) if isinstance(value, dict) else list(value)
        copied[path[0]] = changed(value[path[0]], path[1:], rng)
        return copied if isinstance(value, dict) else type(value)(copied)
    if isinstance(value, torch.Tensor):
        return value.bool().logical_not() if rng.random() < 0.5 or not value.numel() or not value.ndim else value[..., :0]
    others = [None, 7, -1.5, "text", [], True, float("nan")]
    return next(other for other in rng.sample(others, len(others)) if repr(other) != repr(value))


def test_every_changed_value_is_noticed(tmp_path):
    """A file that is whole, with one value changed: nothing of it is used."""
    file, rng = saved(tmp_path), random.Random(0)
    content = torch.load(file, weights_only=True)
    everywhere = [path for path in places(content) if path[0] not in ("version", "checksum")]
    assert len(everywhere) > 50
    refused = r"checkpoint: .*run.pt was changed after it was written .*; give another path, or delete the file to start over"
    for path in rng.sample(everywhere, 50):
        torch.save(changed(content, path, rng), file)
        with pytest.raises(ValueError, match=refused):
            Checkpoint(file).read()
    with pytest.raises(ValueError, match=refused):
        solve(network(seed=0), max_steps=4, checkpoint=file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe")
def test_what_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(OSError, match=r"checkpoint: .* is a device or a pipe.* give the path of a file"):
            Checkpoint(path)


def wider(call):
    return {**call, "y0": torch.nn.Sequential(torch.nn.Linear(3, 1))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: {**call, "method": METHODS["BOME"]}, "was written by MEHA"),
        (lambda call: {**call, "method": meha.MEHA(**MOMENT)}, "start the run with the same method"),
        (lambda call: {**call, "x0": torch.zeros(2)}, r"x: the state has \(1,\)"),
        (wider, "y: the state is for another variable"),
        (lambda call: {**call, "y0": call["y0"].append(torch.nn.Dropout())}, "modules: was 5, is 6"),
        (
            lambda call: {
                **call,
                "problem": meha.Problem(call["problem"].upper, call["problem"].lower, x_set=meha.sets.Box(-9, 9)),
            },
            "x_set: was None, is Box",
        ),
    ],
)
def test_other_runs_are_refused_and_change_nothing(change, message, tmp_path):
    file = saved(tmp_path)
    content = file.read_bytes()
    call = change(network(seed=5))
    before = {name: t.clone() for name, t in call["y0"].state_dict().items()}
    with pytest.raises(ValueError, match=rf"checkpoint: .*run.pt is not of this run: .*{message}.*, or give another path"):
        solve(call, max_steps=4, checkpoint=file)
    assert all(torch.equal(t, before[name]) for name, t in call["y0"].state_dict().items())
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches: ended after 0, but the saved position is 3"),
        ([(INPUTS, TARGETS)] * 2, "batches: ended after 2, but the saved position is 3"),
        (shuffled(generator=torch.Generator()), "random number generators in the loader, got 1; pass the same"),
        (None, "batches: the run in the checkpoint had some, this call has none"),
    ],
)
def test_other_batches_are_refused_and_change_nothing(batches, message, tmp_path):
    file = saved(
        tmp_path, network(seed=0, batches=lambda: [(INPUTS, TARGETS)] * 5 if isinstance(batches, list) else shuffled())
    )
    call = {**network(seed=5), "batches": batches}
    before = {name: t.clone() for name, t in call["y0"].state_dict().items()}
    with pytest.raises(ValueError, match=message):
        solve(call, max_steps=5, checkpoint=file)
    assert all(torch.equal(t, before[name]) for name, t in call["y0"].state_dict().items())


def test_batches_without_a_place_are_refused_up_front(tmp_path):
    file = tmp_path / "run.pt"
    for batches in (iter(shuffled()), (batch for batch in shuffled()), Together(a=iter([1]))):
        with pytest.raises(TypeError, match=r"batches:.* can be iterated over only once.*; pass a list"):
            solve({**network(seed=0), "batches": batches}, checkpoint=file)
    with pytest.raises(
        ValueError, match=r"batches: persistent_workers=True .* pass a DataLoader with persistent_workers=False"
    ):
        solve({**network(seed=0), "batches": shuffled(num_workers=1, persistent_workers=True)}, checkpoint=file)
    assert not file.exists()


def test_paths(tmp_path):
    (tmp_path / "text").write_text("")
    for path, kind, message in (
        (tmp_path, IsADirectoryError, r"checkpoint: .* is a folder; give a file, such as .*run.pt"),
        (tmp_path / "text" / "run.pt", OSError, r"checkpoint: .* cannot be written .*; give a path in a folder that can"),
        ("/proc/run.pt", OSError, r"checkpoint: /proc/run.pt cannot be written"),
        (3, TypeError, "checkpoint: expected the path of a file, got 3"),
    ):
        with pytest.raises(kind, match=message):
            solve(toy(), checkpoint=path, callbacks=lambda run, info: pytest.fail("a step was taken"))
    with pytest.raises(ValueError, match="every: must be a whole number of at least 1, got 0"):
        solve(toy(), checkpoint=tmp_path / "run.pt", every=0)


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    kept = ["run.pt.old", "run.pt.a.part", "other.pt.12.part", "run.pt.1.2.part"]
    for name in (*kept, "run.pt.99999999.part", "run.pt.99999999-7.part"):  # no process has such a number
        (tmp_path / name).write_bytes(b"half")
    solve(toy(), checkpoint=tmp_path / "run.pt", max_steps=3)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "run.pt"])


def test_a_full_disk_keeps_the_file(tmp_path, monkeypatch):
    file = saved(tmp_path)
    before = file.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(
        meha.TrainingWarning, match=r"checkpoint: .*run.pt could not be written .*No space left.*what it held before is kept"
    ):
        assert solve(network(seed=0), max_steps=8, checkpoint=file).steps == 8
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


def simple(**parts):
    """A small problem with an interval, a weight and two objectives, of which some may be others."""
    base = {
        "upper": lambda x, y: (y - 1).square().sum() + x.square().sum(),
        "lower": lambda x, y: (y - x).square().sum(),
        "nonsmooth": meha.nonsmooth.L1(0.1),
        "x_set": meha.sets.Box(-1.0, 1.0),
    }
    problem = meha.Problem(**{**base, **parts})
    return dict(problem=problem, x0=torch.zeros(2), y0=torch.zeros(2), method=meha.MEHA(**MOMENT), tol=None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"x_set": meha.sets.Box(-1.0, 2.0)}, "x_set: was Box, is Box with other numbers"),
        ({"x_set": None}, "x_set: was Box, is None"),
        ({"nonsmooth": meha.nonsmooth.L1(0.2)}, "nonsmooth: was L1, is L1 with other numbers"),
        ({"nonsmooth": meha.nonsmooth.L1(torch.tensor([0.1, 0.2]))}, "nonsmooth: was L1, is L1 with other numbers"),
        (
            {"upper": lambda x, y: (y - 2).square().sum()},
            "upper: is another one: near the start of the run, its value was 2, is 8",
        ),
        (
            {"lower": lambda x, y: (y - x + 1).square().sum()},
            "lower: is another one: near the start of the run, its value was 0, is 2",
        ),
    ],
)
def test_checkpoints_of_other_problems_with_the_same_shapes_are_refused(parts, message, tmp_path):
    file = tmp_path / "run.pt"
    solve(simple(), checkpoint=file, max_steps=3)
    with pytest.raises(ValueError, match=message):
        solve(simple(**parts), checkpoint=file, max_steps=6)
    whole, rest = solve(simple(), max_steps=6), solve(simple(), checkpoint=file, max_steps=6)
    assert_same(rest, whole)


def test_random_objectives_are_not_compared_and_draw_what_they_would_draw(tmp_path):
    def noisy(x, y):
        return (y - 1 - 0.1 * torch.rand(2)).square().sum()

    def run(**options):
        torch.manual_seed(4)
        return solve(simple(upper=noisy), **options)

    whole = run(max_steps=6)
    run(max_steps=3, checkpoint=tmp_path / "run.pt")
    assert_same(run(max_steps=6, checkpoint=tmp_path / "run.pt"), whole)


def test_the_history_is_bounded_and_resumed(tmp_path):
    call = simple()
    whole = meha.solve(**call, max_steps=40, callbacks=[Recorder(limit=5)])
    assert whole.history["step"] == [8, 16, 24, 32, 40]
    every = meha.solve(**call, max_steps=40).history
    assert whole.history["upper"] == [every["upper"][step - 1] for step in (8, 16, 24, 32, 40)]
    found = meha.solve(**simple(), max_steps=43, callbacks=[Recorder(limit=5)])
    assert found.history["step"] == [8, 16, 24, 32, 40, 43]
    for step in (3, 7, 17, 39):
        file = tmp_path / f"{step}.pt"
        meha.solve(**simple(), max_steps=step, callbacks=[Recorder(limit=5)], checkpoint=file)
        again = meha.solve(**simple(), max_steps=43, callbacks=[Recorder(limit=5)], checkpoint=file)
        assert [row for row in again.history["step"] if row in (8, 16, 24, 32, 40, 43)] == found.history["step"]


def test_checkpoints_do_not_grow_with_the_steps(tmp_path):
    sizes = []
    for steps in (200, 3000):
        file = tmp_path / f"{steps}.pt"
        meha.solve(**simple(), max_steps=steps, callbacks=[Recorder(limit=100)], checkpoint=Checkpoint(file, every=1000))
        sizes.append(file.stat().st_size)
    assert sizes[1] < 1.5 * sizes[0]
