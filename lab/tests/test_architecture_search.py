"""Architecture search: operations, networks and genotypes against the same written out with plain tensors."""

import itertools
import json
import re
import sys
from importlib.resources import files

import cells_by_hand as by_hand
import pytest
import torch
from meha_lab.tasks.architecture_search import (
    OPERATIONS,
    FinalNetwork,
    FinalTraining,
    Genotype,
    SearchSpace,
    Stage,
    Style,
    SuperNetwork,
    architecture_search,
    random_genotype,
    search,
)
from meha_lab.tasks.architecture_search.data import Batches, Pictures
from meha_lab.tasks.architecture_search.networks import Fan
from meha_lab.tasks.architecture_search.operations import SeparableConv
from torch import nn
from torch.nn.functional import cross_entropy

NAMES = list(OPERATIONS)
SKIP, MAX, AVERAGE, ZERO = "skip", "max pool 3x3", "average pool 3x3", "none"
SEP3, SEP5, DIL3, DIL5 = "separable conv 3x3", "separable conv 5x5", "dilated conv 3x3", "dilated conv 5x5"

# The cell that DARTS published (its second-order search on CIFAR-10).
DARTS_V2 = Genotype(
    ((SEP3, 0), (SEP3, 1), (SEP3, 0), (SEP3, 1), (SEP3, 1), (SKIP, 0), (SKIP, 0), (DIL3, 2)),
    ((MAX, 0), (MAX, 1), (SKIP, 2), (MAX, 1), (MAX, 0), (SKIP, 2), (SKIP, 2), (MAX, 1)),
)
SMALL = Genotype(((SKIP, 0), (SEP3, 1), (DIL5, 2), (SKIP, 0)), ((MAX, 0), (SKIP, 1), (SKIP, 2), (AVERAGE, 1)))


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slopes(value, *variables):
    """Gradients of a sum with random weights."""
    return torch.autograd.grad((value * randn(*value.shape, seed=99)).sum(), variables, retain_graph=True)


def assert_alike(found, expected, *variables):
    """Values, and gradients with respect to the variables."""
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slopes(found, *variables), slopes(expected, *variables))


