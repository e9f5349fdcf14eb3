"""Loops of one's own: they equal solve, resume in the middle of an epoch, and take built optimizers, scalers and clipping."""

import io
import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import meha
from meha.problem.loaders import Accumulated, Together, random_states, set_random_states

EXAMPLES, CLEAN = 70, 24
METHODS = {
    "default": None,
    "MEHA": meha.MEHA(alpha=2.0, beta=0.1, eta=0.1, gamma=5.0, c=2.0),
    "F2SA": meha.F2SA(alpha=2.0, beta=0.1, eta=0.1, inner_steps=2),
    "RHG": meha.RHG(alpha=2.0, beta=0.1, inner_steps=2),
}
HALF = torch.autocast("cpu", dtype=torch.bfloat16)
ADAM, ADAMW = partial(torch.optim.Adam, lr=0.05), partial(torch.optim.AdamW, lr=0.01)


def lower(x, y, batch):
    index, inputs, labels = batch[0]
    return (x[index].sigmoid() * cross_entropy(y(inputs), labels, reduction="none")).mean()


def upper(x, y, batch):
    inputs, labels = batch[1]
    return cross_entropy(y(inputs), labels)


PROBLEM = meha.Problem(upper, lower)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))


def batches(seed=0, in_order=True):
    """Seven batches of noisy examples an epoch, three of clean ones; one loader has a generator of its own."""
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(EXAMPLES + CLEAN, 2, generator=generator)
    labels = (points.prod(dim=1) > 0).long()
    noisy = TensorDataset(torch.arange(EXAMPLES), points[:EXAMPLES], labels[:EXAMPLES])
    clean = TensorDataset(points[EXAMPLES:], labels[EXAMPLES:])
    train = DataLoader(noisy, batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(seed))
    return Together(train, DataLoader(clean, batch_size=8, shuffle=True))


def begin(method=None, seed=0, **options):
    return meha.start(PROBLEM, torch.zeros(EXAMPLES), network(seed), method, **options)


def steps(run, loader, count):
    """The numbers of the first steps of a loop over epochs."""
    infos = []
    while True:
        for batch in loader:
            infos.append(dict(run.step(batch)))
            if len(infos) == count:
                return infos


def leaves(run):
    return [leaf.detach().clone() for leaf in run.state.x.leaves + run.state.y.leaves]


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Like solve


def compiled(net):
    return torch.compile(net, backend="eager")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *itertools.product(METHODS, ["plain", "accumulated", "autocast around the step", "autocast inside"]),
        ("default", "compiled"),
        ("F2SA", "compiled"),
    ],
)
def test_a_loop_equals_solve_bit_for_bit(name, how):
    problem = PROBLEM
    if how == "autocast inside":

        def inside(objective):
            def call(x, y, batch):
                with HALF:
                    return objective(x, y, batch)

            return call

        problem = meha.Problem(inside(upper), inside(lower))
    form = compiled if how == "compiled" else (lambda net: net)
    ends = []
    for own in (False, True):
        torch.manual_seed(3)  # of the clean loader
        net, x, infos = network(), torch.zeros(EXAMPLES), []
        torch.manual_seed(3)
        loader = Accumulated(batches(), 2) if how == "accumulated" else batches()
        with HALF if how == "autocast around the step" else nullcontext():
            if own:
                run = meha.start(problem, x, form(net), METHODS[name], max_steps=9)
                infos, end = steps(run, loader, 9), run.solution()
            else:
                end = meha.solve(
                    problem,
                    x,
                    form(net),
                    METHODS[name],
                    batches=loader,
                    max_steps=9,
                    tol=None,
                    callbacks=lambda run, info, to=infos: to.append({k: v for k, v in info.items() if k != "change"}),
                )
        assert all(p.dtype == torch.float32 for p in net.parameters())
        ends.append((end, [end.x, *(p.detach().clone() for p in net.parameters())], infos))
    (first, at_first, of_first), (second, at_second, of_second) = ends
    assert_equal(at_first, at_second)
    assert of_first == of_second
    assert first.counts == second.counts
    assert first.history["upper"] == second.history["upper"]
    assert second.method.name == (name if name != "default" else "NetworkSOBA")
    start = network()
    assert not any(torch.equal(a, b) for a, b in zip(at_first[1:], start.parameters(), strict=True)), "y learns"
    if how == "compiled":
        assert set(second.y.state_dict()) == {f"_orig_mod.{name}" for name in start.state_dict()}
        assert set(run.state_dict()["state"]["y"]) == set(start.state_dict()), "names are plain"


