"""The learning tasks in meha reproduce: cells against independent runs, the chosen settings, and what the page shows."""

import dataclasses
import json
import math

import pytest
import torch
from meha_lab.reproduce import learning
from meha_lab.reproduce.cells import Cell
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records, paper
from meha_lab.reproduce.experiments.base import PAPER
from meha_lab.reproduce.experiments.learning import (
    CLEANING,
    FEW_SHOT,
    FRESH,
    METHODS,
    PRINTED,
    PRINTED_FEW_SHOT,
    QUICK_FEW_SHOT,
    VARIANTS,
)
from meha_lab.reproduce.page import Table
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store
from meha_lab.tasks import few_shot, hyper_cleaning

import meha

SHIPPED = Tuning.shipped()
AUTOMATIC = CONTENDERS["automatic"]

DIGITS = dataclasses.replace(CLEANING["digits"], work=60, looks=3, seconds=math.inf)
SHOTS = dataclasses.replace(
    QUICK_FEW_SHOT,
    arguments=(("data", "digits"), ("ways", 3), ("tasks", 2), ("width", 4), ("test_tasks", 10)),
    steps=4,
    looks=2,
    target=None,
    seconds=math.inf,
)


FULL = Options()


def training(case, method, setting, seed=0, label=""):
    return measure(Cell("training", case, CONTENDERS[method], setting, seed, label))


def test_a_cell_of_hyper_cleaning_equals_a_run_of_its_own():
    setting = {"alpha": 0.1, "beta": 0.5, "eta": 0.2, "gamma": 10.0, "c": {"Power": [0.3, 0.25]}}
    record = training(DIGITS, "MEHA", setting, seed=4)
    task = hyper_cleaning("digits", seed=4)
    method = meha.MEHA(alpha=60.0, beta=0.5, eta=0.2, gamma=10.0, c=meha.schedules.Power(0.3, 0.25))
    run = method.start(task.problem, *task.start())
    expected = [task.evaluate(run.x, run.y)]
    for k in range(1, 13):
        run.step()
        if k in (4, 8, 12):
            expected.append(task.evaluate(run.x, run.y))
    assert record["outcome"] == "work"
    assert record["curve"]["work"] == [0, 20, 40, 60]  # five gradients a step
    assert record["curve"]["step"] == [0, 4, 8, 12]
    for name in expected[0]:
        assert record["curve"][name] == pytest.approx([look[name] for look in expected], rel=1e-3, abs=1e-4)
    assert record["reached"] is None
    json.dumps(record, allow_nan=False)


def test_a_cell_of_few_shot_learning_equals_a_run_of_its_own():
    setting = {"lr": 0.01, "inner_steps": 2, "c": 0.5, "beta": 0.5, "eta": 0.5, "warm_start": False}
    record = training(SHOTS, "F2SA", setting, seed=2)
    task = few_shot("digits", ways=3, tasks=2, width=4, test_tasks=10, seed=2)
    optimizer = meha.Optimizer(torch.optim.Adam, lr=0.01)
    method = meha.F2SA(x_optimizer=optimizer, inner_steps=2, c=0.5, beta=0.5, eta=0.5, warm_start=False)
    run = method.start(task.problem, *task.start())
    batches, expected = iter(task.batches()), [task.evaluate(run.x)["accuracy"]]
    for _ in range(2):
        run.step(next(batches))
        run.step(next(batches))
        expected.append(task.evaluate(run.x)["accuracy"])
    assert record["curve"]["step"] == [0, 2, 4]
    assert record["curve"]["accuracy"] == pytest.approx(expected, abs=0.02)


