"""Variables of all kinds: leaves, names, copies, structure."""

import collections
import functools
import threading
import types

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
    state = variable.state_dict()
    assert state["weight"].data_ptr() == model.weight.data_ptr()  # a large base is not copied
    assert state["bias"].data_ptr() != model.bias.data_ptr()
    saved = {name: tensor + 1 for name, tensor in variable.state_dict().items()}
    variable.load_state_dict(saved)
    assert torch.equal(model.weight, saved["weight"])


def wrapped(module):
    forward = module.forward
    module.forward = lambda z: 2 * forward(z)


def method(module):
    forward = module.forward

    @functools.wraps(forward)
    def doubled(self, z, *, factor=2.0):
        return factor * forward(z)

    module.forward = types.MethodType(doubled, module)


def part(module):
    forward = module.forward
    module.forward = functools.partial(lambda factor, own, z: factor * forward(z) + own[0].weight.sum(), 2.0, module)


def recursive(module):
    forward = module[0].forward

    def again(z, depth=1):
        return forward(z) if depth == 0 else again(z, depth - 1)

    module[0].forward = again


def hook(module):
    module.register_forward_hook(lambda own, inputs, out: out + module[0].weight.sum())


def pre_hook(module):
    module[2].register_forward_pre_hook(lambda own, inputs: (inputs[0] + module[0].weight.sum(),))


def compiled(module):
    module.forward = torch.compile(module.forward, backend="eager")


@pytest.mark.parametrize("change", [wrapped, method, part, recursive, hook, pre_hook, compiled])
def test_a_copy_computes_with_its_own_parameters(change):
    """Functions that were set on a module refer to it, and in a copy to the copy."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    change(module)
    variable, z = Variable(module, "y"), torch.ones(4, 2)
    copy, before = variable.copy(), module(z)
    with torch.no_grad():
        for leaf in variable.leaves:
            leaf.zero_()
    out = copy.value(z)
    assert torch.equal(out, before)
    assert all(part is not None for part in torch.autograd.grad(out.sum(), copy.leaves, allow_unused=True))
    assert not module(z).any()


def test_functions_without_a_module_are_shared():
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    module.teacher = lambda z: other(z)
    module.activation = torch.tanh
    copy = Variable(module, "y").copy().value
    assert copy.activation is torch.tanh
    assert torch.equal(copy.teacher(torch.ones(1, 2)), other(torch.ones(1, 2)))


def test_results_of_an_earlier_pass_do_not_keep_a_module_from_being_copied():
    module = torch.nn.Linear(2, 1)
    module.last = module(torch.ones(1, 2))
    copy = Variable(module, "y").copy().value
    assert not copy.last.requires_grad
    module.first = module.weight[0]  # a copy of this one would compute with the parameters of the original
    with pytest.raises(TypeError, match=r"y: cannot be copied \(Only Tensors .*; take away what it holds besides"):
        Variable(module, "y").copy()


def test_modules_that_cannot_be_copied_are_refused():
    module = torch.nn.Linear(2, 1)
    module.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"y: cannot be copied \(cannot pickle .*lock.*; take away .* such as a file, a lock"):
        Variable(module, "y").copy()


def test_empty_tensors_are_refused():
    with pytest.raises(ValueError, match="x: all tensors are empty"):
        Variable(torch.zeros(0), "x")
