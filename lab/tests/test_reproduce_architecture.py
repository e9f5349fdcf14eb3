"""Architecture search in meha reproduce: budgets, cells against runs of their own, and what the page shows."""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from meha_lab.reproduce import architecture, command
from meha_lab.reproduce.architecture import FULL, LONGER, QUICK, REDUCED, ROWS, WORK, SearchRow, methods_of, stages_of
from meha_lab.reproduce.cells import Case, Cell
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records, paper
from meha_lab.reproduce.experiments import architecture_search as experiment
from meha_lab.reproduce.page import Details, Picture, Table
from meha_lab.reproduce.race import measure
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store
from meha_lab.tasks.architecture_search import (
    Genotype,
    SearchSpace,
    Stage,
    architecture_search,
    random_genotype,
    search,
    train_final,
)
from torch.optim.lr_scheduler import CosineAnnealingLR
from typer.testing import CliRunner

import meha
from meha_cli import app

EXPERIMENT = EXPERIMENTS["architecture-search"]
SHIPPED = Tuning.shipped()
SEARCHES = [name for name in ROWS if name != "Random search"]
BOTH = {"momentum": 0.9, "weight_decay": 3e-4, "clip": 5.0}

TINY = dataclasses.replace(
    QUICK,
    name="architecture search, tiny",
    task={"data": "digits", "channels": 4, "cells": 3, "batch": 4, "size": 32, "space": SearchSpace(nodes=1)},
    final={"epochs": 1, "channels": 2, "cells": 3, "batch": 4},
)