def test_rows_without_settings_equal_runs_of_their_own():
    record = measure(Cell("training", DIGITS, AUTOMATIC, {}, 4))
    task = hyper_cleaning("digits", seed=4)
    run = meha.stochastic.NetworkSOBA().start(task.problem, *task.start())
    run.last = round(DIGITS.work / 2.7)  # which it must know
    while run.counts.upper + run.counts.lower < DIGITS.work:
        run.step()
    assert record["last"]["step"] == run.k
    assert record["last"]["accuracy"] == pytest.approx(task.evaluate(run.x, run.y)["accuracy"], rel=1e-3, abs=1e-4)
    record = measure(Cell("training", SHOTS, AUTOMATIC, FRESH, 2))
    task = few_shot("digits", ways=3, tasks=2, width=4, test_tasks=10, seed=2)
    run, batches = meha.StochasticMEHA(warm_start=False).start(task.problem, *task.start()), iter(task.batches())
    for _ in range(4):
        run.step(next(batches))
    assert record["last"]["accuracy"] == pytest.approx(task.evaluate(run.x)["accuracy"], abs=0.02)


def test_the_target_ends_training_and_a_pool_keeps_heads():
    easy = dataclasses.replace(SHOTS, target=0.1)
    record = training(easy, "VPBGD", {"lr": 0.01, "inner_steps": 1, "c": 0.3, "beta": 0.5, "eta": 0.5, "pool": 5})
    assert record["outcome"] == "target"
    assert record["reached"]["step"] == 0
    assert record["reached"]["accuracy"] >= 0.1


def test_failures_of_training_are_results():
    wild = training(DIGITS, "MEHA", {"alpha": 1.0, "beta": 1e30, "eta": 1e30, "gamma": 1.0, "c": 1.0})
    assert wild["outcome"] == "diverged"
    json.dumps(wild, allow_nan=False)
    broken = training(DIGITS, "CG", {"alpha": 1.0, "beta": 0.1, "inner_steps": 1, "cg_steps": 5, "damping": 0.0})
    assert broken["outcome"].startswith("broke down")
    late = training(dataclasses.replace(DIGITS, seconds=0.0), "MEHA", PRINTED)
    assert late["outcome"] == "time"


def test_settings_are_the_best_of_the_trials():
    for task, better in (("hyper-cleaning", max), ("few-shot", min)):
        told = json.loads((learning.files("meha_lab.reproduce") / "learning.json").read_text())[task]
        assert set(told) == set(METHODS)
        for method, rows in told.items():
            assert len(rows) >= 10
            known = [row for row in rows if len(row) > 1 and row[1] is not None]
            failed = [row[0] for row in learning.shipped()[task][method] if math.isinf(learning.loss(task, row))]
            assert failed == [row[0] for row in rows if row not in known]
            best = better(known, key=lambda row: row[1] + row[2] if better is max else row[2])
            assert learning.chosen(task, method) == best[0] == SHIPPED.trained(task, method)
            for setting, *_ in rows:
                learning.build(CONTENDERS[method].kind, setting, 5000)


def test_the_single_loop_is_chosen_among_its_own_trials():
    rows = SHIPPED.attempts["hyper-cleaning"]["MEHA"]
    single = [row for row in rows if "inner_steps" not in row[0]]
    assert len(single) >= 48
    best = max((row for row in single if len(row) > 1 and row[1] is not None), key=lambda row: row[1] + row[2])
    assert SHIPPED.trained("hyper-cleaning", "MEHA", single_loop=True) == best[0]
    assert "inner_steps" in SHIPPED.trained("hyper-cleaning", "MEHA")
    labels = {cell.name: cell.setting for cell in EXPERIMENTS["hyper-cleaning"].cells(Options(), SHIPPED)}
    assert labels["MEHA, single loop"] == best[0]


