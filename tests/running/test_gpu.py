"""The same numbers on a GPU as on the CPU, without a host synchronisation in a step."""

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import meha_lab.problems
import meha_lab.reproduce.architecture
import meha_lab.tasks
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import meha
from meha.lower.batched_newton import Batch
from meha.problem import nonsmooth, sets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def no_synchronisation():
    """A block in which a synchronisation of host and device is an error; the switch is put back whatever happens in it.

    Torch warns once that the switch is a prototype. Where warnings are errors, that one is raised after the switch is on.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


PROBLEMS = {
    "strong convex": meha.problems.strong_convex,
    "merely convex": meha.problems.merely_convex,
    "sine": meha.problems.sine,
    "lasso": meha.problems.lasso,
    "group lasso": lambda n, device=None: meha.problems.group_lasso(6 * n, groups=n, design="orthogonal", device=device),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("preset", ["recipe", "theory"])
def test_equals_the_cpu(name, preset):
    runs = []
    for device in ("cpu", "cuda"):
        problem = PROBLEMS[name](10, device=device)
        run = problem.preset(preset).start(problem, problem.x0, problem.y0)
        for _ in range(100):
            info = run.step()
        runs.append((run, info))
    (cpu, a), (gpu, b) = runs
    assert gpu.x.is_cuda
    assert gpu.y.is_cuda
    assert torch.allclose(cpu.x, gpu.x.cpu(), atol=1e-9)
    assert torch.allclose(cpu.y, gpu.y.cpu(), atol=1e-9)
    assert dict(b) == pytest.approx(dict(a), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_synchronisation_in_a_step(name):
    problem = PROBLEMS[name](10, device="cuda")
    run = problem.preset("recipe").start(problem, problem.x0, problem.y0)
    run.step()
    with no_synchronisation():
        info = run.step()
    assert info["c"] > 0


METHODS = {
    kind.__name__: kind
    for kind in (
        *(meha.RHG, meha.BDA, meha.IAPTT, meha.CG, meha.NS, meha.GALET, meha.BAMM, meha.DARTS),
        *(meha.BOME, meha.F2SA, meha.VPBGD, meha.BVFIM),
    )
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_equal_the_cpu(name):
    runs = []
    for device in ("cpu", "cuda"):
        problem = meha.problems.strong_convex(10, device=device)
        run = METHODS[name]().start(problem, problem.x0, problem.y0)
        for _ in range(20):
            info = run.step()
        runs.append((run, info))
    (cpu, a), (gpu, b) = runs
    assert gpu.x.is_cuda
    assert torch.allclose(cpu.x, gpu.x.cpu(), rtol=1e-9, atol=1e-9)
    assert torch.allclose(cpu.y, gpu.y.cpu(), rtol=1e-9, atol=1e-9)
    assert b["upper"] == pytest.approx(a["upper"], rel=1e-7)  # BVFIM halves its steps on comparisons of values
    assert (cpu.counts, gpu.k) == (gpu.counts, cpu.k)


@pytest.mark.parametrize("name", ["RHG", "BDA", "NS", "GALET", "BAMM", "BOME", "F2SA", "VPBGD"])
def test_no_synchronisation_in_a_step_of_other_methods(name):
    problem = meha.problems.strong_convex(10, device="cuda")
    run = METHODS[name]().start(problem, problem.x0, problem.y0)
    run.step()
    with no_synchronisation():
        run.step()


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_train_networks_on_the_device(name):
    """Hyper-cleaning in small: weights of examples, a network in y; F falls, and memory does not grow."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(60, 4, generator=generator).cuda()
    labels = (points.sum(dim=1) > 0).float()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).cuda()

    def loss(y, part, weight=1.0):
        return (weight * (y(points[part]).squeeze(1) - labels[part]).square()).mean()

    problem = meha.Problem(
        upper=lambda x, y: loss(y, slice(40, 60)) + 0 * x.sum(),
        lower=lambda x, y: loss(y, slice(0, 40), x.sigmoid()) + 1e-2 * sum(p.square().sum() for p in y.parameters()),
    )
    options = {"damping": 1.0} if name == "CG" else {}
    run = METHODS[name](alpha=0.1, beta=0.05, **options).start(problem, torch.zeros(40).cuda(), network)
    values = [run.step()["upper"] for _ in range(5)]
    before = torch.cuda.memory_allocated()
    values += [run.step()["upper"] for _ in range(30)]
    assert values[-1] < values[0]
    assert torch.cuda.memory_allocated() <= before + 4096


