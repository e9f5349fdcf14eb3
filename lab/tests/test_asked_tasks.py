"""Long tails, heads and augmentations: the baselines are those of their papers, rows have equal work, records are resumed, and
the pages have the numbers of the records."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from meha_lab.benchmarks import asked_tasks
from meha_lab.benchmarks.asked_tasks import CLASSES, HEADS, LITTLE, MOST, NEVER, TASKS, TRIALS, WANTED, WORK, Setup
from meha_lab.paths import DOCS, RECORDS
from meha_lab.store import Store
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy

STEPS = 10
SETUP = Setup("digits", 0, "cpu", 0.004, STEPS)
COUNTS = torch.tensor(asked_tasks.counts_of(100, 0))
FIRST = {"train": torch.repeat_interleave(torch.arange(CLASSES), COUNTS)}
"""The class of each training example, in their order."""


@pytest.fixture(scope="module")
def long_tailed():
    return asked_tasks.long_tailed(SETUP)


@pytest.fixture(scope="module")
def on_both():
    return asked_tasks.long_tailed(SETUP._replace(both=True))


def silent(inputs):
    """Logits that are zero."""
    return torch.zeros(len(inputs), CLASSES)


def one_of(label):
    """A batch with one training example of this class."""
    return {"train": torch.nonzero(FIRST["train"] == label)[:1, 0]}


# Long-tailed classes


def test_the_classes_have_a_long_tail():
    assert sorted(COUNTS.tolist(), reverse=True) == [round(100 * 0.01 ** (place / 9)) for place in range(10)]
    orders = {tuple(np.argsort(asked_tasks.counts_of(1000, seed))) for seed in range(5)}
    assert len(orders) == 5


def test_no_image_is_in_two_parts():
    parts = asked_tasks.drawn("digits", [[30] * CLASSES, [8] * CLASSES], 3, "cpu")
    assert [torch.bincount(part.labels).tolist() for part in parts[:2]] == [[30] * CLASSES, [8] * CLASSES]
    assert sum(len(part.labels) for part in parts) == 1797
    images = [{image.numpy().tobytes() for image in part.inputs} for part in parts]
    assert sum(map(len, images)) == len(set.union(*images))


@pytest.mark.parametrize("tau", [1, 3])
def test_logit_adjustment_adds_the_log_prior_in_training(long_tailed, tau):
    name = "logit adjustment, tau = 1" if tau == 1 else "logit adjustment, tau chosen"
    trial = long_tailed.rows[name][0 if tau == 1 else asked_tasks.TAUS.index(0.15 * 3)]
    power = 1 if tau == 1 else 0.45
    prior = COUNTS.double() / COUNTS.sum()
    for label in range(CLASSES):
        loss = long_tailed.problem.lower(trial.args[0], silent, one_of(label))
        assert float(loss) == pytest.approx(-math.log(prior[label] ** power / (prior**power).sum()), rel=1e-5)


def test_the_class_balanced_loss_divides_by_effective_numbers(long_tailed):
    for name, number, beta in (("beta = 0.999", 0, 0.999), ("beta chosen", 4, 1 - 10**-1.5)):
        loss = long_tailed.rows[f"class-balanced loss, {name}"][number].args[0]
        found = torch.stack([loss(silent, one_of(label)) for label in range(CLASSES)]) / math.log(CLASSES)
        effective = torch.tensor([sum(beta**k for k in range(n)) for n in COUNTS.tolist()])  # 1 + b + ... + b^(n - 1)
        torch.testing.assert_close(found * effective, (found * effective).mean().expand(CLASSES), rtol=1e-3, atol=0.0)
        assert float(found.mean()) == pytest.approx(1.0, rel=1e-5)


def test_offsets_follow_the_shares_of_the_joined_data(long_tailed, on_both):
    more = COUNTS + 8
    for row, expected in (("plain", torch.zeros(CLASSES)), ("logit adjustment, tau = 1", (more / more.sum()).log())):
        torch.testing.assert_close(on_both.rows[row][0].args[0] + on_both.shift, expected)
    assert long_tailed.shift.abs().max() == 0
    # An x found on the training data, such as their log prior, means the same on the joined data.
    torch.testing.assert_close((COUNTS / COUNTS.sum()).log() + on_both.shift, (more / more.sum()).log())


def test_fitted_biases_are_stationary(long_tailed):
    validation = asked_tasks.drawn("digits", [COUNTS.tolist(), [8] * CLASSES], 0, "cpu")[1]
    network = long_tailed.train(torch.zeros(CLASSES), 1)
    fitted = asked_tasks.biased(network, validation)
    shares = fitted(validation.inputs).softmax(1).mean(0)  # those of the labels, where the gradient in the biases is 0
    torch.testing.assert_close(shares, torch.full((CLASSES,), 0.1), rtol=0.0, atol=1e-3)
    assert long_tailed.validation(fitted) < long_tailed.validation(network)


def test_an_accuracy_is_a_mean_over_classes():
    task = asked_tasks.long_tailed(SETUP)
    assert task.score(lambda inputs: torch.eye(CLASSES)[3].expand(len(inputs), -1)) == pytest.approx(10.0)


# Heads


@pytest.fixture(scope="module")
def heads():
    return asked_tasks.heads(SETUP)


def test_x_has_the_logarithms_of_the_weights_of_the_further_heads(heads):
    y, batch = heads.new(0), next(heads.batches(0))

    def lower(**logs):
        return float(heads.problem.lower(torch.tensor([logs.get(name, NEVER) for name in [*HEADS][1:]]), y, batch).detach())

    alone = lower()
    for name in [*HEADS][1:]:
        assert lower(**{name: math.log(3)}) - alone == pytest.approx(3 * (lower(**{name: 0.0}) - alone), rel=1e-4)
    heads.problem.lower(heads.rows["main task alone"][0].args[0], y, batch).backward()
    assert all(y.heads[name].weight.grad.abs().max() == 0 for name in [*HEADS][1:])
    assert y.heads["class"].weight.grad.abs().max() > 0


def test_images_are_turned_by_quarters():
    inputs = torch.randn(8, 1, 5, 5)
    found = asked_tasks.turned(inputs, torch.arange(8) % 4)
    for i in range(8):
        expected = np.rot90(inputs[i, 0].numpy(), i % 4)
        np.testing.assert_array_equal(found[i, 0].numpy(), expected)


def test_uncertainty_weighting_is_the_likelihood_of_the_losses():
    """exp(-s) L + s / 2 is stationary at s = log(2 L), as the logarithm of a variance of sigma^2 = 2 L."""
    task = SimpleNamespace(x0=torch.zeros(1), minimise=lambda loss, seed, extra: (loss, seed, extra))
    given = torch.tensor([0.1, 0.2, 0.5, 1.0, 2.0, 5.0])
    loss, seed, extra = asked_tasks.by_uncertainty(task, lambda y, batch: given, 0.03, 7)
    assert (seed, extra["lr"]) == (7, 0.03)
    (s,) = extra["params"]
    loss(None, None).backward()
    torch.testing.assert_close(s.grad, 0.5 - given)
    with torch.no_grad():
        s.copy_((2 * given).log())
    s.grad = None
    loss(None, None).backward()
    torch.testing.assert_close(s.grad, torch.zeros(6), atol=1e-6, rtol=0.0)


def test_five_tasks_are_judged_beside_networks_for_one_task_each():
    task = asked_tasks.heads(SETUP._replace(steps=1), wanted=WANTED)
    trained, fresh = task.train(task.x0, 3), task.new(3)
    assert abs(task.score(fresh)) < 30  # the networks to compare with have had one step as well
    ratio = (100 - task.score(trained)) / (100 - task.score(fresh))
    assert ratio < 1  # of losses: a step helps
    assert float(task.problem.upper(task.x0, trained, {"validation": slice(None)}).detach()) == task.validation(trained)


# Augmentation


def draws_of(number, **values):
    """Draws that are zero but for some columns."""
    columns = ["turn", "zoom", "right", "down", "blur", "contrast", "noise", "across", "along", "erase"]
    draws = torch.zeros(number, asked_tasks.DRAWS, dtype=torch.float64)
    for name, value in values.items():
        draws[:, columns.index(name)] = value
    return draws


@pytest.fixture(scope="module")
def pictures():
    return torch.rand(4, 1, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def given(**values):
    return asked_tasks.strengths(values, "cpu").double()


def test_no_strength_changes_nothing(pictures):
    draws, normal = asked_tasks.random_draws(4, 14, torch.Generator().manual_seed(1))
    found = asked_tasks.augmented(given(), pictures, draws.double(), normal.double())
    torch.testing.assert_close(found, pictures, atol=1e-12, rtol=0.0)
    half = asked_tasks.augmented(given(**MOST), pictures, 0 * draws.double(), normal.double())
    torch.testing.assert_close(half, pictures, atol=1e-12, rtol=0.0)  # all strengths at their most, and nothing drawn


def test_each_strength_does_what_its_name_says(pictures):
    normal = torch.randn(4, 1, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def changed(draws, **values):
        return asked_tasks.augmented(given(**values), pictures, draws, normal)

    right = changed(draws_of(4, right=0.5), move=4 / 14)  # by a pixel, which is 2/14 of half the width
    torch.testing.assert_close(right[..., :-1], pictures[..., 1:], atol=1e-6, rtol=0.0)
    down = changed(draws_of(4, down=-1.0), move=2 / 14)
    torch.testing.assert_close(down[..., 1:, :], pictures[..., :-1, :], atol=1e-6, rtol=0.0)
    whole = {"contrast": 0.5, "noise": 0.4}
    found = changed(draws_of(4, contrast=-1.0, noise=-0.5), **whole)
    torch.testing.assert_close(found, math.exp(-0.5) * pictures + 0.2 * normal, atol=1e-6, rtol=0.0)
    erased = changed(draws_of(4, across=-1.0, along=1.0, erase=1.0), erase=0.999_999)[0, 0] == 0
    assert erased[:6, 8:].all() or erased[8:, :6].all()
    assert not erased[:6, :6].any()
    assert not erased[8:, 8:].any()
    turned = changed(draws_of(4, turn=2.0), turn=45.0)
    torch.testing.assert_close(turned, pictures.rot90(1, (2, 3)), atol=1e-6, rtol=0.0)  # against the clock
    half = changed(draws_of(4, zoom=2.0), zoom=math.log(2) / 2)
    torch.testing.assert_close(half[..., 4:10, 4:10], avg_pool2d(pictures[..., 1:13, 1:13], 2), atol=1e-6, rtol=0.0)
    blurred = changed(draws_of(4, blur=-1.0), blur=0.6)[..., 1:-1, 1:-1]
    expected = 0.4 * pictures[..., 1:-1, 1:-1] + 0.6 * avg_pool2d(pictures, 3, 1)
    torch.testing.assert_close(blurred, expected, atol=1e-6, rtol=0.0)


def test_gradients_in_the_strengths_are_those_of_differences(pictures):
    draws, normal = (part.double() for part in asked_tasks.random_draws(4, 14, torch.Generator().manual_seed(3)))
    aim = torch.rand(4, 1, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    x = torch.tensor([0.3, -0.7, 0.2, -0.1, 0.5, -0.4, 0.1], dtype=torch.float64, requires_grad=True)

    def loss(x):
        return (asked_tasks.augmented(x, pictures, draws, normal) * aim).sum()

    (gradient,) = torch.autograd.grad(loss(x), x)
    assert (gradient.abs() > 1e-3).all()
    for i in range(len(MOST)):
        step = torch.zeros(7, dtype=torch.float64)
        step[i] = 1e-6
        difference = float((loss(x + step) - loss(x - step)).detach()) / 2e-6
        assert float(gradient[i]) == pytest.approx(difference, rel=1e-3)


def test_strengths_are_shares_of_the_most():
    assert asked_tasks.by_kind(given(turn=30.0, noise=0.2).tolist(), 0) == pytest.approx(
        {
            **dict.fromkeys(MOST, 0.0),
            "turn": 30.0,
            "noise": 0.2,
        }
    )


# Rows, records and pages


@pytest.mark.parametrize("name", TASKS)
def test_a_row_has_the_work_of_twenty_trainings(name):
    assert TRIALS + 1 == WORK
    if name == "long-tailed classes":
        task = TASKS[name].build(SETUP)
        for work in (WORK, LITTLE):
            _, record = asked_tasks.FINDERS["`solve`" if work == WORK else "`solve`, a quarter of the work"](task)
            assert work - 0.5 < (record["gradients"] + STEPS) / STEPS <= work + 0.1
            assert record["method"] == "NetworkSOBA"
        assert asked_tasks.random_search(task)[1]["gradients"] + STEPS == WORK * STEPS
    rows = TASKS[name].build(SETUP._replace(steps=1)).rows
    assert {len(trials) for trials in rows.values()} <= {1, TRIALS}
    assert any(len(trials) == TRIALS for trials in rows.values())


def test_validation_chooses_among_the_trials(long_tailed):
    class Kept(nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits = logits

        def forward(self, inputs):
            return self.logits.expand(len(inputs), -1)

    trained = asked_tasks.long_tailed(SETUP._replace(steps=200)).train(long_tailed.x0, 0)
    networks = [Kept(torch.eye(CLASSES)[0] * 2), trained, Kept(torch.eye(CLASSES)[0])]
    best, record = asked_tasks.least([lambda seed, y=y: y for y in networks], long_tailed)
    expected = [
        float(cross_entropy(size * torch.eye(CLASSES)[:1].repeat(CLASSES, 1), torch.arange(CLASSES))) for size in (2, 1)
    ]
    expected.insert(1, long_tailed.validation(trained))
    assert best == 1
    assert record["returned"] == long_tailed.score(trained) > 12
    assert record["trials"] == pytest.approx(expected, rel=1e-5)
    assert record["gradients"] == 3 * STEPS


def test_records_are_resumed(tmp_path, capsys):
    arguments = ["--measure", "--data", "digits", "--seeds", "0", "--steps", "2", "--only", "long-tailed"]
    arguments += ["--rows", "plain", "tau = 1", "quarter", "--records", str(tmp_path)]
    asked_tasks.main(arguments)
    file = tmp_path / "asked_tasks.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert [json.loads(line)["row"] for line in lines] == [
        "plain",
        "logit adjustment, tau = 1",
        "plain, then biases fitted to validation",
        "`solve`, a quarter of the work",
    ]
    file.write_text("".join([lines[0], lines[2], lines[3][:40]]))  # killed while the last line was written
    capsys.readouterr()
    asked_tasks.main(arguments)
    printed = capsys.readouterr().out
    assert [part in printed for part in (": plain: ", "tau = 1", "biases", "quarter")] == [False, True, False, True]
    scores = {record["row"]: record["fresh"] for record in Store(tmp_path).records("asked_tasks")}
    assert scores == {record["row"]: record["fresh"] for record in map(json.loads, lines)}


def test_differences_are_paired_by_seed():
    assert asked_tasks.difference({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}) == "+2.0 (-0.5 .. +4.5)"
    scores = {"a": {0: 1.0, 1: 1.0}, "b": {0: 2.0, 1: 2.0}, "`solve`": {0: 1.5, 1: 1.5}, asked_tasks.ORACLE: {0: 9.0, 1: 9.0}}
    found = asked_tasks.against_best(scores)
    assert found["b"] == "best"
    assert found["`solve`"].startswith("-0.5")


@pytest.mark.parametrize("name", TASKS)
def test_learning_rates_are_the_best_of_the_record(name):
    assert TASKS[name].rate == asked_tasks.best_rate(name, Store(RECORDS))


@pytest.mark.parametrize("page", dict.fromkeys(asked.page for asked in TASKS.values()))
def test_numbers_at_the_beginning_are_those_of_the_table(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    short = text.split("```")[0] + text.split("## In short")[1].split("\n## ")[0]
    drawn = re.search(r"<!-- .*? -->\n(.*)<!-- end", text, re.DOTALL)[1]
    numbers = re.findall(r"[-+]?\d+\.\d+", short.replace("b = 0.999", ""))
    assert len(numbers) > 5
    table = set(re.findall(r"[-+]?\d+\.\d+", drawn))
    assert not [number for number in numbers if number not in table]