def test_declared_trials_alone_are_measured_and_join_the_others(tmp_path):
    known, fresh = SHIPPED.attempts["hyper-cleaning"]["MEHA"][0], [{**PRINTED, "gamma": 7.0}]
    before = Tuning({}, {"hyper-cleaning": {"MEHA": [known, fresh]}})
    (cell,) = EXPERIMENTS["hyper-cleaning"].trials(Options(quick=True), before)
    assert cell.setting == fresh[0]
    store = Store(tmp_path)
    store.put(cell, {**measure(dataclasses.replace(cell, case=DIGITS)), "jobs": 1})
    first, second = EXPERIMENTS["hyper-cleaning"].chosen(Options(quick=True), before, store).attempts["hyper-cleaning"]["MEHA"]
    assert first == known
    assert second[0] == fresh[0]
    assert second[1] > 0.1


def test_the_rows_with_the_numbers_of_the_paper():
    """Tables of the paper: alpha, beta, eta, gamma, c, p, with inverse power annealing of alpha and beta."""
    cleaning = learning.build(CONTENDERS["MEHA"].kind, PRINTED, 5000)
    numbers = (cleaning.alpha(0), cleaning.beta(0), cleaning.eta, cleaning.gamma, cleaning.c, cleaning.p)
    assert numbers == (pytest.approx(0.1), 0.15, 0.001, 100.0, 0.2, 0.25)
    shots = learning.build(CONTENDERS["MEHA"].kind, PRINTED_FEW_SHOT)
    assert (shots.beta(0), shots.eta, shots.gamma, shots.c, shots.p) == (0.05, 0.001, 100.0, 0.067, 0.08)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = shots.x_optimizer([weight])
    scheduler = shots.x_optimizer.scheduler(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.08
    for _ in range(15):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.08 * 16**-0.025)
    assert cleaning.alpha(15) == pytest.approx(0.1 * 16**-0.025)
    assert cleaning.beta(15) == pytest.approx(0.15 * 16**-0.025)
    labelled = [cell for cell in EXPERIMENTS["few-shot"].cells(Options(), SHIPPED) if cell.name == "MEHA, paper's values"]
    assert len(labelled) == 6
    assert all(cell.setting is PRINTED_FEW_SHOT for cell in labelled)


def test_trials_are_measured_again_and_written_as_they_are_shipped(tmp_path):
    """The small form of --tune, on digits."""
    rows = {"MEHA": SHIPPED.attempts["hyper-cleaning"]["MEHA"][:2], "CG": SHIPPED.attempts["hyper-cleaning"]["CG"][:1]}
    before = Tuning({}, {"hyper-cleaning": rows, "few-shot": {"MEHA": SHIPPED.attempts["few-shot"]["MEHA"][:1]}})
    store, tuning, options = Store(tmp_path / "records"), before, Options(quick=True)
    for name in ("hyper-cleaning", "few-shot"):
        cells = EXPERIMENTS[name].trials(options, before)
        assert {cell.seed for cell in cells} == {1000}
        for cell in cells:
            small = DIGITS if name == "hyper-cleaning" else SHOTS
            store.put(cell, {**measure(dataclasses.replace(cell, case=small)), "jobs": 1})
        tuning = tuning.updated(EXPERIMENTS[name].chosen(options, before, store))
    tuning.save(tmp_path)
    assert Tuning.load(tmp_path).attempts == tuning.attempts
    for task, methods in before.attempts.items():
        for method, tried in methods.items():
            again = tuning.attempts[task][method]
            assert [row[0] for row in again] == [row[0] for row in tried]  # the settings stay, in their order
    first = tuning.attempts["hyper-cleaning"]["MEHA"][0]
    record = measure(Cell("training", DIGITS, CONTENDERS["MEHA"], first[0], 1000))
    assert first[1:] == [pytest.approx(record["last"]["accuracy"], abs=1e-4), pytest.approx(record["last"]["f1"], abs=1e-4)]
    assert tuning.attempts["few-shot"]["MEHA"][0][1:] == [None, None]  # there was no target
    SHIPPED.save(tmp_path)
    assert (tmp_path / "learning.json").read_text() == (learning.files("meha_lab.reproduce") / "learning.json").read_text()
    assert (tmp_path / "tuning.json").read_text() == (learning.files("meha_lab.reproduce") / "tuning.json").read_text()