def test_solve_and_diagnostics():
    problem = meha.problems.sine(10, device="cuda")
    hidden = meha.Problem(problem.upper, problem.lower)
    solution = meha.solve(hidden, problem.x0, problem.y0, problem.preset("recipe"), max_steps=300)
    assert solution.x.is_cuda
    diagnosis = solution.diagnose()
    assert diagnosis.gap >= 0
    assert diagnosis.residual < 1
    assert problem.distance(solution.x, solution.y).x < 0.1
    strong = meha.problems.strong_convex(3, device="cuda")
    assert meha.diagnostics.hypergradient(strong, strong.x_star, strong.y0).abs().max() < 1e-6


def test_terms_and_sets_on_the_device():
    y = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = [
        nonsmooth.L1(0.1),
        nonsmooth.ElasticNet(0.1, 0.2),
        nonsmooth.SCAD(0.3),
        nonsmooth.MCP(0.3),
        nonsmooth.NonNegativeL1(0.1),
        nonsmooth.GroupL2([[0, 5, 7], [1, 2]], 0.4),
        nonsmooth.SparseGroup([4] * 3, 0.1, 0.2),
    ]
    for term in terms:
        assert torch.allclose(term.prox(None, y.cuda(), 0.5).cpu(), term.prox(None, y, 0.5), atol=1e-12), term
    domains = [
        sets.NonNegative(),
        sets.Box(torch.full((12,), -0.1), 0.4),
        sets.L2Ball(0.5, torch.ones(12)),
        sets.L1Ball(0.5),
        sets.LinfBall(0.3),
        sets.Simplex(),
        sets.HalfSpace(torch.arange(12.0), -1.0),
        sets.AffineSet(torch.ones(1, 12), torch.ones(1)),
    ]
    for domain in domains:
        assert torch.allclose(domain.project(y.cuda()).cpu(), domain.project(y), atol=1e-6), domain


def test_networks_keep_their_device_and_memory_is_flat():
    torch.manual_seed(0)
    inputs, labels = torch.randn(256, 64, device="cuda"), torch.randint(10, (256,), device="cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
    ).cuda()
    loss = torch.nn.functional.cross_entropy
    problem = meha.Problem(
        upper=lambda x, y: loss(y(inputs[:128]), labels[:128]),
        lower=lambda x, y: (x.sigmoid() * loss(y(inputs), labels, reduction="none")).mean(),
    )
    run = meha.MEHA(alpha=10.0, beta=0.1, eta=0.1, gamma=10.0, c=1.0).start(problem, torch.zeros(256, device="cuda"), model)
    run.step()
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(20):
            run.step()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] == peaks[1] == peaks[2]


def dropout_run(**optimizers):
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 16, device="cuda"), torch.randint(10, (64,), device="cuda")
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 300), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(300, 10)
    ).cuda()
    loss = torch.nn.functional.cross_entropy
    problem = meha.Problem(
        upper=lambda x, y, batch: loss(y(inputs), labels),
        lower=lambda x, y, batch: (x.sigmoid()[batch] * loss(y(inputs[batch]), labels[batch], reduction="none")).mean(),
    )
    steps = {"alpha": 1.0, "beta": 0.1, "eta": 1e-300}
    given = {name: step for name, step in steps.items() if f"{LEVELS[name]}_optimizer" not in optimizers}
    return meha.MEHA(**given, **optimizers, gamma=1.0, c=1.0).start(problem, torch.zeros(64, device="cuda"), model)


LEVELS = {"alpha": "x", "beta": "y", "eta": "theta"}


def test_both_terms_of_the_gap_see_one_dropout_mask():
    run = dropout_run()
    batch = torch.arange(64, device="cuda")
    assert run.step(batch)["d_x"] == 0
    assert run.step(batch)["d_x"] > 0  # y has moved, theta has not


