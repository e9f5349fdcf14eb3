"""Networks with attention: every method takes a few steps on them, with kernels that can be differentiated twice."""

import copy
import dataclasses
import math

import pytest
import torch
from test_architecture import methods
from torch import nn
from torch.backends import cuda
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import meha
from meha.problem.loaders import Indices

WIDTH, HEADS, TOKENS, EXAMPLES, WORDS = 8, 2, 4, 6, 5


class Attending(nn.Module):
    """Self-attention by torch's module, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.out(self.attention(tokens, tokens, tokens, need_weights=False)[0])


class Encoder(nn.Module):
    """A transformer of torch, and a linear layer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, "gelu", batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.out(self.encoder(tokens))


def by_hand(q, k, v, is_causal):
    """softmax(q k^T / sqrt(width)) v, with the future masked."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).softmax(-1) @ v


class GPT(nn.Module):
    """A language model: embeddings, one block with causal attention, and a linear layer."""

    def __init__(self, attention=scaled_dot_product_attention):
        super().__init__()
        self.attention = attention
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm, self.qkv, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        h = self.words(tokens) + self.places(torch.arange(TOKENS))
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.mix(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return self.out(h + self.mlp(h))


MODELS = {
    "MultiheadAttention": Attending,
    "TransformerEncoder, training": Encoder,
    "TransformerEncoder, evaluation": lambda: Encoder().eval(),
    "GPT": GPT,
}


def build(model, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return model(**options).to(dtype)


class Weights:
    """x weighs the examples on which a model learns next words; other examples judge it."""

    def __init__(self, model, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(WORDS, (2, EXAMPLES, TOKENS + 1), generator=generator)
        table = torch.randn(WORDS, WIDTH, generator=generator, dtype=dtype)
        self.inputs = (
            self.words[..., :-1] if any(isinstance(part, GPT) for part in model.modules()) else table[self.words[..., :-1]]
        )
        self.x0 = torch.zeros(EXAMPLES, dtype=dtype)

    def losses(self, model, level, chosen):
        inputs, targets = self.inputs[level, chosen], self.words[level, chosen, 1:]
        return cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(1)

    def upper(self, x, y, batch=None):
        return self.losses(y, 1, slice(None) if batch is None else batch.upper).mean()

    def lower(self, x, y, batch=None):
        chosen = slice(None) if batch is None else batch.lower
        decay = sum(p.square().sum() for p in y.parameters())
        return (x[chosen].sigmoid() * self.losses(y, 0, chosen)).mean() + 0.01 * decay

    def problem(self, batches=False, *, with_x=False, **parts):
        def upper(x, y, batch=None):
            return self.upper(x, y, batch) + (0.1 * (x - 1).square().mean() if with_x else 0.0)

        if batches:
            return meha.Problem(lambda x, y, batch: upper(x, y, batch), lambda x, y, batch: self.lower(x, y, batch), **parts)
        return meha.Problem(lambda x, y: upper(x, y), lambda x, y: self.lower(x, y), **parts)


RATES = dict(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0, inner_steps=2, terms=2, cg_steps=2, damping=1.0, system_steps=2)
SEARCH = dict(space={"x": meha.Uniform(0.5, 1.0)}, to_x=lambda p: torch.full((EXAMPLES,), p["x"]), lower_tol=1.0)
OWN = {
    **dict.fromkeys(("GridSearch", "RandomSearch", "TPE"), SEARCH),
    **{name: dict(max_gradients=60) for name in ("Default", "PenaltyContinuation")},
    "MEHA": dict(inner_steps=1),
}
"""Numbers by method, beside those for all, so that nothing is measured and every step is short."""

REFUSED = {
    "ActiveSets": "ActiveSets takes tensors, not modules|compares values, which change from batch to batch",
    "ImplicitNewton": "x or y has modules|compares values, which change from batch to batch",
    "BiCGAFFA": "is for lower levels that constraints couple with x",
    "LVHBA": "is for lower levels that constraints couple with x",
    "AdaptiveSOBA": "AdaptiveSOBA takes tensors",
}
WITH_BATCHES = {
    **dict.fromkeys(("Default", "PenaltyContinuation"), "compares values, which change from batch to batch"),
    "AdaptiveMEHA": "needs the same objectives in every step",
}
WITHOUT = dict.fromkeys(("SABA", "SPABA", "SRBA", "VRBO"), "needs batches of fixed groups")


def public():
    """The methods that users can name, of the three namespaces."""
    spaces = meha, meha.stochastic, meha.contrib
    found = {kind.__name__: kind for kind in methods() if any(getattr(space, kind.__name__, None) is kind for space in spaces)}
    return {name: found[name] for name in sorted(found) if name != "Method"}


METHODS = public()


def built(name):
    known = {field.name for field in dataclasses.fields(METHODS[name])}
    numbers = {key: value for key, value in RATES.items() if key in known}
    return METHODS[name](**{**numbers, **OWN.get(name, {})})


QUICK = [
    ("MultiheadAttention", False),
    ("TransformerEncoder, training", True),
    ("TransformerEncoder, evaluation", False),
    ("GPT", True),
]
CASES = [
    pytest.param(
        model, batches, marks=[] if (model, batches) in QUICK else pytest.mark.slow, id=f"{model}{', batches' * batches}"
    )
    for model in MODELS
    for batches in (False, True)
]


@pytest.mark.parametrize(("model", "batches"), CASES)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_steps_or_refuses(name, model, batches):
    y = build(MODELS[model])
    weights, before = Weights(y), copy.deepcopy(y)
    draws = Indices(3, upper=EXAMPLES, lower=EXAMPLES, groups=True) if batches else None
    problem = weights.problem(batches, with_x=name == "PBGDFree")  # it moves x along F_x

    def solve():
        return meha.solve(problem, weights.x0, y, built(name), batches=draws, max_steps=3, tol=None)

    refusal = REFUSED.get(name) or (WITH_BATCHES if batches else WITHOUT).get(name)
    if refusal:
        with pytest.raises((TypeError, ValueError), match=refusal):
            solve()
        return
    solution = solve()
    assert not solution.status.failed
    assert math.isfinite(solution.upper)
    assert "products" not in solution.report  # second derivatives are exact
    if "max_gradients" in OWN.get(name, {}):  # a step of these takes hundreds of gradients
        return
    moved = [float((a - b).detach().norm()) for a, b in zip(y.parameters(), before.parameters(), strict=True)]
    assert 0 < max(moved) < math.inf
    assert 0 < float((solution.x - weights.x0).norm()) < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Default", "PenaltyContinuation"])
def test_engines_move_with_more_gradients(name):
    y = build(Attending)
    weights = Weights(y)
    solution = meha.solve(weights.problem(), weights.x0, y, METHODS[name](max_gradients=1600), max_steps=3, tol=None)
    assert 0 < float((solution.x - weights.x0).norm()) < math.inf


@pytest.mark.parametrize("name", ["RHG", "CG"])
def test_the_hypergradient_is_that_of_attention_by_hand(name):
    steps = []
    for attention in (scaled_dot_product_attention, by_hand):
        y = build(GPT, torch.float64, attention=attention)
        weights = Weights(y, torch.float64)
        run = dataclasses.replace(built(name), alpha=1.0).start(weights.problem(), weights.x0, y)
        run.step()
        steps.append(weights.x0 - run.x)
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-10, atol=0)
    assert float(steps[0].abs().max()) > 1e-4


def kernels():
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()


def test_only_what_is_differentiated_twice_leaves_the_fused_kernels():
    """Of two lower steps, the first is plain, the second keeps its graph, and the sweep back records that of the first."""
    seen = []

    def attention(*tensors, **options):
        seen.append(kernels())
        return scaled_dot_product_attention(*tensors, **options)

    y = build(GPT, attention=attention)
    weights, before = Weights(y), kernels()
    run = built("RHG").start(weights.problem(), weights.x0, y)
    run.step()
    plain = (False, False, False, True)
    assert seen == [before, plain, before, plain]  # f, f, F, and f again
    assert kernels() == before


@pytest.mark.parametrize("math", [True, False])
def test_the_users_kernels_are_restored_where_an_objective_raises(math):
    def raising(*tensors, **options):
        raise ZeroDivisionError("of the user")

    y = build(GPT, attention=raising)
    weights = Weights(y)
    problem = meha.Problem(lambda x, y: sum(p.sum() for p in y.parameters()), weights.lower)
    run = dataclasses.replace(built("RHG"), inner_steps=1, terms=1).start(problem, weights.x0, y)
    cuda.enable_math_sdp(math)
    try:
        run.step()  # an ArithmeticError ends the run
        assert run.verdict.status is meha.Status.BROKE_DOWN
        assert kernels() == (True, True, True, math)
    finally:
        cuda.enable_math_sdp(True)


def test_tensors_with_attention():
    """The default takes its second derivatives, many points at once, without a warning of torch; and its answer is right."""
    generator = torch.Generator().manual_seed(0)
    keys, target = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)

    def problem(attention):
        def levels(x, y):
            return attention((keys @ y)[None, None], keys[None, None], keys[None, None])[
                0, 0
            ]  # of four dimensions, or it is not fused

        return meha.Problem(
            lambda x, y: (levels(x, y) - target).square().sum(),
            lambda x, y: (levels(x, y) - x * target).square().sum() + (0.5 + x.square()).sum() * y.square().sum(),
        )

    def plain(q, k, v):
        return (q @ k.mT / 3**0.5).softmax(-1) @ v

    ends = []
    for attention in (scaled_dot_product_attention, plain):
        start = torch.ones(3, dtype=torch.float64), torch.full((3, 3), 0.1, dtype=torch.float64)
        solution = meha.solve(problem(attention), *start)
        assert solution.converged
        assert solution.engine == "ImplicitNewton"
        ends.append(solution.x)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-7)
