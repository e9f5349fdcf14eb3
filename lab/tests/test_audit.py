"""docs/audit.md: what it names exists, and its numbers are those of the records; presets and data of the experiments.

``python tests/test_audit.py`` prints the rows of its measured tables.
"""

import functools
import importlib
import json
import pathlib
import re
import statistics
import sys

import pytest
import torch
from meha_lab.reproduce.experiments import paper
from meha_lab.reproduce.experiments.nonsmooth import _label

import meha
from meha.analysis.diagnostics import prox_residual
from meha.problem.nonsmooth import L1, MCP

ROOT = pathlib.Path(__file__).parents[2]


def text():
    return (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


TRIALS = 1000
"""Seeds from here on are those of trials."""


def records(name):
    """The records of a file in results/."""
    return [json.loads(line) for line in (ROOT / "lab/records" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def measured():
    """The rows of the measured table: case, the paper's number, ours, as text."""
    runs: dict[str, list[dict]] = {}
    for record in records("race"):
        if record["method"] == "MEHA" and "'preset': 'paper'" not in record["setting"]:
            runs.setdefault(record["case"], []).append(record)

    def seconds(case, published):
        done = [run["reached"] for run in runs[case]]
        middle = statistics.median(run["seconds"] for run in done)
        return f"| {case} | {published} | {middle:.2g} s, {statistics.median(run['step'] for run in done):g} steps |"

    rows = [seconds("strong convex, n = 100", f"{paper.STRONG_CONVEX['MEHA'][0]:g} s")]
    rows += [seconds(f"strong convex, n = {n:,}", f"{paper.HIGH_DIMENSION[n]['MEHA']:g} s") for n in paper.HIGH_DIMENSION]
    rows.append(seconds("merely convex, n = 10", "a curve"))
    rows += [seconds(f"sine, n = {n}", f"{paper.SINE[n]['MEHA']:g} s") for n in paper.SINE]
    rows += [seconds(f"lasso, n = {n}", f"{paper.LASSO[n]['MEHA']:g} s") for n in paper.LASSO]
    for m in paper.GROUP_LASSO:
        mean, deviation, *_ = paper.GROUP_LASSO[m]["MEHA"]
        errors = [run["last"]["test error"] for run in runs[f"group lasso, m = {m}"]]
        found = f"{statistics.mean(errors):.1f} ± {statistics.stdev(errors):.1f}"
        rows.append(f"| group lasso, m = {m} | test error {mean:g} ± {deviation:g} | test error {found} |")
    return [*rows, memory(), sensitivity(), *learned(), searched()]


def memory():
    found = {run["method"]: run["peak"] for run in records("memory") if run["case"] == "strong convex, n = 100"}
    theirs = paper.STRONG_CONVEX
    return (
        f"| memory, strong convex, n = 100 | {theirs['MEHA'][1]:,} bytes (BAMM {theirs['BAMM'][1]:,}) |"
        f" {found['MEHA']:,} bytes (BAMM {found['BAMM']:,}) |"
    )


def sensitivity():
    """How many rows of the two tables converge, with the printed numbers and around ours."""
    rows = [change for table in paper.SENSITIVITY.values() for change, _, _ in table]
    runs = {}
    for run in records("race"):
        if run["case"].startswith("lasso"):
            runs.setdefault(run["method"], []).append(run["reached"])
    steps = {}
    for base in ("printed", "recipe"):
        labels = {_label(base, change) for change in rows}
        found = [runs[label] for label in labels if label in runs]
        ends = [[reached["step"] for reached in ends if reached] for ends in found]
        steps[base] = len(found), sorted(statistics.median(end) for end in ends if end)
    (printed, there), (total, ours) = steps["printed"], steps["recipe"]
    theirs = [steps for table in paper.SENSITIVITY.values() for _, steps, _ in table]
    return (
        f"| sensitivity, lasso, n = 1000 | {min(theirs)} to {max(theirs)} steps in {len(rows)} rows |"
        f" printed numbers: {len(there)} of {printed} rows converge;"
        f" ours: {len(ours)} of {total}, {ours[0]:g} to {ours[-1]:g} steps |"
    )


def learned():
    """Hyper-cleaning and few-shot learning."""
    last = {(run["case"], run["method"], run["seed"]): run for run in records("training") if run["seed"] < TRIALS}
    runs = {}
    for (case, method, _), run in last.items():  # of several settings the one that was chosen last
        runs.setdefault((case, method), []).append(run)

    def percent(found, name):
        return f"{100 * statistics.mean(run['last'][name] for run in found):.1f}"

    kinds = {"MEHA": "12 inner steps", "MEHA, single loop": "single loop", "MEHA, paper's values": "the paper's values"}
    for title, data in (("MNIST", "mnist"), ("FashionMNIST", "fashion-mnist")):
        accuracy, f1 = paper.HYPER_CLEANING[data]["MEHA"]
        for method, words in kinds.items():
            found = runs[f"hyper-cleaning, {title}", method]
            ours = f"{percent(found, 'accuracy')} %, F1 {percent(found, 'f1')}"
            yield f"| hyper-cleaning, {title}, {words} | {accuracy:g} %, F1 {f1:g} | {ours} |"
    for ways, theirs in paper.FEW_SHOT.items():
        found = runs[f"few-shot, {ways}-way", "MEHA"]
        seconds = statistics.median(run["reached"]["seconds"] for run in found)
        accuracy, took = theirs["MEHA"]
        ours = f"{percent(found, 'accuracy')} % after {seconds:.2g} s"
        yield f"| few-shot, {ways}-way | {accuracy:g} % after {took:g} s | {ours} |"
        printed = runs[f"few-shot, {ways}-way", "MEHA, paper's values"]
        reached = sum(run["reached"] is not None for run in printed)
        ours = f"{percent(printed, 'accuracy')} % at the end; {reached} of {len(printed)} seeds reach 90 %"
        yield f"| few-shot, {ways}-way, the paper's values | {accuracy:g} % after {took:g} s | {ours} |"


def searched():
    found = [run["final"] for run in records("architecture") if run["method"] == "MEHA" and run["final"]]
    found = [run for run in found if run["epochs"] == found[0]["epochs"]]
    *_, accuracy, millions = paper.ARCHITECTURE_SEARCH["MEHA"]
    ours = f"{100 * statistics.mean(run['accuracy'] for run in found):.1f} % after {found[0]['epochs']} epochs"
    return f"| architecture search | {accuracy:g} %, {millions} M weights, 600 epochs | reduced: {ours} |"


def test_the_measured_numbers_are_those_of_the_records():
    lines = text().splitlines()
    start = lines.index("| experiment | the paper's MEHA | MEHA here |")
    rows = measured()
    assert lines[start + 2 : start + 2 + len(rows) + 1] == [*rows, ""]


def test_what_the_page_names_exists():
    page = text()
    tests = re.findall(r"`(test_\w+)(?:::(test_\w+))?`", page)
    assert len(tests) > 20
    for file, function in tests:
        (path,) = [*(ROOT / "tests").rglob(f"{file}.py"), *(ROOT / "lab/tests").rglob(f"{file}.py")]
        source = path.read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source, (file, function)
    names = re.findall(r"`(meha(?:\.\w+)+)`", page)
    assert len(names) > 15
    for name in names:
        module, *rest = name.split(".")
        try:
            functools.reduce(getattr, rest, importlib.import_module(module))
        except AttributeError:
            importlib.import_module(name)


PAPER = {
    "strong_convex": (1.5, 0.8, 0.8, 10.0, 33.3, 0.49),
    "merely_convex": (0.012, 0.1, 0.009, 5.0, 0.167, 0.49),
    "sine": (5e-4, 5e-4, 0.001, 200.0, 0.02, 0.49),
    "lasso": (0.1, 1e-5, 0.1, 10.0, 2.0, 0.49),
    "group_lasso": (0.01, 0.05, 0.05, 100.0, 20.0, 0.48),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_presets_are_the_values_of_the_paper(name):
    make = getattr(meha.problems, name)
    preset = (make(6, groups=2) if name == "group_lasso" else make(2)).preset("paper")
    at_first = [value(0) if callable(value) else value for value in (preset.alpha, preset.beta, preset.eta)]
    assert (*at_first, preset.gamma, preset.c, preset.p) == PAPER[name]


@pytest.mark.parametrize(("m", "groups"), [(600, 30), (1200, 300)])
def test_the_data_of_the_group_lasso(m, groups):
    """Three blocks of 50 ones; the signal twice as long as the noise, over all 300 rows: from values of losses alone."""
    problem = meha.problems.group_lasso(m)
    truth = torch.zeros(3, m // 3, dtype=torch.float64)
    truth[:, :50] = 1
    truth = truth.reshape(-1)
    assert problem.distance(problem.x0, truth).y == 0
    assert problem.x0.tolist() == [0.1] * groups
    assert not problem.y0.any()
    assert problem.g.groups == [m // groups] * groups
    losses = (problem.lower, problem.upper, problem.metrics["test error"])
    noise, mirrored, labels = (sum(200 * float(loss(problem.x0, y)) for loss in losses) for y in (truth, -truth, 0 * truth))
    signal = (noise + mirrored) / 2 - labels  # |b - Av|^2 + |b + Av|^2 = 2 |b|^2 + 2 |Av|^2
    assert signal / noise == pytest.approx(4, rel=1e-9)
    assert signal == pytest.approx(300 * 150, rel=0.2)  # 300 rows of A v, each normal with variance 150
    gradient = torch.autograd.functional.jacobian(lambda y: problem.lower(problem.x0, y), problem.y0)
    assert float(gradient @ truth) == pytest.approx(-100 * 150 / 100, rel=0.5)  # the loss is divided by 2 * 100


def test_every_open_point_of_the_paper_has_a_reading():
    """The register of what the paper leaves open: all have a reading, and a place in the code or a test."""
    lines = text().split("## What the paper leaves open")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert len(rows) >= 20
    assert all(len(row) == 3 and all(row) for row in rows)


@pytest.mark.parametrize("c", [1.0, 8.0])
def test_the_step_of_the_prox_residual(c):
    """Where the prox ends at the kink, the mapping is y / s, with s = gamma / c or, for weakly convex g, less."""
    x, y = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.01, dtype=torch.float64)

    def measure(g, gamma):
        problem = meha.Problem(lambda x, y: 0 * (x * y).sum(), lambda x, y: 0 * (x * y).sum(), nonsmooth=g)
        return prox_residual(problem, x, y, gamma, c)

    assert measure(L1(1.0), 0.5) == pytest.approx(0.01 * c / 0.5, rel=1e-9)
    assert measure(MCP(1.0, a=0.25), 0.2) == pytest.approx(0.01 * c / 0.125, rel=1e-9)
    assert measure(MCP(1.0, a=0.25), 0.1) == pytest.approx(0.01 * c / 0.1, rel=1e-9)


if __name__ == "__main__":
    sys.stdout.write("\n".join(measured()) + "\n")
