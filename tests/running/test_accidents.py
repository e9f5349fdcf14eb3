"""Training accidents: bad batches, interrupts, errors, full disks, killed processes. Nothing is lost; the message is right."""

import copy
import math
import os
import random
import signal
from functools import partial

import pytest
import torch
from torch import nn

import meha
from meha import Checkpoint, Status, TrainingWarning
from meha.problem.loaders import Accumulated, Together
from meha.running.observers import SkipBadBatches

MOMENT = {"alpha": 0.1, "beta": 0.1, "eta": 0.1, "gamma": 1.0, "c": 1.0}
NAN = float("nan")


def data(count=7, bad=None, seed=0):
    """Batches of two levels; the inputs of batch number ``bad`` (from 1) hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(1, count + 1):
        inputs = torch.randn(6, 3, generator=generator)
        if i == bad:
            inputs[2, 1] = NAN
        batches.append({"inputs": inputs, "targets": torch.randn(6, 1, generator=generator)})
    return batches


def training(batches=None, method=None, **options):
    """A call of solve: a small network with dropout and batch norm, and the weight of its decay."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def loss(y, batch):
        return (y(batch["inputs"]) - batch["targets"]).square().mean()

    problem = meha.Problem(
        lambda x, y, batch: loss(y, batch),
        lambda x, y, batch: loss(y, batch) + x.exp() * sum(w.square().sum() for w in y.parameters()),
    )
    given = dict(problem=problem, x0=torch.tensor(-3.0), y0=network, method=method or meha.MEHA(**MOMENT))
    return {**given, "batches": data() if batches is None else batches, "tol": None, "max_steps": 20, **options}


def numbers(solution):
    return [solution.x, *solution.y.state_dict().values()]


def same(a, b):
    return all(torch.equal(first, second) for first, second in zip(numbers(a), numbers(b), strict=True))


# Bad batches


@pytest.mark.parametrize("method", [meha.StochasticMEHA(), meha.MEHA(**MOMENT), meha.F2SA(alpha=0.1, beta=0.1, eta=0.1)])
def test_a_bad_batch_is_named_and_the_start_is_not_blamed(method):
    solution = meha.solve(**training(data(bad=5), method))
    assert solution.status is Status.NON_FINITE
    assert solution.steps == 5
    assert "Look at batch 5 of this pass: inputs has 1 NaN or infinite of 18 numbers" in solution.message
    assert "SkipBadBatches" in solution.message
    assert "start" not in solution.message
    assert all(bool(torch.isfinite(tensor).all()) for tensor in numbers(solution))


def test_a_bad_first_batch_is_named():
    solution = meha.solve(**training(data(bad=1)))
    assert "Look at batch 1 of this pass: inputs has 1 NaN" in solution.message
    assert "start" not in solution.message


@pytest.mark.parametrize(
    ("join", "name"),
    [
        (lambda good, bad: Together(good=good, bad=bad), "good batch 1, bad batch 2 of this pass: bad.inputs has 1 NaN"),
        (lambda good, bad: Accumulated(bad, 2), "the 2 batches up to batch 2 of this pass: 1.inputs has 1 NaN"),
    ],
)
def test_bad_batches_of_joined_loaders_are_named(join, name):
    call = training(join(data(1), data(3, bad=2)))
    if isinstance(call["batches"], Together):
        upper, lower = call["problem"].upper, call["problem"].lower
        call["problem"] = meha.Problem(lambda x, y, b: upper(x, y, b.good), lambda x, y, b: lower(x, y, b.bad))
    assert f"Look at {name}" in meha.solve(**call).message


def test_a_batch_on_which_only_the_value_is_bad_is_named():
    """All numbers of the batch are finite, and the objective is not."""
    problem = meha.Problem(
        lambda x, y, b: (x - 1).square().sum() + (y - b).square().sum() + b.log().sum(), lambda x, y, b: (y - x).square().sum()
    )
    batches = [torch.ones(1), torch.ones(1), -torch.ones(1)]
    solution = meha.solve(problem, torch.zeros(1), torch.zeros(1), meha.MEHA(**MOMENT), batches=batches)
    assert solution.steps == 3
    assert "F = nan" in solution.message
    assert "Look at batch 3 of this pass: upper is nan on it, and finite on the batch before" in solution.message


