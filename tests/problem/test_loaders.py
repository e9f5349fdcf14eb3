"""Endless loaders, and how their position is saved and restored."""

import itertools
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import meha
from meha.problem.loaders import (
    Accumulated,
    Endless,
    Indices,
    MicroBatches,
    Together,
    check_resumable,
    from_start,
    joined,
    random_states,
    set_random_states,
)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_endless():
    assert take(Endless([1, 2, 3]), 7) == [1, 2, 3, 1, 2, 3, 1]
    assert list(Endless([])) == []
    assert list(Endless(iter([1, 2]))) == [1, 2]  # cannot restart
    assert take(Endless(torch.arange(2)), 3) == [0, 1, 0]


def shuffled(generator=None):
    return DataLoader(list(range(10)), batch_size=3, shuffle=True, generator=generator)


@pytest.mark.parametrize("own", [False, True])
def test_a_shuffled_loader_resumes_despite_other_draws(own):
    def loader(seed):
        return Endless(shuffled(torch.Generator().manual_seed(seed) if own else None))

    torch.manual_seed(0)
    batches, seen = loader(0), []
    for _ in range(9):
        seen += [(batches.state_dict(), random_states(batches.loader), next(batches).tolist())]
        torch.rand(3)
    assert len({str(batch) for *_, batch in seen}) > 6
    for k in (0, 1, 3, 4, 8):
        place, states, _ = seen[k]
        other = loader(1)
        other.load_state_dict(place)
        set_random_states(states, other.loader)
        for *_, expected in seen[k:]:
            assert next(other).tolist() == expected
            torch.rand(3)


def test_together_has_loaders_of_unequal_lengths():
    batches = Together(clean=[1, 2], noisy=(c for c in "abcde"))
    seen = take(batches, 5)
    with pytest.raises(StopIteration):  # a generator cannot restart
        next(batches)
    assert [batch.clean for batch in seen] == [1, 2, 1, 2, 1]
    assert "".join(batch.noisy for batch in seen) == "abcde"
    clean, noisy = seen[-1]
    assert (clean, noisy) == (1, "e")


def test_together_resumes():
    """Two loaders share one generator, and each is in the middle of an epoch."""

    def build():
        own = torch.Generator().manual_seed(2)
        return Together(a=shuffled(own), b=DataLoader(list(range(7)), batch_size=2, shuffle=True, generator=own))

    batches = build()
    take(batches, 6)
    place, states = batches.state_dict(), random_states(batches)
    expected = [[part.tolist() for part in batch] for batch in take(batches, 6)]
    other = build()
    other.load_state_dict(place)
    set_random_states(states, other)
    assert [[part.tolist() for part in batch] for batch in take(other, 6)] == expected
    with pytest.raises(ValueError, match=r"the state is for loaders \['a', 'b'\], got \['a'\]"):
        Together(a=[1]).load_state_dict(place)


# Epochs


