"""Objectives that leave torch, or that have a state, with ``compile=True``: the run of Python, or a warning.

``python tests/running/test_compiled_hostile.py`` counts all of them with the true compiler; ``--interpreted`` without it.
"""

import math
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from test_compiled import Outside, without_compiler

import meha
from meha.problem.loaders import Accumulated
from meha.running.compiled import CompileWarning

STEPS = 150
METHOD = meha.MEHA(alpha=0.02, beta=0.05, eta=0.05, gamma=0.5, c=1.0)
TOLERANCE = 1e-6
"""The relative difference of x and y that is allowed where nothing is said."""

CASES = {}
"""For each name a function that makes the parts of a call anew, with counters at zero."""


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def near(x, y):
    return (x - 1).square().sum() + (y - 2).square().sum()


def follow(x, y):
    return (y - x).square().sum()


def case(make):
    """A case for each level: what ``make`` returns is added to F, and then to f."""
    name = make.__name__.replace("_", " ")
    CASES[f"{name}, in F"] = lambda: upper_part(make())
    CASES[f"{name}, in f"] = lambda: lower_part(make())
    return make


def upper_part(part):
    return {"problem": meha.Problem(lambda x, y: near(x, y) + part(x), follow)}


def lower_part(part):
    return {"problem": meha.Problem(near, lambda x, y: follow(x, y) + 0.3 * (1 + 0 * y.sum()) * part(x) * y.sum())}


@case
def numpy_value():
    return lambda x: float(abs(x.detach().numpy()).sum()) * (x - 0.5).square().sum()


@case
def array_function():
    return lambda x: float(np.tanh(np.asarray(x.detach())).sum()) * x.square().sum()


@case
def numpy_solver():
    return lambda x: torch.from_numpy(np.linalg.solve(np.eye(1) * 2, x.detach().numpy())).sum() * x.sum()


@case
def list_branch():
    return lambda x: (x - 0.5).square().sum() if x.tolist()[0] < 0.5 else (x - 2).square().sum()


@case
def list_tensor():
    return lambda x: (torch.tensor(x.tolist(), dtype=torch.float64) * x).sum()


@case
def item_value():
    return lambda x: x.detach().sum().item() * x.sum()


@case
def float_value():
    return lambda x: float(x.detach().sum()) * x.sum()


@case
def branch_on_a_tensor():
    return lambda x: x.square().sum() if x.sum() > 0.4 else x.sum()


@case
def math_function():
    return lambda x: math.sin(x.detach().sum()) * x.sum()


@case
def formatted_value():
    return lambda x: float(f"{x.detach().sum():.6f}") * x.sum()


@case
def integer_value():
    return lambda x: int(10 * x.detach().sum()) * x.sum() / 10


@case
def iterated_rows():
    return lambda x: sum((float(v) * x.sum() for v in x.detach()), start=x.sum())


@case
def function_with_numpy():
    return lambda x: Outside.apply(x).sum()


@case
def counter():
    calls = []

    def part(x):
        calls.append(1)
        return x.square().sum() * (1 + 0.01 * len(calls))

    return part


@case
def counter_that_starts_late():
    calls = []

    def part(x):
        calls.append(1)
        return x.square().sum() * (2.0 if len(calls) > 120 else 1.0)

    return part


@case
def list_of_past_values():
    past = []

    def part(x):
        past.append(x.detach().clone())
        return ((x - past[max(0, len(past) - 30)]) ** 2).sum() + 0.1 * x.square().sum()

    return part


@case
def tensor_changed_in_place():
    state = t(0.0)

    def part(x):
        with torch.no_grad():
            state.add_(0.01)
        return (state.clone() * x).sum()

    return part


@case
def moving_average():
    state = t(0.0)

    def part(x):
        state.copy_(0.9 * state + 0.1 * x.detach())
        return (state.clone() * x).sum()

    return part


@case
def numpy_random():
    return lambda x: (x * float(np.random.default_rng().normal())).sum() * 0.1


@case
def global_numpy_random():
    return lambda x: (x * float(np.random.normal())).sum() * 0.1


@case
def python_random():
    return lambda x: (x * random.random()).sum() * 0.1


@case
def seeded_own_generator():
    generator = torch.Generator().manual_seed(0)
    return lambda x: (x * torch.randn(1, dtype=torch.float64, generator=generator)).sum() * 0.1


@case
def cache_by_identity():
    kept = {}

    def part(x):
        return (kept.setdefault(id(x), float(x.detach().sum())) * x).sum()

    return part


@case
def cache_by_shape():
    kept = {}

    def part(x):
        return (kept.setdefault(tuple(x.shape), x.detach().clone()) * x).sum()

    return part


