"""The race with batches: value functions against independent solvers, what a call is, a tiny race, and its tables."""

import numpy as np
import pytest
import torch
from meha_lab.benchmarks import batches
from meha_lab.benchmarks.finite_sums import ALL, FAMILIES, ValueFunction, flat, least, leaves, like
from meha_lab.store import Store
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

import meha
from meha.problem.oracle import Counts


@pytest.fixture(params=FAMILIES, scope="module")
def value(request):
    return ValueFunction(FAMILIES[request.param](3, "small"))


def somewhere(value, seed=0):
    x = value.x0 + 0.5 * torch.randn(len(value.x0), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    low, high = value.model.box or (-9.0, 9.0)
    return x.clamp(low, high)


def test_the_gradient_of_h_is_that_of_finite_differences(value):
    x = somewhere(value)
    direction = torch.linspace(-1.0, 1.0, len(x), dtype=torch.float64)
    differences = (value(x + 1e-4 * direction) - value(x - 1e-4 * direction)) / 2e-4
    h, gradient = value.gradient(x)
    assert h == pytest.approx(value(x), abs=1e-12)
    assert float(gradient @ direction) == pytest.approx(differences, rel=1e-4, abs=1e-8)


def test_the_hessian_of_f_is_that_of_automatic_differentiation(value):
    model, x, y = value.model, somewhere(value), flat(value.model.y0) + 0.3
    point = like(model.x0, x)
    expected = torch.autograd.functional.hessian(lambda z: model.lower(point, like(model.y0, z), ALL), y)
    torch.testing.assert_close(model.hessian(point, like(model.y0, y)), expected)


def fitted(A, labels, weights, ridge):
    """Softmax regression by scikit-learn, with f = mean weights * cross-entropy + ridge |y|^2 / 2."""
    model = LogisticRegression(C=1 / (ridge * len(A)), fit_intercept=False, tol=1e-12, max_iter=10_000)
    return torch.from_numpy(model.fit(A.numpy(), labels.numpy(), sample_weight=weights.numpy()).coef_.T.copy())


@pytest.mark.parametrize("family", ["quadratic", "logistic", "cleaning", "domains"])
def test_the_lower_level_is_solved(family):
    value = ValueFunction(FAMILIES[family](3, "small"))
    model, x = value.model, somewhere(value)
    y = like(model.y0, value.y(x))
    if model.family == "quadratic":
        A, c = model.A.flatten(0, 1).numpy(), (model.G @ x + model.g).flatten().numpy()
        expected = torch.from_numpy(np.linalg.lstsq(A, -c, rcond=None)[0])
    elif model.family == "logistic":  # with the penalty 1 for each number of u = exp(x / 2) y
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(model.A) // 2)
        A = signs[:, None] * model.A * (-x / 2).exp()
        expected = fitted(A, signs, torch.ones_like(signs), 1.0)[:, 0] * (-x / 2).exp()
    elif model.family == "cleaning":
        expected = fitted(model.A, model.labels, x.sigmoid(), model.ridge)
    else:
        expected = fitted(model.A, model.labels, 8 * x.softmax(0)[torch.arange(len(model.A)) % 8], model.ridge)
        expected = expected - expected.mean(1, keepdim=True)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    h = model.upper(like(model.x0, x), expected, ALL)
    assert value(x) == pytest.approx(float(h), abs=1e-6)


def test_the_path_of_the_network_depends_on_x_alone():
    value = ValueFunction(FAMILIES["network"](3, "small"))
    x, other = somewhere(value, 1), somewhere(value, 2)
    first = value.y(x)
    value.y(other)
    torch.testing.assert_close(value.y(x), first, rtol=0, atol=1e-12)
    descended = minimize(lambda z: value.lower(x, torch.from_numpy(z))[0], first.numpy(), method="BFGS")
    assert descended.fun == pytest.approx(value.lower(x, first)[0], abs=1e-9), "it is a minimum"
    line = [value.y(value.x0 + s * (x - value.x0)) for s in (0.5, 0.50001)]
    assert float((line[0] - line[1]).norm()) < 1e-3, "it moves continuously"


def test_the_quadratics_have_the_condition_numbers_that_are_stated():
    model = FAMILIES["quadratic"](0, "small")
    value = ValueFunction(model)
    eigenvalues = torch.linalg.eigvalsh(model.hessian(model.x0, model.y0))
    assert float(eigenvalues[-1] / eigenvalues[0]) == pytest.approx(10.0)
    start = value.gradient(value.x0)[1]
    columns = [value.gradient(value.x0 + e)[1] - start for e in torch.eye(len(start), dtype=torch.float64)]
    eigenvalues = torch.linalg.eigvalsh(torch.stack(columns))
    assert float(eigenvalues[-1] / eigenvalues[0]) == pytest.approx(70.0)


def test_nothing_random_is_below_the_best(value):
    x, ends = least(value, 1)
    assert value(x) == pytest.approx(ends[0])
    assert all(value(x + 0.1 * (somewhere(value, seed) - value.x0)) > ends[0] for seed in range(3) if value.model.box is None)
    assert all(value(somewhere(value, seed)) > ends[0] for seed in range(10))


def test_single_precision_has_the_same_objectives(value):
    model, single = value.model, value.model.to(torch.float32)
    assert all(leaf.dtype == torch.float32 for leaf in leaves(single.x0) + leaves(single.y0))
    batch = next(single.batches())
    for level in ("upper", "lower"):
        torch.testing.assert_close(
            getattr(single, level)(single.x0, single.y0, batch),
            getattr(model, level)(model.x0, model.y0, batch),
            check_dtype=False,
            rtol=1e-5,
            atol=1e-5,
        )


def test_objectives_are_means_over_their_batches(value):
    model = value.model
    loader = model.batches()
    groups = [next(loader) for _ in range(max(model.counts) // model.batch)]
    for level, count in zip(("upper", "lower"), model.counts, strict=True):
        objective = getattr(model, level)
        parts = [float(objective(model.x0, model.y0, batch)) for batch in groups[: count // model.batch]]
        assert np.mean(parts) == pytest.approx(float(objective(model.x0, model.y0, ALL)))


def instance_of(family, tmp_path):
    return batches.Instance.of(family, 0, "small", Store(tmp_path))


def test_a_product_counts_two_and_runs_end_with_the_budget(tmp_path):
    assert batches.calls(Counts(upper=1, lower=2, hvp=3)) == 9
    instance = instance_of("quadratic", tmp_path)
    method = meha.F2SA(alpha=1e-3, beta=0.1, eta=0.1, inner_steps=2)
    cost = 3 * 1 + 2 + 2 * 2  # F with both steps of y and with x; f for z and for y twice each, and twice for x
    judge = batches.Judge(instance, 100)
    solution, why = batches.solve(instance.model, method, 1000, judge, False)
    assert not why
    assert batches.calls(solution.counts) == judge.calls[-1] == cost * solution.steps
    assert 100 <= judge.calls[-1] < 100 + cost
    assert all(later >= batches.SPACING * done for done, later in zip(judge.calls[:-2], judge.calls[1:-1], strict=True))
    assert judge.values[-1] == pytest.approx(instance.value(solution.x), abs=1e-12)
    steps, *_ = batches.pilot(instance.model, method, 900)
    assert steps == 100


def test_a_run_that_diverges_ends(tmp_path):
    instance = instance_of("quadratic", tmp_path)
    setting = {"alpha": 1e3, "beta": 0.5, "eta": 0.5, "c": 10.0, "inner_steps": 1, "falls": False}
    record = batches.race(instance, "F2SA", setting, 2000, batches.Pilots(), compiled=False)
    assert record["calls"][-1] < 200
    known = instance.known
    assert all(batches.reached(record, level, known["best"], known["h0"]) == np.inf for level in batches.LEVELS)


def test_rates_are_in_units_of_the_instance_and_fall_to_the_end():
    known = {"L_f": 4.0, "L_F": 2.0, "L_h": 0.5}
    setting = {"alpha": 0.1, "beta": 0.2, "eta": 0.4, "c": 10.0, "inner_steps": 1, "falls": True}
    method = batches.build("F2SA", setting, known, 10)
    assert method.c == 5.0
    assert [method.alpha(0), method.beta(0), method.eta(5)] == pytest.approx([0.1 / 0.5 * 5.0, 0.05, 0.05])
    assert 0 < method.beta(9) <= 0.1 * method.beta(0)
    assert batches.build("F2SA", {**setting, "falls": False}, known, 10).beta == 0.05
    assert batches.draw("F2SA", "logistic", 3) == batches.draw("F2SA", "logistic", 3) != batches.draw("F2SA", "logistic", 4)


def test_a_level_is_reached_where_the_run_stays_below_it():
    record = {"status": "finished", "calls": [1, 2, 4, 8], "values": [1.0, 0.04, 0.2, 0.05]}
    assert [batches.reached(record, level, 0.0, 1.0) for level in (0.1, 0.5, 0.01)] == [8, 2, np.inf]
    assert batches.reached({**record, "status": "non-finite"}, 0.1, 0.0, 1.0) == np.inf


def test_a_race_in_small(tmp_path, capsys):
    asked = [
        "--tune",
        "--measure",
        "--small",
        "--eager",
        "--records",
        str(tmp_path),
        "--family",
        "quadratic",
        "--family",
        "domains",
    ]
    asked += ["--method", "default", "--method", "F2SA"]
    batches.main(asked)
    ran = capsys.readouterr().out
    assert ran.count("seed 10") == 2 * 2, "two settings on each family"
    records = Store(tmp_path).records("batches")
    assert {record["method"] for record in records} == {"default", "F2SA"}
    assert all(record["calls"][-1] >= 400 or record["status"] == "stopped" for record in records)
    chosen = [row["chosen"] for row in Store(tmp_path).records("batches_parts") if row["method"] == "F2SA"]
    assert len(chosen) == 2
    assert all(set(row) == {"0.1", "0.01", "0.001", "all"} for row in chosen)
    batches.main(asked)
    assert not capsys.readouterr().out, "nothing is run twice"


def fake(store, method, seed, values, setting, **more):
    record = {"family": "quadratic", "size": "full", "instance": f"seed {seed}", "method": method, "setting": setting}
    record |= {"seed": seed, "budget": 1000, "dtype": "float64", "status": "finished", "calls": [10, 100, 1000]}
    store.add("batches", f"{method} {seed} {setting}", {**record, "values": values, **more})


def test_the_tables_come_from_the_records(tmp_path):
    store = Store(tmp_path)
    made = {"processor": "P", "torch": "T"}
    for seed in (0, 1, 2):
        store.add("batches_best", f"seed {seed}", {"h0": 1.0, "best": 0.1})  # the runs below find 0
        fake(store, "default", seed, [0.5, 0.05, 0.0005], {}, cpu={"eager": 0.02, "compiled": 0.01})
        fake(store, "SOBA", seed, [0.05, 0.04, 0.02], {"alpha": 1})
        fake(store, "SOBA", seed, [0.5, 0.005 if seed else 0.05, 0.0], {"alpha": 2}, cpu={"eager": 0.02})
    row = {"part": "race", "family": "quadratic", "size": "full", "budget": 1000, "dtype": "float64", "seeds": [0, 1, 2]}
    row["made with"] = made
    store.add("batches_parts", "a", {**row, "method": "default", "chosen": {"all": {}}})
    chosen = {"0.1": {"alpha": 1}, "0.01": {"alpha": 2}, "0.001": {"alpha": 2}, "all": {"alpha": 2}}
    store.add("batches_parts", "b", {**row, "method": "SOBA", "chosen": chosen})
    store.add("batches_parts", "c", {"part": "steps", "cells": ["MEHA", "6", "9,000", "900", "10.0"], "made with": made})
    lines = batches.table(Store(tmp_path))
    assert lines[0] == "Budget 1,000 calls, float64, P, torch T."
    assert "h 1, best 0." in lines
    assert "| **default** | 100 | 1,000 | 1,000 | 5.0e-04 | 10 | 20 |" in lines
    assert "| `SOBA`, best for the column | 10 | 100 (100 .. 1,000) | 1,000 |  |  |  |" in lines
    assert "| `SOBA`, one setting | 100 | 100 (100 .. 1,000) | 1,000 | 0.0e+00 | - | 2 (2 .. 20) |" in lines
    assert "| default / best tuned, each seed | 10.00 | 10.00 (1.00 .. 10.00) | 1.00 |  |  |  |" in lines
    assert "| MEHA | 6 | 9,000 | 900 | 10.0 |" in lines