def test_steps_that_are_too_long_are_not_blamed_on_the_batch():
    problem = meha.Problem(lambda x, y, b: (x + y + b).square().sum(), lambda x, y, b: (y - x).pow(4).sum())
    method = meha.MEHA(alpha=0.1, beta=1.0, eta=1.0, gamma=1.0, c=1.0)
    guard = meha.observers.DivergenceGuard(1e30)
    start = torch.zeros(2), torch.full((2,), 3.0)
    solution = meha.solve(problem, *start, method, batches=[torch.zeros(1)] * 3, callbacks=guard)
    assert solution.status is Status.NON_FINITE
    assert "Look at" not in solution.message
    assert "start (x0, y0)" not in solution.message


def test_bad_batches_are_skipped_on_request():
    """The run is that without these batches, except for the random numbers that the step drew."""
    call = training(data(bad=5), x0=torch.tensor(-3.0))
    call["y0"] = nn.Sequential(nn.Linear(3, 1))
    skip = SkipBadBatches()
    solution = meha.solve(**{**call, "y0": copy.deepcopy(call["y0"])}, callbacks=skip)
    clean = [batch for i, batch in enumerate(data()) if i != 4]
    expected = meha.solve(**{**call, "y0": copy.deepcopy(call["y0"]), "batches": clean})
    assert solution.status is Status.MAX_STEPS
    assert same(solution, expected)
    assert skip.skipped == ["batch 5 of this pass"] * 3
    assert solution.history["skipped"][-1] == 3


def test_skipping_ends_when_all_batches_are_bad():
    skip = SkipBadBatches(limit=4)
    solution = meha.solve(**training(data(1, bad=1)), callbacks=skip)
    assert solution.status is Status.NON_FINITE
    assert len(skip.skipped) == 4
    assert "inputs has 1 NaN" in solution.message


def test_skipping_survives_a_checkpoint(tmp_path):
    file = tmp_path / "run.pt"
    first, second = SkipBadBatches(), SkipBadBatches()
    meha.solve(**{**training(data(bad=5)), "max_steps": 8}, callbacks=first, checkpoint=file)
    solution = meha.solve(**training(data(bad=5)), callbacks=second, checkpoint=file)
    whole = meha.solve(**training(data(bad=5)), callbacks=SkipBadBatches())
    assert second.skipped[: len(first.skipped)] == first.skipped
    assert same(solution, whole)


# Values without NaN in the gradients


@pytest.mark.parametrize(
    "method",
    [
        *(kind(alpha=0.1, beta=0.1, eta=0.1) for kind in (meha.F2SA, meha.VPBGD, meha.BOME)),
        *(meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0), meha.MEHA(**MOMENT), meha.StochasticMEHA(lr=0.1, x_lr=0.1)),
        *(meha.RHG(alpha=0.1, beta=0.1), meha.CG(alpha=0.1, beta=0.1)),
    ],
    ids=lambda method: method.name,
)
def test_a_lower_objective_that_is_nan_with_finite_gradients_is_noticed(method):
    """The gradient of log(1 - y) is finite beyond its domain, where the solution without it lies."""
    problem = meha.Problem(
        lambda x, y: (x - 1).square().sum() + (y - 2).square().sum(),
        lambda x, y: (y - x).square().sum() - 1e-3 * torch.log(1 - y).sum(),
    )
    zero = torch.zeros(1, dtype=torch.float64)
    solution = meha.solve(problem, zero, zero, method, max_steps=3000)
    assert solution.status is Status.NON_FINITE
    assert "f + g = nan" in solution.message or "Lower is nan" in solution.message


@pytest.mark.parametrize("method", [meha.MEHA(**MOMENT), meha.StochasticMEHA()])
def test_a_weight_that_is_nan_at_the_end_is_noticed(method):
    """The root of a negative x is NaN, of which the proximal map of g makes nothing, and no gradient depends on it."""
    problem = meha.Problem(
        lambda x, y: (x + 5).square().sum() + (y - 2).square().sum(),
        lambda x, y: (y - x).square().sum(),
        nonsmooth=meha.nonsmooth.GroupL2([1], weight=lambda x: x.detach().sqrt()),
    )
    half = torch.full((1,), 0.5, dtype=torch.float64)
    solution = meha.solve(problem, half, half, method, max_steps=300)
    assert solution.status is Status.NON_FINITE
    assert "Lower is nan" in solution.message or "f + g = nan" in solution.message or "gave NaN" in solution.message


def test_an_upper_objective_that_is_nan_at_the_end_gives_back_the_iterate_before():
    """The number that a step shows is F before it, so that the last step may leave the domain of F unseen."""
    problem = meha.Problem(
        lambda x, y: (x - 2).square().sum() + 1e-3 * torch.log(0.5 - x.detach()).sum(), lambda x, y: (y - x).square().sum()
    )
    zero, method = torch.zeros(1, dtype=torch.float64), meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    whole = meha.solve(problem, zero, zero, method)  # ends in the step after
    solution = meha.solve(problem, zero, zero, method, max_steps=whole.steps - 1)
    assert solution.status is Status.NON_FINITE
    assert "Upper is nan after step" in solution.message
    assert math.isfinite(solution.upper)