def test_a_problem_without_batches_and_the_engines():
    problem = meha.problems.sine(n=10)
    run = meha.start(problem, problem.x0, problem.y0)
    while run.verdict is None:
        run.step()
    whole, mine = meha.solve(problem, problem.x0, problem.y0), run.solution()
    assert mine.status is whole.status is meha.Status.CONVERGED
    assert mine.message == whole.message
    assert torch.equal(mine.x, whole.x)
    early = meha.start(problem, problem.x0, problem.y0)
    early.step()
    assert "stopped after 1 step" in str(early.solution())


# Resuming


def training(seed, scaler=None):
    """A loop with all that there is: built optimizers, groups, schedules of both kinds, epochs."""
    net = network(seed)
    x = torch.zeros(EXAMPLES, requires_grad=True)
    groups = [{"params": net[0].parameters(), "weight_decay": 0.1}, {"params": net[2].parameters(), "lr": 0.02}]
    y_optimizer, x_optimizer = torch.optim.AdamW(groups, lr=0.01), torch.optim.Adam([x], lr=0.05)
    mine = lr_scheduler.StepLR(y_optimizer, 3, gamma=0.7)
    theirs = meha.Optimizer(x_optimizer, scheduler=lr_scheduler.ExponentialLR(x_optimizer, 0.95), clip=0.5)
    run = meha.start(
        PROBLEM, x, net, meha.StochasticMEHA(), x_optimizer=theirs, y_optimizer=y_optimizer, max_steps=20, scaler=scaler
    )
    return run, mine