def test_no_synchronisation_with_dropout_clipping_schedules_and_micro_batches():
    schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)
    optimizer = meha.Optimizer(torch.optim.Adam, lr=0.01, scheduler=schedule, clip=0.1)
    run = dropout_run(x_optimizer=optimizer, y_optimizer=optimizer)
    batch = meha.MicroBatches(torch.arange(64, device="cuda").split(32))
    run.step(batch)
    with no_synchronisation():
        run.step(batch)


def test_a_batch_on_the_host_is_refused():
    problem = meha.Problem(lambda x, y, b: (y - b).square().sum(), lambda x, y, b: (y - x).square().sum())
    host, device = torch.ones(2), torch.ones(2, device="cuda")
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    with pytest.raises(ValueError, match="batch: has tensors on cpu, but x and y are on cuda:0; move them"):
        method.start(problem, device, device).step(host)
    closing = meha.Problem(lambda x, y: (y - host).square().sum(), lambda x, y: (y - x).square().sum())
    with pytest.raises(ValueError, match=r"upper: uses tensors on other devices \(.*\), but x and y are on cuda:0"):
        method.start(closing, device, device).step()


def test_autocast():
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 8, device="cuda"), torch.randn(64, 1, device="cuda")

    def loss(x, y):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return (x.sigmoid()[:, None] * (y(inputs) - targets).square()).mean()

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).cuda()
    run = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=10.0, c=1.0).start(
        meha.Problem(loss, loss), torch.zeros(64, device="cuda"), model
    )
    values = [run.step()["upper"] for _ in range(50)]
    assert values[-1] < 0.9 * values[0]
    assert model[0].weight.dtype == torch.float32


