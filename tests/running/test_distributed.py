"""Several processes end where one with all batches does, whole or sharded; they stop, log and go on together."""

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import (
    ADAM,
    ALL,
    EXAMPLES,
    FRESH,
    KINDS,
    NORMALISED,
    PROBLEM,
    STEPS,
    compare,
    divided,
    examples,
    full,
    in_processes,
    lower,
    matrices,
    network,
    shard,
    share,
    upper,
)
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import meha
from meha import MEHA, Problem, SharedCheckpoint, Status, StochasticMEHA, stochastic
from meha.problem import nonsmooth, sets
from meha.problem.loaders import Endless
from meha.running.loggers import CSVLogger
from meha.running.observers import SkipBadBatches, Validate

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

HERE = Path(__file__).parent
MOST = {torch.float64: 1e-12, torch.float32: 1e-6}
ROUNDING = 1e-4  # of single precision, in steps whose length does not depend on the gradient


def weights(dtype=torch.float64):
    return torch.linspace(-1, 1, EXAMPLES, dtype=dtype)


def mine():
    return share(dist.get_rank(), dist.get_world_size())


def line(size=None):
    return init_device_mesh("cpu", (size or dist.get_world_size(),))


# The same end


def equal(kinds, methods, dtype, record=None):
    for name in kinds:
        for label in methods:
            errors = compare(KINDS[name], {**ALL, **FRESH}[label], dtype=dtype)
            if record is not None and dist.get_rank() == 0:
                with record.open("a") as file:
                    print(json.dumps([name, label, *errors]), file=file)
            most = ROUNDING if dtype is torch.float32 and label in NORMALISED else MOST[dtype]
            assert max(errors) < most, (name, label, errors)


@pytest.mark.parametrize(
    ("dtype", "method"), [(torch.float64, "StochasticMEHA"), (torch.float32, "MEHA(gradients=2)")], ids=str
)
def test_all_kinds_equal_one_process(dtype, method):
    in_processes(2, equal, tuple(KINDS), (method,), dtype)


def test_all_methods_equal_one_process():
    in_processes(2, equal, ("modules", "fully_shard"), tuple(ALL), torch.float64)


def test_four_processes_equal_one():
    in_processes(4, equal, ("HSDP", "fully_shard of tensor parallel"), ("StochasticMEHA",), torch.float64)