def test_a_callback_that_writes_nan_is_named():
    problem = meha.problems.strong_convex(2)

    def careless(run, info):
        if info.step == 4:
            run.x.fill_(torch.nan)

    method = meha.RHG(alpha=0.02, beta=0.5)
    solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=9, callbacks=careless)
    assert solution.status is Status.NON_FINITE
    assert "callbacks: careless put NaN or infinity into x or y after step 4; check what it writes" in solution.message
    expected = meha.solve(problem, problem.x0, problem.y0, method, max_steps=3)
    assert torch.equal(solution.x, expected.x)


@pytest.mark.parametrize("where", ["objective", "batch"])
def test_data_made_under_inference_mode_is_named(where):
    with torch.inference_mode():
        data = torch.ones(2)
    if where == "batch":
        problem = meha.Problem(lambda x, y, b: (x * y * b).sum(), lambda x, y, b: (y - x).square().sum())
    else:
        problem = meha.Problem(lambda x, y: (x * y * data).sum(), lambda x, y: (y - x).square().sum())
    with pytest.raises(ValueError, match=rf"upper: the {where} has a tensor that was made under .*inference_mode.*clone"):
        meha.solve(
            problem, torch.ones(2), torch.ones(2), meha.RHG(alpha=0.1, beta=0.1), batches=[data] if where == "batch" else None
        )


def test_a_start_made_under_inference_mode_is_copied():
    problem = meha.problems.strong_convex(2)
    with torch.inference_mode():
        x0, y0 = problem.x0.clone(), problem.y0.clone()
    method = meha.RHG(alpha=0.02, beta=0.5)
    found, expected = (meha.solve(problem, *start, method, max_steps=3) for start in ((x0, y0), (problem.x0, problem.y0)))
    assert torch.equal(found.x, expected.x)


# Checkpoints


def test_a_failed_run_leaves_the_last_good_checkpoint(tmp_path):
    """The batch is repaired, and the call repeated: the run is that with good data from the start."""
    file = tmp_path / "run.pt"
    failed = meha.solve(**training(data(bad=6)), checkpoint=Checkpoint(file, every=2))
    assert failed.status is Status.NON_FINITE
    assert Checkpoint(file).read()["run"]["state"]["k"] == 4
    repaired = meha.solve(**training(data()), checkpoint=Checkpoint(file, every=2))
    assert same(repaired, meha.solve(**training()))


def test_two_checkpoints_rotate_and_the_older_one_takes_over(tmp_path):
    file = Checkpoint(tmp_path / "run.pt", every=3)
    meha.solve(**{**training(), "max_steps": 8}, checkpoint=file)
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.previous"]
    assert [torch.load(path)["run"]["state"]["k"] for path in (file.path, file.previous)] == [8, 6]
    file.path.write_bytes(file.path.read_bytes()[:-300])
    with pytest.warns(TrainingWarning, match=r"run.pt is damaged .* Going on from the one before it, run.pt.previous"):
        solution = meha.solve(**training(), checkpoint=file)
    assert same(solution, meha.solve(**training()))


def test_a_run_that_is_started_over_leaves_no_older_checkpoint(tmp_path):
    file = Checkpoint(tmp_path / "run.pt", every=3)
    meha.solve(**{**training(), "max_steps": 8}, checkpoint=file)
    file.path.unlink()
    meha.solve(**{**training(), "max_steps": 2}, checkpoint=file)
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    file = Checkpoint(tmp_path / "run.pt", every=3)
    meha.solve(**{**training(), "max_steps": 8}, checkpoint=file)
    assert torch.load(file.previous)["run"]["state"]["k"] == 6


@pytest.mark.parametrize("last", [True, False])
def test_a_full_disk_does_not_end_the_run(last, tmp_path, monkeypatch):
    file, real, writes = Checkpoint(tmp_path / "run.pt", every=5), os.fsync, []

    def sync(descriptor):
        writes.append(1)
        if len(writes) == (4 if last else 2):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.warns(TrainingWarning, match=r"run.pt could not be written .*No space left.* The run goes on"):
        solution = meha.solve(**training(), checkpoint=file)
    assert len(writes) == 4
    assert same(solution, meha.solve(**training()))
    assert file.read()["run"]["state"]["k"] == (15 if last else 20)


# Interrupts and errors