def test_a_scaler_in_a_loop():
    """The losses are so small that gradients in float16 are zero without it; a scale that is too large is halved."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 8, device="cuda"), torch.randn(64, 1, device="cuda")

    def loss(x, y, batch):
        return 1e-7 * (x.sigmoid()[:, None] * (y(inputs) - targets).float().square()).mean()

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**50)
    x = torch.zeros(64, device="cuda")
    run = meha.start(meha.Problem(loss, loss), x, model, y_optimizer=optimizer, max_steps=60, scaler=scaler)
    values = []
    while run.k < 60:
        with torch.autocast("cuda", dtype=torch.float16):
            info = run.step(0)
        values += [] if info["skipped"] else [info["upper"]]
    assert 1.0 < scaler.get_scale() < 2.0**50
    assert values[-1] < 0.9 * values[0]
    assert run.state_dict()["loop"]["scaler"] == scaler.state_dict()


def test_steps_with_a_built_optimizer_are_not_recorded():
    """Its rate may change between steps, and a CUDA graph would not see that."""
    model = torch.nn.Linear(8, 1).cuda()
    inputs, targets = torch.randn(64, 8, device="cuda"), torch.randn(64, 1, device="cuda")
    problem = meha.Problem(*[lambda x, y: (x.exp() * (y(inputs) - targets).square()).mean()] * 2)
    method = meha.StochasticMEHA(y_optimizer=torch.optim.AdamW(model.parameters(), capturable=True))
    with pytest.warns(UserWarning, match="y_optimizer was built outside of the run, where its options may change"):
        meha.solve(problem, torch.zeros(1, device="cuda"), model, method, max_steps=40, compile=True)


def test_mixed_devices_are_refused():
    problem = meha.problems.sine(2)
    with pytest.raises(ValueError, match="x is on cuda:0 and y on cpu"):
        meha.MEHA().start(problem, problem.x0.cuda(), problem.y0)


def test_negative_weights_end_as_non_finite():
    problem = meha.Problem(
        lambda x, y: x.sum() * 10 + (y - 3).square().sum(),
        lambda x, y: (y - x).square().sum(),
        nonsmooth=nonsmooth.L1(lambda x: x),
    )
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    solution = meha.solve(problem, torch.ones(2, device="cuda"), torch.ones(2, device="cuda"), method)
    assert solution.status is meha.Status.NON_FINITE


@pytest.mark.parametrize("method", [meha.Default(), meha.Default(second_order=False), meha.contrib.AdaptiveMEHA()], ids=repr)
@pytest.mark.parametrize("make", [meha.problems.strong_convex, meha.problems.sine, meha.problems.lasso])
def test_automatic_methods(make, method):
    problem = make(10, device="cuda")
    solution = meha.solve(problem, problem.x0, problem.y0, method)
    assert solution.x.is_cuda
    assert problem.distance(solution.x, solution.y).x <= (1e-3 if isinstance(method, meha.contrib.AdaptiveMEHA) else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["logistic, weight per feature", "quadratic, condition 10", "softmax, one weight"])
def test_points_that_are_taken_at_once(name, dtype, monkeypatch):
    seen = []
    solve = Batch.solve
    monkeypatch.setattr(Batch, "solve", lambda self, *points: seen.append(solve(self, *points)) or seen[-1])
    entry = next(entry for entry in meha_lab.problems.collection() if entry.name == name)
    problem = entry.make(dtype=dtype, device="cuda")
    solution = meha.solve(problem, problem.x0, problem.y0)
    assert solution.x.is_cuda
    assert seen[0] is not None
    assert seen[0].y.is_cuda
    assert problem.error(solution.x, solution.y) <= (1e-4 if dtype is torch.float64 else 1e-2)


def test_no_synchronisation_in_a_step_of_the_stochastic_method():
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).cuda()
    problem = meha.Problem(
        lambda x, y, b: y(b).square().mean(), lambda x, y, b: (x.sigmoid()[: len(b)] * (y(b)[:, 0] - 1).square()).mean()
    )
    run = meha.StochasticMEHA().start(problem, torch.zeros(32, device="cuda"), network)
    batch = torch.randn(32, 8, device="cuda")
    for _ in range(3):
        run.step(batch)
    with no_synchronisation():
        run.step(batch)


@pytest.mark.parametrize("name", ["sine", "lasso", "strong_convex"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_compiled_runs_are_replayed_as_a_graph(name, dtype):
    problem = getattr(meha.problems, name)(8, dtype=dtype, device="cuda")
    method = problem.preset("recipe")
    plain, compiled = (
        meha.solve(problem, problem.x0, problem.y0, method, max_steps=333, tol=None, compile=c) for c in (False, True)
    )
    tol = 1e-11 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(compiled.x, plain.x, rtol=tol, atol=tol)
    torch.testing.assert_close(compiled.y, plain.y, rtol=tol, atol=tol)
    assert (compiled.counts, compiled.status) == (plain.counts, plain.status)


def test_compiled_runs_take_their_batches():
    problem = meha.Problem(
        upper=lambda x, y, batch: (y - batch["target"]).square().mean() + x.square().sum(),
        lower=lambda x, y, batch: (batch["data"] @ y - x).square().mean(),
    )
    batches = [{"data": torch.randn(5, 2, device="cuda"), "target": torch.randn(2, device="cuda")} for _ in range(7)]
    x0, y0 = torch.zeros(1, device="cuda"), torch.zeros(2, device="cuda")
    method = meha.MEHA(alpha=0.05, beta=0.05, eta=0.05, gamma=1.0, c=2.0)
    plain, compiled = (
        meha.solve(problem, x0, y0, method, max_steps=100, tol=None, batches=batches, compile=c) for c in (False, True)
    )
    torch.testing.assert_close(compiled.x, plain.x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["LeastSquares", "Logistic", "Softmax"])
def test_losses_on_the_device(loss):
    torch.manual_seed(0)
    A = torch.randn(50, 4, dtype=torch.float64)
    labels = torch.randint(3 if loss == "Softmax" else 2, (50,))
    target = torch.randn(50, dtype=torch.float64) if loss == "LeastSquares" else labels
    y = torch.randn(4, 3, dtype=torch.float64) if loss == "Softmax" else torch.randn(4, dtype=torch.float64)
    weights = torch.rand(50, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        function = getattr(meha.losses, loss)(A.to(device), target.to(device))
        at = y.to(device).requires_grad_()
        value = function(at) + function(at, weights=weights.to(device))
        assert value.device.type == torch.device(device).type
        results.append([value.detach().cpu(), torch.autograd.grad(value, at)[0].cpu()])
    torch.testing.assert_close(results[0], results[1])


def network_task(dropout=0.0):
    """A network with batch normalisation as y, weights of examples as x, and batches."""
    torch.manual_seed(0)
    drop = [torch.nn.Dropout(dropout)] if dropout else []
    net = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Tanh(), *drop, torch.nn.Linear(12, 3))
    loss = torch.nn.functional.cross_entropy
    problem = meha.Problem(
        upper=lambda x, y, batch: loss(y(batch["images"][:16]), batch["labels"][:16]),
        lower=lambda x, y, batch: (
            x[batch["index"]].sigmoid() * loss(y(batch["images"][16:]), batch["labels"][16:], reduction="none")
        ).mean(),
    )
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "images": torch.randn(48, 6, generator=generator).cuda(),
            "labels": torch.randint(3, (48,), generator=generator).cuda(),
            "index": torch.randint(50, (32,), generator=generator).cuda(),
        }
        for _ in range(9)
    ]
    return problem, torch.zeros(50, device="cuda"), net.cuda(), batches


NETWORK_METHODS = {
    "plain": meha.MEHA(alpha=1.0, beta=0.1, eta=0.1, gamma=10.0, c=1.0, p=0.3),
    "shared": meha.MEHA(alpha=1.0, beta=0.1, eta=0.1, gamma=10.0, c=1.0, gradients=2),
    "optimizers": meha.MEHA(
        eta=0.1,
        gamma=10.0,
        c=1.0,
        p=0.3,
        x_optimizer=partial(torch.optim.Adam, lr=0.05),
        y_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "cold start": meha.MEHA(
        eta=0.1,
        gamma=10.0,
        c=1.0,
        inner_steps=3,
        warm_start=False,
        x_optimizer=partial(torch.optim.Adam, lr=0.05),
        y_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "F2SA": meha.F2SA(alpha=1.0, beta=0.1, eta=0.1, c=2.0, inner_steps=2),
}


@pytest.mark.parametrize("name", NETWORK_METHODS)
def test_steps_on_networks_are_recorded(name):
    results = []
    for compile in (False, True):
        problem, x0, y0, batches = network_task()
        options = dict(max_steps=100, tol=None, batches=batches, callbacks=meha.observers.Recorder(every=100))
        solution = meha.solve(problem, x0, y0, NETWORK_METHODS[name], compile=compile, **options)
        results.append((solution, [tensor.clone() for tensor in solution.y.state_dict().values()]))
    (plain, a), (recorded, b) = results
    torch.testing.assert_close(recorded.x, plain.x, rtol=1e-2, atol=1e-3)
    for u, v in zip(a, b, strict=True):
        torch.testing.assert_close(u, v, rtol=1e-2, atol=1e-3)
    assert (recorded.counts, recorded.steps) == (plain.counts, plain.steps)
    assert recorded.history["upper"][-1] == pytest.approx(plain.history["upper"][-1], rel=1e-2)
    if plain.method.warm_start is not False:
        assert float(plain.x.abs().max()) > 1e-3


def test_random_numbers_in_a_network_are_not_recorded():
    problem, x0, y0, batches = network_task(dropout=0.5)
    with pytest.warns(meha.running.compiled.CompileWarning, match="random numbers"):
        meha.solve(problem, x0, y0, NETWORK_METHODS["plain"], max_steps=20, tol=None, batches=batches, compile=True)


def with_schedules(**options):
    """MEHA whose three optimizers have schedules."""
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=60)
    sgd = partial(meha.Optimizer, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3, clip=1.0, scheduler=cosine)
    adam = meha.Optimizer(torch.optim.Adam, lr=0.05, scheduler=cosine)
    return meha.MEHA(gamma=10.0, c=1.0, x_optimizer=adam, y_optimizer=sgd(), theta_optimizer=sgd(), **options)


def test_schedules_of_optimizers_are_recorded(tmp_path):
    results = []
    for compile in (False, True, "killed"):
        problem, x0, y0, batches = network_task()
        options = dict(tol=None, batches=batches, compile=bool(compile))
        with warnings.catch_warnings():
            warnings.simplefilter("error", meha.running.compiled.CompileWarning)
            if compile == "killed":
                meha.solve(problem, x0, y0, with_schedules(), max_steps=25, checkpoint=tmp_path / "run.pt", **options)
                problem, x0, y0, batches = network_task()
                options |= dict(batches=batches, checkpoint=tmp_path / "run.pt")
            solution = meha.solve(problem, x0, y0, with_schedules(), max_steps=60, **options)
        results.append((solution.x, [tensor.clone() for tensor in solution.y.state_dict().values()]))
    for x, weights in results[1:]:
        torch.testing.assert_close(x, results[0][0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(weights, results[0][1], rtol=1e-2, atol=1e-3)


def test_a_schedule_that_advances_several_times_in_a_step_is_not_recorded():
    problem, x0, y0, batches = network_task()
    with pytest.warns(meha.running.compiled.CompileWarning, match="takes 2 steps in one of the method"):
        meha.solve(problem, x0, y0, with_schedules(inner_steps=2), max_steps=20, tol=None, batches=batches, compile=True)


def test_architecture_search_on_the_gpu_is_that_on_the_cpu():
    from meha_lab.tasks.architecture_search import SearchSpace, SuperNetwork

    torch.manual_seed(0)
    network, images = SuperNetwork(SearchSpace(), channels=8).double(), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    x = {kind: torch.randn(14, 8, dtype=torch.float64, requires_grad=True) for kind in ("normal", "reduction")}
    here = network(images, x)
    slopes = torch.autograd.grad(here.square().sum(), [*x.values(), *network.parameters()])
    there_x = {kind: part.detach().cuda().requires_grad_() for kind, part in x.items()}
    network.cuda()
    there = network(images.cuda(), there_x)
    others = torch.autograd.grad(there.square().sum(), [*there_x.values(), *network.parameters()])
    torch.testing.assert_close(there.cpu(), here)
    for slope, other in zip(slopes, others, strict=True):
        torch.testing.assert_close(other.cpu(), slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("row", ["MEHA", "DARTS, order 2", "RHG", "MEHA on PC-DARTS"])
def test_steps_of_an_architecture_search_are_recorded(row):
    """The first steps; Adam soon magnifies rounding errors, between two ways of computing on a CPU as well."""
    from meha_lab.reproduce.architecture import PARTIAL, QUICK, ROWS, methods_of
    from meha_lab.tasks.architecture_search import Stage, architecture_search, search

    course = {"PC-DARTS": {"partial": PARTIAL, "edge_normalisation": True}}.get(ROWS[row].course, {})
    stage = Stage(9)
    moves, losses = [], []
    for compile in (False, True):
        task = architecture_search(**QUICK.task, **course, device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("error", meha.running.compiled.CompileWarning)
            found = search(task, methods_of(ROWS[row], QUICK), [stage], compile=compile)
        start, _ = task.start()
        moves.append(torch.cat([(found.x[name] - start[name]).flatten() for name in start]))
        losses.append(found.history["upper"][-1])
    assert torch.cosine_similarity(*moves, dim=0) > 0.75  # 0.83 to 0.88 were measured; unrelated moves have 0.1
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_methods_that_work_in_python_are_not_recorded():
    results = []
    for compile in (False, True):
        problem, x0, y0, batches = network_task()
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = meha.solve(problem, x0, y0, max_steps=20, tol=None, batches=batches, compile=compile)
        assert len([w for w in caught if w.category is meha.running.compiled.CompileWarning]) == compile
        results.append(solution.x)
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def coupled(device, **parts):
    """One x and one y on a device, with rows below."""
    options = dict(dtype=torch.float64, device=device)
    problem = meha.Problem(
        lambda x, y: (x - 5).square().sum() + (2 * y + 1).square().sum(),
        lambda x, y: (y - 1).square().sum() - 1.5 * (x * y).sum(),
        x_set=sets.NonNegative(),
        lower_constraints=[
            meha.constraints.Linear([[-3.0], [1.0], [1.0]], [[1.0], [-0.5], [1.0]], [-3.0, 4.0, 7.0]),
            meha.constraints.Bounds(0.0, lambda x: 9 + x),
        ],
        **parts,
    )
    return problem, torch.tensor([4.0], **options), torch.tensor([0.0], **options)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"upper_constraints": meha.constraints.Smooth(lambda x, y: y * y - 30 + x.exp() / 1e3)},
        {"nonsmooth": nonsmooth.L1(lambda x: 0.1 * x)},
    ],
    ids=["linear", "smooth above", "L1"],
)
def test_coupled_problems_equal_the_cpu(parts):
    cpu, gpu = (meha.solve(*coupled(device, **parts)) for device in ("cpu", "cuda"))
    assert gpu.x.is_cuda
    assert gpu.y.is_cuda
    assert gpu.status is cpu.status is meha.Status.CONVERGED
    assert torch.allclose(cpu.x, gpu.x.cpu(), atol=1e-7)
    assert torch.allclose(cpu.y, gpu.y.cpu(), atol=1e-7)


@pytest.mark.parametrize("method", [meha.LVHBA(), meha.BiCGAFFA()], ids=lambda method: method.name)
def test_methods_for_coupled_problems_equal_the_cpu(method):
    runs = []
    for device in ("cpu", "cuda"):
        run = method.start(*coupled(device))
        for _ in range(50):
            run.step()
        runs.append(run)
    assert torch.allclose(runs[0].x, runs[1].x.cpu(), atol=1e-9)
    assert torch.allclose(runs[0].y, runs[1].y.cpu(), atol=1e-9)


def test_projection_on_a_polyhedron_equals_the_cpu():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(20, 10, generator=generator, dtype=torch.float64)
    domain = sets.Polyhedron(A, torch.ones(20, dtype=torch.float64), A_eq=torch.ones(1, 10), b_eq=[0.1])
    z = 3 * torch.randn(10, generator=generator, dtype=torch.float64)
    there = domain.project(z.cuda())
    assert there.is_cuda
    assert torch.allclose(there.cpu(), domain.project(z), atol=1e-10)


class Reader(torch.nn.Module):
    """Causal attention between two linear layers, by a kernel of torch's choice, of the user's, or by hand."""

    def __init__(self, kernel=None):
        super().__init__()
        self.kernel, self.into, self.out = kernel, torch.nn.Linear(16, 192), torch.nn.Linear(64, 16)

    def forward(self, tokens):
        q, k, v = self.into(tokens).unflatten(-1, (4, 48)).transpose(1, 2).chunk(3, -1)
        if self.kernel == "by hand":
            future = torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device).triu(1).bool()
            heads = (q @ k.mT / 4).masked_fill(future, -torch.inf).softmax(-1) @ v
        else:
            with sdpa_kernel(self.kernel) if self.kernel else nullcontext():
                heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(-2))


def read(kernel, half=False):
    """x after a step of RHG, and what the run reports."""
    torch.manual_seed(0)
    y, (tokens, targets) = Reader(kernel).cuda(), torch.randn(2, 8, 32, 16, device="cuda")

    def errors(y):
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return (y(tokens) - targets).float().square().mean((1, 2))

    problem = meha.Problem(lambda x, y: errors(y)[4:].mean(), lambda x, y: (x.exp() * errors(y)[:4]).mean())
    run = meha.RHG(alpha=1.0, beta=0.5, inner_steps=3).start(problem, torch.zeros(4, device="cuda"), y)
    run.step()
    return run.x, run.method.report(run)


@pytest.mark.parametrize("half", [False, True])
def test_attention_is_differentiated_twice(half):
    """Torch would take fused kernels of its own here, which have no second derivative."""
    exact, _ = read("by hand", half)
    found, report = read(None, half)
    assert not report
    torch.testing.assert_close(found, exact, rtol=0.05 if half else 1e-4, atol=0)
    assert float(exact.abs().min()) > 1e-6


def test_differences_take_the_place_of_a_fused_kernel():
    exact, _ = read("by hand")
    with pytest.warns(meha.TrainingWarning, match="efficient_attention_backward is not implemented"):
        found, _ = read(SDPBackend.EFFICIENT_ATTENTION)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)
    with pytest.warns(meha.TrainingWarning, match="flash_attention_backward is not implemented"):
        read(SDPBackend.FLASH_ATTENTION, half=True)  # which takes half precision only: there, differences are mostly rounding