def test_training_ends_with_the_method(monkeypatch):
    """A method that says that it is done is not asked for further steps."""
    done = meha.Verdict(meha.Status.DIVERGED, "too far")
    monkeypatch.setattr(meha.MEHA, "terminate", lambda self, state: done if state.k >= 5 else None)
    record = training(DIGITS, "MEHA", PRINTED)
    assert (record["outcome"], record["last"]["step"]) == ("diverged", 5)


def test_every_row_of_the_papers_table_has_cells():
    cleaning = EXPERIMENTS["hyper-cleaning"].cells(Options(), SHIPPED)
    shots = EXPERIMENTS["few-shot"].cells(Options(), SHIPPED)
    for data, rows in paper.HYPER_CLEANING.items():
        for method in rows:
            seeds = [c.seed for c in cleaning if c.case.name == CLEANING[data].name and c.name == method]
            assert seeds == [0, 1, 2]
        assert any(c.name == PAPER and c.setting == PRINTED for c in cleaning)
        assert [c.seed for c in cleaning if c.case.name == CLEANING[data].name and c.contender is AUTOMATIC] == [0, 1, 2]
    for ways, rows in paper.FEW_SHOT.items():
        for method in rows:
            assert [c.seed for c in shots if c.case is FEW_SHOT[ways] or (c.case == FEW_SHOT[ways] and c.name == method)]
    assert {c.label for c in cleaning} >= set(VARIANTS)
    assert len({c.key for c in [*cleaning, *shots]}) == len(cleaning) + len(shots)
    only = EXPERIMENTS["few-shot"].cells(Options(methods=frozenset({"RHG"}), seeds=1, limit=3.0), SHIPPED)
    assert [(c.name, c.seed, c.case.seconds) for c in only] == [("RHG", 0, 3.0)] * 2


def invented(cell, accuracy):
    """A record as if it had been measured."""
    steps = [0, 5, 10]
    curve = {name: [s * 1.0 for s in steps] for name in ("step", "seconds", "work", "gradients")}
    curve |= {"accuracy": [0.1, 0.5, accuracy], "f1": [2 / 3, 0.8, accuracy], "validation loss": [2.3, 1.0, 0.5]}
    last = {name: values[-1] for name, values in curve.items()}
    found = last if cell.case.target is not None and accuracy >= cell.case.target else None
    about = {
        "case": cell.case.name,
        "method": cell.name,
        "setting": str(dict(cell.setting)),
        "seed": cell.seed,
        "outcome": "work",
    }
    return {**about, "reached": found, "last": last, "curve": curve, "took": 1.0, "machine": "m", "torch": "2", "jobs": 1}


def draw(name, accuracies, tmp_path, options=FULL):
    store, cells = Store(tmp_path), EXPERIMENTS[name].cells(options, SHIPPED)
    for cell in cells:
        store.put(cell, invented(cell, accuracies.get(cell.name, 0.5) + 0.001 * cell.seed))
    results = Records(store, cells)
    return EXPERIMENTS[name].section(results), EXPERIMENTS[name].claims(results)


def tables(section):
    return {block.name: block for block in section.blocks if isinstance(block, Table)}


