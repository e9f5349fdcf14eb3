"""What an object remembers is saved as plain data, and comes back as it was."""

import io

import numpy as np
import pytest
import torch

from meha.engines.attempt import EngineKind, Start
from meha.method.status import Status, Verdict
from meha.tensors.state import TYPE, VALUE, Saved, pack, restore, saved, unpack
from meha.tensors.variables import Variable


class Part(Saved):
    saves = ("count",)

    def __init__(self):
        self.count = 0


class Whole(Saved):
    saves = ("part", "y", "verdict", "starts", "table", "array", "nothing")

    def __init__(self):
        self.part, self.y = Part(), Variable(torch.zeros(2), "y")
        self.verdict, self.starts, self.table, self.array, self.nothing = None, [], {}, np.zeros(0), None


def test_everything_comes_back_through_a_file_that_holds_plain_data_only():
    whole, other = Whole(), Whole()
    whole.part.count, whole.verdict = 3, Verdict(Status.LOCAL, "here")
    whole.y.leaves[0].detach().fill_(2.0)
    whole.starts = [Start("a", 1.0, torch.ones(1), torch.zeros(2), [torch.ones(2)])]
    whole.table, whole.array = {"kind": EngineKind.IMPLICIT_NEWTON, "pair": (1, [2.0])}, np.arange(3.0)
    file, part = io.BytesIO(), other.part
    torch.save(whole.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.part is part  # parts that restore themselves do so in place
    assert part.count == 3
    assert torch.equal(other.y.leaves[0], torch.full((2,), 2.0))
    assert other.verdict == whole.verdict
    assert other.table == whole.table
    assert np.array_equal(other.array, whole.array)
    assert other.nothing is None
    (start,) = other.starts
    assert isinstance(start, Start)
    assert torch.equal(start.others[0], torch.ones(2))


def test_a_state_is_a_copy_in_both_directions():
    tensor = torch.zeros(2)
    state = pack([tensor])
    tensor.fill_(1.0)
    assert not state[0].any()
    (back,) = unpack(state)
    back.fill_(1.0)
    assert not state[0].any()


@pytest.mark.parametrize("name", ["subprocess:Popen", "meha.tensors.state:Saved", "meha.nowhere:Thing"])
def test_a_file_can_name_no_type_but_the_records_of_the_library(name):
    with pytest.raises(ValueError, match="does not know"):
        unpack({TYPE: name, VALUE: {}})


def test_a_state_with_other_attributes_is_refused():
    with pytest.raises(ValueError, match="count"):
        restore(Part(), {**saved(Part()), "more": 1})
