"""Architecture search at work: batches, training and searches in stages against loops written out here."""

import copy
import itertools
from collections import Counter
from functools import partial

import cells_by_hand as by_hand
import pytest
import torch
from meha_lab.tasks.architecture_search import (
    OPERATIONS,
    FinalTraining,
    Genotype,
    LowerDescent,
    SearchSpace,
    Stage,
    architecture_search,
    search,
    train_final,
)
from meha_lab.tasks.architecture_search.data import Batches, Pictures, Scaling, crop_and_flip, cut_out
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import meha

NAMES = list(OPERATIONS)
SMALL = Genotype((("skip", 0), ("separable conv 3x3", 1)), (("max pool 3x3", 0), ("skip", 1)))


def tiny(**options):
    small = {"size": 48, "channels": 4, "cells": 3, "batch": 8, "space": SearchSpace(nodes=1)}
    return architecture_search("digits", **{**small, **options})


# --- batches ---------------------------------------------------------------------------------------------------------------


def test_crops_and_flips_move_whole_images():
    """Each result is one of 2 x 3 x 3 windows of the image in a frame of zeros, and all of them occur."""
    images = torch.randint(1, 256, (1, 2, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = images.repeat(600, 1, 1, 1)
    found = crop_and_flip(images, torch.Generator().manual_seed(1))
    framed = torch.zeros(2, 10, 14, dtype=torch.uint8)  # an eighth of the width, as a whole number: 1
    framed[:, 1:9, 1:13] = images[0]
    allowed = {}
    for row, column, flip in itertools.product(range(3), range(3), (False, True)):
        window = framed[:, row : row + 8, column : column + 12]
        allowed[tuple((window.flip(2) if flip else window).flatten().tolist())] = (row, column, flip)
    counts = Counter(allowed[tuple(image.flatten().tolist())] for image in found)
    assert len(counts) == 18
    assert 10 < min(counts.values()) <= max(counts.values()) < 70  # 33 on average
    assert found.dtype == torch.uint8
    assert found.shape == images.shape


def test_cutout_erases_a_square():
    """Side 4 of 8, around each of the 6 x 8 pixels, as far as it lies inside."""
    image = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(0)) + 1
    found = cut_out(image.repeat(1500, 1, 1, 1), torch.Generator().manual_seed(1))
    allowed = {}
    for row, column in itertools.product(range(6), range(8)):
        cut = image.clone()
        for i, j in itertools.product(range(row - 2, row + 2), range(column - 2, column + 2)):
            if 0 <= i < 6 and 0 <= j < 8:
                cut[:, i, j] = 0
        allowed[tuple(cut.flatten().tolist())] = (row, column)
    assert {allowed[tuple(one.flatten().tolist())] for one in found} == set(allowed.values())


def test_images_are_scaled():
    images = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 4
    scaled = Scaling.of(images)(images)
    torch.testing.assert_close(scaled.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(scaled.transpose(0, 1).flatten(1).std(dim=1), torch.ones(3))
    torch.testing.assert_close(Scaling.of(images)(images[:5]), scaled[:5])


def test_an_epoch_has_every_image_once():
    """Two sets of 13 and 8 images, four of each in a batch: new orders after three and after two batches."""
    sets = [Pictures(torch.arange(count)[:, None], torch.arange(count)) for count in (13, 8)]
    batches = iter(Batches(sets, 4, lambda drawn, count, generator: (*drawn, count), seed=0))
    seen = [next(batches) for _ in range(12)]
    assert [count for *_, count in seen] == list(range(12))
    assert all(torch.equal(part.images[:, 0], part.labels) for *parts, _ in seen for part in parts)
    for which, size, number in ((0, 13, 3), (1, 8, 2)):
        epochs = [torch.cat([one[which].labels for one in seen[i : i + number]]).tolist() for i in range(0, 12, number)]
        assert all(len(set(epoch)) == 4 * number for epoch in epochs)
        assert len(set(map(tuple, epochs))) == len(epochs)
        assert set(itertools.chain(*epochs)) == set(range(size))
    other = iter(Batches(sets, 4, lambda drawn, count, generator: (*drawn, count), seed=1))
    assert any(not torch.equal(next(other)[0].labels, one[0].labels) for one in seen)


def test_batches_go_on_where_they_were(tmp_path):
    task = tiny(skip_dropout=0.5, steps=20)
    final = task.final(SMALL, epochs=2, channels=4, cells=2, batch=8)
    for make in (task.batches, final.batches):
        batches = make()
        stream = iter(batches)
        for _ in range(4):
            next(stream)  # four of three in an epoch
        torch.save(batches.state_dict(), tmp_path / "place")
        expected = [next(stream) for _ in range(7)]
        again = make()
        next(iter(again))
        again.load_state_dict(torch.load(tmp_path / "place", weights_only=True))
        stream = iter(again)
        for batch in expected:
            assert all(torch.equal(a, b) for a, b in zip(next(stream), batch, strict=True))


def test_dropout_of_skip_connections_falls():
    task = tiny(skip_dropout=0.4, steps=5, cells=2, space=SearchSpace(nodes=2))
    batches = list(itertools.islice(task.batches(), 7))
    assert [float(batch.dropout) for batch in batches] == pytest.approx([0.4, 0.32, 0.24, 0.16, 0.08, 0, 0])
    noise = torch.stack([batch.noise for batch in batches])
    assert noise.shape == (7, 8, 2, 5)
    assert float(noise.min()) >= 0
    assert 0.4 < float(noise.mean()) < 0.6
    assert len(noise.flatten().unique()) > 0.99 * noise.numel()
    assert next(iter(tiny().batches())).noise is None


def test_drop_path_grows_and_keeps_the_mean():
    pictures = Pictures(torch.zeros(400, 1, 4, 4, dtype=torch.uint8), torch.zeros(400, dtype=torch.int64))
    task = FinalTraining(SMALL, pictures, pictures, channels=2, cells=5, batch=400, epochs=4, drop_path=0.6)
    assert task.steps == 4
    for rate, batch in zip((0, 0.15, 0.3, 0.45, 0.6, 0.6), task.batches(), strict=False):
        masks = batch.masks
        assert masks.shape == (400, 5, 2)
        kept = masks[masks > 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
        assert float((masks == 0).float().mean()) == pytest.approx(rate, abs=0.04)
        assert float(masks.mean()) == pytest.approx(1, abs=0.1)


def test_cutout_is_done_after_scaling():
    pictures = Pictures(torch.full((64, 1, 8, 8), 200, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64))
    pictures.images[::2] = 100
    for cutout in (False, True):
        task = FinalTraining(SMALL, pictures, pictures, channels=2, cells=2, batch=64, cutout=cutout)
        images = next(iter(task.batches())).images
        assert bool((images == 0).any()) == cutout  # the mean of all images; their own numbers are -1, 1 and the frame


# --- training --------------------------------------------------------------------------------------------------------------


def descend(loss, network, batches, count, lr, last, period):
    """SGD as in DARTS, by torch alone."""
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9, weight_decay=3e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=period, eta_min=last) if period else None
    for batch in itertools.islice(batches, count):
        optimizer.zero_grad()
        loss(network, batch).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_trained(found, expected, start):
    """The same numbers up to rounding, which training magnifies, and not those of the start."""
    for (name, a), b, c in zip(found.named_parameters(), expected.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        assert name.startswith("linear") or not torch.equal(a, c)


def test_lower_descent_is_sgd():
    task = tiny()
    x, y = task.start()
    expected, start = copy.deepcopy(y), copy.deepcopy(y)
    descend(lambda y, batch: task.problem.lower(x, y, batch), expected, task.batches(), 6, lr=0.1, last=0.01, period=6)
    schedule = partial(CosineAnnealingLR, T_max=6, eta_min=0.01)
    sgd = meha.Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=3e-4, clip=5.0, scheduler=schedule)
    before = {name: part.clone() for name, part in x.items()}
    found = meha.solve(task.problem, x, y, LowerDescent(y_optimizer=sgd), max_steps=6, tol=None, batches=task.batches())
    assert_trained(found.y, expected, start)
    assert all(torch.equal(found.x[name], before[name]) for name in before)
    assert (found.counts.lower, found.counts.upper, found.counts.hvp) == (6, 0, 0)
    assert len(found.history["lower"]) == 6


def test_the_final_network_is_trained_as_in_darts():
    """The loss of both heads with factors of drop path, and a rate that falls to 0."""
    task = tiny().final(SMALL, epochs=1.5, channels=4, cells=3, batch=8, drop_path=0.5)
    assert task.steps == 9
    _, network = task.start()
    expected, start = copy.deepcopy(network), copy.deepcopy(network)
    rates = []

    def loss(network, batch):
        main, seen = by_hand.final_network(network, SMALL, batch.images, 3, masks=batch.masks)
        rates.append(batch.masks.unique().tolist())
        return cross_entropy(main, batch.labels) + 0.4 * cross_entropy(network.auxiliary(seen), batch.labels)

    descend(loss, expected, task.batches(), 9, lr=0.05, last=0.0, period=9)
    assert rates[0] == [1]
    assert rates[-1] == pytest.approx([0, 1 / (1 - 0.5 * 8 / 9)])
    found = train_final(task, lr=0.05)
    assert_trained(found.network, expected, start)
    assert found.scores == task.evaluate(None, found.network)
    assert found.parameters == found.network.parameter_count < sum(p.numel() for p in found.network.parameters())
    assert len(found.history["lower"]) == 9
    assert found.network.stem[1].running_mean.abs().sum() > 0


# --- searches --------------------------------------------------------------------------------------------------------------


def test_the_warm_up_moves_y_alone():
    """Three steps of y, then one of x along F_x and one of y: DARTS of order 1, by hand."""
    task = tiny()
    x, y = task.start()
    batches = iter(task.batches())
    descend(lambda y, batch: task.problem.lower(x, y, batch), y, batches, 3, lr=0.025, last=0.0, period=None)
    batch = next(batches)
    x = {name: part.requires_grad_() for name, part in x.items()}
    gradients = torch.autograd.grad(task.problem.upper(x, y, batch), list(x.values()))
    expected = {name: (part - 2.0 * g).detach() for (name, part), g in zip(x.items(), gradients, strict=True)}
    slopes = torch.autograd.grad(task.problem.lower(expected, y, batch), list(y.parameters()))
    method = meha.DARTS(order=1, x_optimizer=partial(torch.optim.SGD, lr=2.0), y_optimizer=partial(torch.optim.SGD, lr=0.1))
    seen = []
    found = search(task, lambda n: seen.append(n) or method, [Stage(1, warm_up=3)])
    assert seen == [1]
    for name, part in expected.items():
        torch.testing.assert_close(found.x[name], part, rtol=1e-3, atol=1e-5)
        assert float((found.x[name] - x[name].detach()).abs().max()) > 1e-3
    for a, b, slope in zip(found.y.parameters(), y.parameters(), slopes, strict=True):
        torch.testing.assert_close(a, b.detach() - 0.1 * slope, rtol=1e-3, atol=1e-4)
    assert (found.counts.upper, found.counts.lower) == (1, 3 + 1)
    assert found.history["step"] == [1]
    assert found.genotype == task.genotype(found.x)
    assert found.outcome == "max steps"


def test_the_warm_up_takes_the_optimizer_that_it_is_given():
    task = tiny()
    _, y = task.start()
    still = partial(torch.optim.SGD, lr=0.0)
    found = search(task, lambda n: LowerDescent(y_optimizer=still), [Stage(2, warm_up=2)], warm_up=still)
    assert all(torch.equal(a, b) for a, b in zip(found.y.parameters(), y.parameters(), strict=True))
    moved = search(task, lambda n: LowerDescent(y_optimizer=still), [Stage(2, warm_up=2)])
    assert not torch.equal(moved.y.linear.weight, y.linear.weight)


def test_meha_searches():
    task = tiny(size=160, batch=16)
    x, y = task.start()
    before = task.evaluate(x, y)["validation loss"]
    adam = partial(torch.optim.Adam, lr=0.03)
    sgd = meha.Optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    method = meha.MEHA(gamma=200.0, c=2.0, p=0.49, gradients=2, x_optimizer=adam, y_optimizer=sgd, theta_optimizer=sgd)
    found = search(task, lambda n: method, [Stage(20)])
    after = found.task.evaluate(found.x, found.y)
    assert after["validation loss"] < before - 0.2
    assert after["entropy"] < found.history["entropy"][0] < 2.08
    assert all(float((found.x[name] - x[name]).abs().max()) > 0.05 for name in x)
    assert found.counts.upper + found.counts.lower == 3 * 20
    assert len(found.history["upper"]) == 20


def test_the_course_of_p_darts():
    """Each stage keeps the strongest operations of the one before, on a deeper network."""
    task = tiny(most_skips=0, space=SearchSpace(nodes=2), size=32)
    adam, sgd = partial(torch.optim.Adam, lr=0.05), partial(torch.optim.SGD, lr=0.05)
    stages = [Stage(2, 1, 1, 5, 0.0), Stage(2, 1, 2, 3, 0.4), Stage(2, 1, 3, None, 0.7)]
    seen = []

    def look(run, info):
        seen.append((run.y, {name: part.clone() for name, part in run.x.items()}, run.batch))

    method = meha.DARTS(order=1, x_optimizer=adam, y_optimizer=sgd)
    found = search(task, lambda n: method, stages, callbacks=[look])
    assert [len(network.cells) for network, *_ in seen] == [1, 1, 2, 2, 3, 3]
    assert [tuple(x["normal"].shape) for _, x, _ in seen] == [(5, 8)] * 2 + [(5, 5)] * 2 + [(5, 3)] * 2
    rates = [batch.dropout for *_, batch in seen]
    assert rates[:2] == [None, None]  # a warm-up step comes before the two of each stage
    assert [float(rate) for rate in rates[2:]] == pytest.approx([0.4 * 2 / 3, 0.4 / 3, 0.7 * 2 / 3, 0.7 / 3])
    kept = {kind: [NAMES] * 5 for kind in ("normal", "reduction")}
    for last, count, later in ((1, 5, 3), (3, 3, 5)):
        x, network = seen[last][1], seen[later][0]
        for kind in kept:
            rows = zip(kept[kind], x[kind].tolist(), strict=True)
            best = [sorted(zip(row, names, strict=True))[-count:] for names, row in rows]
            kept[kind] = [[name for name in NAMES if name in dict(map(reversed, row))] for row in best]
        for cell, (_, reduction) in zip(network.cells, network.plan, strict=True):
            own = kept["reduction" if reduction else "normal"]
            for edges, fan in zip(([0, 2], [1, 3], [4]), cell.fans, strict=True):
                for column, name in enumerate(NAMES):
                    assert fan.edges[column] == [place for place, edge in enumerate(edges) if name in own[edge]]
                    assert len(fan.operations[column]) == len(fan.edges[column])
    assert found.task.remaining == {kind: tuple(map(tuple, rows)) for kind, rows in kept.items()}
    assert found.genotype == found.task.genotype(found.x)
    assert found.genotype.skips == 0
    assert (found.counts.lower, found.counts.upper) == (3 + 6, 6)
    assert found.history["step"] == [1, 2] * 3


def test_a_finished_search_is_read_from_its_folder(tmp_path):
    task = tiny()
    sgd = partial(torch.optim.SGD, lr=0.05)
    method = meha.DARTS(order=1, x_optimizer=sgd, y_optimizer=sgd)
    calls = []

    def run():
        return search(task, lambda n: method, [Stage(2, 1)], folder=tmp_path, callbacks=[lambda *_: calls.append(1)])

    first, second = run(), run()
    assert len(calls) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage-0.pt", "warm-up-0.pt"]
    assert all(torch.equal(first.x[name], second.x[name]) for name in first.x)
    assert all(torch.equal(a, b) for a, b in zip(first.y.parameters(), second.y.parameters(), strict=True))
    assert (first.counts, first.history) == (second.counts, second.history)