class NoSchedule:
    def step(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def turns(run, loader, scheduler, first, last, save_at=None):
    """Epochs of steps with a schedule in the loop; return the numbers, and what was saved after a step."""
    infos, saved = [], None
    for _ in range(first, last):
        for batch in loader:
            infos.append(dict(run.step(batch)))
            scheduler.step()
            if run.k == save_at:
                state = {
                    "run": run.state_dict(),
                    "batches": loader.state_dict(),
                    "random": random_states(loader),
                    "scheduler": scheduler.state_dict(),
                }
                buffer = io.BytesIO()
                torch.save(state, buffer)
                saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return infos, saved


@pytest.mark.parametrize("save_at", [3, 7, 10])
@pytest.mark.parametrize("kind", [*METHODS, "everything", "scaled"])
def test_a_loop_resumes_in_the_middle_of_an_epoch(kind, save_at):
    """Three epochs of seven batches; the state is saved in the middle of one, and in the last turn of one."""

    def make(seed):
        scaler = torch.amp.GradScaler("cpu", growth_interval=4) if kind == "scaled" else None
        if kind in METHODS:
            run = begin(METHODS[kind], seed, max_steps=21)
            return run, NoSchedule()
        return training(seed, scaler)

    torch.manual_seed(1)
    run, scheduler = make(0)
    torch.manual_seed(1)
    loader = batches()
    infos, saved = turns(run, loader, scheduler, 0, 3, save_at)
    assert run.k == len(infos) == 21
    torch.manual_seed(2)
    other, scheduler = make(1)
    loader = batches(seed=1)
    torch.rand(5)
    other.load_state_dict(saved["run"])
    loader.load_state_dict(saved["batches"])
    scheduler.load_state_dict(saved["scheduler"])
    set_random_states(saved["random"], loader)
    rest, _ = turns(other, loader, scheduler, (save_at - 1) // 7, 3)  # the epoch that the loop was in
    assert rest == infos[save_at:]
    assert_equal(leaves(run), leaves(other))
    first, second = run.solution(), other.solution()
    histories = [{k: v for k, v in found.history.items() if k != "seconds"} for found in (first, second)]
    assert str(histories[0]) == str(histories[1])  # as text, in which NaN equals NaN
    assert_equal(first.y0, second.y0)
    assert first.counts == second.counts
    if kind == "scaled":
        assert run.scaler.state_dict() == other.scaler.state_dict()
        assert run.scaler.get_scale() == 2.0**16 * 2**5, "it grows after every fourth step"


def test_states_that_do_not_fit_are_refused():
    run, scaled = begin(), begin(scaler=torch.amp.GradScaler("cpu"))
    state = run.state_dict()
    with pytest.raises(ValueError, match=r"state: lacks \['loop'\]; pass what state_dict\(\) of a run of meha.start"):
        run.load_state_dict({name: part for name, part in state.items() if name != "loop"})
    with pytest.raises(ValueError, match="scaler: the run that was saved had no, this one has one"):
        scaled.load_state_dict(state)
    with pytest.raises(ValueError, match="start the run with the same method"):
        begin(METHODS["F2SA"]).load_state_dict(state)


# Built optimizers


def test_a_built_optimizer_takes_the_steps_of_a_factory():
    """Groups, schedules in the loop, and theta: bit for bit as the factories that make the same."""

    def groups(parameters, **options):
        first, second = parameters[:2], parameters[2:]
        return torch.optim.AdamW([{"params": first, "weight_decay": 0.2}, {"params": second, "lr": 0.03}], lr=0.01, **options)

    for method in (meha.StochasticMEHA(), meha.F2SA(alpha=0.1, eta=0.1, inner_steps=1), meha.stochastic.NetworkSOBA()):
        schedule = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
        torch.manual_seed(0)
        by_factory = begin(method, y_optimizer=meha.Optimizer(groups, scheduler=schedule))
        torch.manual_seed(0)
        infos = steps(by_factory, batches(), 6)
        for inside in (True, False):  # who steps the scheduler
            net = network()
            optimizer = groups(list(net.parameters()))
            scheduler = schedule(optimizer)
            given = meha.Optimizer(optimizer, scheduler=scheduler) if inside else optimizer
            run = meha.start(PROBLEM, torch.zeros(EXAMPLES), net, method, y_optimizer=given)
            torch.manual_seed(0)
            for batch, expected in zip(batches(), infos, strict=False):
                assert dict(run.step(batch)) == expected
                if not inside:
                    scheduler.step()
            assert_equal(leaves(run), leaves(by_factory))
            assert run.state.y_optimizer.optimizer is optimizer
            assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3


def test_theta_has_the_optimizer_of_y():
    """MEHA moves theta before y: both with the rates of one built optimizer, against two factories."""
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    factory = meha.Optimizer(torch.optim.AdamW, lr=0.01, scheduler=schedule)
    numbers = {"alpha": 2.0, "gamma": 5.0, "c": 2.0}
    by_factory = begin(meha.MEHA(**numbers, y_optimizer=factory, theta_optimizer=factory))
    torch.manual_seed(0)
    infos = steps(by_factory, batches(), 5)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = schedule(optimizer)
    run = meha.start(
        PROBLEM, torch.zeros(EXAMPLES), net, meha.MEHA(**numbers, y_optimizer=optimizer, theta_optimizer=optimizer)
    )
    torch.manual_seed(0)
    for batch, expected in zip(batches(), infos, strict=False):
        assert dict(run.step(batch)) == expected
        scheduler.step()
    assert_equal(leaves(run), leaves(by_factory))
    own = run.state.theta_optimizer.optimizer
    assert own is not optimizer
    assert len(optimizer.state) == len(own.state) == 4, "moments of their own"


def quadratic():
    """F and f of x in which y has no part, so that the direction of x is known."""
    return meha.Problem(lambda x, y: 0.5 * (x["a"] - 1).square().sum() + y.sum(), lambda x, y: 0.5 * y.square().sum())


@pytest.mark.parametrize("warm", [False, True])
def test_tensors_of_a_built_optimizer_are_trained_in_place_and_its_moments_stay(warm):
    a = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    mine, reference = torch.optim.Adam([a], lr=0.1), a.detach().clone().requires_grad_()
    other = torch.optim.Adam([reference], lr=0.1)
    for tensor, optimizer in ((a, mine), (reference, other)) if warm else ():
        tensor.grad = torch.full_like(tensor, -3.0)  # a moment of another direction
        optimizer.step()
        tensor.grad = None
    method = meha.F2SA(beta=0.1, eta=0.1, inner_steps=1, c=1.0)
    run = meha.start(quadratic(), {"a": a}, torch.zeros(2, dtype=torch.float64), method, x_optimizer=mine)
    for _ in range(4):
        run.step()
        reference.grad = reference.detach() - 1
        other.step()
        torch.testing.assert_close(a, reference, rtol=1e-12, atol=1e-14)
    assert run.x["a"].data_ptr() == a.data_ptr()
    assert a.grad is None, "gradients of the caller stay as they are"
    solution = run.solution()
    run.step()
    assert not torch.equal(solution.x["a"], a), "a solution is a copy"


def test_solve_takes_built_optimizers_and_resumes_with_them(tmp_path):
    def solve(max_steps, **options):
        net, x = network(), torch.zeros(EXAMPLES, requires_grad=True)
        y_optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        y_optimizer = meha.Optimizer(y_optimizer, scheduler=lr_scheduler.StepLR(y_optimizer, 2))
        method = meha.StochasticMEHA(x_optimizer=torch.optim.Adam([x], lr=0.05), y_optimizer=y_optimizer)
        torch.manual_seed(0)
        end = meha.solve(PROBLEM, x, net, method, batches=batches(), max_steps=max_steps, tol=None, **options)
        assert torch.equal(end.x, x)
        return [end.x, *net.parameters()]

    whole = solve(10)
    solve(6, checkpoint=tmp_path / "run.pt")
    assert_equal(solve(10, checkpoint=tmp_path / "run.pt"), whole)


def test_a_run_that_begins_again_forgets_the_moments_of_its_first_attempt():
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    given = meha.Optimizer(optimizer, scheduler=lr_scheduler.LinearLR(optimizer, total_iters=4))
    run = meha.start(PROBLEM, torch.zeros(EXAMPLES), net, meha.F2SA(eta=0.1, inner_steps=1), y_optimizer=given)
    start = leaves(run)
    rate = optimizer.param_groups[0]["lr"]
    torch.manual_seed(0)
    first = steps(run, batches(), 3)
    run.method = meha.F2SA(**{**vars(run.method), "alpha": 4 * run.method.alpha})  # begin_again divides it by 4
    run.begin_again(start)
    assert optimizer.param_groups[0]["lr"] == rate
    assert not optimizer.state
    torch.manual_seed(0)
    assert steps(run, batches(), 3) == first


def test_frozen_parameters_may_be_in_the_optimizer():
    net = network()
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    run = meha.start(
        PROBLEM,
        torch.zeros(EXAMPLES),
        net,
        meha.StochasticMEHA(),
        y_optimizer=torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5),
    )
    steps(run, batches(), 3)
    assert torch.equal(net[0].weight, before)
    assert not torch.equal(net[2].weight, network()[2].weight)


def sgd(*tensors, **options):
    return torch.optim.SGD(list(tensors), lr=0.1, **options)


def wrong_optimizers():
    net, x, stranger = network(), torch.zeros(EXAMPLES, requires_grad=True), torch.zeros(4, requires_grad=True)
    own, plateau = sgd(x), sgd(x)
    free, of_net = torch.zeros(EXAMPLES), meha.StochasticMEHA(y_optimizer=sgd(*net.parameters()))
    start = partial(meha.start, PROBLEM, x, net)
    return {
        "lacks": (lambda: start(y_optimizer=sgd(net[0].weight)), "y_optimizer: .* lacks '0.bias', '2.weight', '2.bias'"),
        "stranger": (lambda: start(x_optimizer=sgd(x, stranger)), r"holds 1 that is not of x \(of shape \(4,\)\)"),
        "both levels": (lambda: start(y_optimizer=sgd(x, *net.parameters())), "y_optimizer: .* build one for each level"),
        "swapped": (lambda: start(x_optimizer=sgd(*net.parameters())), "x_optimizer: the SGD must hold the tensors of x"),
        "no gradients": (
            lambda: meha.start(PROBLEM, free, net, x_optimizer=sgd(free)),
            "x: .* make it with requires_grad=True",
        ),
        "climbs": (lambda: start(x_optimizer=sgd(x, maximize=True)), "maximize=True would climb"),
        "LBFGS": (lambda: start(x_optimizer=torch.optim.LBFGS([x])), "LBFGS evaluates the objective itself"),
        "theta": (
            lambda: start(meha.MEHA(theta_optimizer=sgd(*network().parameters()))),
            "theta_optimizer: .* must hold the tensors of y",
        ),
        "options": (lambda: meha.Optimizer(own, lr=0.2), "lr: the SGD is built already; give this option when you build it"),
        "scheduler of another": (
            lambda: meha.Optimizer(own, scheduler=lr_scheduler.StepLR(plateau, 2)),
            "scheduler: the StepLR belongs to another optimizer",
        ),
        "scheduler alone": (
            lambda: meha.Optimizer(torch.optim.SGD, scheduler=lr_scheduler.StepLR(own, 2)),
            "scheduler: the StepLR belongs to another optimizer",
        ),
        "plateau": (
            lambda: start(x_optimizer=meha.Optimizer(plateau, scheduler=lr_scheduler.ReduceLROnPlateau(plateau))),
            r"ReduceLROnPlateau waits .* in a loop of your own \(meha.start\)",
        ),
        "of a copy": (
            lambda: meha.solve(PROBLEM, x, net, of_net, batches=batches(), copy=True),
            "y_optimizer: .* of the tensors that the run gets",
        ),
        "in refit": (
            lambda: start(meha.StochasticMEHA()).refit(steps=1, batches=batches(), optimizer=sgd(*net.parameters())),
            "optimizer: the SGD must hold the tensors of y",
        ),
        "no such optimizer": (
            lambda: start(METHODS["RHG"], y_optimizer=sgd(*net.parameters())),
            r"y_optimizer: RHG takes its own steps of y and has no y_optimizer \(it takes x_optimizer\), got SGD; leave it out",
        ),
        "default of tensors": (
            lambda: meha.start(meha.problems.sine(n=1), x, x.clone(), x_optimizer=ADAM),
            "x_optimizer: the method that is chosen for this problem, Default, takes its own steps of x",
        ),
        "twice": (
            lambda: start(meha.StochasticMEHA(x_optimizer=ADAM), x_optimizer=ADAM),
            r"x_optimizer: the method has one already \(x_lr=0.01, momentum=0.9, x_optimizer=Adam\(lr=0.05\)\)",
        ),
        "beside a step": (
            lambda: start(meha.F2SA(alpha=0.1), x_optimizer=sgd(x)),
            "alpha and x_optimizer: give one of them",
        ),
    }


@pytest.mark.parametrize("name", wrong_optimizers())
def test_optimizers_that_do_not_fit(name):
    call, message = wrong_optimizers()[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_the_rate_of_a_built_optimizer_is_not_a_part_of_the_methods_description():
    """A state fits a run whose scheduler stands elsewhere."""
    run, scheduler = training(0)
    state = run.state_dict()
    scheduler.optimizer.param_groups[0]["lr"] = 0.5
    run.load_state_dict(state)
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.01
    assert "x_optimizer=Optimizer(Adam of 1 tensor, scheduler=ExponentialLR, clip=0.5)" in run.method.describe()
    assert "y_optimizer=AdamW of 2 and 2 tensors" in run.method.describe()


# What people do in their loops


def test_a_schedule_that_waits_for_a_plateau():
    net = network()
    optimizer = sgd(*net.parameters())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    run = meha.start(PROBLEM, torch.zeros(EXAMPLES), net, meha.StochasticMEHA(), y_optimizer=optimizer)
    for _ in range(3):
        steps(run, batches(), 7)
        scheduler.step(1.0)  # never better after the first
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert run.state.theta_optimizer.lr == 0.1 * 0.5**2


@pytest.mark.parametrize("by", ["clip", "hook"])
def test_clipping(by):
    """The direction of x has the norm sqrt(3): clipped to 1, each number moves by 0.1 / sqrt(3)."""
    a = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = sgd(a)
    if by == "hook":
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_([a], 1.0) and None)
    given = meha.Optimizer(optimizer, clip=1.0) if by == "clip" else optimizer
    method = meha.F2SA(beta=0.1, eta=0.1, inner_steps=1, c=1.0)
    run = meha.start(quadratic(), {"a": a}, torch.zeros(2, dtype=torch.float64), method, x_optimizer=given)
    info = run.step()
    assert info["d_x"] == pytest.approx(3**0.5)
    assert a.tolist() == pytest.approx([0.1 / 3**0.5] * 3, rel=1e-5)


def test_gradient_accumulation():
    """Two halves of a batch are the batch, up to rounding."""
    runs = [begin(METHODS["F2SA"]), begin(METHODS["F2SA"])]
    torch.manual_seed(0)
    for batch in batches():
        (index, inputs, labels), clean = batch
        halves = [((index[part], inputs[part], labels[part]), clean) for part in (slice(5), slice(5, 10))]
        whole, parts = runs[0].step(batch), runs[1].step(meha.MicroBatches(halves))
        assert whole["lower"] == pytest.approx(parts["lower"], rel=1e-5)
    for a, b in zip(*map(leaves, runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_an_average_of_the_weights():
    net = network()
    run = meha.start(PROBLEM, torch.zeros(EXAMPLES), net, max_steps=7)
    average, seen = AveragedModel(net), []
    for batch in batches():
        run.step(batch)
        average.update_parameters(net)
        seen.append([p.detach().clone() for p in net.parameters()])
    for mean, values in zip(average.module.parameters(), zip(*seen, strict=True), strict=True):
        torch.testing.assert_close(mean.detach(), torch.stack(values).mean(dim=0))
    assert not torch.equal(seen[0][0], seen[-1][0])


# Solutions


def test_a_solution_at_any_time():
    run = begin(max_steps=10)
    assert run.solution().message == "The loop ended after 0 of 10 steps."
    steps(run, batches(), 4)
    early = run.solution()
    assert (early.status, early.message, early.steps) == (meha.Status.STOPPED, "The loop ended after 4 of 10 steps.", 4)
    assert str(early).startswith("NetworkSOBA: stopped after 4 steps")
    x, counts, history = early.x.clone(), str(early.counts), list(early.history["upper"])
    steps(run, batches(), 6)
    late = run.solution()
    assert (late.status, late.message) == (meha.Status.FINISHED, "All 10 steps were taken.")
    assert torch.equal(early.x, x)
    assert str(early.counts) == counts
    assert early.history["upper"] == history == late.history["upper"][:4]
    values = [float(run.oracle.upper(run.state.x, run.state.y, run.batch).detach()) for _ in range(2)]
    assert late.upper == values[0] == values[1]  # F of the y that is returned, and not of the last step
    assert begin().solution().message == "The loop ended after 0 steps."


def test_refit_leaves_the_loop_where_it_is():
    torch.manual_seed(0)
    run, loader = begin(max_steps=20), batches()
    taken = [run.step(batch) for batch in itertools.islice(loader, 3)]
    place = str(loader.state_dict())
    states = random_states(loader)
    fresh = run.refit(steps=5, batches=loader)
    assert fresh.how == "5 steps from y0"
    assert str(loader.state_dict()) == place
    set_random_states(states, loader)
    assert len(list(loader)) == 7 - len(taken), "the epoch goes on"
    assert not torch.equal(fresh.y[0].weight, run.y[0].weight)


def test_a_broken_step_ends_the_run():
    def lower(x, y):
        raise ZeroDivisionError("no")

    run = meha.start(meha.Problem(lambda x, y: (x * y).sum(), lower), torch.ones(1), torch.ones(1), METHODS["F2SA"])
    run.step()
    end = run.solution()
    assert (end.status, end.steps, end.history.get("step", [])) == (meha.Status.BROKE_DOWN, 0, [])
    with pytest.raises(RuntimeError, match="the run is over"):
        run.step()


def test_numbers_that_are_not_finite_are_in_the_verdict():
    steep = meha.Problem(lambda x, y: (x * y).sum(), lambda x, y: 100 * (y - x).square().sum())
    run = meha.start(steep, torch.ones(1), torch.zeros(1), METHODS["F2SA"])
    while run.verdict is None and run.k < 50:
        run.step()
    assert run.solution().status is meha.Status.NON_FINITE


def test_warnings_are_those_of_solve():
    net = network()
    run = meha.start(PROBLEM, torch.zeros(EXAMPLES), net)
    steps(run, batches(), 2)
    run.solution()
    with pytest.warns(meha.TrainingWarning, match="y0: a run has trained this module before") as caught:
        meha.start(PROBLEM, torch.zeros(EXAMPLES), net)
    assert caught[0].filename == __file__
    dropout = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    with pytest.warns(meha.TrainingWarning, match="y0: Dropout gives another value with every call, and RHG needs the same"):
        meha.start(PROBLEM, torch.zeros(EXAMPLES), dropout, METHODS["RHG"])
    with pytest.warns(meha.TrainingWarning, match="y0: the module is in eval mode"):
        meha.start(PROBLEM, torch.zeros(EXAMPLES), dropout.eval())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"problem": upper}, TypeError, "problem: expected a meha.Problem, got function"),
        ({"method": "MEHA"}, TypeError, "method: expected a method such as"),
        ({"max_steps": 0}, ValueError, "max_steps: must be a whole number"),
        ({"scaler": 2.0}, TypeError, r"scaler: expected a torch.amp.GradScaler\(\"cuda\"\), got float"),
        ({"x_optimizer": "adam"}, TypeError, "x_optimizer: expected a factory .* or an optimizer that is built, got str"),
    ],
)
def test_arguments_are_checked(arguments, kind, message):
    with pytest.raises(kind, match=message):
        meha.start(**{"problem": PROBLEM, "x": torch.zeros(EXAMPLES), "y": network(), **arguments})