@case
def nan_times_zero():
    return lambda x: 0 * torch.log(0.9 - x).sum()


def callback_case(name):
    """A case in which a callback changes what an objective reads."""

    def add(make):
        CASES[name] = make
        return make

    return add


@callback_case("a float that a callback changes at step 2")
def early_float():
    return changed_by_a_callback(2)


@callback_case("a float that a callback changes at step 100")
def late_float():
    return changed_by_a_callback(100)


def changed_by_a_callback(step):
    weight = [1.0]

    def change(run, info):
        weight[0] = 1.0 if info.step < step else 3.0

    return {"problem": meha.Problem(lambda x, y: near(x, y) + weight[0] * x.square().sum(), follow), "callbacks": change}


@callback_case("a captured tensor that a callback changes in place")
def tensor_by_callback():
    weight = t(1.0)

    def change(run, info):
        weight.fill_(1.0 if info.step < 60 else 3.0)

    problem = meha.Problem(lambda x, y: near(x, y) + (weight * x.square()).sum(), follow)
    return {"problem": problem, "callbacks": change, "max_steps": 1500}  # callbacks are called at the ends of groups


@callback_case("a captured tensor that a callback replaces")
def replaced_by_callback():
    weight = {"a": t(1.0)}

    def change(run, info):
        weight["a"] = t(1.0 if info.step < 60 else 3.0)

    return {"problem": meha.Problem(lambda x, y: near(x, y) + (weight["a"] * x.square()).sum(), follow), "callbacks": change}


@callback_case("a mode of a module that a callback changes")
def mode_by_callback():
    layer = torch.nn.Sequential(torch.nn.Dropout(0.0))

    def change(run, info):
        layer.train(info.step % 50 < 25)

    def upper(x, y):
        return near(x, y) + (2.0 if layer.training else 1.0) * layer(x).square().sum()

    return {"problem": meha.Problem(upper, follow), "callbacks": change}


ON_BATCHES = meha.Problem(lambda x, y, batch: near(x, y) + (batch * x).sum(), lambda x, y, batch: follow(x, y - 0.1 * batch))


@callback_case("a loader that reuses one tensor")
def reusing():
    buffer = t(0.0)

    class Reusing:
        def __iter__(self):
            for value in (0.0, 1.0, 5.0):
                yield buffer.fill_(value)

    return {"problem": ON_BATCHES, "batches": Reusing()}


@callback_case("a loader that reuses one tensor, accumulated")
def reusing_accumulated():
    return {"problem": ON_BATCHES, "batches": Accumulated(reusing()["batches"], 3)}


@callback_case("a loader that changes what it gave before")
def changing():
    class Changing:
        def __iter__(self):
            last = None
            for value in (0.0, 1.0, 5.0):
                if last is not None:
                    last.fill_(100.0)
                last = t(value)
                yield last

    return {"problem": ON_BATCHES, "batches": Changing()}


SEEDS = (random.seed, np.random.seed, torch.manual_seed)


def outcome(name):
    """How a compiled run of a case ends: "equal" to the run of Python, "warned", "refused", or "silent" where it is none."""
    found, said = {}, []
    for compile in (False, True):
        for seed in SEEDS:
            seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = {"x0": t(0.0), "y0": t(0.0), "method": METHOD, "max_steps": STEPS, "tol": None, "compile": compile}
            try:
                found[compile] = meha.solve(**{**start, **CASES[name]()})
            except ValueError as error:
                assert "yield new tensors" in str(error)  # noqa: PT017
                return "refused"
        said = [str(warning.message) for warning in caught if issubclass(warning.category, CompileWarning)]
    if said:
        return "warned"
    same = all(
        torch.allclose(getattr(found[True], part), getattr(found[False], part), rtol=TOLERANCE, atol=TOLERANCE) for part in "xy"
    )
    return "equal" if same and found[True].status is found[False].status else "silent"


def test_there_are_58_cases():
    assert len(CASES) == 58


@pytest.mark.parametrize(
    "name", [name if i % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CASES)]
)
def test_no_silent_difference(name, monkeypatch):
    without_compiler(monkeypatch.setattr)
    assert outcome(name) != "silent"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_silent_difference_with_the_compiler(name):
    assert outcome(name) != "silent"


if __name__ == "__main__":
    if "--interpreted" in sys.argv:
        without_compiler(setattr)
    ends = {name: outcome(name) for name in CASES}
    for kind in ("equal", "warned", "refused", "silent"):
        names = [name for name, end in ends.items() if end == kind]
        sys.stdout.write(f"{kind}: {len(names)} of {len(ends)}{': ' + '; '.join(names) if kind == 'silent' else ''}\n")
