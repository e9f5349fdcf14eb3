"""Bad input ends in an error that names the argument and says what to do."""

import numpy as np
import pytest
import torch

import meha
from meha.problem.nonsmooth import L1, GroupL2
from meha.problem.sets import Box, L2Ball, NonNegative

ONE, TWO = torch.ones(1), torch.ones(2)
GIVEN = dict(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=1.0)


def upper(x, y):
    return (x.sum() - 1) ** 2 + y.square().sum()


def lower(x, y):
    return (y - x.sum()).square().sum()


def attempt(problem=None, x=ONE, y=TWO, method=None, **parts):
    problem = problem or meha.Problem(parts.pop("upper", upper), parts.pop("lower", lower), **parts)
    run = (method or meha.MEHA(**GIVEN)).start(problem, x, y)
    return run.step()


def test_good_input_works():
    assert attempt().step == 1


@pytest.mark.parametrize("method", [meha.MEHA(**GIVEN), meha.MEHA(p=0.49), meha.MEHA()], ids=["given", "rule", "automatic"])
@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        # objectives
        (
            dict(upper=lambda x, y: x + y),
            ValueError,
            r"upper: must return a scalar tensor, got a tensor of shape \(2,\).*\.sum\(\)",
        ),
        (dict(lower=lambda x, y: (y - x) ** 2), ValueError, r"lower: must return a scalar.*\.mean\(\)"),
        (dict(upper=lambda x, y: 1.0), ValueError, "upper: must return a scalar tensor, got float"),
        (dict(lower=lambda x, y: None), ValueError, "lower: must return a scalar tensor, got NoneType"),
        (dict(lower=lambda x, y: x.square().sum()), ValueError, "lower: does not depend on y"),
        (dict(lower=lambda x, y: (y.detach() - x).square().sum()), ValueError, r"lower: does not.*\.detach\(\)"),
        (dict(upper=lambda x, y: torch.ones(())), ValueError, "upper: does not depend on y.* not on x either"),
        (dict(upper=lambda y: y.square().sum()), TypeError, "upper: takes y alone, but there is an x0; pass x0=None"),
        (
            dict(upper=lambda x, y: y.square().sum(), lower=lambda x, y: (y - 1).square().sum()),
            ValueError,
            "x: neither upper nor lower nor nonsmooth depends on it",
        ),
        (dict(upper=lambda x, y: y.sum() + (x @ y)), RuntimeError, "size|shape"),
        # starts
        (dict(x=torch.tensor([1])), TypeError, r"x: dtype torch.int64 .* x\.double\(\)"),
        (dict(y={"a": torch.tensor([True])}), TypeError, r"y\['a'\]: dtype torch.bool"),
        (dict(y=torch.tensor([1j, 2j])), TypeError, "y: dtype torch.complex64"),
        (dict(x=torch.tensor([float("nan")])), ValueError, "x: 1 of its 1 numbers are NaN or infinite"),
        (dict(y=torch.tensor([0.0, float("inf")])), ValueError, "y: 1 of its 2 numbers are NaN or infinite"),
        (dict(x=3.0), TypeError, r"x: got float, expected a tensor, nested dicts .* torch\.as_tensor"),
        (dict(y=[TWO, "two"]), TypeError, r"y\['1'\]: got str"),
        (dict(y=None), TypeError, "y: got NoneType"),
        (dict(y={}), ValueError, "y: dict has no tensor to optimise"),
        (dict(y=torch.nn.ReLU()), ValueError, "y: ReLU has no tensor to optimise"),
        (dict(x=torch.ones(1, device="meta")), ValueError, "x is on meta and y on cpu; move both to one device"),
        (dict(y=[TWO, torch.ones(1, device="meta")]), ValueError, r"y: tensors are on different devices \(cpu, meta\)"),
        # constraints and terms
        (dict(x_set=Box(2.0, 3.0)), ValueError, r"x0 is not in X = Box\(low=2.0, high=3.0\); start from x_set.project\(x0\)"),
        (dict(y_set=L2Ball(0.5)), ValueError, "y0 is not in Y"),
        (
            dict(x_set=Box(torch.zeros(3), 9.0)),
            ValueError,
            r"Box: low has shape \(3,\), which does not broadcast to x of shape \(1,\)",
        ),
        (dict(nonsmooth=GroupL2([[0, 5]])), ValueError, "GroupL2: groups name the coordinate 5, but y has 2 coordinates"),
        (dict(nonsmooth=GroupL2([3])), ValueError, "GroupL2: the groups' sizes add up to 3, but y has 2"),
        (dict(nonsmooth=GroupL2([1, 1], weight=torch.ones(3))), ValueError, r"GroupL2: weight has shape \(3,\) for 2 groups"),
        (dict(nonsmooth=L1(torch.ones(3))), ValueError, r"L1: weight has shape \(3,\)"),
        (dict(nonsmooth=L1(lambda x: -x)), ValueError, "L1: a weight is negative"),
        (dict(nonsmooth=L1(lambda x: "heavy")), TypeError, "L1: a weight must be a number or a tensor, got str; wrap"),
        (dict(nonsmooth=L1(part="coef")), ValueError, "L1: part: no leaf is named 'coef'"),
        (dict(nonsmooth=L1(1.0), y_set=L2Ball(9.0)), ValueError, "y_set and nonsmooth: .*closed form"),
        (dict(nonsmooth=meha.nonsmooth.NonNegativeL1(1.0), y=-TWO), ValueError, "nonsmooth: NonNegativeL1 is inf at the start"),
    ],
)
def test_refused_with_the_name_of_the_argument(method, parts, kind, message):
    with pytest.raises(kind, match=message):
        attempt(method=method, **parts)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(gamma=0.0), ValueError, "gamma: must be a positive number, got 0.0"),
        (dict(gamma=-1.0), ValueError, "gamma"),
        (dict(gamma=float("nan")), ValueError, "gamma"),
        (dict(p=0.5), ValueError, r"p: must be in \[0, 1/2\), got 0.5"),
        (dict(p=-0.1), ValueError, "p: must be"),
        (dict(c=0.0), ValueError, "c: must be"),
        (dict(alpha=-1.0), ValueError, "alpha: must be"),
        (dict(beta="fast"), ValueError, "beta: must be a positive number, got 'fast'"),
        (dict(eta=float("inf")), ValueError, "eta"),
        (dict(alpha=True), ValueError, "alpha"),
        (dict(c=lambda k: 1.0, p=0.2), ValueError, "p: c is a function"),
        (dict(alpha=0.1, x_optimizer=torch.optim.SGD), ValueError, "alpha and x_optimizer: give one of them"),
        (dict(y_optimizer="adam"), TypeError, r"y_optimizer: expected a factory such as partial\(torch.optim.Adam"),
    ],
)
def test_hyper_parameters(arguments, kind, message):
    with pytest.raises(kind, match=message):
        meha.MEHA(**arguments)