# Scalers


def float16():
    return torch.autocast("cpu", dtype=torch.float16)


def small(scale):
    """Losses whose gradients in float16 are too small, or too large for a scale of 2^16."""

    def lower(x, y, batch):
        index, inputs, labels = batch[0]
        weighted = x[index].sigmoid() * (y(inputs)[:, 0] - labels).float().square()
        return scale * weighted.mean()

    def upper(x, y, batch):
        inputs, labels = batch[1]
        return scale * (y(inputs)[:, 0] - labels).float().square().mean()

    return meha.Problem(upper, lower)


ADAPTIVE = partial(meha.StochasticMEHA, x_optimizer=partial(torch.optim.Adam, lr=0.05), y_optimizer=ADAMW)


@pytest.mark.parametrize("method", [None, ADAPTIVE()])
def test_a_scaler_keeps_small_gradients_of_float16(method):
    """Scaled by 1e-8, gradients are below the smallest number of float16; NetworkSOBA and Adam do not mind the scale."""
    ends = {}
    for name, scaler in (("single", None), ("half", None), ("scaled", torch.amp.GradScaler("cpu"))):
        torch.manual_seed(0)
        run = begin_small(1e-8, method, scaler)
        with nullcontext() if name == "single" else float16():
            infos = steps(run, batches(), 7)
        assert all(p.dtype == torch.float32 for p in run.y.parameters())
        ends[name] = torch.cat([leaf.flatten() for leaf in leaves(run)[1:]]), infos
    start = torch.cat([p.detach().flatten() for p in network().parameters()])
    way = (ends["single"][0] - start).norm()
    assert way > 0.01
    assert (ends["scaled"][0] - ends["single"][0]).norm() < 0.1 * way
    assert (ends["half"][0] - ends["single"][0]).norm() > 0.3 * way, "without the scaler, it is another run"
    assert all(info["skipped"] == 0.0 and info["scale"] == 2.0**16 for info in ends["scaled"][1])