def at_call(count, action, call):
    """The call with an objective f that does something when it is called for the ``count``-th time."""
    lower, seen = call["problem"].lower, []

    def counted(x, y, batch):
        seen.append(1)
        if len(seen) == count:
            action()
        return lower(x, y, batch)

    return {**call, "problem": meha.Problem(call["problem"].upper, counted)}


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_within_a_step_returns_the_step_before():
    solution = meha.solve(**at_call(27, interrupt, training()))
    assert solution.status is Status.INTERRUPTED
    assert str(solution.status) == "interrupted"
    assert solution.message == f"Interrupted after step {solution.steps}."
    assert same(solution, meha.solve(**{**training(), "max_steps": solution.steps}))
    assert "interrupted after" in str(solution)


def test_an_interrupt_between_steps_returns_the_last_one(tmp_path):
    def press(run, info):
        if info.step == 7:
            interrupt()

    file = Checkpoint(tmp_path / "run.pt", every=3)
    solution = meha.solve(**training(), callbacks=press, checkpoint=file)
    assert solution.steps == 7
    assert f"go on from the checkpoint {file.path}" in solution.message
    assert same(solution, meha.solve(**{**training(), "max_steps": 7}))
    assert same(meha.solve(**training(), checkpoint=file), meha.solve(**training()))


class OwnError(Exception):
    pass


def fail():
    raise OwnError("of the user")


def test_an_error_of_an_objective_says_where_and_keeps_what_there_was():
    call = at_call(27, fail, training())
    with pytest.raises(OwnError, match="of the user") as caught:
        meha.solve(**call)
    solution = caught.value.solution
    assert solution.steps == 6
    assert caught.value.__notes__ == [
        "meha: raised after step 6 of the run, with batch 7 of this pass; error.solution is what there was until then."
    ]
    assert same(solution, meha.solve(**{**training(), "max_steps": 6}))
    assert solution.y is call["y0"]


def test_an_error_in_the_first_step_is_passed_on_as_it_is():
    with pytest.raises(OwnError) as caught:
        meha.solve(**at_call(1, fail, training()))
    assert not hasattr(caught.value, "__notes__")


# Loaders


@pytest.mark.parametrize("batches", [[], iter([]), Accumulated([], 2), Together(first=[])])
def test_an_empty_loader_is_an_error(batches):
    with pytest.raises(ValueError, match=r"batches: (first )?yields nothing; pass a loader with at least one batch"):
        meha.solve(**training(batches))


def test_a_loader_that_ends_later_is_none():
    assert meha.solve(**training(iter(data(3)))).steps == 3
    call = training(Together(a=iter(data(3)), b=data(2)))
    upper, lower = call["problem"].upper, call["problem"].lower
    call["problem"] = meha.Problem(lambda x, y, b: upper(x, y, b.a), lambda x, y, b: lower(x, y, b.b))
    assert meha.solve(**call).steps == 3


@pytest.mark.parametrize("method", [None, meha.MEHA(**MOMENT), meha.RHG(alpha=0.1, beta=0.1)])
def test_forgotten_batches_are_named(method):
    problem = meha.Problem(lambda x, y, b: (x - b).sum(), lambda x, y, b: (y - x).square().sum())
    with pytest.raises(
        TypeError, match=r"batches: upper and lower must be called with a batch, .* pass solve\(\.\.\., batches="
    ):
        meha.solve(problem, torch.zeros(1), torch.zeros(1), method)
    mixed = meha.Problem(lambda x, y: (x - y).sum(), problem.lower)
    with pytest.raises(TypeError, match=r"batches: lower must be called"):
        meha.solve(mixed, torch.zeros(1), torch.zeros(1), method)


def test_batches_that_nothing_takes_are_named():
    problem = meha.Problem(lambda x, y: (x - y).square().sum(), lambda x, y: (y - x).square().sum())
    with pytest.raises(TypeError, match=r"batches: upper and lower cannot be called with a batch; .* leave the batches out"):
        meha.solve(problem, torch.zeros(1), torch.zeros(1), batches=[torch.ones(1)])


# Modules


def test_a_module_in_eval_mode_is_pointed_out():
    call = training()
    call["y0"].eval()
    with pytest.warns(
        TrainingWarning, match=r"y0: the module is in eval mode, in which its BatchNorm1d, Dropout .* y0\.train\(\)"
    ):
        meha.solve(**call)
    plain = training(y0=nn.Linear(3, 1).eval())
    meha.solve(**plain)


def test_frozen_parts_of_a_module_in_training_are_left_alone():
    call = training()
    call["y0"][1].eval()
    meha.solve(**call)