def test_positional_hyper_parameters_are_refused():
    with pytest.raises(TypeError):
        meha.MEHA(0.1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_schedules_are_checked_as_they_go(value):
    run = meha.MEHA(**GIVEN | dict(beta=lambda k: 0.1 if k < 2 else value)).start(meha.Problem(upper, lower), ONE, TWO)
    run.step()
    run.step()
    with pytest.raises(ValueError, match=r"beta: the schedule gave .* at step 2"):
        run.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(upper=3, lower=lower), r"upper: expected a function of \(x, y\) or \(x, y, batch\), got int"),
        (dict(upper=upper, lower=None), "lower: expected a function"),
        (dict(upper=upper, lower=lower, nonsmooth=0.1), "nonsmooth: expected a term of meha.nonsmooth"),
        (dict(upper=upper, lower=lower, x_set=(0, 1)), "x_set: expected a set of meha.sets"),
        (dict(upper=upper, lower=lower, y_set=NonNegative), "y_set: expected a set"),
    ],
)
def test_problems(arguments, message):
    with pytest.raises(TypeError, match=message):
        meha.Problem(**arguments)


def test_start_needs_a_problem():
    with pytest.raises(TypeError, match=r"problem: expected a meha.Problem, got function"):
        meha.MEHA(**GIVEN).start(upper, ONE, TWO)


