"""Networks, batches and optimizers: schedules, clipping, micro-batches, autocast, devices, compiled modules, modes, memory."""

import copy
import io
from functools import partial

import pytest
import torch
from meha_lab.benchmarks import network
from meha_lab.reproduce.memory import peak
from torch import nn
from torch.optim import lr_scheduler

import meha
from meha.problem.nonsmooth import L1
from meha.problem.sets import L2Ball
from meha.tensors.variables import Variable

STEPS = dict(alpha=0.5, beta=0.1, eta=0.1, gamma=5.0, c=2.0)
METHODS = {
    "MEHA": meha.MEHA(**STEPS),
    "RHG": meha.RHG(alpha=0.5, beta=0.1, inner_steps=3),
    "BOME": meha.BOME(alpha=0.5, beta=0.1, eta=0.1, inner_steps=2),
    "CG": meha.CG(alpha=0.5, beta=0.1, inner_steps=2, cg_steps=3, damping=5.0),
    "BAMM": meha.BAMM(alpha=0.5, beta=0.1, eta=0.1, strategy=None),
}


def make_data(size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, size, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(2, size, 2, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "targets": targets, "index": torch.arange(size)}


def loss(y, batch, part):
    return (y(batch["inputs"][part]) - batch["targets"][part]).square().sum(dim=1)


def upper(x, y, batch):
    return loss(y, batch, 0).mean() + 0.01 * x.square().sum()


def lower(x, y, batch):
    ridge = sum(p.square().sum() for p in y.parameters())
    return (x[batch["index"]].sigmoid() * loss(y, batch, 1)).mean() + 0.1 * ridge


PROBLEM = meha.Problem(upper, lower)


def make_model(*extra, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), *extra, nn.Tanh(), nn.Linear(5, 2)).double()


def start(method, model=None, problem=PROBLEM):
    return method.start(problem, torch.zeros(12, dtype=torch.float64), make_model() if model is None else model)


def tensors(run):
    parts = {name: part for name, part in vars(run.state).items() if isinstance(part, Variable)}
    return {f"{part}.{name}": t.clone() for part, variable in parts.items() for name, t in variable.tensors().items()}


def assert_equal(first, second, atol=0.0):
    found, expected = tensors(first), tensors(second)
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=atol), name


# Optimizers: schedules and clipping