def test_the_page_of_hyper_cleaning(tmp_path):
    section, claims = draw(
        "hyper-cleaning", {"MEHA": 0.93, "automatic": 0.97, "F2SA": 0.95, "VPBGD": 0.9, PAPER: 0.99}, tmp_path
    )
    rows = {row[0]: row for row in tables(section)["hyper-cleaning-mnist"].rows}
    tuned = "MEHA, 12 inner steps, γ = 10,000"  # what was chosen is not the single loop
    assert rows[tuned][1].text == "93.10 ± 0.10"
    assert rows[tuned][-1].text == "89.55 / 91.26"
    assert "MEHA" not in rows
    assert rows[PAPER][1].kind == "best"  # the table says what is best
    assert rows["F2SA"][-1] is None  # not in the paper's table
    assert len(tables(section)["hyper-cleaning-variants"].rows) == 4
    told = {claim.claim: claim for claim in claims}
    assert told["MNIST: MEHA has an accuracy of 89.55 % and an F1 of 91.26 %"].answer == "holds"
    best = told["MNIST: MEHA has the best accuracy and F1 for the same work"]
    assert best.answer == "does not hold"
    assert "93.10 % against 95.10 % of F2SA" in best.measured  # the row without settings takes no part
    assert rows["automatic"][1].text == "97.10 ± 0.10"
    _, claims = draw("hyper-cleaning", {"MEHA": 0.9, "F2SA": 0.9005}, tmp_path / "level")
    level = {claim.claim: claim for claim in claims}["MNIST: MEHA has the best accuracy and F1 for the same work"]
    assert (level.answer, "level" in level.measured) == ("holds", True)
    worse = {claim.claim: claim for claim in claims}["MNIST: MEHA has an accuracy of 89.55 % and an F1 of 91.26 %"]
    assert worse.answer == "does not hold"


def test_the_page_of_few_shot_learning(tmp_path):
    section, claims = draw("few-shot", {"MEHA": 0.93, "automatic": 0.92, "RHG": 0.95}, tmp_path)
    rows = {row[0]: row for row in tables(section)["few-shot-10"].rows}
    assert rows["MEHA"][1].text.startswith("10")
    assert rows["MEHA"][-1].text == "×\N{NO-BREAK SPACE}1"
    assert [item.text for item in rows["MEHA"][5:7]] == ["93.10 ± 0.10", f"{paper.FEW_SHOT[10]['MEHA'][0]:.2f}"]
    assert tables(section)["few-shot-10"].columns[5:7] == ["test accuracy at the end, %", "paper: accuracy, %"]
    assert rows["automatic"][6] is None
    assert rows["automatic"][1].text.startswith("10")
    assert rows["BDA"][1].kind == "failed"
    assert "50.1 %" in rows["BDA"][1].text
    told = {claim.claim: claim for claim in claims}
    assert told["Few-shot, 20-way: MEHA reaches 90 %"].answer == "holds"
    assert "RHG" in told["Few-shot, 20-way: MEHA is fastest to 90 %"].measured
    quick, _ = draw("few-shot", {"MEHA": 0.7}, tmp_path / "quick", Options(quick=True))
    assert "few-shot-digits-5" in tables(quick)


def test_missing_data_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MEHA_DATA", str(tmp_path))
    monkeypatch.setenv("MEHA_CACHE", str(tmp_path / "cache"))
    for name, files in (("hyper-cleaning", "train-images"), ("few-shot", "images_background.zip")):
        assert files in EXPERIMENTS[name].lacks(Options())
        assert "meha download" in EXPERIMENTS[name].lacks(Options())
        assert not EXPERIMENTS[name].lacks(Options(quick=True))


def test_runs_that_time_cut_short_prove_nothing(tmp_path):
    store, cells = Store(tmp_path), EXPERIMENTS["hyper-cleaning"].cells(Options(seeds=1), SHIPPED)
    for cell in cells:
        outcome = {"RHG": "time", "CG": "broke down: it"}.get(cell.name, "work")
        store.put(cell, {**invented(cell, 0.93 if cell.name == "MEHA" else 0.5), "outcome": outcome})
    results = Records(store, cells)
    claims = {claim.claim: claim for claim in EXPERIMENTS["hyper-cleaning"].claims(results)}
    best = claims["MNIST: MEHA has the best accuracy and F1 for the same work"]
    assert (best.answer, best.measured) == ("open", "time was up for RHG")
    names = [row[0] for row in tables(EXPERIMENTS["hyper-cleaning"].section(results))["hyper-cleaning-mnist"].rows]
    assert "RHG (time was up)" in names
    assert "CG (breaks down)" in names