def begin_small(scale, method=None, scaler=None):
    return meha.start(small(scale), torch.zeros(EXAMPLES), network(), method, max_steps=20, scaler=scaler)


def test_a_step_that_overflows_is_skipped():
    run = begin_small(1.0, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3))
    before, scales = leaves(run), []
    loader = batches()
    with float16():
        for batch in itertools.islice(itertools.cycle(loader), 12):
            k, info = run.k, run.step(batch)
            scales.append((info["scale"], info["skipped"]))
            if info["skipped"]:
                assert run.k == k
                assert set(info) == {"scale", "skipped"}
            if not run.k:
                assert_equal(before, leaves(run))  # nothing has moved
    skipped = [scale for scale, skipped in scales if skipped]
    assert skipped[:2] == [2.0**20, 2.0**19]
    assert run.k == 12 - len(skipped) > 5
    assert len(run.solution().history["upper"]) == run.k
    # After three good steps the scale doubles, and a scale that overflows is halved.
    good = 0
    for (scale, bad), (following, _) in itertools.pairwise(scales):
        good = 0 if bad else good + 1
        assert following == (scale / 2 if bad else 2 * scale if good == 3 else scale)
        good %= 3
    assert not all(torch.equal(a, b) for a, b in zip(before, leaves(run), strict=True))


