"""Variables of all kinds: leaves, names, copies, structure."""

import collections

import pytest
import torch

from meha.tensors.variables import Variable, named_leaves, norm, select

Pair = collections.namedtuple("Pair", ["first", "second"])


def nested():
    model = torch.nn.Linear(2, 1, bias=False)
    return {"w": torch.ones(2), "list": [torch.zeros(1), (torch.zeros(()), model)], "pair": Pair(torch.ones(3), torch.ones(1))}


NAMES = ["w", "list.0", "list.1.0", "list.1.1.weight", "pair.0", "pair.1"]


def test_names_and_structure():
    value = nested()
    assert list(named_leaves(value)) == NAMES
    variable = Variable(value, "x")
    assert variable.names == NAMES
    assert variable.numel == 2 + 1 + 1 + 2 + 3 + 1
    assert isinstance(variable.value["pair"], Pair)
    assert variable.value["list"][1][1] is value["list"][1][1]
    assert variable.value["w"] is not value["w"]
    assert variable.label("w") == "x['w']"
    assert Variable(torch.ones(1), "x").label("") == "x"


def test_copies_are_independent():
    variable = Variable(nested(), "x")
    copy, kept = variable.copy(), variable.snapshot()
    with torch.no_grad():
        for leaf in variable.leaves:
            leaf.add_(1)
    for ours, theirs in zip(variable.leaves, copy.leaves, strict=True):
        assert not torch.equal(ours, theirs)
    assert torch.equal(kept["w"], torch.ones(2))
    assert not kept["w"].requires_grad
    assert torch.equal(variable.detached()["w"], torch.full((2,), 2.0))


def test_ties_are_kept():
    shared = torch.ones(2)
    variable = Variable({"a": shared, "b": shared}, "x")
    assert variable.names == ["a"]
    assert variable.value["a"] is variable.value["b"]


def test_views_and_expanded_tensors_are_made_plain():
    variable = Variable(torch.ones(1).expand(3), "x")
    with torch.no_grad():
        variable.leaves[0][0] = 5
    assert variable.leaves[0].tolist() == [5, 1, 1]


def test_like_unfolds_modules():
    variable = Variable(nested(), "x")
    filled = variable.like([torch.full_like(leaf, 7.0) for leaf in variable.leaves])
    assert torch.equal(filled["list"][1][1]["weight"], torch.full((1, 2), 7.0))
    assert filled["pair"].second.item() == 7


def test_select():
    assert select(None, NAMES, "part") == list(range(6))
    assert select("list", NAMES, "part") == [1, 2, 3]
    assert select(["pair.1", "w"], NAMES, "part") == [5, 0]
    with pytest.raises(ValueError, match=r"part: no leaf is named 'lis'; the leaves are 'w', 'list.0'"):
        select("lis", NAMES, "part")


def test_norm_is_that_of_all_leaves():
    a, b = torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])
    assert float(norm([a])) == 3
    assert float(norm([a, b])) == 5
    assert float(norm([a], [b])) == 5


def test_names_that_collide_are_refused():
    with pytest.raises(ValueError, match=r"x: two tensors are named 'a.b'"):
        Variable({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, "x")


def test_ties_between_modules_and_tensors_are_kept():
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    b.weight = a.weight
    variable = Variable({"w": a.weight, "a": a, "b": b}, "y")
    assert variable.names == ["w", "a.bias", "b.bias"]
    assert variable.value["w"] is a.weight
    copy = variable.copy()
    assert copy.names == variable.names
    assert copy.value["w"] is copy.value["a"].weight is copy.value["b"].weight
    assert copy.value["w"] is not a.weight


def test_a_state_holds_frozen_parameters_once():
    model = torch.nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    variable = Variable(model, "y")
    assert set(variable.state_dict()) == {"weight", "bias"}
    assert set(variable.copy().state_dict()) == {"bias"}
    saved = {name: tensor + 1 for name, tensor in variable.state_dict().items()}
    variable.load_state_dict(saved)
    assert torch.equal(model.weight, saved["weight"])


def test_empty_tensors_are_refused():
    with pytest.raises(ValueError, match="x: all tensors are empty"):
        Variable(torch.zeros(0), "x")