def test_a_schedule_is_that_of_torch():
    """x with Adam and a schedule, against torch's own optimizer and scheduler fed with the same directions."""
    problem = meha.Problem(lambda x, y: 0.5 * (x - 1).square().sum() + y.sum(), lambda x, y: 0.5 * (y - 0 * x).square().sum())
    factory = meha.Optimizer(torch.optim.Adam, lr=0.1, scheduler=partial(lr_scheduler.StepLR, step_size=2, gamma=0.5))
    method = meha.MEHA(x_optimizer=factory, beta=0.1, eta=0.1, gamma=1.0, c=2.0, p=0.0)
    run = method.start(problem, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([leaf], lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for k in range(6):
        assert run.state.x_optimizer.lr == 0.1 * 0.5 ** (k // 2)
        run.step()
        leaf.grad = (leaf.detach() - 1) / 2
        optimizer.step()
        scheduler.step()
        assert torch.equal(run.x, leaf.detach())


def test_a_schedule_advances_with_the_steps_of_its_level():
    factory = meha.Optimizer(torch.optim.SGD, lr=0.1, scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.5))
    method = meha.MEHA(alpha=0.1, y_optimizer=factory, theta_optimizer=factory, gamma=5.0, c=2.0, inner_steps=3)
    run = start(method)
    run.step(make_data())
    run.step(make_data())
    assert run.state.y_optimizer.lr == run.state.theta_optimizer.lr == 0.1 * 0.5**6


def test_clip_bounds_the_whole_direction():
    problem = meha.Problem(
        lambda x, y: 3 * x["a"].sum() + 4 * x["b"].sum() + y.sum(), lambda x, y: 0.5 * (y - 0 * x["a"]).square().sum()
    )
    x0 = {"a": torch.zeros(1, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    for clip, length in ((1.0, 1.0), (100.0, 5.0)):
        factory = meha.Optimizer(torch.optim.SGD, lr=0.1, clip=clip)
        method = meha.MEHA(x_optimizer=factory, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
        run = method.start(problem, x0, torch.zeros(1, dtype=torch.float64))
        info = run.step()
        assert float(run.x["a"]) == pytest.approx(-0.1 * length * 3 / 5)
        assert float(run.x["b"]) == pytest.approx(-0.1 * length * 4 / 5)
        assert info["d_x"] == pytest.approx(5.0)


def test_a_direction_of_zero_is_not_clipped():
    problem = meha.Problem(lambda x, y: x.square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum())
    factory = meha.Optimizer(torch.optim.SGD, lr=0.1, clip=1.0)
    method = meha.MEHA(x_optimizer=factory, y_optimizer=factory, theta_optimizer=factory, gamma=1.0, c=1.0)
    run = method.start(problem, torch.zeros(2), torch.zeros(2))
    assert run.step()["residual"] == 0
    assert torch.equal(run.x, torch.zeros(2))


def test_plain_steps_equal_sgd_on_networks():
    sgd = {name: meha.Optimizer(torch.optim.SGD, lr=lr) for name, lr in (("x", 0.5), ("y", 0.1), ("theta", 0.1))}
    factories = {f"{name}_optimizer": factory for name, factory in sgd.items()}
    runs = [start(METHODS["MEHA"]), start(meha.MEHA(**factories, gamma=5.0, c=2.0))]
    for _ in range(5):
        infos = [run.step(make_data()) for run in runs]
    assert_equal(*runs, atol=1e-14)
    assert dict(infos[0]) == pytest.approx(dict(infos[1]))


SCHEDULERS = {
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    "function": partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: 0.9**k),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[2, 6]),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("kind", [meha.MEHA, meha.BOME, meha.RHG, meha.BAMM, meha.DARTS])
def test_schedules_are_restored_bit_for_bit(kind, name):
    factory = meha.Optimizer(torch.optim.Adam, lr=0.01, scheduler=SCHEDULERS[name], clip=0.5)
    options = {meha.MEHA: dict(y_optimizer=factory, eta=0.1, gamma=5.0, c=2.0), meha.BOME: dict(y_optimizer=factory, eta=0.1)}
    method = kind(x_optimizer=factory, **options.get(kind, dict(beta=0.1)))
    run = start(method)
    for seed in range(4):
        run.step(make_data(seed=seed))
    buffer = io.BytesIO()
    torch.save(run.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = start(method, make_model(seed=1))
    other.load_state_dict(saved)
    assert other.state.x_optimizer.lr == run.state.x_optimizer.lr
    for seed in range(4, 8):
        assert dict(run.step(make_data(seed=seed))) == dict(other.step(make_data(seed=seed)))
    assert_equal(run, other)


def test_damaged_schedules_are_refused():
    factory = meha.Optimizer(torch.optim.Adam, lr=0.01, scheduler=SCHEDULERS["cosine"])
    run = start(meha.MEHA(x_optimizer=factory, beta=0.1, eta=0.1, gamma=5.0, c=2.0))
    run.step(make_data())
    good, rate = run.state_dict(), run.state.x_optimizer.lr
    schedule = good["state"]["x_optimizer"]["scheduler"]
    for damage in (None, {}, {**schedule, "last_epoch": "five"}, {**schedule, "base_lrs": [0.1, 0.1]}):
        broken = copy.deepcopy(good)
        broken["state"]["x_optimizer"]["scheduler"] = damage
        with pytest.raises(ValueError, match=r"state: the scheduler needs .*damaged"):
            run.load_state_dict(broken)
        assert run.state.x_optimizer.lr == rate
    del broken["state"]["x_optimizer"]["optimizer"]
    with pytest.raises(ValueError, match="damaged"):
        run.load_state_dict(broken)


def test_factories_are_told_apart():
    cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=100)
    factories = [
        partial(torch.optim.Adam, lr=1e-3),
        meha.Optimizer(torch.optim.Adam, lr=1e-3),
        meha.Optimizer(torch.optim.Adam, lr=1.0000001e-3),
        meha.Optimizer(torch.optim.AdamW, lr=1e-3),
        meha.Optimizer(torch.optim.Adam, lr=1e-3, clip=1.0),
        meha.Optimizer(torch.optim.Adam, lr=1e-3, clip=2.0),
        meha.Optimizer(torch.optim.Adam, lr=1e-3, scheduler=cosine),
        meha.Optimizer(torch.optim.Adam, lr=1e-3, scheduler=partial(lr_scheduler.CosineAnnealingLR, T_max=101)),
        meha.Optimizer(torch.optim.Adam, lr=1e-3, scheduler=partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: 0.9**k)),
        meha.Optimizer(torch.optim.Adam, lr=1e-3, scheduler=partial(lr_scheduler.LambdaLR, lr_lambda=[lambda k: 0.8**k])),
    ]
    states = [start(meha.MEHA(x_optimizer=f, beta=0.1, eta=0.1, gamma=5.0, c=2.0)).state_dict() for f in factories]
    assert len({state["given"] for state in states}) == len(factories)
    assert not any("0x" in state["given"] for state in states)  # no addresses, which another process does not share


class Box(nn.Module):
    """A schedule with a state that is no number."""

    def __init__(self):
        super().__init__()
        self.inside = object()

    def __call__(self, k):
        return 1.0


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (dict(scheduler=lr_scheduler.ReduceLROnPlateau), TypeError, "x_optimizer: ReduceLROnPlateau waits for a number"),
        (dict(scheduler=lambda optimizer: 3), TypeError, "x_optimizer: scheduler returned int"),
        (dict(scheduler=lr_scheduler.StepLR), ValueError, r"x_optimizer: the scheduler StepLR cannot be made \(.*step_size"),
        (dict(scheduler=partial(lr_scheduler.LambdaLR, lr_lambda=Box())), ValueError, "state of LambdaLR cannot be saved"),
        (
            dict(scheduler=lambda o: lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3)),
            ValueError,
            "x_optimizer: scheduler must use the optimizer that it gets",
        ),
        (dict(speed=3), ValueError, r"x_optimizer: Optimizer\(Adam, lr=0.1, speed=3\) cannot be made \(.*speed.*correct"),
        (dict(betas=(2.0, 0.9)), ValueError, "x_optimizer: .*Invalid beta"),
    ],
)
def test_unsuitable_schedules_are_refused(options, kind, message):
    method = meha.MEHA(x_optimizer=meha.Optimizer(torch.optim.Adam, lr=0.1, **options), beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    with pytest.raises(kind, match=message):
        start(method)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(kind="adam"), TypeError, "kind: expected a class such as torch.optim.Adam, or .* got str"),
        (dict(kind=torch.optim.SGD, scheduler=3), TypeError, r"scheduler: expected a factory such as partial\("),
        (dict(kind=torch.optim.SGD, clip=0.0), ValueError, "clip: must be a positive number, got 0.0"),
    ],
)
def test_factories_check_their_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        meha.Optimizer(**arguments)