@pytest.mark.slow
def test_steps_that_start_over_equal_one_process():
    in_processes(2, equal, ("modules", "fully_shard"), tuple(FRESH), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", MOST, ids=str)
@pytest.mark.parametrize("processes", [2, 4])
def test_everything_equals_one_process(processes, dtype, tmp_path):
    record = tmp_path / "errors.jsonl"
    in_processes(processes, equal, tuple(KINDS), tuple(ALL), dtype, record)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(rows) == len(KINDS) * len(ALL)
    print(f"\n{processes} processes, {dtype}: largest differences; of steps in units of the gradients")
    for name in KINDS:
        plain, normalised = (
            max(max(errors) for kind, label, *errors in rows if kind == name and (label in NORMALISED) == which)
            for which in (False, True)
        )
        print(f"{name}: {plain:.0e}; {normalised:.0e}")


# The methods, one by one

FIRST_ORDER = (
    *(MEHA(**STEPS, gamma=5.0, c=2.0, gradients=n) for n in (4, 3, 2)),
    *(StochasticMEHA(), stochastic.NetworkSOBA(), meha.F2SA(**STEPS), meha.VPBGD(**STEPS), meha.BOME(**STEPS)),
    *(meha.DARTS(alpha=1.0, beta=0.05), meha.BVFIM(alpha=1.0, beta=0.05, eta=0.05)),
)
SECOND_ORDER = (
    *(kind(alpha=1.0, beta=0.05, inner_steps=3) for kind in (meha.RHG, meha.BDA, meha.IAPTT, meha.CG, meha.NS, meha.GALET)),
    *(meha.BAMM(alpha=1.0, beta=0.05),),
    *(kind(alpha=1.0, beta=0.05, eta=0.05) for kind in (stochastic.SOBA, stochastic.MASOBA, stochastic.FSLA)),
    *(kind(alpha=1.0, beta=0.05, eta=0.05, system_steps=2) for kind in (stochastic.MRBO, stochastic.SUSTAIN, stochastic.TTSA)),
    *(
        kind(alpha=1.0, beta=0.05, eta=0.05, inner_steps=2, system_steps=2)
        for kind in (stochastic.StocBiO, stochastic.AmIGO, stochastic.BSA)
    ),
)
ON_TENSORS = (
    meha.Default(),
    meha.Default(second_order=False),
    meha.ImplicitNewton(),
    meha.PenaltyContinuation(),
    meha.contrib.AdaptiveMEHA(),
    stochastic.AdaptiveSOBA(),
    meha.MEHA(),
    meha.GridSearch(space=meha.Uniform(-2.0, 2.0), points=4),
    meha.RandomSearch(space=meha.Uniform(-2.0, 2.0), seed=1),
    meha.TPE(space=meha.Uniform(-2.0, 2.0), seed=1),
)


ON_CONSTRAINTS = (meha.BiCGAFFA(alpha=0.05, eta=0.1), meha.LVHBA())
ALONE = (meha.ActiveSets(), stochastic.SABA(), stochastic.SRBA(), stochastic.SPABA(), stochastic.VRBO())
ALONG_F_X = stochastic.PBGDFree(alpha=1.0, beta=0.05)


def test_the_table_of_methods_is_whole():
    named = {**vars(meha.methods), **vars(meha.contrib), **vars(stochastic)}
    methods = {name for name, item in named.items() if isinstance(item, type) and issubclass(item, meha.Method)}
    tested = (*FIRST_ORDER, *SECOND_ORDER, *ON_TENSORS, *ON_CONSTRAINTS, *ALONE, ALONG_F_X)
    assert {type(method).__name__ for method in tested} == methods - {"Method"}
    table = (HERE.parents[1] / "docs" / "distributed.md").read_text().split("## Which methods", 1)[1].split("##", 1)[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == methods - {"Method"}


def methods_on_modules(methods, wrapped):
    pulled = Problem(lambda x, y, batch: upper(x, y, batch) + 0.1 * (x - 1).square().mean(), lower)
    for method in methods:
        options = {"max_steps": 3, "tol": None}
        problem = pulled if method.name == "PBGDFree" else PROBLEM  # it moves x along F_x alone
        expected = meha.solve(problem, weights(), network(), method, batches=[examples()], **options)
        y = shard(network(), line()) if wrapped else network(dist.get_rank())
        group = None if wrapped else dist.group.WORLD
        found = meha.solve(problem, weights(), y, method, batches=[mine()], group=group, **options)
        for value, reference in ((found.x, expected.x), (found.y, expected.y)):
            for a, b in zip(full(value), full(reference), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda text, m=method: f"{m.name}: {text}")


@pytest.mark.slow
def test_first_order_methods_take_modules_whole_or_sharded():
    in_processes(2, methods_on_modules, (*FIRST_ORDER, ALONG_F_X), False)
    in_processes(2, methods_on_modules, (*FIRST_ORDER, ALONG_F_X), True)


def left_out():
    """Numbers that are left out are estimated alike from shards and from whole tensors."""
    options = {"max_steps": 3, "tol": None}
    expected = meha.solve(PROBLEM, weights(), network(), MEHA(), batches=[examples()], **options)
    found = meha.solve(PROBLEM, weights(), shard(network(), line()), MEHA(), batches=[mine()], **options)
    for name in ("alpha", "beta", "eta", "gamma", "c"):
        assert getattr(found.method, name) == pytest.approx(getattr(expected.method, name), rel=1e-5)


@pytest.mark.slow
def test_numbers_are_chosen_from_shards():
    in_processes(2, left_out)


def test_second_order_methods_take_whole_modules():
    in_processes(2, methods_on_modules, SECOND_ORDER, False)


class TanhOnce(torch.autograd.Function):
    """tanh, which cannot be differentiated twice."""

    @staticmethod
    def forward(context, z):
        context.save_for_backward(z.tanh())
        return z.tanh()

    @staticmethod
    @once_differentiable
    def backward(context, gradient):
        (value,) = context.saved_tensors
        return gradient * (1 - value.square())


class Once(nn.Module):
    def forward(self, z):
        return TanhOnce.apply(z)


def differences():
    """Both gradients of a difference are means over the processes."""
    method, options = meha.RHG(alpha=50.0, beta=0.05, inner_steps=3), {"max_steps": 3, "tol": None}
    expected = meha.solve(PROBLEM, weights(), network(), method, batches=[examples()], **options)
    y = network(dist.get_rank())
    y[1] = Once()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = meha.solve(PROBLEM, weights(), y, method, batches=[mine()], group=dist.group.WORLD, **options)
    assert sum(warning.category is meha.TrainingWarning for warning in told) == (dist.get_rank() == 0)
    assert found.counts.hvp == 0 < expected.counts.hvp
    torch.testing.assert_close(found.x, expected.x, rtol=0, atol=1e-9)
    assert float((found.x - weights()).abs().max()) > 1e-3


def test_differences_in_place_of_second_derivatives_are_averaged():
    in_processes(2, differences)


def ridge(features, targets, decay=0.0):
    """A smooth problem with a strongly convex lower level; each process has rows of its own."""

    def lower(x, y):
        return (features[0] @ y - targets[0]).square().mean() + (x.exp() * y.square()).mean()

    def upper(x, y):
        fit = (features[1] @ y - targets[1]).square().mean()
        return fit + decay * (x - 1).square().sum() if decay else fit

    return Problem(upper, lower)


def methods_on_tensors():
    generator = torch.Generator().manual_seed(0)
    features, noise = (torch.randn(2, 20, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    targets = features @ torch.ones(4, dtype=torch.float64) + noise[..., 0]
    rank = dist.get_rank()
    half = slice(10 * rank, 10 * (rank + 1))
    start = torch.zeros(1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for method in (ALONG_F_X, *ON_TENSORS):
        decay = 0.1 if method is ALONG_F_X else 0.0  # it moves x along F_x alone
        expected = meha.solve(ridge(features, targets, decay), *start, method, max_steps=30)
        own = ridge(features[:, half], targets[:, half], decay)
        found = meha.solve(own, *start, method, max_steps=30, group=dist.group.WORLD)
        assert found.status == expected.status, method
        # Where numbers are chosen, the rounding of sums decides when Lanczos' method, in 4 dimensions, has seen them all.
        spare = 8 if method == MEHA() else 0
        pairs = zip(dataclasses.astuple(found.counts), dataclasses.astuple(expected.counts), strict=True)
        assert all(abs(a - b) <= spare for a, b in pairs), (method, found.counts, expected.counts)
        # Sums in another order differ by 1e-16, and quasi-Newton steps amplify that; the engines are accurate to 1e-6.
        torch.testing.assert_close(found.x, expected.x, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(found.y, expected.y, rtol=1e-7, atol=1e-8)
        assert abs(found.diagnose(gamma=1.0).gap - expected.diagnose(gamma=1.0).gap) < 1e-8
    fresh = found.refit(steps=5, lr=0.1)
    assert abs(fresh.upper - expected.refit(steps=5, lr=0.1).upper) < 1e-10


def test_methods_on_tensors_share_the_data():
    in_processes(2, methods_on_tensors)


def default_with_batches():
    """Two batches in turn, of which each process has a half."""
    generator = torch.Generator().manual_seed(0)
    features, noise = (torch.randn(2, 20, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    targets, rank = features @ torch.ones(4, dtype=torch.float64) + noise[..., 0], dist.get_rank()
    whole = [(features[:, part], targets[:, part]) for part in (slice(0, None, 2), slice(1, None, 2))]
    mine = [tuple(part[:, 5 * rank : 5 * (rank + 1)] for part in batch) for batch in whole]
    problem = Problem(lambda x, y, b: ridge(*b).upper(x, y), lambda x, y, b: ridge(*b).lower(x, y))
    start = torch.zeros(1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    expected = meha.solve(problem, *start, batches=whole, max_steps=60, tol=None)
    found = meha.solve(problem, *start, batches=mine, max_steps=60, tol=None, group=dist.group.WORLD)
    assert expected.method.name == found.method.name == "AdaptiveSOBA"
    assert float(found.x.abs()) > 0
    # Differences of gradients magnify the rounding of sums in another order.
    torch.testing.assert_close((found.x, found.y), (expected.x, expected.y), rtol=1e-7, atol=1e-8)
    assert found.counts == expected.counts


def test_the_default_with_batches_equals_one_process():
    in_processes(2, default_with_batches)


def coupled(targets):
    """A lower level y <= x with targets that each process has some of."""
    return Problem(
        lambda x, y: (x - 1).square().sum() + (y * targets).mean() / 10,
        lambda x, y: (y - targets).square().mean(),
        lower_constraints=meha.constraints.Linear([[-1.0]], [[1.0]], [0.0]),
    )


def coupled_and_cornered():
    targets, group = torch.linspace(1, 3, 8, dtype=torch.float64), dist.group.WORLD
    mine = targets[4 * dist.get_rank() :][:4]
    start = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    method, refusing = ON_CONSTRAINTS
    expected = meha.solve(coupled(targets), *start, method, max_steps=20, tol=None)
    found = meha.solve(coupled(mine), *start, method, max_steps=20, tol=None, group=group)
    torch.testing.assert_close((found.x, found.y), (expected.x, expected.y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.history["gap"], expected.history["gap"], rtol=1e-12, atol=1e-12)
    for other in (refusing, meha.Default()):
        with pytest.raises(ValueError, match=f"{other.name} cannot take several processes.*use BiCGAFFA"):
            meha.solve(coupled(mine), *start, other, group=group)
    problems = [
        Problem(
            lambda x, y: (y - 1).square().sum(),
            lambda x, y, part=part: (y - x * part).square().mean(),
            x_set=sets.Polyhedron([[1.0]], [0.5]),
        )
        for part in (targets, mine)
    ]
    expected, found = meha.solve(problems[0], *start), meha.solve(problems[1], *start, group=group)
    torch.testing.assert_close((found.x, found.y), (expected.x, expected.y), rtol=1e-5, atol=1e-5)


def test_constraints_that_couple_are_shared_or_refused():
    in_processes(2, coupled_and_cornered)


# What is refused


def refused(kind, message, problem, x, y, method=None, **options):
    with pytest.raises(kind, match=message):
        meha.solve(problem, x, y, method or StochasticMEHA(), batches=[mine()], max_steps=1, **options)


def wrapped():
    """A module that is wrapped, as far as it can be seen; a whole one would have to outlive the group."""
    module = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(module)
    module.module = network()
    return module


def refusals(folder):
    mesh, world = line(), dist.group.WORLD
    x, sharded = weights(), shard(network(), mesh)
    refused(
        TypeError,
        r"y: is wrapped in DistributedDataParallel.*\.module",
        PROBLEM,
        x,
        wrapped(),
        group=world,
    )
    for method in SECOND_ORDER:
        refused(ValueError, f"{method.name} cannot take variables that are divided", PROBLEM, x, sharded, method)
    whole = Problem(lambda x, y: y(x[:1, None].expand(1, 4)).sum(), lambda x, y: y(x[:1, None].expand(1, 4)).square().sum())
    for method in (meha.Default(), meha.contrib.AdaptiveMEHA()):
        with pytest.raises(ValueError, match=f"{method.name} cannot take variables that are divided"):
            meha.solve(whole, x, sharded, method)
    refused(
        ValueError,
        "x_set: Simplex mixes numbers of x",
        Problem(upper, lower, x_set=sets.Simplex()),
        divided(x, mesh),
        network(),
    )
    bounds = sets.Box(-torch.ones(EXAMPLES), torch.ones(EXAMPLES))
    refused(
        ValueError, "Box has an entry of low for each number", Problem(upper, lower, x_set=bounds), divided(x, mesh), network()
    )
    term = Problem(upper, lower, nonsmooth=nonsmooth.GroupL2([1] * sum(p.numel() for p in network().parameters())))
    refused(ValueError, "nonsmooth: GroupL2 mixes numbers of y", term, x, sharded)
    trained = Problem(upper, lower, response=meha.responses.Trained(steps=2, lr=0.1))
    refused(ValueError, "response: .* y is divided", trained, x, sharded, meha.F2SA(alpha=1.0))
    refused(TypeError, "group: expected a process group or a DeviceMesh, got int", PROBLEM, x, network(), group=3)
    refused(TypeError, "pass a folder", PROBLEM, x, network(), group=world, checkpoint=meha.Checkpoint(folder / "run.pt"))
    refused(TypeError, "for several processes", PROBLEM, x, network(), checkpoint=SharedCheckpoint(folder / "run"))
    graphs = meha.RHG(alpha=1.0, beta=0.1, keep_graph=True)
    refused(ValueError, "keep_graph: .* not averaged", PROBLEM, x, matrices(), graphs, group=world)
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    refused(ValueError, r"group=mesh\['dp'\]", PROBLEM, x, shard(network(), grid))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    refused(ValueError, r"fully_shard averages the gradients of y over \[0, 1\]", PROBLEM, x, sharded, group=alone)
    other = dist.new_group([0])
    if dist.get_rank() == 1:
        refused(ValueError, "does not belong to it", PROBLEM, x, network(), group=other)
    toy = meha.problems.strong_convex(4)
    for method in ALONE:
        with pytest.raises(ValueError, match=f"{method.name} cannot take several processes"):
            method.start(toy, toy.x0, toy.y0, group=world)
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="a sampler divides the batches among 2 processes"):
        meha.solve(PROBLEM, x, network(), batches=DataLoader(range(8), 2, sampler=sampler))
    with pytest.raises(ValueError, match="refit: y is a sharded module"):
        meha.solve(PROBLEM, x, sharded, batches=[mine()], max_steps=1).refit(steps=1)
    with pytest.raises(ValueError, match="y0: is divided among processes"):
        meha.check(PROBLEM, x, sharded, batch=mine())
    with pytest.warns(meha.running.compiled.CompileWarning, match="several processes"):
        meha.solve(PROBLEM, x, network(), batches=[mine()], max_steps=2, compile=True, group=world)


def test_refusals_name_the_remedy(tmp_path):
    in_processes(2, refusals, tmp_path)


# Terms and sets on parts


def parts():
    mesh, options = line(), {"max_steps": 10, "tol": None}
    for problem, method in (
        (Problem(upper, lower, x_set=sets.Box(-0.5, 0.5)), StochasticMEHA()),
        (
            Problem(upper, lower, x_set=sets.Box(-0.5, 0.5), nonsmooth=nonsmooth.L1(lambda x: x.exp().mean() / 50)),
            StochasticMEHA(),
        ),
        (
            Problem(upper, lower, nonsmooth=nonsmooth.L1(lambda x: x.exp().mean() / 50)),
            MEHA(**STEPS, gamma=5.0, c=2.0, gradients=2),
        ),
        (Problem(upper, lower, y_set=sets.Box(-0.3, 0.3)), MEHA(**STEPS, gamma=5.0, c=2.0)),
    ):
        x0, y0 = weights() / 2, network()
        with torch.no_grad():
            for p in y0.parameters():
                p.clamp_(-0.3, 0.3)
        kept = {name: p.clone() for name, p in y0.state_dict().items()}
        expected = meha.solve(problem, x0, y0, method, batches=[examples()], **options)
        again = network()
        again.load_state_dict(kept)
        x = divided(x0, mesh) if problem.nonsmooth is None else x0
        found = meha.solve(problem, x, shard(again, mesh), method, batches=[mine()], **options)
        for value, reference in ((found.x, expected.x), (found.y, expected.y)):
            for a, b in zip(full(value), full(reference), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found.history["lower"], expected.history["lower"], rtol=1e-11, atol=1e-12)


def test_terms_and_sets_of_single_numbers_act_on_parts():
    in_processes(2, parts)


# Watching, stopping, logging


def watched(folder):
    rank, group = dist.get_rank(), dist.group.WORLD
    run = partial(meha.solve, PROBLEM, weights(), batches=[mine()], tol=None, group=group)

    stopped = run(network(), max_steps=9, callbacks=lambda run, info: rank == 1 and info.step == 3)
    assert (stopped.steps, stopped.status) == (3, Status.STOPPED)

    logger = CSVLogger(folder / f"log-{rank}.csv")
    run(network(), max_steps=3, callbacks=logger)
    assert logger.path.exists() == (rank == 0)

    ended = meha.solve(PROBLEM, weights(), network(), batches=iter([mine()] * (3 + rank)), tol=None, group=group)
    assert ended.steps == 3

    scores = iter([[3.0, 1.0, 2.0, 2.0], [3.0, 3.0, 2.0, 3.0]][rank])
    validate = Validate(lambda x, y: next(scores), every=1, patience=None)
    kept = run(network(), max_steps=4, callbacks=validate)
    assert (validate.step, validate.best) == (2, 2.0)
    assert kept.history["score"] == [3.0, 2.0, 2.0, 2.5]

    bad = mine()
    if rank == 1:
        bad = dataclasses.replace(bad, inputs=torch.full_like(bad.inputs, torch.nan))
    for y in (network(), shard(network(), line())):
        failed = meha.solve(PROBLEM, weights(), y, batches=[mine(), bad], tol=None, group=group)
        assert (failed.status, failed.steps) == (Status.NON_FINITE, 2)
        assert "Look at batch 2 of this pass in process 1: inputs has" in failed.message
    skip = SkipBadBatches()
    fine = meha.solve(PROBLEM, weights(), network(), batches=[mine(), bad], tol=None, group=group, callbacks=skip, max_steps=4)
    assert (fine.steps, len(skip.skipped)) == (4, 3)
    assert str(fine).startswith("NetworkSOBA: finished after 4 steps")


def test_processes_stop_and_log_together(tmp_path):
    in_processes(2, watched, tmp_path)
    assert len((tmp_path / "log-0.csv").read_text().splitlines()) == 4


def loops():
    """A loop of one's own equals solve; gradients that overflow in one process end the step in both."""
    rank, group = dist.get_rank(), dist.group.WORLD
    expected = meha.solve(PROBLEM, weights(), network(), batches=[mine()], max_steps=4, tol=None, group=group)
    run = meha.start(PROBLEM, weights(), network(), max_steps=4, group=group)
    for _ in range(4):
        run.step(mine())
    assert torch.equal(run.x, expected.x)
    assert all(map(torch.equal, run.y.parameters(), expected.y.parameters()))
    assert run.solution().upper == expected.upper

    large = dataclasses.replace(mine(), inputs=torch.full_like(mine().inputs, torch.inf)) if rank == 1 else mine()
    run = meha.start(PROBLEM, weights(), network(), group=group, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))
    assert run.step(mine())["skipped"] == 0.0
    x = run.x.clone()
    assert run.step(large)["skipped"] == 1.0
    assert (run.k, run.scaler.get_scale()) == (1, 2.0**39)
    assert torch.equal(run.x, x)
    assert run.step(mine())["skipped"] == 0.0


def test_a_loop_in_several_processes():
    in_processes(2, loops)


def test_samplers_get_the_number_of_the_pass():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)
    batches = Endless(DataLoader(range(8), 2, sampler=sampler))
    taken = []
    for i in range(6):
        if i == 3:
            position = batches.state_dict()
        taken.append(next(batches).tolist())
    assert taken[:2] != taken[2:4]
    other = Endless(DataLoader(range(8), 2, sampler=DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)))
    other.load_state_dict(position)
    assert [next(other).tolist() for _ in range(3)] == taken[3:]


class Counting(DataLoader):
    """A loader that sets its sampler to the number of its own passes."""

    passes = 0

    def __iter__(self):
        self.sampler.set_epoch(self.passes)
        self.passes += 1
        return super().__iter__()


def test_a_loader_that_counts_its_own_passes_cannot_be_resumed():
    def batches():
        return Endless(Counting(range(8), 2, sampler=DistributedSampler(range(8), num_replicas=2, rank=0)))

    first = batches()
    position = [(next(first), first.state_dict())[1] for _ in range(3)]
    batches().load_state_dict(position[1])  # of the first pass
    with pytest.raises(ValueError, match="sets its sampler to pass 0, but 1 was saved; give a plain DataLoader"):
        batches().load_state_dict(position[2])


# Checkpoints


class Rows(Dataset):
    def __init__(self):
        self.data = examples()

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return vars(self.data[i])


def collated(rows):
    return type(examples())(*(torch.stack([row[name] for row in rows]) for name in rows[0]))


def loader():
    sampler = DistributedSampler(Rows(), dist.get_world_size(), dist.get_rank(), seed=1)
    return DataLoader(Rows(), 4, sampler=sampler, collate_fn=collated)


def noisy_network(seed=0):
    torch.manual_seed(seed)
    parts = nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3)
    return nn.Sequential(*parts).double()


def result(solution):
    buffers = [buffer.clone() for buffer in solution.y.buffers()]
    return full(solution.x) + full(solution.y) + buffers, solution.history["upper"]


SAVED = {
    "NetworkSOBA": stochastic.NetworkSOBA(),
    "MEHA with Adam": MEHA(x_optimizer=ADAM, y_optimizer=ADAM, theta_optimizer=ADAM, gamma=5.0, c=2.0, gradients=2),
}


def call(folder, method, wrapped, max_steps=11, stop=None, seed=0, **options):
    torch.manual_seed(100 * seed + dist.get_rank())
    y = noisy_network(seed)
    if wrapped:
        y = shard(y, line())
    torch.manual_seed(7 + dist.get_rank())
    checkpoint = None if folder is None else SharedCheckpoint(folder, every=3, **options)
    group = dist.group.WORLD
    # Runs that are to be the same have one end, on which the rates of NetworkSOBA depend.
    options = dict(max_steps=max_steps, tol=None, checkpoint=checkpoint, group=group)
    return meha.solve(PROBLEM, weights(), y, method, batches=loader(), callbacks=lambda run, info: info.step == stop, **options)


def resumed(folder):
    for name, method in SAVED.items():
        for wrapped in (False, True):
            path = folder / f"{name} {wrapped}"
            whole = result(call(None, method, wrapped))
            call(path, method, wrapped, stop=7, asynchronous=wrapped)
            tensors, history = result(call(path, method, wrapped, seed=1, asynchronous=wrapped))
            assert history == whole[1], name
            assert all(torch.equal(a, b) for a, b in zip(tensors, whole[0], strict=True)), (name, wrapped)
            again = result(call(path, method, wrapped, seed=2))
            assert again[1] == history
            assert len(list(path.iterdir())) == 2
    last = sorted(path.iterdir())[-1]
    dist.barrier()
    if dist.get_rank() == 0:
        for file in last.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors, history = result(call(path, method, True, seed=3))
    assert history == whole[1]
    assert (dist.get_rank() == 0) == any("holds damaged states" in str(warning.message) for warning in caught)


def on_other_processes(folder):
    for name, method in SAVED.items():
        for wrapped in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                solution = call(folder / f"{name} {wrapped}", method, wrapped, 13)
            assert solution.steps == 13
            found = [str(warning.message) for warning in caught if issubclass(warning.category, meha.TrainingWarning)]
            assert len(found) == (dist.get_rank() == 0)
            assert all("2 processes wrote it, and 1 read it" in text for text in found)


def test_runs_go_on_bit_for_bit_and_on_other_processes(tmp_path):
    in_processes(2, resumed, tmp_path)
    in_processes(1, on_other_processes, tmp_path)


def launched(folder, kills, steps):
    """Run a script by torchrun in two processes, of which one is killed now and then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [f"--max-restarts={5 + 3 * kills}", str(HERE / "killed_run.py"), str(folder), str(kills), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"end-{rank}.pt") for rank in range(2)]


def check_kills(folder, kills, steps):
    ends = launched(folder / "whole", 0, steps)
    for (tensors, history), (others, other_history) in zip(launched(folder / "killed", kills, steps), ends, strict=True):
        assert history == other_history
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    assert len(list((folder / "killed").glob("killed-*"))) == kills


@pytest.mark.slow
def test_a_killed_process_does_not_end_the_run(tmp_path):
    check_kills(tmp_path, 1, 60)


def resumable(folder, attempt, rank):
    """The run of a killed process, in a fork of this one."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{attempt}", rank=rank, world_size=2, timeout=timeout)
    (folder / f"begun-{attempt}-{rank}").touch()
    solution = call(folder / "run", StochasticMEHA(), True, 60)
    torch.save(result(solution), folder / f"end-{rank}.pt")
    os._exit(0)


def attempted(folder, attempt, delay=None):
    """Run both processes, and kill one of them so long after both have begun; whether the run ended."""
    folder.mkdir(exist_ok=True)
    context = torch.multiprocessing.get_context("fork")  # without the time to import torch
    processes = [context.Process(target=resumable, args=(folder, attempt, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    if delay is not None:
        while not all((folder / f"begun-{attempt}-{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        time.sleep(delay)
        processes[attempt % 2].kill()
        processes[1 - attempt % 2].join(timeout=1)
        processes[1 - attempt % 2].kill()  # as torchrun does
    for process in processes:
        process.join()
    return all(process.exitcode == 0 for process in processes)


@pytest.mark.slow
def test_twenty_kills_do_not_end_the_run(tmp_path):
    begin = time.perf_counter()
    assert attempted(tmp_path / "whole", 0)
    most, draw, folder = (time.perf_counter() - begin) / 6, random.Random(0), tmp_path / "killed"
    for attempt in range(20):
        assert not attempted(folder, attempt, draw.uniform(0, most))
    assert attempted(folder, 20)
    for rank in range(2):
        (tensors, history), (others, other_history) = (
            torch.load(tmp_path / name / f"end-{rank}.pt") for name in ("whole", "killed")
        )
        assert history == other_history
        assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


# Rounding


def flat_lower(x, y, batch):
    """An objective whose values hardly differ, beside their size."""
    return 1 + 1e-6 * lower(x, y, batch)


def rounding():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    data = share(dist.get_rank(), 2, torch.float32)
    for half, count in ((torch.bfloat16, 1), (None, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = shard(network(dtype=torch.float32), line(), mp_policy=MixedPrecisionPolicy(param_dtype=half))
            problem = Problem(upper, flat_lower)
            meha.solve(problem, weights(torch.float32), y, batches=[data], max_steps=24, tol=None)
        found = [str(warning.message) for warning in caught if issubclass(warning.category, meha.TrainingWarning)]
        assert len(found) == (count if dist.get_rank() == 0 else 0), found
        assert all("at step 16" in text and "bfloat16" in text for text in found)


def test_differences_within_rounding_are_told():
    in_processes(2, rounding)