class Stream(IterableDataset):
    """Numbers that nobody has counted."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def streamed(count):
    return DataLoader(Stream(count), batch_size=None)


def epochs(loader, count):
    return [list(loader) for _ in range(count)]


def test_a_for_loop_ends_with_the_epoch_of_the_longest_loader():
    """The batches are those of next, which are those of two cycles."""
    batches = Together(list("abc"), [1, 2, 3, 4, 5])
    assert len(batches) == 5
    found = epochs(batches, 3)
    assert [len(epoch) for epoch in found] == [5, 5, 5]
    cycles = list(itertools.islice(zip(itertools.cycle("abc"), itertools.cycle([1, 2, 3, 4, 5]), strict=False), 15))
    assert [batch for epoch in found for batch in epoch] == cycles
    assert take(Together(list("abc"), [1, 2, 3, 4, 5]), 15) == cycles
    assert take(Endless(Together(list("abc"), [1, 2, 3, 4, 5])), 15) == cycles
    assert all(type(batch) is tuple for batch in cycles)


def test_a_loop_that_was_broken_off_goes_on():
    batches = Together([1, 2, 3, 4], [5, 6])
    assert [first for first, _ in itertools.islice(batches, 3)] == [1, 2, 3]
    assert list(batches) == [(4, 6)]
    assert [first for first, _ in batches] == [1, 2, 3, 4]
    take(batches, 4)  # a whole epoch by next
    assert len(list(batches)) == 4
    take(batches, 5)
    assert len(list(batches)) == 3
    for batch in batches:  # a break in the last turn
        if batch[0] == 4:
            break
    assert len(list(batches)) == 4


def test_loaders_without_a_length():
    batches = Together(streamed(3), streamed(2))
    with pytest.raises(TypeError, match="Together: no loader has a length, so an epoch ends where the first of them does"):
        len(batches)
    assert batches, "it is true"
    assert epochs(batches, 2) == [[(0, 0), (1, 1), (2, 0)], [(0, 1), (1, 0), (2, 1)]]
    assert take(batches, 4) == [(0, 0), (1, 1), (2, 0), (0, 1)]
    assert list(batches) == [(1, 0), (2, 1)]
    assert epochs(Together(streamed(9), [1, 2]), 2) == [[(0, 1), (1, 2)], [(2, 1), (3, 2)]]  # one has a length
    assert epochs(Together(iter([1, 2, 3]), iter("ab")), 2) == [[(1, "a"), (2, "b")], []]  # iterators cannot restart
    assert epochs(Together([1, 2, 3], iter("ab")), 2) == [[(1, "a"), (2, "b")], []]
    with pytest.raises(ValueError, match="batches: loader 2 yields nothing; pass a loader with at least one batch"):
        list(Together([1], []))
    for empty in (Together(first=[]), Together(first=streamed(0))):
        with pytest.raises(ValueError, match="batches: first yields nothing"):
            list(empty)


def test_accumulated_ends_with_the_epoch():
    """Five batches in groups of two: three groups hold a pass, and the next epoch goes on within the second pass."""
    batches = Accumulated([1, 2, 3, 4, 5], 2)
    assert len(batches) == 3
    assert epochs(batches, 2) == [[(1, 2), (3, 4), (5, 1)], [(2, 3), (4, 5), (1, 2)]]
    assert take(Accumulated([1, 2, 3, 4, 5], 2), 6) == take(Endless(Accumulated([1, 2, 3, 4, 5], 2)), 6)
    assert epochs(Accumulated(streamed(5), 2), 2) == [[(0, 1), (2, 3)]] * 2  # without a length, the last one is dropped
    assert take(Accumulated(streamed(5), 2), 3)[2] == (4, 0)
    pairs = Accumulated(Together([1, 2, 3], list("ab")), 2)
    assert epochs(pairs, 2) == [[((1, "a"), (2, "b")), ((3, "a"), (1, "b"))], [((2, "a"), (3, "b")), ((1, "a"), (2, "b"))]]
    assert len(Together(Accumulated(range(6), 3), [1])) == 2
    with pytest.raises(TypeError, match="Accumulated: no loader has a length"):
        len(Accumulated(streamed(5), 2))


def looped(batches, after, count):
    """Batches of a loop over epochs with random numbers in between, and the state after some of them."""
    seen, state = [], None
    for epoch in range(count):
        for batch in itertools.islice(batches, count - len(seen)):
            seen.append((epoch, plain(batch)))
            torch.rand(2)
            if len(seen) == after:
                state = batches.state_dict(), random_states(batches)
    return seen, state


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: Together(numbered(seed), shuffled()),
        lambda seed: Together(shuffled(), DataLoader(Stream(11), batch_size=3)),
        lambda seed: Together(DataLoader(Stream(11), batch_size=3), shuffled()),
        lambda seed: Accumulated(Together(a=numbered(seed), b=shuffled()), 3),
        lambda seed: Accumulated(DataLoader(Stream(11), batch_size=2), 2),
        lambda seed: Together(Accumulated(numbered(seed), 2), shuffled()),
    ],
    ids=["two", "a stream second", "a stream first", "accumulated", "an accumulated stream", "in Together"],
)
def test_a_loop_over_epochs_resumes_from_everywhere(build):
    """In the middle of an epoch, in its last turn, and in the first of the next."""
    torch.manual_seed(0)
    whole, _ = looped(build(0), 0, 14)
    assert len({epoch for epoch, _ in whole}) > 2
    for after in range(1, 13):
        torch.manual_seed(0)
        _, (state, states) = looped(build(0), after, after)
        torch.manual_seed(1)
        other = build(1)
        take(other, 2)
        other.load_state_dict(state)
        set_random_states(states, other)
        first = whole[after - 1][0]  # the loop begins with the epoch that it was in
        rest = [(first + i, plain(batch)) for i in range(14) for batch in _with_numbers(other)]
        assert rest[: 14 - after] == whole[after:]


def _with_numbers(batches):
    for batch in batches:
        yield batch
        torch.rand(2)


def test_a_loop_tells_samplers_the_number_of_the_epoch():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)
    reference = DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)
    batches = Together(DataLoader(range(8), 2, sampler=sampler), [1])
    for epoch in range(3):
        reference.set_epoch(epoch)
        assert [number for batch, _ in batches for number in batch.tolist()] == list(reference)


def test_loaders_in_a_tuple_are_joined():
    loaders = DataLoader([1.0, 2.0, 3.0], batch_size=1), DataLoader([4.0, 5.0], batch_size=1)
    problem = meha.Problem(
        upper=lambda x, y, batch: (y - batch[1]).square().sum() + x.square().sum(),
        lower=lambda x, y, batch: (y - x - batch[0]).square().sum(),
    )
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    one, seen = torch.ones(1), []
    for batches in (loaders, Together(*loaders)):
        solution = meha.solve(
            problem, one, one, method, batches=batches, max_steps=5, callbacks=lambda run, info: seen.append(run.batch)
        )
        assert solution.refit(steps=2, batches=batches).upper == solution.refit(steps=2, batches=loaders).upper
    assert seen[:5] == seen[5:] == [(1, 4), (2, 5), (3, 4), (1, 5), (2, 4)]
    assert len(Accumulated(loaders, 2)) == 2
    for kept in ((torch.zeros(1), torch.ones(1)), ([1], [2]), ("a", "b"), (np.zeros(1),), ({}, {}), (), (iter([1]), 2)):
        assert joined(kept) is kept
    assert joined(pair := Pair(iter([1]), iter([2]))) is pair


def test_a_loader_from_the_start_leaves_the_place_where_it_is():
    nested = Accumulated(Together([1, 2, 3], Endless(["a", "b"])), 2)
    first = take(nested, 2)
    state = nested.state_dict()
    assert take(from_start(nested), 2) == first
    assert nested.state_dict() == state


def test_random_states():
    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand(), np.random.randn(), own.initial_seed(), norm(own)

    def norm(generator):
        return torch.randn(1, generator=generator).item()

    own = torch.Generator().manual_seed(3)
    np.random.randn()  # numpy draws normal numbers in pairs, and keeps the second
    loader = shuffled(own)
    states = random_states(loader)
    first = draw()
    assert draw() != first
    set_random_states(states, loader)
    assert draw() == first


def test_arguments_that_are_not_loaders():
    with pytest.raises(TypeError, match="loader: expected an iterable of batches, got int"):
        Endless(3)
    with pytest.raises(TypeError, match="Together: noisy must be an iterable of batches, got int"):
        Together(clean=[1], noisy=3)
    with pytest.raises(ValueError, match=r"Together: expected loaders in order, .* got none"):
        Together()
    with pytest.raises(TypeError, match="loader: expected an iterable of batches, got int"):
        Accumulated(3, 2)
    with pytest.raises(ValueError, match="Accumulated: n: must be a whole number of at least 1, got 0"):
        Accumulated([1], 0)


def test_accumulated_groups_successive_batches_across_epochs():
    batches = Accumulated([1, 2, 3, 4, 5], 2)
    assert take(batches, 5) == [(1, 2), (3, 4), (5, 1), (2, 3), (4, 5)]
    assert isinstance(next(batches), MicroBatches)
    assert take(Accumulated(torch.arange(2), 3), 1) == [(0, 1, 0)]


def test_accumulated_drops_an_incomplete_group_and_ends():
    batches = Accumulated(iter(range(5)), 2)
    assert list(batches) == [(0, 1), (2, 3)]
    assert list(batches) == []
    assert list(Accumulated([], 2)) == []


Pair = namedtuple("Pair", ["first", "second"])


def plain(batch):
    return [plain(part) for part in batch] if isinstance(batch, tuple) else batch.tolist()


def numbered(seed):
    return DataLoader(list(range(7)), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: Accumulated(shuffled(), 3),
        lambda seed: Accumulated(numbered(seed), 3),
        lambda seed: Accumulated(Together(a=numbered(seed), b=shuffled()), 3),
        lambda seed: Together(a=Accumulated(numbered(seed), 3), b=shuffled()),
        lambda seed: Endless(Accumulated(Endless(numbered(seed)), 3)),
    ],
    ids=["shared generator", "own generator", "of Together", "in Together", "nested"],
)
def test_accumulated_resumes_in_the_middle_of_an_epoch(build):
    """An epoch has four batches, a group three; the resumed process has drawn other random numbers."""
    torch.manual_seed(0)
    batches, seen = build(0), []
    for _ in range(9):
        seen += [(batches.state_dict(), random_states(batches), plain(next(batches)))]
        torch.rand(3)
    assert len({str(group) for *_, group in seen}) == 9
    for k in (0, 1, 2, 5, 8):
        position, states, _ = seen[k]
        torch.manual_seed(1)
        other = build(1)
        take(other, 2)
        other.load_state_dict(position)
        set_random_states(states, other)
        for *_, expected in seen[k:]:
            assert plain(next(other)) == expected
            torch.rand(3)


def test_accumulated_refuses_the_state_of_other_groups():
    with pytest.raises(ValueError, match="the state is for Accumulated with n = 2, got n = 3"):
        Accumulated([1], 3).load_state_dict(Accumulated([1], 2).state_dict())


def test_check_resumable_looks_through_loaders():
    check_resumable(Accumulated(Together(a=[1], b=Counting(3)), 2), "batches")
    for once in (Accumulated(iter([1]), 2), Endless(iter([1])), Together(a=Accumulated(iter([1]), 2))):
        with pytest.raises(TypeError, match="list_iterator can be iterated over only once"):
            check_resumable(once, "batches")


def test_solve_takes_accumulated_batches_from_a_checkpoint(tmp_path):
    """A run that is stopped and resumed sees the groups of an uninterrupted one, with the numbers of their means."""
    problem = meha.Problem(
        upper=lambda x, y, batch: (y - batch.double().mean()).square().sum() + x.square().sum(),
        lower=lambda x, y, batch: (y - x - batch.double().mean()).square().sum(),
    )
    method, one = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0), torch.ones(1, dtype=torch.float64)

    def solve(steps, **options):
        return meha.solve(problem, one, one, method, batches=Accumulated(numbered(0), 3), max_steps=steps, tol=None, **options)

    whole = solve(9)
    solve(5, checkpoint=tmp_path / "run.pt")
    resumed = solve(9, checkpoint=tmp_path / "run.pt")
    assert torch.equal(resumed.x, whole.x)
    assert torch.equal(resumed.y, whole.y)
    run, batches = method.start(problem, one, one), Endless(numbered(0))
    for _ in range(9):
        run.step(MicroBatches(take(batches, 3)))
    assert torch.equal(run.x, whole.x)


def test_solve_takes_loaders_together():
    seen = []
    problem = meha.Problem(
        upper=lambda x, y, batch: (y - batch.clean).square().sum() + x.square().sum(),
        lower=lambda x, y, batch: (y - x - batch.noisy).square().sum(),
    )
    method = meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    batches = Together(clean=torch.tensor([1.0, 2.0]), noisy=torch.tensor([3.0, 4.0, 5.0]))
    one = torch.ones(1)
    meha.solve(problem, one, one, method, batches=batches, max_steps=4, callbacks=lambda run, info: seen.append(run.batch))
    assert [(float(batch.clean), float(batch.noisy)) for batch in seen] == [(1, 3), (2, 4), (1, 5), (2, 3)]


class Counting:
    """A finite loader that saves its own position."""

    def __init__(self, n):
        self.n, self.i = n, 0

    def __iter__(self):
        while self.i < self.n:
            self.i += 1
            yield self.i
        self.i = 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


def test_a_loader_that_saves_its_own_position_resumes_from_everywhere():
    for taken in range(1, 10):
        batches = Endless(Counting(4))
        for _ in range(taken):
            next(batches)
        place = batches.state_dict()
        expected = [next(batches) for _ in range(6)]
        other = Endless(Counting(4))
        other.load_state_dict(place)
        assert [next(other) for _ in range(6)] == expected


def test_indices_draw_every_example_once_a_pass_and_resume():
    batches = Indices((3, 2), upper=7, lower=4, seed=3)
    drawn = [next(batches) for _ in range(14)]
    for level, count in (("upper", 7), ("lower", 4)):  # 14 batches of 3 are 6 passes through 7 examples, of 2 are 7 through 4
        order = torch.cat([getattr(batch, level) for batch in drawn])
        assert all(sorted(part.tolist()) == list(range(count)) for part in order.split(count))
    again = Indices((3, 2), upper=7, lower=4, seed=3)
    stacked = again.stack(5)
    assert torch.equal(stacked.upper, torch.stack([batch.upper for batch in drawn[:5]]))
    state = again.state_dict()
    other = Indices((3, 2), upper=7, lower=4, seed=3)
    other.load_state_dict(state)
    assert torch.equal(next(other).lower, drawn[5].lower)
    with pytest.raises(ValueError, match=r"Indices with \{'seed': 3\}"):
        Indices((3, 2), upper=7, lower=4, seed=4).load_state_dict(state)


def test_indices_in_groups_are_the_same_examples_each_time():
    batches = Indices(2, upper=4, lower=6, groups=True)
    members = {}
    for batch in itertools.islice(batches, 9):
        found = members.setdefault(int(batch.group[1]), set(batch.lower.tolist()))
        assert found == set(batch.lower.tolist())
        assert batch.groups == (2, 3)
        assert (batch.whole().upper.tolist(), batch.whole().lower.tolist()) == (list(range(4)), list(range(6)))
    assert sorted(itertools.chain(*members.values())) == list(range(6))


def test_indices_of_several_draws_are_independent_batches():
    batches = Indices((3, 2), upper=7, lower=4, seed=3, draws=2)
    plain = Indices((3, 2), upper=7, lower=4, seed=3)
    drawn = [next(batches) for _ in range(3)]
    assert all((batch.upper.shape, batch.lower.shape) == ((2, 3), (2, 2)) for batch in drawn)
    for row in [batch.row(j) for batch in drawn for j in (0, 1)]:  # the same examples in the same order as one by one
        expected = next(plain)
        assert torch.equal(row.upper, expected.upper)
        assert torch.equal(row.lower, expected.lower)
    again = Indices((3, 2), upper=7, lower=4, seed=3, draws=2)
    assert torch.equal(again.stack(3).upper, torch.stack([batch.upper for batch in drawn]))
    assert torch.equal(next(again).lower, next(batches).lower)
    with pytest.raises(ValueError, match=r"Indices with \{'draws': 2\}"):
        plain.load_state_dict(again.state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 2, "upper": 4, "lower": 6, "groups": True, "draws": 3}, "draws: methods that use groups take one batch"),
        ({"size": 2, "upper": 4, "lower": 6, "draws": 0}, "draws: must be a whole number"),
        ({"size": 64, "upper": 10_000, "lower": 64, "groups": True}, "take a size of 50 or 80"),
        ({"size": 5, "upper": 4, "lower": 6}, "larger than the 4 examples of upper"),
        ({"size": 0, "upper": 4, "lower": 6}, "size: must be a whole number"),
        ({"size": (2, 2, 2), "upper": 4, "lower": 6}, "size: must be a whole number, or a pair"),
        ({"size": 2, "upper": 4, "lower": 6, "seed": -1}, "seed: must be a whole number of at least 0"),
    ],
)
def test_indices_refuse_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        Indices(arguments.pop("size"), **arguments)


def test_objectives_get_several_draws_as_one_batch():
    """The values at the end of a run, and methods that know nothing of draws: means over all the examples drawn."""
    inputs, labels = torch.arange(12.0, dtype=torch.float64).reshape(6, 2), torch.tensor([0, 1, 0, 1, 1, 0])

    def lower(x, y, batch):
        fit = torch.nn.functional.cross_entropy(inputs[batch.lower] @ y, labels[batch.lower])  # refuses a second dimension
        return fit + 0.5 * x.exp() * y.square().sum()

    problem = meha.Problem(lambda x, y, b: torch.nn.functional.cross_entropy(inputs[b.upper] @ y, labels[b.upper]), lower)
    start = torch.zeros((), dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    method = meha.stochastic.StocBiO(alpha=0.01, beta=0.001, inner_steps=1, system_steps=1)
    batches = Indices(2, upper=6, lower=6, draws=3)  # all of them in each step
    solution = meha.solve(problem, *start, method, batches=batches, max_steps=3)
    everything = meha.loaders.Draw(torch.arange(6), torch.arange(6))
    assert solution.upper == pytest.approx(float(problem.upper(solution.x, solution.y, everything)), rel=1e-12)
    plain = meha.MEHA(alpha=0.01, beta=0.001, eta=0.001, gamma=1.0, c=1.0)
    apart, whole = (
        meha.solve(problem, *start, plain, batches=given, max_steps=3)
        for given in (Indices(2, upper=6, lower=6, draws=3), [everything])
    )
    torch.testing.assert_close(apart.x, whole.x, rtol=1e-10, atol=1e-12)