def test_clip_is_refused_before_a_prox_and_fine_before_a_projection():
    lasso = meha.problems.lasso(4)
    clipped = meha.Optimizer(torch.optim.SGD, lr=0.01, clip=1.0)
    with pytest.raises(ValueError, match=r"y_optimizer: clip would shorten .* leave clip out"):
        meha.MEHA(alpha=0.1, y_optimizer=clipped, eta=0.1, gamma=1.0, c=1.0).start(lasso, lasso.x0, lasso.y0)
    problem = meha.Problem(lambda x, y: 10 * x.sum() + y.square().sum(), lambda x, y: (y - x).square().sum(), x_set=L2Ball(1.0))
    method = meha.MEHA(x_optimizer=clipped, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    solution = meha.solve(problem, torch.zeros(2), torch.zeros(2), method, max_steps=500, tol=None)
    assert torch.allclose(solution.x, torch.full((2,), -(0.5**0.5)), atol=1e-3)


def test_a_learning_rate_of_zero_stands_still():
    """At the end of a cosine, also before a prox."""
    problem = meha.Problem(
        lambda x, y: (x - 1).square().sum() + y.square().sum(), lambda x, y: (y - x).square().sum(), nonsmooth=L1(0.1)
    )
    factory = meha.Optimizer(torch.optim.SGD, lr=0.1, scheduler=partial(lr_scheduler.CosineAnnealingLR, T_max=2))
    method = meha.MEHA(alpha=0.1, y_optimizer=factory, eta=0.1, gamma=1.0, c=1.0)
    run = method.start(problem, torch.zeros(1), torch.ones(1))
    for _ in range(2):
        run.step()
    before = run.y.clone()
    info = run.step()
    assert run.state.y_optimizer.scheduler.last_epoch == 3
    assert torch.equal(run.y, before)
    assert info["residual"] > 0


# Micro-batches


def split(batch, sizes=(6, 6)):
    cut = {name: tensor.split(sizes, dim=0 if tensor.ndim == 1 else 1) for name, tensor in batch.items()}
    return meha.MicroBatches({name: parts[i] for name, parts in cut.items()} for i in range(len(sizes)))


@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_equal_the_whole_batch(name):
    runs = [start(METHODS[name]) for _ in range(2)]
    for seed in range(3):
        whole = make_data(seed=seed)
        infos = [run.step(batch) for run, batch in zip(runs, (whole, split(whole, (4, 4, 4))), strict=True)]
        assert dict(infos[0]) == pytest.approx(dict(infos[1]), rel=1e-10)
    assert_equal(*runs, atol=1e-12)
    assert runs[0].counts == runs[1].counts


@pytest.mark.parametrize("keep_graph", [False, True])
@pytest.mark.parametrize("kind", [meha.RHG, meha.IAPTT])
def test_micro_batches_through_unrolled_steps(kind, keep_graph):
    problem = meha.Problem(
        lambda x, y, b: (b["inputs"][0] @ y - 1).square().mean(),
        lambda x, y, b: (x[b["index"]].sigmoid() * (b["inputs"][1] @ y - 2).square()).mean() + 0.1 * y.square().sum(),
    )
    ends = []
    for cut in (lambda batch: batch, split):
        run = kind(alpha=0.5, beta=0.1, inner_steps=3, keep_graph=keep_graph).start(
            problem, torch.zeros(12, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        )
        for seed in range(3):
            run.step(cut(make_data(seed=seed)))
        ends.append((run.x.clone(), run.y.clone(), run.counts))
    assert torch.allclose(ends[0][0], ends[1][0], rtol=0, atol=1e-12)
    assert torch.allclose(ends[0][1], ends[1][1], rtol=0, atol=1e-12)
    assert ends[0][2] == ends[1][2]


def test_numbers_are_chosen_with_micro_batches():
    runs = [start(meha.MEHA(p=0.49)) for _ in range(2)]
    for run, batch in zip(runs, (make_data(), split(make_data())), strict=True):
        run.step(batch)
    assert runs[0].method.alpha == pytest.approx(runs[1].method.alpha, rel=1e-6)


def test_micro_batches_take_the_memory_of_one_part():
    def upper(x, y, batch):
        return y(batch).square().mean()

    def lower(x, y, batch):
        return (x * y(batch).square()).mean()

    batch = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    run = meha.MEHA(**STEPS).start(meha.Problem(upper, lower), torch.ones(1), model)
    run.step(batch)
    whole, part = peak(lambda: run.step(batch)), peak(lambda: run.step(batch[:64]))
    parts = peak(lambda: run.step(meha.MicroBatches(batch.split(64))))
    assert part <= parts <= 1.1 * part < 0.3 * whole


@pytest.mark.parametrize(
    ("batches", "kind", "message"),
    [([], ValueError, "MicroBatches is empty"), (torch.ones(3), TypeError, "got Tensor"), ({"a": 1}, TypeError, "dict")],
)
def test_micro_batches_check_their_argument(batches, kind, message):
    with pytest.raises(kind, match=f"batches: .*{message}"):
        meha.MicroBatches(batches)


# Autocast


@pytest.mark.parametrize("where", ["inside the objectives", "around the step"])
@pytest.mark.parametrize("name", METHODS)
def test_autocast(name, where):
    """Half precision is close to full precision, and no parameter is used as it was before a move."""

    def inside(objective):
        def call(x, y, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return objective(x, y, batch)

        return call

    def low(y, batch, part):
        return (y(batch["inputs"][part].float()) - batch["targets"][part]).square().sum(dim=1)

    exact = meha.Problem(
        lambda x, y, batch: low(y, batch, 0).mean(), lambda x, y, batch: (x[batch["index"]].sigmoid() * low(y, batch, 1)).mean()
    )
    cast = meha.Problem(inside(exact.upper), inside(exact.lower))
    runs = []
    for problem, outside in ((exact, False), (exact, True) if where == "around the step" else (cast, False)):
        run = METHODS[name].start(problem, torch.zeros(12), make_model().float())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            for _ in range(5):
                info = run.step(make_data(seed=3))
        assert all(t.dtype == torch.float32 for t in (run.x, *run.state.y.leaves))
        runs.append((run, info))
    (first, a), (second, b) = runs
    assert a["upper"] == pytest.approx(b["upper"], rel=0.02)
    for u, v, begin in zip(first.state.y.leaves, second.state.y.leaves, make_model().float().parameters(), strict=True):
        assert (u - v).norm() < 0.05 * (u - begin).norm() + 1e-3


def test_values_in_half_precision_are_averaged_in_single_precision():
    """bfloat16 has three digits: it knows 256 and 1, but not their mean."""
    problem = meha.Problem(
        lambda x, y, b: (y.sum() + b).bfloat16(), lambda x, y, b: (y.square().sum() + 0 * x.sum() + b).bfloat16()
    )
    run = meha.MEHA(**STEPS).start(problem, torch.zeros(1), torch.zeros(1))
    info = run.step(meha.MicroBatches([256.0, 1.0]))
    assert info["upper"] == info["lower"] == 128.5


# Devices


def test_devices():
    meta = torch.device("meta")
    here, there = torch.ones(2), torch.ones(2, device=meta)
    simple = meha.Problem(lambda x, y, b: (y - b).square().sum(), lambda x, y, b: (y - x).square().sum())
    closing = meha.Problem(lambda x, y: (y - 1).square().sum(), lambda x, y: (y - there * x).square().sum())
    moving = meha.Problem(lambda x, y: (y - 1).square().sum().to(meta), lambda x, y: (y - x).square().sum())
    method = meha.MEHA(**STEPS)
    for batch in (there, {"deep": [here, (there,)]}, meha.MicroBatches([there])):
        problem = meha.Problem(lambda x, y, b: (y - deepest(b)).square().sum(), simple.lower)
        with pytest.raises(ValueError, match=r"batch: has tensors on meta, but x and y are on cpu; move them"):
            method.start(problem, here, here).step(batch)
    with pytest.raises(ValueError, match=r"lower: uses tensors on other devices \(.*meta.*\), but x and y are on cpu; move"):
        method.start(closing, here, here).step()
    with pytest.raises(ValueError, match="upper: returns a tensor on meta, but x and y are on cpu"):
        method.start(moving, here, here).step()
    with pytest.raises(RuntimeError, match=r"size|shape"):  # others stay as they are, also with a batch elsewhere
        method.start(meha.Problem(lambda x, y, b: y @ torch.ones(3), simple.lower), here, here).step(there)


@pytest.mark.parametrize(
    ("types", "elsewhere"),
    [
        ("Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor)", True),
        ("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor)", True),
        ("Input type (torch.cuda.DoubleTensor) and weight type (torch.cuda.FloatTensor)", False),
        ("Input type (torch.DoubleTensor) and weight type (torch.FloatTensor)", False),
    ],
)
def test_what_convolutions_say_about_devices(types, elsewhere):
    def upper(x, y):
        raise RuntimeError(f"{types} should be the same")

    run = meha.MEHA(**STEPS).start(meha.Problem(upper, lambda x, y: (y - x).square().sum()), torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError if elsewhere else RuntimeError, match="upper: uses" if elsewhere else "^Input type"):
        run.step()


def deepest(batch):
    while not isinstance(batch, torch.Tensor):
        batch = list(batch.values())[-1] if isinstance(batch, dict) else batch[-1]
    return batch


# Compiled modules


def compiled_counter(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    return CompileCounterWithBackend(backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_modules_take_the_same_steps(backend):
    counter = compiled_counter(backend)
    plain = start(METHODS["MEHA"], make_model(nn.BatchNorm1d(5)))
    inside = make_model(nn.BatchNorm1d(5))
    run = start(METHODS["MEHA"], torch.compile(inside, backend=counter))
    theta = run.state.theta.value
    assert type(theta) is type(run.y)
    assert theta._orig_mod is not inside
    assert run.state.y.names == plain.state.y.names == [name for name, _ in inside.named_parameters()]
    for seed in range(3):
        plain.step(make_data(seed=seed))
        run.step(make_data(seed=seed))
    compiled = counter.frame_count
    for seed in range(3, 6):
        plain.step(make_data(seed=seed))
        run.step(make_data(seed=seed))
    assert 1 <= counter.frame_count == compiled
    assert_equal(plain, run, atol=1e-12)
    assert int(theta._orig_mod[1].num_batches_tracked) == 12

    other = start(METHODS["MEHA"], make_model(nn.BatchNorm1d(5), seed=1))  # not compiled
    other.load_state_dict(run.state_dict())
    assert_equal(other, run)


@pytest.mark.parametrize("name", ["BOME", "RHG", "BAMM"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_modules_with_other_methods(name):
    compiled = torch.compile(make_model(), backend=compiled_counter("eager"))
    runs = [start(METHODS[name]), start(METHODS[name], compiled)]
    for seed in range(3):
        for run in runs:
            run.step(make_data(seed=seed))
    assert_equal(*runs, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_modules_on_the_upper_level_share_frozen_parameters():
    inner = make_model()
    inner[0].requires_grad_(False)
    module = torch.compile(inner, backend=compiled_counter("eager"))
    variable = Variable({"net": module, "scale": torch.ones(())}, "x")
    assert variable.names == ["net.2.weight", "net.2.bias", "scale"]
    other = variable.copy()
    net = other.value["net"]._orig_mod
    assert net[0].weight is inner[0].weight
    assert net[2].weight is not inner[2].weight
    with torch.no_grad():
        for leaf in other.leaves:
            leaf.zero_()
    inputs = make_data()["inputs"][0]
    assert torch.equal(other.value["net"](inputs), torch.zeros(12, 2).double())
    assert module(inputs).abs().max() > 0
    assert set(variable.tensors()) == {*variable.names, "net.0.weight", "net.0.bias"}
    assert set(variable.like(variable.leaves)["net"]) == {"2.weight", "2.bias"}


# Modes, batch norm and dropout


def test_copies_follow_the_mode_of_the_module():
    model = make_model(nn.BatchNorm1d(5), nn.Dropout(0.5))
    model[1].eval()
    run = start(METHODS["MEHA"], model)
    theta = run.state.theta.value
    assert (theta.training, theta[1].training, theta[2].training) == (True, False, True)
    run.step(make_data())
    assert int(theta[1].num_batches_tracked) == 0
    model.train()
    run.step(make_data())
    assert int(theta[1].num_batches_tracked) == 2
    model.eval()
    run.step(make_data())
    assert not any(part.training for part in theta.modules())
    assert int(theta[1].num_batches_tracked) == 2


@pytest.mark.parametrize("kind", [meha.BOME, meha.F2SA])
def test_copies_of_other_methods_follow_too(kind):
    model = make_model(nn.BatchNorm1d(5)).eval()
    run = start(kind(alpha=0.1, beta=0.1, eta=0.1), model)
    run.step(make_data())
    z = run.state.z.value
    assert int(z[1].num_batches_tracked) == int(model[1].num_batches_tracked) == 0
    model.train()
    run.step(make_data())
    assert int(z[1].num_batches_tracked) > 0


def test_statistics_of_y_are_those_of_its_own_passes():
    """Against batch norm fed by hand with what y's four passes see: F and f for x, F and f for y."""
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).double()
    run = start(METHODS["MEHA"], model)
    expected = nn.BatchNorm1d(3, affine=False).double()
    for seed in range(3):
        batch = make_data(seed=seed)
        run.step(batch)
        for part in (0, 1, 0, 1):
            expected(batch["inputs"][part])
    assert torch.allclose(model[0].running_mean, expected.running_mean, rtol=0, atol=1e-14)
    theta, lower_only = run.state.theta.value, nn.BatchNorm1d(3, affine=False).double()
    for seed in range(3):
        for _ in range(2):
            lower_only(make_data(seed=seed)["inputs"][1])
    assert torch.allclose(theta[0].running_mean, lower_only.running_mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("parts", [1, 2])
def test_both_terms_of_the_gap_see_one_dropout_mask(parts):
    """Where y = theta and F ignores x, the x-direction is zero; the next step has other masks."""
    seen = []

    def lower(x, y, batch):
        values = loss(y, batch, 1)
        seen.append(float(values.detach().sum()))
        return (x[batch["index"]].sigmoid() * values).mean()

    problem = meha.Problem(lambda x, y, batch: loss(y, batch, 0).mean(), lower)
    method = meha.MEHA(alpha=0.5, beta=1e-300, eta=1e-300, gamma=1.0, c=1.0)  # y and theta stay where they are
    run = start(method, make_model(nn.Dropout(0.5)), problem)
    batch = make_data() if parts == 1 else split(make_data())
    masks = []
    for _ in range(2):
        seen.clear()
        assert run.step(batch)["d_x"] == 0
        of_theta, in_x_y, in_x_theta, of_y = (seen[i * parts : (i + 1) * parts] for i in range(4))
        assert in_x_y == in_x_theta
        assert of_theta != in_x_y != of_y
        masks.append(in_x_y)
    assert masks[0] != masks[1]


def test_dropout_differs_from_step_to_step_and_with_the_seed():
    ends = []
    for seed in (0, 0, 1):
        run = start(METHODS["MEHA"], make_model(nn.Dropout(0.5)))
        torch.manual_seed(seed)
        for _ in range(3):
            run.step(make_data())
        ends.append(run.x.clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


# Frozen parameters, gradients of the user, memory


@pytest.mark.parametrize("name", ["MEHA", "BOME", "cold"])
def test_adapters_share_their_base(name):
    methods = {**METHODS, "cold": meha.MEHA(**STEPS, inner_steps=2, warm_start=False)}
    base = nn.Linear(3, 50).double().requires_grad_(False)
    model = nn.Sequential(base, nn.Tanh(), nn.Linear(50, 2).double())
    before = base.weight.clone()
    run = start(methods[name], model)
    for seed in range(2):
        run.step(make_data(seed=seed))
    copies = [part for key, part in vars(run.state).items() if isinstance(part, Variable) and key not in ("x", "y")]
    assert copies
    for part in copies:
        assert part.value[0].weight is base.weight
        assert part.value[2].weight is not model[2].weight
    assert torch.equal(base.weight, before)
    assert base.weight.grad is None
    state = run.state_dict()["state"]
    assert [key for key, part in state.items() if isinstance(part, dict) and "0.weight" in part] == ["y"]


@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.SGD, lr=0.1)])
def test_gradients_of_the_user_stay(optimizer):
    model = make_model()
    mine = [torch.full_like(p, 7.0) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), mine, strict=True):
        p.grad = gradient
    step = dict(beta=0.1) if optimizer is None else dict(y_optimizer=optimizer)
    run = start(meha.MEHA(alpha=0.5, eta=0.1, gamma=5.0, c=2.0, **step), model)
    plain = start(METHODS["MEHA"])
    for _ in range(3):
        run.step(make_data())
        plain.step(make_data())
    assert_equal(run, plain, atol=1e-14)
    for p, gradient in zip(model.parameters(), mine, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, torch.full_like(p, 7.0))


def test_gradients_stay_when_an_objective_fails():
    model = make_model()
    model[0].weight.grad = torch.ones_like(model[0].weight)

    def upper(x, y, batch):
        raise KeyError

    with pytest.raises(KeyError):
        start(METHODS["MEHA"], model, meha.Problem(upper, lower)).step(make_data())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[2].weight.grad is None


def test_gradients_that_share_memory():
    """Tied weights, an expanded gradient, and one tensor as the gradient of two leaves, in separate passes."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2).double())
            self.tied = self.a

        def forward(self):
            return (self.a + self.b).square().sum() + (self.a + self.b).sum() + self.tied.sum()

    problem = meha.Problem(lambda x, y: y(), lambda x, y: y() * x.sum())
    run = meha.MEHA(alpha=1e-9, beta=0.1, eta=1e-9, gamma=1e9, c=1.0).start(problem, torch.ones(1).double(), Pair())
    assert run.state.y.names == ["a", "b"]
    run.step()
    assert torch.allclose(run.y.a.detach(), torch.full((2,), 1 - 0.1 * 2 * 6.0).double(), atol=1e-6)
    assert torch.allclose(run.y.b.detach(), torch.full((2,), 1 - 0.1 * 2 * 5.0).double(), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in network.CASES if "5000" not in name])
def test_memory_of_a_step(name):
    """x + y + theta + one forward-backward pass, and torch's second gradient of the largest parameter; flat in steps."""
    found = network.memory(name)
    assert found["MEHA"] <= 1.15 * (found["sum"] + found["largest"])
    if name.startswith(("8 layers", "ConvNet")):  # where no parameter makes up most of the network
        assert found["MEHA"] <= 1.15 * found["sum"]
    assert found["RHG"] > 3 * found["MEHA"]


def test_the_bare_loop_takes_the_same_steps():
    network.compare("MLP, 64 examples", rounds=1)


def test_optimizers_add_their_own_state_only():
    x, y, batch = network.build("8 layers, 64 examples")
    plain = meha.MEHA(**network.STEPS).start(network.PROBLEM, x, y)
    clipped = meha.Optimizer(torch.optim.SGD, lr=0.05, clip=1.0)
    other = meha.MEHA(alpha=1.0, y_optimizer=clipped, eta=0.05, gamma=10.0, c=2.0).start(network.PROBLEM, x, y)
    for run in (plain, other):
        run.step(batch)
    largest = max(network.size(p) for p in y.parameters())
    assert peak(lambda: other.step(batch)) <= peak(lambda: plain.step(batch)) + largest


def test_rounding_is_no_matter_while_x_rests():
    """The warning about differences within rounding looks at step 16, when y alone moves."""
    network, z = nn.Linear(2, 1), torch.ones(4, 2)
    upper, lower = (lambda x, y, b: (y(z) - 1).square().mean()), (lambda x, y, b: (y(z) - x).square().mean())
    run = meha.start(meha.Problem(upper, lower), torch.zeros(1), network, max_steps=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [run.step(b) for b in range(20)]  # a warning is an error
    assert found[12]["gap"] != 0
    assert "gap" not in found[15]


def test_hooks_that_act_on_gradients_are_refused():
    network = torch.nn.Linear(2, 1)
    network.weight.register_post_accumulate_grad_hook(lambda leaf: None)
    problem = meha.Problem(lambda x, y: y(x).sum(), lambda x, y: (y(x) - 1).square().sum())
    with pytest.raises(ValueError, match=r"y\['weight'\]: has a hook"):
        meha.MEHA().start(problem, torch.ones(2), network)
