"""Learning tasks: protocols, objectives and measures against independent computations."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from meha_lab.tasks import few_shot, hyper_cleaning
from meha_lab.tasks.few_shot import Backbone, FewShot
from torch.nn.functional import cross_entropy

import meha

real = pytest.mark.skipif("MEHA_DATA" not in os.environ, reason="needs MNIST and Omniglot in the folder MEHA_DATA")


# --- hyper-cleaning ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    return hyper_cleaning("digits", seed=3)


def test_half_of_the_labels_are_drawn_anew(digits):
    changed = digits.train.labels != digits.true_labels
    assert int(digits.tampered.sum()) == 300
    assert not bool((changed & ~digits.tampered).any())
    assert 230 < int(changed.sum()) < 295  # a tenth of those drawn again are right
    exact = hyper_cleaning("digits", seed=3, exact=True)
    assert torch.equal(exact.train.labels != exact.true_labels, exact.tampered)
    assert len(exact.train.labels[exact.tampered].unique()) == 10
    assert not bool(hyper_cleaning("digits", fraction=0.0).tampered.any())


def test_parts_do_not_overlap_and_seeds_differ(digits):
    images = torch.cat([digits.train.inputs, digits.validation.inputs, digits.test.inputs])
    assert len(images.unique(dim=0)) >= 1790  # of 1797: digits has no more than a few equal images
    again, other = hyper_cleaning("digits", seed=3), hyper_cleaning("digits", seed=4)
    assert torch.equal(again.train.labels, digits.train.labels)
    assert torch.equal(again.start()[1][0].weight, digits.start()[1][0].weight)
    assert not torch.equal(other.train.inputs, digits.train.inputs)
    assert not torch.equal(other.start()[1][0].weight, digits.start()[1][0].weight)
    assert 0 <= float(images.min()) <= float(images.max()) == 1


def test_the_seed_of_the_caller_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    hyper_cleaning("digits", seed=9).start()
    assert torch.equal(torch.rand(3), expected)


def test_objectives_by_hand(digits):
    x, y = digits.start()
    x = torch.linspace(-3, 3, len(x))
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in y.parameters())

    def losses(part):
        hidden = 1 / (1 + np.exp(-(part.inputs.double().numpy() @ w1.T + b1)))
        scores = hidden @ w2.T + b2
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return -scores[np.arange(len(scores)), part.labels.numpy()]

    problem = digits.problem
    weights = 1 / (1 + np.exp(-x.double().numpy()))
    assert problem.lower(x, y).item() == pytest.approx((weights * losses(digits.train)).mean(), rel=1e-5)
    assert problem.upper(x, y).item() == pytest.approx(losses(digits.validation).mean(), rel=1e-5)


def test_f1_counts_kept_and_clean(digits):
    _, y = digits.start()
    clean = ~digits.tampered
    x = torch.where(clean, 1.0, -1.0)
    assert digits.evaluate(x, y)["f1"] == 1
    x[clean.nonzero()[:100, 0]] = -1  # 100 of 300 clean ones are lost: precision 1, recall 2/3
    assert digits.evaluate(x, y)["f1"] == pytest.approx(0.8)
    x[digits.tampered.nonzero()[:200, 0]] = 0.0  # and 200 others kept: precision 1/2
    assert digits.evaluate(x, y)["f1"] == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert digits.evaluate(torch.full_like(x, -1.0), y)["f1"] == 0
    right = digits.train.labels == digits.true_labels
    assert digits.evaluate(torch.where(right, 1.0, -1.0), y)["f1 by label"] == 1


def test_meha_cleans_digits():
    task = hyper_cleaning("digits", seed=1)
    x, y = task.start()
    before = task.evaluate(x, y)
    c = meha.schedules.Power(0.15, 1 / 6)
    method = meha.MEHA(alpha=lambda k: 60 * c(k), beta=lambda k: 2 * c(k), c=c, eta=0.125, gamma=1e4, inner_steps=6)
    solution = meha.solve(task.problem, x, y, method, max_steps=40, tol=None)
    after = task.evaluate(solution.x, solution.y)
    assert before["f1"] == pytest.approx(2 / 3)
    assert after["accuracy"] > 0.85
    assert after["f1"] > 0.8
    assert after["validation loss"] < before["validation loss"] / 3


def test_bad_arguments():
    for options, message in [
        ({"sizes": (10, 10)}, "sizes: must be three positive numbers"),
        ({"sizes": (1000, 1000, 1000)}, "at most 1797"),
        ({"fraction": 1.5}, r"fraction: must be in \[0, 1\], got 1.5"),
        ({"activation": "tanh"}, "activation: must be one of sigmoid, relu, none"),
        ({"data": "cifar"}, "'digits', 'mnist', 'fashion-mnist'"),
    ]:
        with pytest.raises(ValueError, match=message):
            hyper_cleaning(**options)


@real
def test_mnist_has_the_sizes_of_the_paper():
    task = hyper_cleaning("mnist", seed=0)
    assert [len(part.labels) for part in (task.train, task.validation, task.test)] == [5000, 5000, 10000]
    assert task.train.inputs.shape[1] == 784
    assert int(task.tampered.sum()) == 2500
    x, y = task.start()
    kept = torch.where(task.train.labels == task.true_labels, 1.0, -1.0)
    assert task.evaluate(kept, y)["f1"] == pytest.approx(0.952, abs=0.005)  # the most that labels can tell
    assert [tuple(p.shape) for p in y.parameters()] == [(300, 784), (300,), (10, 300), (10,)]
    assert x.shape == (5000,)


# --- few-shot ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shots():
    return few_shot("digits", ways=3, shots=2, queries=4, tasks=2, width=4, test_tasks=12, seed=1)


def test_a_batch_shows_each_class_in_turn(shots):
    """With classes that are told by their images, the labels must be 0, 1, ..., N - 1 in turn, and no image is used twice."""
    images = torch.arange(8 * 7, dtype=torch.uint8).reshape(8, 7, 1, 1).expand(8, 7, 28, 28).contiguous()
    task = FewShot(images, images, ways=3, shots=2, queries=4, tasks=5)
    for _, batch in zip(range(3), task.batches(), strict=False):
        support, query = ((part[:, 0, 0, 0] * 255).round().long().reshape(5, -1, 3) for part in batch[:2])
        classes = torch.cat([support, query], dim=1) // 7
        assert bool((classes == classes[:, :1]).all())  # a column is a class
        for row, places in zip(classes[:, 0], torch.cat([support, query], dim=1), strict=True):
            assert len(row.unique()) == 3
            assert len(places.unique()) == 18


def test_classes_of_training_and_test_differ(shots):
    assert shots.training.shape[:1] == shots.testing.shape[:1] == (20,)
    quarter = shots.training[0].rot90(1, (1, 2))
    assert torch.equal(shots.training[1], quarter)
    training = {tuple(image.flatten().tolist()) for image in shots.training[:, :5].flatten(0, 1)}
    assert not any(tuple(image.flatten().tolist()) in training for image in shots.testing[:, :5].flatten(0, 1))


def test_objectives_task_by_task(shots):
    x, y = shots.start()
    y = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    batch = next(iter(shots.batches()))
    for objective, images, many in ((shots.problem.lower, batch.support, 2), (shots.problem.upper, batch.query, 4)):
        features, total = x(images).detach().reshape(2, 3 * many, 4), 0.0
        for task in range(2):
            scores = features[task] @ y[task, :, :4].T + y[task, :, 4]
            total += float(cross_entropy(scores, torch.arange(3).repeat(many)))
        assert float(objective(x, y, batch).detach()) == pytest.approx(total, rel=1e-5)


METHODS = {
    "MEHA": meha.MEHA(alpha=0.01, beta=0.5, eta=0.5, gamma=1.0, c=1.0, p=0.0, inner_steps=3, warm_start=False),
    "MEHA, one loop": meha.MEHA(alpha=0.01, beta=0.5, eta=0.5, gamma=1.0, c=1.0, p=0.0),
    "RHG": meha.RHG(alpha=0.01, beta=0.5, inner_steps=3, warm_start=False, keep_graph=True),
    "RHG, recomputed": meha.RHG(alpha=0.01, beta=0.5, inner_steps=3, warm_start=False),
    "CG": meha.CG(alpha=0.01, beta=0.5, inner_steps=2, warm_start=False, cg_steps=2, damping=0.1),
    "BAMM": meha.BAMM(alpha=0.01, beta=0.5, eta=0.1, mu=0.3, strategy=None),
    "IAPTT": meha.IAPTT(alpha=0.01, beta=0.5, eta=0.1, inner_steps=2, keep_graph=True),
    "BOME": meha.BOME(alpha=0.01, beta=0.5, eta=0.5, inner_steps=2),
    "F2SA": meha.F2SA(alpha=0.01, beta=0.5, eta=0.5, inner_steps=2, c=0.5, warm_start=False),
    "VPBGD": meha.VPBGD(alpha=0.01, beta=0.5, eta=0.5, inner_steps=2, c=0.5),
}


@pytest.mark.parametrize("name", METHODS)
def test_kept_features_change_nothing(name, shots):
    """Every method takes the same steps as with features that are computed each time."""

    def loss(x, y, batch, part):
        images = getattr(batch, part)
        features = torch.nn.functional.pad(x(images), (0, 1), value=1.0).reshape(2, -1, 5)
        scores = features @ y.transpose(1, 2)
        labels = torch.arange(3).repeat(scores.shape[1] // 3)
        return sum(cross_entropy(scores[task], labels) for task in range(2))

    plain = meha.Problem(lambda x, y, b: loss(x, y, b, "query"), lambda x, y, b: loss(x, y, b, "support"))
    runs = [METHODS[name].start(problem, *shots.start()) for problem in (shots.problem, plain)]
    for _, batch in zip(range(3), shots.batches(), strict=False):
        numbers = [run.step(batch) for run in runs]
        assert dict(numbers[0]) == pytest.approx(dict(numbers[1]), rel=1e-3, abs=1e-4)
    for a, b in zip(runs[0].x.parameters(), runs[1].x.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_step_of_meha_runs_the_backbone_once(shots):
    run = METHODS["MEHA"].start(shots.problem, *shots.start())
    calls = []
    run.x.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    batches = iter(shots.batches())
    run.step(next(batches))
    calls.clear()
    run.step(next(batches))
    assert sorted(calls) == [2 * 3 * 2, 2 * 3 * 4]  # support and query


def test_accuracy_equals_that_of_heads_trained_one_by_one(shots):
    x, _ = shots.start()
    generator = torch.Generator().manual_seed(12345)
    places = shots.draw(shots.testing, 12, generator)
    batch = shots.images(shots.testing, places)
    with torch.no_grad():
        support, query = x(batch.support).reshape(12, 6, 4), x(batch.query).reshape(12, 12, 4)
    right = 0
    for task in range(12):
        head = torch.nn.Linear(4, 3)
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            cross_entropy(head(support[task]), torch.arange(3).repeat(2)).backward()
            optimizer.step()
        right += int((head(query[task]).argmax(dim=1) == torch.arange(3).repeat(4)).sum())
    assert shots.evaluate(x)["accuracy"] == pytest.approx(right / 144, abs=0.015)


def test_training_raises_the_accuracy():
    task = few_shot("digits", ways=3, tasks=4, width=8, test_tasks=30)
    adam = torch.optim.Adam
    method = meha.MEHA(
        x_optimizer=lambda leaves: adam(leaves, lr=1e-2),
        beta=0.5,
        eta=0.5,
        gamma=1.0,
        c=1.0,
        p=0.0,
        inner_steps=3,
        warm_start=False,
    )
    run = method.start(task.problem, *task.start())
    before = task.evaluate(run.x)["accuracy"]
    for _, batch in zip(range(15), task.batches(), strict=False):
        run.step(batch)
    assert task.evaluate(run.x)["accuracy"] > before + 0.05


def test_heads_of_a_pool_are_kept(shots):
    task = FewShot(shots.training, shots.testing, ways=3, shots=2, queries=4, tasks=2, width=4, pool=5)
    x, y = task.start()
    assert y.shape == (5, 3, 5)
    run = METHODS["MEHA, one loop"].start(task.problem, x, y)
    batch = next(iter(task.batches()))
    before = run.y.clone()
    run.step(batch)
    moved = (run.y - before).abs().sum(dim=(1, 2)) > 0
    assert moved.nonzero()[:, 0].tolist() == sorted(batch.heads.tolist())
    seen = {}
    for _, batch in zip(range(12), task.batches(), strict=False):
        for head, images in zip(batch.heads.tolist(), batch.support.reshape(2, -1), strict=True):
            assert torch.equal(seen.setdefault(head, images), images)  # a task keeps its images
    assert len(seen) == 5


def test_batches_go_on_from_a_state(shots):
    batches = shots.batches()
    stream = iter(batches)
    next(stream)
    state = batches.state_dict()
    expected = next(stream)
    other = shots.batches()
    other.load_state_dict(state)
    assert torch.equal(next(iter(other)).query, expected.query)


def test_bad_arguments_of_few_shot(shots):
    for options, message in [
        ({"ways": 21}, "ways: must be at most 20"),
        ({"ways": 0}, "ways"),
        ({"queries": 174}, "shots \\+ queries: must be at most 174"),
        ({"pool": 3}, "pool: must be 0 or at least tasks = 16"),
        ({"data": "imagenet"}, "data: must be 'omniglot' or 'digits'"),
    ]:
        with pytest.raises(ValueError, match=message):
            few_shot(**{"data": "digits", **options})


@real
def test_omniglot_has_turned_characters(tmp_path):
    task = few_shot(ways=20, seed=0)
    assert task.training.shape == (4800, 20, 28, 28)
    assert task.testing.shape == (1692, 20, 28, 28)
    assert task.start()[1].shape == (16, 20, 33)


def test_kept_features_are_those_of_the_network_and_the_images(shots):
    """Networks that take each other's place in memory, new numbers behind autograd's back, and changed images are noticed."""
    _, y = shots.start()
    y = torch.ones_like(y) * torch.arange(5.0)
    batch = next(iter(shots.batches()))

    def both(x):
        fresh = dataclasses.replace(shots)
        return shots.problem.upper(x, y, batch).item(), fresh.problem.upper(x, y, batch).item()

    for seed in range(4):
        torch.manual_seed(seed)
        kept, true = both(Backbone(4))
        assert kept == true
    x = Backbone(4)
    both(x)
    x[0].weight.data = torch.randn_like(x[0].weight)
    kept, true = both(x)
    assert kept == true
    batch.query.mul_(0.5)
    kept, true = both(x)
    assert kept == true


def test_a_small_test_set_does_not_decide_the_number_of_classes():
    for seed in range(5):
        task = hyper_cleaning("Digits", sizes=(200, 100, 3), seed=seed)
        x, y = task.start()
        assert y[2].out_features == 10
        assert task.problem.lower(x, y).item() > 0


def test_hyper_cleaning_can_be_checkpointed(tmp_path):
    task = hyper_cleaning("digits", sizes=(50, 50, 50))
    method = meha.MEHA(alpha=5.0, beta=0.1, eta=0.1, gamma=10.0, c=1.0, p=0.0)
    options = dict(batches=task.batches(), checkpoint=meha.Checkpoint(tmp_path / "run.pt", every=2), tol=None)
    meha.solve(task.problem, *task.start(), method, max_steps=4, **options)
    resumed = meha.solve(task.problem, *task.start(), method, max_steps=6, **options)
    whole = meha.solve(task.problem, *task.start(), method, max_steps=6, tol=None)
    assert torch.equal(resumed.x, whole.x)