@pytest.mark.parametrize(
    "method", [meha.RHG(alpha=0.01, beta=0.01), meha.CG(alpha=0.01, beta=0.01), meha.NS(alpha=0.01, beta=0.01)]
)
def test_dropout_is_pointed_out_where_values_must_repeat(method):
    with pytest.warns(TrainingWarning, match=rf"y0: Dropout gives another value .* {method.name} needs the same value twice"):
        meha.solve(**{**training(method=method), "max_steps": 2})
    call = training(method=method)
    call["y0"][2].p = 0.0
    meha.solve(**{**call, "max_steps": 2})


def test_a_second_run_on_one_module_does_not_go_on_silently(tmp_path):
    call = training()
    meha.solve(**call)
    with pytest.warns(TrainingWarning, match=r"y0: a run has trained this module before, .* copy=True"):
        meha.solve(**call)
    meha.solve(**{**call, "y0": copy.deepcopy(call["y0"])})
    with torch.no_grad():
        for parameter in call["y0"].parameters():
            parameter.normal_()
    meha.solve(**call)
    meha.solve(**call, checkpoint=tmp_path / "run.pt")


# Random faults


def disk_full(monkeypatch, rng):
    real, writes, bad = os.fsync, [], rng.randint(1, 5)

    def sync(descriptor):
        writes.append(1)
        if len(writes) == bad:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


def at_step(step, action, run, info):
    if info.step == step:
        action()


def killed(call, **options):
    """Run a call in a process of its own, which a signal kills on the way."""
    child = os.fork()
    if not child:
        meha.solve(**call, **options)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def fault(kind, rng, file, monkeypatch):
    """One accident, and what it must say and leave."""
    step, checkpoint = rng.randint(2, 18), Checkpoint(file, every=rng.randint(1, 6))
    count = 4 * step + 3  # f is called four times in each step
    if kind == "NaN batch":
        bad = rng.randint(1, 7)
        solution = meha.solve(**training(data(bad=bad)), checkpoint=checkpoint)
        assert solution.status is Status.NON_FINITE
        assert f"Look at batch {bad} of this pass: inputs has 1 NaN" in solution.message
    elif kind == "Ctrl-C in an objective":
        solution = meha.solve(**at_call(count, interrupt, training()), checkpoint=checkpoint)
        assert (solution.status, solution.steps) == (Status.INTERRUPTED, step)
        assert same(solution, meha.solve(**{**training(), "max_steps": step}))
    elif kind == "Ctrl-C in a callback":
        solution = meha.solve(**training(), callbacks=partial(at_step, step, interrupt), checkpoint=checkpoint)
        assert (solution.status, solution.steps) == (Status.INTERRUPTED, step)
    elif kind == "error in an objective":
        with pytest.raises(OwnError) as caught:
            meha.solve(**at_call(count, fail, training()), checkpoint=checkpoint)
        assert f"after step {step} of the run" in caught.value.__notes__[0]
        assert same(caught.value.solution, meha.solve(**{**training(), "max_steps": step}))
    elif kind == "error in a callback":
        with pytest.raises(OwnError) as caught:
            meha.solve(**training(), callbacks=partial(at_step, step, fail), checkpoint=checkpoint)
        assert caught.value.solution.steps == step
    elif kind == "full disk":
        checkpoint.every = rng.randint(1, 4)
        with monkeypatch.context() as patch:
            disk_full(patch, rng)
            with pytest.warns(TrainingWarning, match="No space left"):
                solution = meha.solve(**training(), checkpoint=checkpoint)
        assert (solution.status, solution.steps) == (Status.MAX_STEPS, 20)
    else:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731 (the number is that of the child)
        where = training() if rng.random() < 0.5 else at_call(count, kill, training())
        callbacks = partial(at_step, step, kill)
        assert killed(where, callbacks=callbacks, checkpoint=checkpoint) == signal.SIGKILL


KINDS = (
    *("NaN batch", "Ctrl-C in an objective", "Ctrl-C in a callback", "error in an objective", "error in a callback"),
    *("full disk", "SIGKILL"),
)


@pytest.mark.parametrize("faults", [14, pytest.param(100, marks=pytest.mark.slow)])
def test_after_random_faults_the_repeated_call_ends_as_if_nothing_had_happened(faults, tmp_path, monkeypatch):
    expected = meha.solve(**training())
    for i in range(faults):
        rng, file = random.Random(i), tmp_path / f"{i}.pt"
        fault(KINDS[i % len(KINDS)], rng, file, monkeypatch)
        assert not list(tmp_path.glob("*.part")) or KINDS[i % len(KINDS)] == "SIGKILL"
        assert same(meha.solve(**training(), checkpoint=file), expected), KINDS[i % len(KINDS)]