def test_shared_parameters_are_refused():
    model = torch.nn.Linear(1, 1)
    problem = meha.Problem(lambda x, y: y.weight.sum() ** 2, lambda x, y: x.weight.sum() + y.weight.square().sum())
    with pytest.raises(ValueError, match="x and y share parameters"):
        meha.MEHA(**GIVEN).start(problem, model, model)


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        (lambda leaves: "sgd", TypeError, "x_optimizer: the factory returned str"),
        (torch.optim.LBFGS, TypeError, "x_optimizer: LBFGS evaluates the objective itself"),
        (
            lambda leaves: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1),
            ValueError,
            "x_optimizer: the factory must",
        ),
    ],
)
def test_optimizer_factories(factory, kind, message):
    method = meha.MEHA(x_optimizer=factory, beta=0.1, eta=0.1, gamma=1.0, c=1.0)
    with pytest.raises(kind, match=message):
        attempt(method=method)


def test_negative_weights_on_the_way_are_an_error():
    """Without x_set the weight leaves the domain of the term during the run; that must not pass silently."""
    problem = meha.Problem(lambda x, y: x.sum() * 10 + (y - 3).square().sum(), lower, nonsmooth=L1(lambda x: x))
    with pytest.raises(ValueError, match=r"L1: a weight is negative .*x_set=meha.sets.NonNegative"):
        meha.solve(problem, ONE, TWO, meha.MEHA(**GIVEN))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: L1(-1.0), ValueError, "L1: weight must not be negative, got -1.0"),
        (lambda: L1("a"), TypeError, "L1: weight must be a number, a tensor, a list or dict of them, or a function of x"),
        (lambda: L1(0.1, part=0), TypeError, "L1: part must be a name or a list of names, got 0"),
        (lambda: L1(0.1) + 1, TypeError, "Sum: expected terms of meha.nonsmooth, got int"),
        (lambda: GroupL2(3), TypeError, "GroupL2: groups must be a list of sizes or of index lists, got int"),
        (lambda: GroupL2([2, [3]]), TypeError, "GroupL2: groups mixes sizes and index lists"),
        (lambda: meha.nonsmooth.ElasticNet(0.1, -0.1), ValueError, "ElasticNet: l2 must not be negative"),
        (lambda: Box(None, 1.0), TypeError, "Box: low must be a number or a tensor, got None"),
        (lambda: L2Ball("big"), ValueError, "L2Ball: radius: must be a positive number"),
        (lambda: meha.sets.HalfSpace([0.0, 0.0], 1.0), ValueError, "HalfSpace: normal must not be zero"),
        (lambda: meha.sets.HalfSpace([1.0, 0.0], float("nan")), ValueError, "HalfSpace: .* offset=nan"),
        (lambda: meha.sets.Simplex(float("inf")), ValueError, "Simplex: total: must be a positive number"),
        (lambda: meha.sets.Product([Box(0.0, 1.0)]), TypeError, "Product: expected a dict from names of leaves to sets"),
        (lambda: meha.sets.Product({0: Box(0.0, 1.0)}), TypeError, "Product: expected a dict"),
        (lambda: meha.Problem(upper, lower, constants={"L_F": 1.0}), TypeError, r"constants: expected meha.theory.Constants"),
        (lambda: meha.theory.Constants(L_F="a", L_f=1.0), TypeError, "Constants: L_F must be a number, got 'a'"),
        (lambda: meha.theory.estimate(meha.Problem(upper, lower), ONE, TWO, rounds=0), ValueError, "rounds: must be a whole"),
        (lambda: meha.diagnostics.envelope(meha.Problem(upper, lower), ONE, TWO, 1.0, max_steps=0), ValueError, "max_steps"),
    ],
)
def test_terms_sets_and_the_rest(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        attempt()


def test_lists_and_numpy_numbers_are_welcome():
    assert meha.sets.L2Ball(1.0, center=[1.0, 0.0]).project(torch.tensor([3.0, 0.0])).tolist() == [2.0, 0.0]
    assert meha.sets.HalfSpace([1.0, 0.0], 1.0).project(TWO * 2).tolist() == [1.0, 2.0]
    assert meha.sets.AffineSet([[1.0, 0.0]], [1.0]).project(TWO * 2).tolist() == [1.0, 2.0]
    assert L1(np.float32(0.5)).prox(None, TWO, 1.0).tolist() == [0.5, 0.5]
    assert meha.MEHA(gamma=np.float32(0.5)).gamma == 0.5


def test_terms_show_themselves():
    assert repr(L1(0.5, part="w")) == "L1(part='w', weight=0.5)"
    assert repr(GroupL2([2, 3], 0.5)) == "GroupL2(part=None, weight=0.5, groups=[2, 3])"
