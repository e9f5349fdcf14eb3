"""Loaders without end, and their place."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import meha
from meha.loaders import Endless, Together, random_states, set_random_states


def take(batches, count):
    return [next(batches) for _ in range(count)]


def test_endless():
    assert take(Endless([1, 2, 3]), 7) == [1, 2, 3, 1, 2, 3, 1]
    assert list(Endless([])) == []
    assert list(Endless(iter([1, 2]))) == [1, 2]  # cannot be begun anew
    assert take(Endless(torch.arange(2)), 3) == [0, 1, 0]


def shuffled(generator=None):
    return DataLoader(list(range(10)), batch_size=3, shuffle=True, generator=generator)


@pytest.mark.parametrize("own", [False, True])
def test_a_shuffled_loader_is_found_again_with_other_draws_in_between(own):
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
    seen = list(batches)
    assert [batch.clean for batch in seen] == [1, 2, 1, 2, 1]
    assert "".join(batch.noisy for batch in seen) == "abcde"
    clean, noisy = seen[-1]
    assert (clean, noisy) == (1, "e")


def test_together_is_found_again():
    """Two loaders that draw from one generator, each in the middle of its own epoch."""

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
    with pytest.raises(ValueError, match=r"the state is of the loaders \['a', 'b'\], these are \['a'\]"):
        Together(a=[1]).load_state_dict(place)


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


def test_loaders_that_are_none():
    with pytest.raises(TypeError, match="loader: expected an iterable of batches, got int"):
        Endless(3)
    with pytest.raises(TypeError, match="Together: noisy must be an iterable of batches, got int"):
        Together(clean=[1], noisy=3)
    with pytest.raises(ValueError, match="Together: expected loaders by name"):
        Together()


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
    """A finite loader that knows its place."""

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


def test_a_loader_with_a_place_of_its_own_goes_on_from_everywhere():
    for taken in range(1, 10):
        batches = Endless(Counting(4))
        for _ in range(taken):
            next(batches)
        place = batches.state_dict()
        expected = [next(batches) for _ in range(6)]
        other = Endless(Counting(4))
        other.load_state_dict(place)
        assert [next(other) for _ in range(6)] == expected