def test_where_nothing_underflows_a_scaler_changes_nothing():
    """The scale is a power of two: gradients are the same, bit for bit."""
    for method in (None, METHODS["MEHA"], METHODS["F2SA"], ADAPTIVE()):
        numbers = []
        for scaler in (None, torch.amp.GradScaler("cpu")):
            torch.manual_seed(0)
            run = begin(method, scaler=scaler)
            infos = steps(run, batches(), 5)
            numbers.append(([{k: v for k, v in info.items() if k not in ("scale", "skipped")} for info in infos], leaves(run)))
        assert numbers[0][0] == numbers[1][0]
        assert_equal(numbers[0][1], numbers[1][1])


def test_a_loss_that_is_nan_ends_a_run_with_a_scaler():
    problem = meha.Problem(lambda x, y, b: (x * y).sum(), lambda x, y, b: torch.nan * y.sum())
    run = meha.start(problem, torch.ones(1), torch.ones(1), METHODS["F2SA"], scaler=torch.amp.GradScaler("cpu"))
    taken = 0
    while run.ended is None:
        run.step(0)
        taken += 1
        assert taken < 40
    assert run.verdict.status is meha.Status.NON_FINITE
    assert "also at a scale of 6.1e-05; look for the cause in F and f" in run.verdict.message