def scrambled(module, seed=0):
    """Double precision, and random numbers for scales that start at 1 and shifts that start at 0."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
    return module


# --- operations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", [False, True], ids=["search", "final"])
@pytest.mark.parametrize("activation", ["relu", "swish"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_operations(name, stride, activation, final):
    operation = scrambled(OPERATIONS[name](4, stride, Style(activation, final=final)))
    x = randn(3, 4, 8, 6).requires_grad_()
    found = operation(x)
    assert found.shape == (3, 4, 8 // stride, 6 // stride)
    expected = by_hand.operation(name, operation, x, stride, activation, final)
    if name == ZERO:
        assert torch.equal(found, expected)
    else:
        assert_alike(found, expected, x, *operation.parameters())


def test_pools_leave_out_the_padding():
    final = Style(final=True)
    image = torch.arange(1.0, 17).reshape(1, 1, 4, 4)
    average = OPERATIONS[AVERAGE](1, 1, final)(image)
    assert average[0, 0, 0, 0] == (1 + 2 + 5 + 6) / 4
    assert average[0, 0, 0, 1] == (1 + 2 + 3 + 5 + 6 + 7) / 6
    assert average[0, 0, 1, 1] == (1 + 2 + 3 + 5 + 6 + 7 + 9 + 10 + 11) / 9
    assert OPERATIONS[MAX](1, 1, final)(-image)[0, 0].tolist() == [  # zeros of the padding would be larger
        [-1, -1, -2, -3], [-1, -1, -2, -3], [-5, -5, -6, -7], [-9, -9, -10, -11],
    ]  # fmt: skip


def test_normalisations_have_numbers_of_their_own_in_the_final_network_only():
    for name in (SEP3, DIL5):
        searching, final = (OPERATIONS[name](4, 1, Style(final=flag)) for flag in (False, True))
        assert all(parameter.dim() == 4 for parameter in searching.parameters())
        assert not list(searching.buffers())
        layers = 2 if name == SEP3 else 1
        assert sum(parameter.dim() == 1 for parameter in final.parameters()) == 2 * layers
        assert sum(buffer.dim() == 1 for buffer in final.buffers()) == 2 * layers  # running mean and variance
    for name in (MAX, AVERAGE):
        assert not list(OPERATIONS[name](4, 1, Style(final=True)).parameters())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", [name for name in NAMES if name != ZERO])
def test_operations_of_a_kind_are_evaluated_together(name, stride):
    operations = [OPERATIONS[name](4, stride, Style("swish")).double() for _ in range(3)]
    x, weights = randn(3, 4, 6, 6).requires_grad_(), randn(3, seed=1).requires_grad_()
    found = type(operations[0]).together(operations, x, weights)
    expected = torch.cat([weight * operation(x) for weight, operation in zip(weights, operations, strict=True)], dim=1)
    assert_alike(found, expected, x, weights, *[p for operation in operations for p in operation.parameters()])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("stride", "size", "dilation"), [(1, 3, 1), (2, 5, 1), (2, 3, 2), (1, 5, 2)])
def test_a_fused_convolution_equals_two(stride, size, dilation, count):
    operations = [SeparableConv(4, stride, Style(), size=size, dilation=dilation, layers=2).double() for _ in range(count)]
    for layer, channels in ((0, 4), (1, 4 * count)):
        x = randn(2, channels, 8, 8).requires_grad_()
        fused, two = (operations[0]._convolve(operations, layer, x, fused=flag) for flag in (True, False))
        own = [p for operation in operations for p in (operation.depthwise[layer].weight, operation.pointwise[layer].weight)]
        assert_alike(fused, two, x, *own)


# --- mixed edges -----------------------------------------------------------------------------------------------------------

SOME = [NAMES, [SKIP, SEP3, MAX], [ZERO], [DIL5, ZERO, SKIP]]
"""The operations of four edges: all, some, and none at all."""


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kept", [[NAMES] * 3, SOME], ids=["all", "some"])
def test_a_mixed_edge_is_the_weighted_sum_of_its_operations(kept, stride):
    fan = Fan(SearchSpace(), kept, 4, stride, Style(), partial=1).double()
    x, weights = randn(3, 4, 8, 8).requires_grad_(), torch.rand(len(kept), 8, dtype=torch.float64, requires_grad=True)
    images = fan(x, weights)
    assert len(images) == len(kept)
    for place, names in enumerate(kept):
        own = [weights[place, NAMES.index(name)] for name in names]
        expected = by_hand.edge(fan, place, names, x, stride, own, "relu", partial=1)
        if names == [ZERO]:
            assert torch.equal(images[place], torch.zeros_like(expected))
        else:
            assert_alike(images[place], expected, x, weights)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_quarter_of_the_channels_goes_through_the_operations(stride):
    """K = 4 and 8 channels: 0 and 1 are mixed, 2 to 7 pass; then 0 2 4 6 1 3 5 7."""
    fan = Fan(SearchSpace(), [NAMES], 8, stride, Style(), partial=4).double()
    x, weights = randn(2, 8, 4, 4), torch.rand(1, 8, dtype=torch.float64)
    (found,) = fan(x, weights)
    mixed = sum(weights[0, i] * by_hand.operation(name, fan.operations[i][0], x[:, :2], stride) for i, name in enumerate(NAMES))
    passed = x[:, 2:]
    if stride == 2:
        passed = torch.empty(2, 6, 2, 2, dtype=torch.float64)
        for n, c, i, j in itertools.product(range(2), range(6), range(2), range(2)):
            passed[n, c, i, j] = max(x[n, 2 + c, 2 * i + a, 2 * j + b] for a in (0, 1) for b in (0, 1))
    torch.testing.assert_close(found[:, [0, 4]], mixed)
    torch.testing.assert_close(found[:, [1, 2, 3, 5, 6, 7]], passed[:, [0, 2, 4, 1, 3, 5]])


# --- super-networks --------------------------------------------------------------------------------------------------------

PRUNED = {"normal": [[SKIP, SEP3], [MAX, DIL3], [ZERO, SKIP], [SEP5, DIL5], [SKIP, AVERAGE]], "reduction": [[SKIP, SEP5]] * 5}


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "swish"}, {"partial": 4}, {"partial": 4, "edges": True}, {"kept": PRUNED}, {"dropped": 0.4}],
    ids=str,
)
def test_a_super_network_by_hand(options):
    """Two nodes, three cells of 8, 16 and 32 channels: states, preprocessing, mixtures, concatenation, classes."""
    space, options = SearchSpace(nodes=2), dict(options)
    with_edges, rate = options.pop("edges", False), options.pop("dropped", None)
    network = scrambled(SuperNetwork(space, inputs=3, classes=5, channels=8, cells=3, **options))
    kept = options.get("kept", dict.fromkeys(("normal", "reduction"), [NAMES] * 5))
    x = {kind: randn(5, len(kept[kind][0]), seed=i) for i, kind in enumerate(kept)}
    if with_edges:
        x |= {f"{kind} edges": randn(5, seed=i) for i, kind in enumerate(kept, start=5)}
    for part in x.values():
        part.requires_grad_()
    images, rest = randn(3, 3, 8, 8, seed=7), {}
    if rate is not None:
        rest = {"noise": torch.rand(3, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), "rate": rate}
    leaving = [0, 2, 1, 3, 4]  # the edges from state 0, from state 1, from state 2
    noise, dropout = (None, None) if rate is None else (rest["noise"][:, :, leaving], torch.tensor(rate, dtype=torch.float64))
    found = network(images, x, noise, dropout)
    numbers = {"act": options.get("activation", "relu"), "partial": options.get("partial", 1)}
    expected = by_hand.super_network(network, images, x, kept, nodes=2, cells=3, **numbers, **rest)
    assert found.shape == (3, 5)
    assert_alike(found, expected, *x.values(), *[p for p in network.parameters() if p.requires_grad])


def test_reductions_stand_at_a_third_and_two_thirds():
    for cells, places in ((1, {0}), (2, {0, 1}), (3, {1, 2}), (5, {1, 3}), (8, {2, 5}), (20, {6, 13})):
        plan = SuperNetwork(SearchSpace(nodes=1), channels=2, cells=cells).plan
        assert {i for i, (_, reduction) in enumerate(plan) if reduction} == places
        assert [width for width, _ in plan] == [2 * 2 ** sum(place <= i for place in places) for i in range(cells)]


def test_what_is_kept_mixes_as_if_the_others_had_no_weight():
    task = architecture_search("digits", channels=4, cells=3, batch=8, space=SearchSpace(nodes=2))
    x = {kind: randn(5, 8, seed=i) for i, kind in enumerate(("normal", "reduction"))}
    kept = task.pruned(x, 3)
    for kind in x:
        for edge, names in enumerate(kept[kind]):
            best = sorted(range(8), key=lambda i: float(x[kind][edge, i]))[-3:]
            assert list(names) == [NAMES[i] for i in sorted(best)]
    whole = SuperNetwork(task.space, channels=4).double()
    small = SuperNetwork(task.space, channels=4, kept=kept).double()
    copied = {name: value for name, value in whole.state_dict().items() if "operations" not in name}
    small.load_state_dict(copied, strict=False)
    for cell, other in zip(small.cells, whole.cells, strict=True):
        for fan, all_of in zip(cell.fans, other.fans, strict=True):
            for column, edges in enumerate(fan.edges):
                for module, edge in zip(fan.operations[column], edges, strict=True):
                    module.load_state_dict(all_of.operations[column][edge].state_dict())
    images = randn(3, 3, 8, 8, seed=5)
    some = {kind: torch.stack([x[kind][e, [NAMES.index(n) for n in kept[kind][e]]] for e in range(5)]) for kind in x}
    hidden = {kind: torch.full((5, 8), -torch.inf, dtype=torch.float64) for kind in x}
    for kind in x:
        for e, names in enumerate(kept[kind]):
            for name in names:
                hidden[kind][e, NAMES.index(name)] = x[kind][e, NAMES.index(name)]
    torch.testing.assert_close(small(images, some), whole(images, hidden))


class Doubled(nn.Module):
    """An operation of a user, without ``together``."""

    def __init__(self, channels, stride):
        super().__init__()
        self.stride, self.scale = stride, nn.Parameter(torch.full((channels, 1, 1), 2.0))

    def forward(self, x):
        return self.scale * x[:, :, :: self.stride, :: self.stride]


def test_own_operations_take_part():
    space = SearchSpace({SKIP: OPERATIONS[SKIP], "doubled": lambda channels, stride, style: Doubled(channels, stride)}, nodes=1)
    network = SuperNetwork(space, channels=4, cells=1).double()
    x = {kind: randn(2, 2, seed=i) for i, kind in enumerate(("normal", "reduction"))}
    for place, double in enumerate(network.cells[0].fans[0].operations[1]):
        double.scale.data *= 1 + place
    images = randn(2, 3, 8, 8)
    weights = x["reduction"].softmax(dim=1)
    states = by_hand.inputs(network, 0, [by_hand.stem(network, images)] * 2, False, "relu")
    node = sum(
        weights[e, 0] * by_hand.reduction(network.cells[0].fans[e].operations[0][0], states[e], "relu")
        + weights[e, 1] * network.cells[0].fans[e].operations[1][0].scale * states[e][:, :, ::2, ::2]
        for e in (0, 1)
    )
    torch.testing.assert_close(network(images, x), by_hand.scores(network, node))
    task = architecture_search("digits", channels=4, cells=1, batch=8, space=space)
    likes_it = {kind: torch.tensor([[0.0, 1.0], [0.0, 1.0]]) for kind in x}
    genotype = task.genotype(likes_it)
    assert genotype.normal == (("doubled", 0), ("doubled", 1))
    final = FinalNetwork(genotype, space, channels=4, cells=1)
    assert isinstance(final.cells[0].operations[0], Doubled)


# --- genotypes -------------------------------------------------------------------------------------------------------------


def test_derived_cells():
    """Two nodes: edges 0 and 1 enter the first, 2, 3 and 4 the second."""
    space = SearchSpace(nodes=2)
    weights = [
        {ZERO: 0.9, SKIP: 0.1, SEP3: 0.0},
        {ZERO: 0.0, SKIP: 0.2, SEP3: 0.3},
        {ZERO: 0.0, SKIP: 0.3, SEP3: 0.2},
        {ZERO: 0.95, SKIP: 0.01, SEP3: 0.02},  # it would enter if "none" counted
        {ZERO: 0.1, SKIP: 0.25, SEP3: 0.65},
    ]
    assert space.derive(weights) == ((SKIP, 0), (SEP3, 1), (SKIP, 0), (SEP3, 2))


def test_ties_go_to_the_first():
    space = SearchSpace(nodes=2)
    assert space.derive([{ZERO: 0.4, MAX: 0.3, SKIP: 0.3}] * 5) == ((MAX, 0), (MAX, 1), (MAX, 0), (MAX, 1))


def test_the_weakest_skips_are_replaced_one_at_a_time():
    space = SearchSpace(nodes=2)
    weights = [
        {SKIP: 0.5, SEP3: 0.1},
        {SKIP: 0.7, SEP3: 0.3},
        {SKIP: 0.9, SEP3: 0.05},
        {SKIP: 0.6, SEP3: 0.2},
        {SKIP: 0.3, SEP3: 0.4, MAX: 0.1},
    ]
    whole = ((SKIP, 0), (SKIP, 1), (SKIP, 0), (SKIP, 1))
    assert space.derive(weights) == space.derive(weights, most_skips=4) == whole
    assert space.derive(weights, most_skips=3) == ((SEP3, 0), (SKIP, 1), (SKIP, 0), (SKIP, 1))
    # Without its skip (0.6), edge 3 is weaker than edge 4, which takes its place.
    assert space.derive(weights, most_skips=2) == ((SEP3, 0), (SKIP, 1), (SKIP, 0), (SEP3, 2))
    assert space.derive(weights, most_skips=1) == ((SEP3, 0), (SEP3, 1), (SKIP, 0), (SEP3, 2))
    assert space.derive(weights, most_skips=0) == ((SEP3, 0), (SEP3, 1), (SEP3, 1), (SEP3, 2))


def test_the_bound_on_skips_is_for_normal_cells_only():
    task = architecture_search("digits", batch=8, most_skips=0, space=SearchSpace({n: OPERATIONS[n] for n in (SKIP, MAX)}))
    x = {kind: torch.tensor([[2.0, 0.0]]).repeat(14, 1) for kind in ("normal", "reduction")}
    genotype = task.genotype(x)
    assert {name for name, _ in genotype.normal} == {MAX}
    assert {name for name, _ in genotype.reduction} == {SKIP}
    assert genotype.skips == 0


def test_edge_weights_decide_with_the_operations():
    """The product of both softmaxes: edge 0 has the best operation and loses, since its node hardly uses it."""
    task = architecture_search("digits", batch=8, edge_normalisation=True, space=SearchSpace(nodes=2))
    x, _ = task.start()
    assert {name: tuple(part.shape) for name, part in x.items()} == {
        "normal": (5, 8), "reduction": (5, 8), "normal edges": (5,), "reduction edges": (5,),
    }  # fmt: skip
    x = {name: torch.zeros_like(part) for name, part in x.items()}
    for e, (name, weight) in enumerate([(SKIP, 1.0), (SKIP, 1.0), (SEP3, 3.0), (SEP5, 2.0), (DIL3, 1.0)]):
        x["normal"][e, NAMES.index(name)] = weight
        x["reduction"][e, NAMES.index(name)] = weight
    x["normal edges"] = torch.tensor([5.0, 0.0, -4.0, 0.0, 0.0])  # the first two belong to another node
    genotype = task.genotype(x)
    assert genotype.normal[2:] == ((SEP5, 1), (DIL3, 2))
    assert genotype.reduction[2:] == ((SEP3, 0), (SEP5, 1))


def test_random_genotypes_hold_everything_but_none():
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(60):
        genotype = random_genotype(SearchSpace(nodes=3), generator)
        for cell in (genotype.normal, genotype.reduction):
            pairs = [(cell[2 * node][1], cell[2 * node + 1][1]) for node in range(3)]
            assert all(a < b <= 1 + node for node, (a, b) in enumerate(pairs))  # different states that are there
            seen |= {(place // 2, name, source) for place, (name, source) in enumerate(cell)}
    assert seen == {(node, name, source) for node in range(3) for name in NAMES[1:] for source in range(2 + node)}


def test_genotypes_as_text_and_json():
    assert str(SMALL).splitlines() == [
        "node  normal cell                      reduction cell",
        "2     skip(0), separable conv 3x3(1)   max pool 3x3(0), skip(1)",
        "3     dilated conv 5x5(2), skip(0)     skip(2), average pool 3x3(1)",
    ]
    wide = Genotype(((SEP3, 0), (DIL3, 1)), ((MAX, 0), (MAX, 1)))
    assert str(wide).splitlines()[1] == "2     separable conv 3x3(0), dilated conv 3x3(1)  max pool 3x3(0), max pool 3x3(1)"
    told = json.loads(json.dumps(SMALL.to_dict()))
    assert told["reduction"][3] == [AVERAGE, 1]
    assert Genotype.from_dict(told) == SMALL
    assert (SMALL.nodes, SMALL.skips, DARTS_V2.nodes, DARTS_V2.skips) == (2, 0.5, 4, 0.25)


def test_genotypes_are_drawn(monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    figure = DARTS_V2.draw()
    normal, reduction = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Normal cell", "Reduction cell"]
    states = ["c(k−2)", "c(k−1)", "2", "3", "4", "5", "c(k)"]
    for ax, operations in ((normal, ["sep 3x3"] * 5 + ["skip"] * 2 + ["dil 3x3"]), (reduction, [MAX] * 5 + ["skip"] * 3)):
        assert sorted(text.get_text() for text in ax.texts) == sorted(states + operations)
        assert len(ax.patches) == 8 + 4  # an arrow for each edge, a line from each node to the output
    twice = Genotype(((SEP3, 0), (MAX, 0)), ((SKIP, 1), (SKIP, 1)))
    for ax in (*figure.axes, *twice.draw().axes):
        places = [text.get_position() for text in ax.texts]
        assert len(set(places)) == len(places)  # also parallel edges do not hide each other
    figure.canvas.draw()
    monkeypatch.setitem(sys.modules, "meha_lab.tasks.architecture_search.drawing", None)
    with pytest.raises(ImportError, match=re.escape('draw() needs matplotlib; install it with: pip install "meha[plot]"')):
        SMALL.draw()


# --- final networks --------------------------------------------------------------------------------------------------------


def published():
    found = json.loads((files("meha_lab.reproduce") / "genotypes.json").read_text())
    return Genotype.from_dict(found["the cell published with MEHA"])


@pytest.mark.parametrize(
    ("genotype", "cells", "count"), [(DARTS_V2, 20, 3_349_342), (published(), 8, 1_524_142)], ids=["DARTS", "MEHA"]
)
def test_published_cells_have_the_published_sizes(genotype, cells, count):
    """DARTS (second order) states 3.3 M, the paper 1.524 M for MEHA, both without the auxiliary head."""
    with torch.device("meta"):
        plain, headed = (FinalNetwork(genotype, channels=36, cells=cells, auxiliary=flag) for flag in (False, True))
    assert plain.parameter_count == sum(p.numel() for p in plain.parameters()) == count
    assert headed.parameter_count == count
    width = 4 * 36 * 4  # four nodes, doubled twice
    head = width * 128 + 2 * 128 + 128 * 768 * 4 + 2 * 768 + 768 * 10 + 10
    assert sum(p.numel() for p in headed.parameters()) == count + head


@pytest.mark.parametrize("activation", ["relu", "swish"])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_final_network_by_hand(activation, dropped):
    network = scrambled(FinalNetwork(SMALL, classes=5, channels=4, cells=3, activation=activation))
    images = randn(3, 3, 16, 16)
    masks = torch.rand(3, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) if dropped else None
    expected, _ = by_hand.final_network(network, SMALL, images, 3, activation, masks)
    assert_alike(network(images, masks), expected, *[p for p in network.parameters() if p.requires_grad])


def test_drop_path_leaves_identities_alone():
    genotype = Genotype(((SKIP, 0), (SKIP, 1)), ((SKIP, 0), (SKIP, 1)))
    network = FinalNetwork(genotype, channels=4, cells=2).double()  # both cells reduce: their skips are convolutions
    images, masks = randn(2, 3, 8, 8), torch.zeros(2, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(network(images, masks), network.linear.bias.expand(2, -1))
    network = FinalNetwork(genotype, channels=4, cells=3).double()
    masks = torch.ones(2, 3, 2, dtype=torch.float64)
    masks[:, 0] = 0  # the first cell is normal: its skips are identities
    torch.testing.assert_close(network(images, masks), network(images))


@pytest.mark.parametrize(
    ("sides", "cells", "pooled"),
    [((32, 32), 3, (8, 8)), ((32, 32), 4, (8, 8)), ((32, 32), 1, (16, 16)), ((16, 16), 3, (4, 4)), ((32, 64), 3, (8, 16))],
)
def test_the_auxiliary_head(sides, cells, pooled):
    network = FinalNetwork(SMALL, channels=4, cells=cells, auxiliary=True).double()
    images = randn(2, 3, *sides)
    main, extra = network.scores(images)
    _, seen = by_hand.final_network(network, SMALL, images, cells)
    assert seen.shape[2:] == pooled
    _, _, narrow, first_norm, _, wide, second_norm, _, _, linear = network.auxiliary
    if pooled == (8, 8):
        windows = seen.clamp(min=0).unfold(2, 5, 3).unfold(3, 5, 3)
        small = windows.mean(dim=(4, 5))
    else:
        small = seen.clamp(min=0).unflatten(3, (2, -1)).unflatten(2, (2, -1)).mean(dim=(3, 5))
    hidden = by_hand.normed(first_norm, torch.einsum("oi,nihw->nohw", narrow.weight[:, :, 0, 0], small)).clamp(min=0)
    hidden = torch.einsum("oihw,nihw->no", wide.weight, hidden)[:, :, None, None]
    hidden = by_hand.normed(second_norm, hidden).clamp(min=0).flatten(1)
    torch.testing.assert_close(extra, hidden @ linear.weight.T + linear.bias)
    assert main.shape == (2, 10)
    network.eval()
    assert network.scores(images)[1] is None


# --- the task --------------------------------------------------------------------------------------------------------------


def tiny(**options):
    small = {"size": 48, "channels": 4, "cells": 3, "batch": 8, "space": SearchSpace(nodes=1)}
    return architecture_search("digits", **{**small, **options})


def test_digits_are_divided_among_the_levels():
    task = architecture_search("digits", batch=8, seed=3)
    parts = [task.train, task.validation, task.test]
    assert [len(part.labels) for part in parts] == [599, 599, 599]
    images = torch.cat([part.images for part in parts])
    assert images.shape == (1797, 1, 8, 8)
    assert len(images.unique(dim=0)) >= 1790  # digits has a few equal images
    other = architecture_search("digits", batch=8, seed=4)
    assert torch.equal(other.test.images, task.test.images)  # the test does not depend on the seed
    assert not torch.equal(other.train.images, task.train.images)
    assert [len(part.labels) for part in (tiny().train, tiny().validation)] == [24, 24]


def test_objectives_and_measures_by_hand():
    task = tiny()
    x, y = task.start()
    assert 3e-4 < float(torch.cat([x["normal"], x["reduction"]]).std()) < 3e-3
    x = {kind: 500 * part for kind, part in x.items()}
    batch = next(iter(task.batches()))
    kept = dict.fromkeys(("normal", "reduction"), [NAMES] * 2)

    def scores(images):
        return by_hand.super_network(y, images, x, kept, nodes=1, cells=3)

    for loss, images, labels in (
        (task.problem.lower, batch.train, batch.train_labels),
        (task.problem.upper, batch.validation, batch.validation_labels),
    ):
        expected = -scores(images).log_softmax(dim=1)[range(8), labels].mean()
        torch.testing.assert_close(loss(x, y, batch), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(batch.train_labels, batch.validation_labels)
    found = task.evaluate(x, y)
    every = torch.cat([part.images for part in (task.train, task.validation)]).float() / 255
    mean, deviation = every[:24].mean(), every[:24].std()
    for part, name in ((task.train, "train accuracy"), (task.validation, "accuracy")):
        own = scores((part.images.float() / 255 - mean) / deviation)
        assert found[name] == pytest.approx(float((own.argmax(dim=1) == part.labels).float().mean()), abs=1.01 / 24)
    loss = cross_entropy(own.detach(), task.validation.labels)
    assert found["validation loss"] == pytest.approx(float(loss), rel=1e-3)
    rows = torch.cat([x["normal"], x["reduction"]]).softmax(dim=1)
    assert found["entropy"] == pytest.approx(float(-(rows * rows.log()).sum(dim=1).mean()), rel=1e-5)


def test_the_start_depends_on_the_seed_and_leaves_that_of_the_caller_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    (x, y), (again, twin), (other, _) = tiny(seed=5).start(), tiny(seed=5).start(), tiny(seed=6).start()
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(x["normal"], again["normal"])
    assert all(torch.equal(a, b) for a, b in zip(y.parameters(), twin.parameters(), strict=True))
    assert not torch.equal(x["normal"], other["normal"])


def test_a_final_network_is_trained_on_the_images_of_both_levels():
    task = tiny(activation="swish", seed=2)
    genotype = task.genotype(task.start()[0])
    final = task.final(genotype, epochs=3, channels=4, cells=2, batch=12, cutout=False)
    assert torch.equal(final.train.images, torch.cat([task.train.images, task.validation.images]))
    assert torch.equal(final.train.labels, torch.cat([task.train.labels, task.validation.labels]))
    assert final.test is task.test
    assert (final.steps, final.activation, final.seed, final.cutout) == (12, "swish", 2, False)
    _, network = final.start()
    assert network.style == Style("swish", final=True)
    network.train(False)
    assert sorted(final.evaluate(None, network)) == ["accuracy", "train accuracy"]
    assert not network.training
    right = network(final.scaling(final.test.images)).argmax(dim=1) == final.test.labels
    assert final.evaluate(None, network.train())["accuracy"] == pytest.approx(float(right.float().mean()))
    assert network.training


# --- errors ----------------------------------------------------------------------------------------------------------------


def pictures(height=8, width=8, count=20):
    return Pictures(torch.zeros(count, 1, height, width, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64))


def both(*edges):
    return dict.fromkeys(("normal", "reduction"), edges)


def training(**options):
    return FinalTraining(SMALL, pictures(), pictures(), **options)


ONE = (("skip", 0), ("skip", 1))
TWO_EDGES = [[SKIP, MAX]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tiny(channels=0), "channels: must be a whole number of at least 1, got 0"),
        (lambda: tiny(cells=1.5), "cells: must be a whole number of at least 1, got 1.5"),
        (lambda: tiny(batch=0), "batch: must be a whole number"),
        (lambda: tiny(partial=0), "partial: must be a whole number"),
        (lambda: tiny(steps=0), "steps: must be a whole number"),
        (lambda: tiny(activation="gelu"), "activation: must be 'relu' or 'swish', got 'gelu'"),
        (lambda: tiny(channels=6, partial=4), "channels: must be a multiple of partial = 4, got 6"),
        (lambda: tiny(skip_dropout=1.0), "skip_dropout: must be at least 0 and below 1, got 1.0"),
        (lambda: tiny(skip_dropout=-0.1), "skip_dropout: must be at least 0 and below 1, got -0.1"),
        (lambda: tiny(batch=25).batches(), "batch: must be at most 24, the number of images, got 25"),
        (lambda: tiny(size=1), "size: must be from 2 to 1198, the number of training images, got 1"),
        (lambda: tiny(size=1199), "size: must be from 2 to 1198, the number of training images, got 1199"),
        (lambda: architecture_search("mnist"), "data: must be 'cifar10' or 'digits', got 'mnist'"),
        (lambda: tiny(kept={"normal": TWO_EDGES}), "kept: must have 2 edges for 'reduction', got 0"),
        (
            lambda: tiny(kept=both([SKIP], ["sum"])),
            "kept: edge 1 of 'normal' has ['sum'] that the space lacks; there are ['none', ",
        ),
        (
            lambda: SuperNetwork(SearchSpace(nodes=1), kept={"normal": TWO_EDGES, "reduction": [[SKIP, MAX], [SKIP]]}),
            "kept: all edges of 'reduction' must have as many different operations, got ['skip', 'max pool 3x3'] on edge 0 and"
            " ['skip'] on edge 1",
        ),
        (lambda: tiny(kept=both([SKIP, SKIP], [SKIP, SKIP])), "as many different operations"),
        (lambda: tiny(kept=both([], [])), "as many different operations"),
        (lambda: tiny().pruned(tiny().start()[0], 0), "operations: must be a whole number of at least 1, got 0"),
        (lambda: SearchSpace(nodes=0), "nodes: must be a whole number of at least 1, got 0"),
        (lambda: SearchSpace({ZERO: OPERATIONS[ZERO]}), "operations: ['none'] has none besides 'none'; add a factory"),
        (
            lambda: SearchSpace(nodes=1).derive([{ZERO: 0.1, SKIP: 0.9}, {SKIP: 0.9, MAX: 0.1}], most_skips=0),
            "weights: node 2 needs two edges with an operation other than 'none'; keep more operations on its edges, or raise",
        ),
        (lambda: Genotype(((SKIP, 0), (SKIP, 2)), ONE), "normal: edge 1 takes state 2, but its node has only states 0 to 1"),
        (lambda: Genotype(ONE, ((SKIP, -1), (SKIP, 1))), "reduction: edge 0 takes state -1, but its node has only"),
        (lambda: Genotype((*ONE, (SKIP, 3), (SKIP, 0)), ONE * 2), "edge 2 takes state 3, but its node has only states 0 to 2"),
        (lambda: Genotype(ONE, ONE * 2), "must have two edges for each node, and as many nodes, got 2 and 4 edges"),
        (lambda: Genotype(ONE[:1], ONE[:1]), "must have two edges for each node, and as many nodes, got 1 and 1 edges"),
        (lambda: Genotype((), ()), "must have two edges for each node, and as many nodes, got 0 and 0 edges"),
        (
            lambda: FinalNetwork(Genotype((("sum", 0), (SKIP, 1)), ONE)),
            "genotype: has operations ['sum'] that the space lacks; there are ['none', ",
        ),
        (lambda: FinalNetwork(SMALL, activation="gelu"), "activation: must be 'relu' or 'swish', got 'gelu'"),
        (lambda: SuperNetwork(SearchSpace(), activation="gelu"), "activation: must be 'relu' or 'swish', got 'gelu'"),
        (lambda: training(activation="gelu"), "activation: must be 'relu' or 'swish'"),
        (lambda: training(drop_path=1.0), "drop_path: must be at least 0 and below 1, got 1.0"),
        (lambda: training(epochs=0), "epochs: must be a positive number, got 0"),
        (lambda: training(cells=0), "cells: must be a whole number of at least 1, got 0"),
        (lambda: search(tiny(), lambda n: None, []), "stages: is empty; give at least one Stage(steps)"),
        (lambda: Stage(0), "steps: must be a whole number of at least 1, got 0"),
        (lambda: Stage(3, warm_up=-1), "warm_up: must be a whole number of at least 1, got -1"),
        (lambda: Stage(3, cells=0), "cells: must be a whole number of at least 1, got 0"),
        (lambda: Stage(3, operations=0), "operations: must be a whole number of at least 1, got 0"),
        (lambda: Stage(3, skip_dropout=1.5), "skip_dropout: must be at least 0 and below 1, got 1.5"),
        (lambda: Batches([pictures(count=3)], 4, None, 0), "batch: must be at most 3, the number of images, got 4"),
    ],
)  # fmt: skip
def test_errors_name_argument_and_remedy(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_images_must_be_halved_twice():
    from meha_lab.tasks.architecture_search import ArchitectureSearch

    with pytest.raises(ValueError, match="sides must be multiples of 4, got 8x6"):
        ArchitectureSearch(pictures(8, 6), pictures(8, 6), pictures(8, 6))
    with pytest.raises(ValueError, match="sides must be multiples of 4, got 10x8"):
        ArchitectureSearch(pictures(10, 8), pictures(10, 8), pictures(10, 8))