def cell_of(protocol, row, seed=0, setting=None):
    case = Case(protocol.name, architecture_search, (("protocol", protocol),), data=True)
    return Cell("architecture", case, CONTENDERS[ROWS[row].method], setting or {"row": row}, seed, row)


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """Measure on the CPU, with a cache of its own."""
    monkeypatch.setattr(architecture, "device", lambda: torch.device("cpu"))
    monkeypatch.setenv("MEHA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- budgets and methods ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_stay_within_their_budget(name):
    row = ROWS[name]
    for work in (*range(24, 80), 597, 598, 599, 600, 601):
        stages = stages_of(row, dataclasses.replace(QUICK, work=work), 160)
        spent = sum(stage.warm_up + WORK[row.method] * stage.steps for stage in stages)
        assert work - len(stages) * 2 * WORK[row.method] < spent <= work
        assert len(stages) == (3 if row.course == "P-DARTS" else 1)


def test_the_stages_of_the_reduced_protocol():
    """600 passes: for P-DARTS 200 in each stage, of whose steps 40 % are a warm-up of one pass; for PC-DARTS 30 %."""
    expected = {
        "DARTS, order 1": [Stage(300)],
        "DARTS, order 2": [Stage(120)],
        "P-DARTS": [Stage(75, 50, 3, 5, 0.0), Stage(75, 50, 4, 3, 0.4), Stage(75, 50, 5, None, 0.7)],
        "PC-DARTS": [Stage(246, 106)],
        "RHG": [Stage(200)],
        "CG": [Stage(150)],
        "IAPTT": [Stage(120)],
        "MEHA": [Stage(200)],
        "MEHA, Swish": [Stage(200)],
        "MEHA on P-DARTS": [Stage(54, 36, 3, 5, 0.0), Stage(54, 36, 4, 3, 0.4), Stage(54, 36, 5, None, 0.7)],
        "MEHA on PC-DARTS": [Stage(175, 75)],
    }
    assert {name: stages_of(ROWS[name], REDUCED, 25_000) for name in SEARCHES} == expected


def test_the_stages_of_the_full_protocol():
    """Epochs on 25,000 images: 50 of 390 batches; for P-DARTS 25 of 260, ten of them a warm-up; for PC-DARTS 50 of 97."""
    for name in SEARCHES:
        stages = stages_of(ROWS[name], FULL, 25_000)
        if ROWS[name].course == "P-DARTS":
            assert [(stage.warm_up, stage.steps, stage.cells) for stage in stages] == [(2600, 3900, n) for n in (5, 11, 17)]
            assert [(stage.operations, stage.skip_dropout) for stage in stages] == [(5, 0.0), (3, 0.4), (None, 0.7)]
        else:
            assert stages == [Stage(50 * 97 - 15 * 97, 15 * 97)] if ROWS[name].course == "PC-DARTS" else [Stage(50 * 390)]


@pytest.mark.parametrize("method", WORK)
def test_a_step_takes_the_passes_that_are_stated(method):
    task = architecture_search(**TINY.task)
    found = search(task, methods_of(SearchRow(method), TINY), [Stage(2)])
    taken = found.counts.upper + found.counts.lower + found.counts.hvp
    assert taken <= 2 * WORK[method]
    assert taken == 2 * WORK[method] or method == "IAPTT"


def test_methods_have_the_declared_numbers():
    for name, rate in {"DARTS, order 1": 3e-3, "P-DARTS": 6e-3, "PC-DARTS": 6e-3, "CG": 3e-3, "MEHA on PC-DARTS": 6e-3}.items():
        method = methods_of(ROWS[name], REDUCED)(100)
        assert method.x_optimizer.keywords == {"lr": rate, "betas": (0.5, 0.999), "weight_decay": 1e-3}
    full = methods_of(ROWS["MEHA"], FULL)(1000)
    assert full.x_optimizer.keywords["lr"] == 8e-5
    assert (full.gamma, full.c, full.p, full.gradients) == (200, 2, 0.49, 2)
    for optimizer in (full.y_optimizer, full.theta_optimizer):
        made = optimizer([torch.zeros(1, requires_grad=True)])
        assert {key: made.defaults[key] for key in ("lr", "momentum", "weight_decay")} == {
            "lr": 0.025, "momentum": 0.9, "weight_decay": 3e-4,
        }  # fmt: skip
        assert optimizer.clip == 5
        schedule = optimizer.scheduler(made)
        for _ in range(1000):
            made.step()
            schedule.step()
        assert made.param_groups[0]["lr"] == pytest.approx(0.001)
    for name, steps in (("RHG", 1), ("CG", 1), ("IAPTT", 2)):
        method = methods_of(ROWS[name], REDUCED)(100)
        assert (method.inner_steps, method.beta(0), method.beta(50)) == (steps, 0.2, pytest.approx(0.104))
    assert [methods_of(ROWS[f"DARTS, order {n}"], REDUCED)(9).order for n in (1, 2)] == [1, 2]


# --- cells -----------------------------------------------------------------------------------------------------------------


def test_cells():
    cells = EXPERIMENT.cells(Options(), SHIPPED)
    assert len({cell.key for cell in cells}) == len(cells)
    searched = [cell for cell in cells if "row" in cell.setting]
    assert [(cell.name, cell.seed) for cell in searched] == [(name, seed) for name in ROWS for seed in (0, 1)]
    assert {cell.case.name for cell in searched} == {REDUCED.name}
    others = [(cell.name, cell.case.name) for cell in cells if "genotype" in cell.setting]
    longer = [(name, LONGER.name) for name in ("MEHA", "DARTS, order 1") if name in experiment.genotypes()]
    assert others == [("the cell published with MEHA", REDUCED.name), *longer]
    full = EXPERIMENT.cells(Options(full=True), SHIPPED)
    assert [(cell.name, cell.case.name) for cell in full] == [(name, FULL.name) for name in ROWS for _ in range(2)]
    quick = EXPERIMENT.cells(Options(quick=True), SHIPPED)
    names = ["DARTS, order 1", "PC-DARTS", "MEHA", "MEHA on P-DARTS", "Random search"]
    assert [(cell.name, cell.case.name, cell.seed) for cell in quick] == [(name, QUICK.name, 0) for name in names]
    assert set(paper.ARCHITECTURE_SEARCH) <= set(ROWS)
    assert all(cell.contender.name == ROWS[cell.name].method for cell in full)


def test_cells_of_some_methods_and_seeds():
    def names(**options):
        return [(cell.name, cell.seed) for cell in EXPERIMENT.cells(Options(full=True, **options), SHIPPED)]

    mine = ["MEHA", "MEHA, Swish", "MEHA on P-DARTS", "MEHA on PC-DARTS"]
    assert names(methods=frozenset({"MEHA"}), seeds=1) == [(name, 0) for name in mine]
    assert names(methods=frozenset({"RandomSearch"}), seeds=3) == [("Random search", seed) for seed in range(3)]
    assert names(methods=frozenset({"DARTS, order 1"}), seeds=1) == [(n, 0) for n in ("DARTS, order 1", "P-DARTS", "PC-DARTS")]
    some = EXPERIMENT.cells(Options(methods=frozenset({"RHG"})), SHIPPED)
    assert [(cell.name, cell.seed) for cell in some] == [("RHG", 0), ("RHG", 1)]


def test_cells_that_were_found_are_trained_longer(monkeypatch):
    known = experiment.genotypes()
    monkeypatch.setattr(experiment, "genotypes", lambda: {**known, "MEHA": SKIPS.to_dict(), "DARTS, order 1": POOLS.to_dict()})
    longer = [cell for cell in EXPERIMENT.cells(Options(), SHIPPED) if cell.case.name == LONGER.name]
    assert [(cell.name, cell.seed, cell.setting["genotype"]) for cell in longer] == [
        ("MEHA", 0, SKIPS.to_dict()), ("DARTS, order 1", 0, POOLS.to_dict()),
    ]  # fmt: skip
    assert not any(c.case.name == LONGER.name for c in EXPERIMENT.cells(Options(quick=True), SHIPPED))


def test_missing_images_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MEHA_DATA", str(tmp_path))
    monkeypatch.setenv("MEHA_CACHE", str(tmp_path / "cache"))
    assert "meha download cifar10" in EXPERIMENT.lacks(Options())
    assert "meha download cifar10" in EXPERIMENT.lacks(Options(full=True))
    assert not EXPERIMENT.lacks(Options(quick=True))


def test_a_missing_package_is_named_at_the_start(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="sklearn"):
        command._check_extras({"architecture-search": EXPERIMENT.cells(Options(quick=True), SHIPPED)})


# --- measuring -------------------------------------------------------------------------------------------------------------


def test_a_cell_equals_a_run_of_its_own(on_the_cpu):
    """PC-DARTS with MEHA: its task, stage and method written out."""
    record = measure(cell_of(TINY, "MEHA on PC-DARTS", seed=3))
    task = architecture_search(**TINY.task, partial=4, edge_normalisation=True, seed=3)

    def method(steps):
        sgd = meha.Optimizer(torch.optim.SGD, lr=0.05, scheduler=partial(CosineAnnealingLR, T_max=steps, eta_min=0.002), **BOTH)
        adam = partial(torch.optim.Adam, lr=0.06, betas=(0.5, 0.999), weight_decay=1e-3)
        return meha.MEHA(gamma=200.0, c=2.0, p=0.49, gradients=2, x_optimizer=adam, y_optimizer=sgd, theta_optimizer=sgd)

    warm_up = meha.Optimizer(torch.optim.SGD, lr=0.05, **BOTH)
    found = search(task, method, [Stage(8, 4)], warm_up=warm_up)
    trained = train_final(task.final(found.genotype, **TINY.final), lr=0.05)
    assert record["outcome"] == "max steps"
    assert record["genotype"] == found.genotype.to_dict()
    assert record["curve"] == {name: pytest.approx(found.history[name], rel=1e-3) for name in ("step", "upper", "entropy")}
    own = task.evaluate(found.x, found.y)
    assert {name: record["search"][name] for name in own} == {name: pytest.approx(own[name], abs=1e-3) for name in own}
    assert (record["search"]["steps"], record["search"]["work"], record["search"]["memory"]) == (8, 4 + 8 * 3, None)
    assert record["final"]["accuracy"] == pytest.approx(trained.scores["accuracy"], abs=0.02)
    assert (record["final"]["parameters"], record["final"]["epochs"]) == (trained.parameters, 1)
    assert list(on_the_cpu.rglob("*.pt")) == []
    assert not (on_the_cpu / "searches" / cell_of(TINY, "MEHA on PC-DARTS", seed=3).key).exists()


def test_p_darts_bounds_the_skips_and_swish_is_passed_on(on_the_cpu, monkeypatch):
    seen = []

    def spy(task, method, stages, **options):
        seen.append((task, stages, options))
        raise InterruptedError

    monkeypatch.setattr(architecture, "search", spy)
    for row in ("MEHA on P-DARTS", "MEHA, Swish", "PC-DARTS", "DARTS, order 2"):
        with pytest.raises(InterruptedError):
            architecture.measure_architecture(cell_of(TINY, row, seed=1))
    told = [(t.most_skips, t.activation, t.partial, t.edge_normalisation, t.seed, len(s), o["compile"]) for t, s, o in seen]
    assert told == [
        (2, "relu", 1, False, 1, 3, False),
        (None, "swish", 1, False, 1, 1, False),
        (None, "relu", 4, True, 1, 1, False),
        (None, "relu", 1, False, 1, 1, False),
    ]
    full = dataclasses.replace(FULL, task={**FULL.task, "data": "digits"})
    for row, batch in (("P-DARTS", 96), ("PC-DARTS", 256), ("RHG", 64)):
        with pytest.raises(InterruptedError):
            architecture.measure_architecture(cell_of(full, row))
        assert seen[-1][0].batch == batch


def test_random_search_keeps_the_best_on_the_upper_level(on_the_cpu, monkeypatch):
    trainings, accuracies = [], iter([0.3, 0.5, 0.5, 0.2, 0.9])

    def invented(task, *, lr, folder, compile=False):
        trainings.append((task, lr, folder))
        return SimpleNamespace(scores={"accuracy": next(accuracies), "train accuracy": 0.1}, seconds=1.5, parameters=7)

    monkeypatch.setattr(architecture, "train_final", invented)
    protocol = dataclasses.replace(TINY, candidates=4, work=30, final_rate=0.125)
    record = architecture.measure_architecture(cell_of(protocol, "Random search", seed=5))
    generator = torch.Generator().manual_seed(5)
    drawn = [random_genotype(SearchSpace(nodes=1), generator) for _ in range(4)]
    assert [task.genotype for task, *_ in trainings] == [*drawn, drawn[1]]  # the first of the best
    assert record["genotype"] == drawn[1].to_dict()
    task = architecture_search(**TINY.task, seed=5)
    for training, rate, _ in trainings[:4]:
        assert torch.equal(training.train.images, task.train.images)
        assert torch.equal(training.test.images, task.validation.images)
        assert (training.steps, training.cells, training.channels, training.batch, rate) == (7, 3, 4, 4, 0.05)
        assert not training.auxiliary
    assert len({folder for *_, folder in trainings}) == 5
    assert record["search"] == {
        "accuracy": 0.5, "train accuracy": 0.1, "steps": 28, "work": 28, "seconds": 6.0, "memory": None,
    }  # fmt: skip
    last, rate, _ = trainings[-1]
    assert rate == 0.125
    assert len(last.train.labels) == 32
    assert record["final"]["accuracy"] == 0.9
    assert record["curve"] is None


def test_a_quick_cell_gives_a_whole_record(on_the_cpu, tmp_path):
    store, (cell,) = Store(tmp_path), EXPERIMENT.cells(Options(quick=True, methods=frozenset({"RandomSearch"})), SHIPPED)
    store.put(cell, {**measure(cell), "jobs": 1})
    record = Store(tmp_path).get(cell)
    assert record is not None
    json.dumps(record, allow_nan=False)
    assert Genotype.from_dict(record["genotype"]).nodes == 4
    assert record["search"]["work"] == QUICK.work
    assert 0 <= record["final"]["accuracy"] <= 1
    assert not list(on_the_cpu.rglob("*.pt"))
    section = EXPERIMENT.section(Records(store, [cell]))
    assert [row[0] for row in tables(section)["architecture-search-quick"].rows] == ["Random search"]


def test_a_cell_with_a_genotype_is_trained_alone(on_the_cpu, monkeypatch):
    monkeypatch.setattr(architecture, "search", None)
    genotype = Genotype((("skip", 0), ("max pool 3x3", 1)), (("skip", 0), ("skip", 1)))
    record = measure(cell_of(TINY, "MEHA", setting={"genotype": genotype.to_dict()}))
    assert (record["search"], record["curve"], record["genotype"]) == (None, None, genotype.to_dict())
    final = architecture_search(**TINY.task).final(genotype, **TINY.final)
    assert record["final"]["accuracy"] == pytest.approx(train_final(final, lr=0.05).scores["accuracy"], abs=0.02)


@pytest.mark.slow
def test_the_quick_form(tmp_path, monkeypatch):
    monkeypatch.setenv("MEHA_CACHE", str(tmp_path / "cache"))
    arguments = ["reproduce", "architecture-search", "--quick", "--jobs", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "5 runs measured." in done.output
    assert (tmp_path / "out/tables/architecture-search-quick.csv").exists()


# --- the page --------------------------------------------------------------------------------------------------------------

SKIPS = Genotype((("skip", 0), ("skip", 1), ("skip", 0), ("max pool 3x3", 1)), (("skip", 0), ("skip", 1)) * 2)
POOLS = Genotype((("max pool 3x3", 0), ("max pool 3x3", 1)) * 2, (("max pool 3x3", 0), ("average pool 3x3", 1)) * 2)


def invented(cell, accuracy, jobs=1, outcome="max steps", memory=3 * 2**30):
    """A record as if it had been measured."""
    found = "genotype" not in cell.setting
    score = {"train accuracy": 0.5, "accuracy": 0.4, "steps": 200, "work": 600, "seconds": 20.0 + 4 * cell.seed}
    curve = {"step": [1.0, 2.0, 1.0, 2.0], "upper": [2.3, 2.0, 1.5, 1.2], "entropy": [2.07, 2.0, 1.1, 1.0]}
    about = {"case": cell.case.name, "method": cell.name, "setting": "", "seed": cell.seed, "outcome": outcome}
    genotype = cell.setting.get("genotype", (POOLS if cell.seed else SKIPS).to_dict())
    final = {"train accuracy": 0.6, "accuracy": accuracy, "parameters": 1_500_000, "epochs": 5, "seconds": 9.0}
    searching = {**score, "memory": memory} if found else None
    record = {**about, "search": searching, "curve": curve if found and cell.contender.name != "RandomSearch" else None}
    return {**record, "genotype": genotype, "final": final, "took": 1.0, "machine": "m", "torch": "2", "jobs": jobs}


def fill(store, options, accuracies, **details):
    cells = EXPERIMENT.cells(options, SHIPPED)
    for cell in cells:
        own = {key: value[cell.name] for key, value in details.items() if cell.name in value}
        store.put(cell, invented(cell, accuracies.get(cell.name, 0.5) + 0.01 * cell.seed, **own))
    return Records(store, cells)


def flat(blocks):
    for block in blocks:
        yield block
        if isinstance(block, Details):
            yield from flat(block.blocks)


def tables(section):
    return {block.name: block for block in flat(section.blocks) if isinstance(block, Table)}


def pictures(section):
    return {block.name: block for block in flat(section.blocks) if isinstance(block, Picture)}


def test_the_page(tmp_path):
    accuracies = {"MEHA": 0.8, "CG": 0.81, "the cell published with MEHA": 0.99}
    results = fill(Store(tmp_path), Options(), accuracies, outcome={"RHG": "diverged", "IAPTT": "broke down: it"})
    section = EXPERIMENT.section(results)
    table = tables(section)["architecture-search"]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows)[:3] == ["DARTS, order 1", "DARTS, order 2", "P-DARTS"]
    best = [name for name, row in rows.items() if row["test accuracy, %"].kind == "best"]
    assert best == ["CG"]  # a published cell is not the result of a search here
    assert rows["CG"]["test accuracy, %"].text == f"81.50 ± {math.sqrt(0.5):.2f}"
    assert rows["the cell published with MEHA"]["test accuracy, %"].text == "99.00"
    assert rows["the cell published with MEHA"]["parameters, M"].text == "1.52"  # the paper's value for its network
    assert rows["the cell published with MEHA"]["search, s"] is None
    assert rows["MEHA"]["skips, %"].text == f"38 ± {math.sqrt(0.5) * 75:.0f}"  # 75 % and 0
    assert (rows["MEHA"]["steps"], rows["MEHA"]["search, s"].text, rows["MEHA"]["search, GiB"].text) == (200, "22", "3.0")
    shown = rows["MEHA"]["paper: test, %"]
    assert (shown.text, shown.kind, rows["MEHA"]["paper: parameters, M"].text) == ("96.07", "paper", "1.52")
    assert rows["DARTS, order 2"]["paper: test, %"] is None
    assert {"RHG (diverges)", "IAPTT (breaks down)"} <= set(rows)
    assert "over 2 seeds" in table.caption
    levels = {row[0]: row for row in tables(section)["architecture-search-levels"].rows}
    assert [mark.text for mark in levels["IAPTT"][1:4]] == ["50.0", "40.0", "60.0"]
    assert [mark.text for mark in levels["IAPTT"][4:]] == ["98.9", "99.5", "99.8"]
    assert levels["the cell published with MEHA"][1:3] == [None, None]
    drawn = pictures(section)
    assert {"architecture-search-meha", "architecture-search-darts-order-1", "architecture-search-random-search"} <= set(drawn)
    assert drawn["architecture-search-meha"].alt == str(SKIPS)  # of the first seed
    shown = [block.name for block in section.blocks if isinstance(block, Picture)]
    assert shown == ["architecture-search-course", "architecture-search-meha", "architecture-search-darts-order-1"]
    lines = drawn["architecture-search-course"].figure.axes[0].get_lines()
    assert any(list(line.get_xdata()) == [25, 50, 75, 100] for line in lines)  # stages one after the other
    assert any(list(line.get_ydata()) == [2.3, 2.0, 1.5, 1.2] for line in lines)


def test_times_are_those_of_runs_alone(tmp_path):
    store, cells = Store(tmp_path), EXPERIMENT.cells(Options(methods=frozenset({"RHG", "CG"})), SHIPPED)
    for cell in cells:
        memory = None if cell.name == "CG" else (2 + 2 * cell.seed) * 2**30
        store.put(cell, invented(cell, 0.5, jobs=2 if cell.seed == 0 or cell.name == "CG" else 1, memory=memory))
    rows = {row[0]: row for row in tables(EXPERIMENT.section(Records(store, cells)))["architecture-search"].rows}
    assert [item.text for item in rows["RHG"][5:7]] == ["24", "3.0"]
    assert rows["CG"][5:7] == [None, None]


def test_claims_are_what_was_measured(tmp_path):
    def claims(name, accuracies, **options):
        found = EXPERIMENT.claims(fill(Store(tmp_path / name), Options(seeds=1, **options), accuracies))
        return {claim.claim: (claim.answer, claim.measured) for claim in found}

    best, chance = (
        f"CIFAR-10 (reduced): MEHA{rest}" for rest in (" finds the best architecture", "'s search beats random search")
    )
    others = {"MEHA, Swish": 0.9, "MEHA on P-DARTS": 0.9, "DARTS, order 2": 0.8}
    told = claims("behind", {"MEHA": 0.6, "RHG": 0.61, "Random search": 0.6, **others})
    assert told[best] == ("does not hold", "60.00 % against 61.00 % of RHG")  # the others are not the paper's rivals
    assert told[chance] == ("open", "60.00 % against 60.00 % of random search, and the seeds overlap")
    told = claims("ahead", {"MEHA": 0.7, "Random search": 0.65, "RHG": 0.66})
    assert told[best][0] == "holds"
    assert told[chance] == ("holds", "70.00 % against 65.00 % of random search")
    told = claims("full", {"MEHA": 0.7}, full=True)
    assert set(told) == {claim.replace("reduced", "full") for claim in (best, chance)}
    assert claims("alone", {}, methods=frozenset({"RHG"})) == {}
    assert claims("quick", {}, quick=True) == {}


def test_cells_trained_longer_have_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "genotypes", lambda: {experiment.PUBLISHED_CELL: POOLS.to_dict(), "MEHA": SKIPS.to_dict()})
    section = EXPERIMENT.section(fill(Store(tmp_path), Options(seeds=1), {"MEHA": 0.93}))
    table = tables(section)["architecture-search-longer"]
    assert "30 epochs" in table.caption
    (row,) = table.rows
    assert row[:5] == ["MEHA", pytest.approx(93), pytest.approx(60), 1.5, 9.0]
    assert row[5].text == "96.07"


def test_the_command_takes_full(tmp_path):
    """The page of the whole protocol is drawn from its own records."""
    fill(Store(tmp_path / "records"), Options(full=True, seeds=1, methods=frozenset({"RHG", "RandomSearch"})), {})
    arguments = ["reproduce", "architecture-search", "--draw", "--records", str(tmp_path / "records"), "--seeds", "1"]
    reduced = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "reduced")])
    assert reduced.exit_code == 2
    assert "has no records of architecture-search" in " ".join(reduced.output.split())
    full = CliRunner().invoke(app, [*arguments, "--full", "--out", str(tmp_path / "full")])
    assert full.exit_code == 0, full.output
    written = (tmp_path / "full/tables/architecture-search-full.csv").read_text()
    assert [line.partition(",")[0] for line in written.splitlines()[1:]] == ["RHG", "Random search"]
    assert "600 epochs of final training" in (tmp_path / "full/architecture-search.html").read_text()
    assert (tmp_path / "full/figures/architecture-search-full-random-search.svg").exists()