def test_a_scaler_that_is_switched_off_does_nothing():
    run = begin(scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert "skipped" not in run.step(next(batches()))


def everything(kind):
    """All methods of the library, by their classes."""
    for other in kind.__subclasses__():
        yield other
        yield from everything(other)


def test_methods_that_take_no_scaler():
    """A method that takes a scaler takes no second derivatives."""
    takes, problem = [], meha.problems.strong_convex(n=2)
    for kind in {
        kind for kind in everything(meha.Method) if kind.__module__.startswith("meha.") and not kind.__abstractmethods__
    }:
        space = {"space": meha.Uniform(0, 1)} if "space" in kind.__dataclass_fields__ else {}
        if kind.refuses_scaler:
            with pytest.raises(
                ValueError, match=rf"scaler: {kind.__name__} cannot take one, because .*; compute in torch.bfloat16"
            ):
                meha.start(problem, problem.x0, problem.y0, kind(**space), scaler=torch.amp.GradScaler("cpu"))
            continue
        try:
            run = kind().start(problem, problem.x0, problem.y0)
        except (TypeError, ValueError):  # it is for other problems
            assert kind.__name__ in ("BiCGAFFA", "LVHBA")
            continue
        counted = run.counts.hvp
        run.step()
        takes.append(kind.__name__)
        assert run.counts.hvp == counted, kind
    assert {"NetworkSOBA", "StochasticMEHA", "MEHA", "F2SA", "VPBGD", "BOME", "DARTS", "BVFIM"} <= set(takes)
