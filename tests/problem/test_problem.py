"""A problem keeps its class and all of its fields wherever the library copies it."""

from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from meha_lab.problems.blueprints import Blueprint, double, known_problem
from meha_lab.problems.collected import CollectedProblem, collected
from meha_lab.problems.scaled import scaled
from meha_lab.problems.variants import VARIANTS

import meha
from meha.problems import sine


@dataclass(frozen=True, eq=False, kw_only=True)
class Noting(meha.Problem):
    """A problem with one more field, in which it notes every projection that it hands out."""

    notes: list = field(default_factory=list)

    def _bind_projection(self, x):
        self.notes.append(x)
        return super()._bind_projection(x)


@dataclass(frozen=True, eq=False, kw_only=True)
class Titled(CollectedProblem):
    """A known problem with one more field."""

    title: str


def noting(**parts):
    return Noting(
        upper=lambda x, y: (x - 1).square().sum() + y.square().sum(), lower=lambda x, y: (y - x).square().sum(), **parts
    )


NUMBERS = dict(alpha=0.1, beta=0.1, eta=0.1, gamma=0.1, c=1.0)

USES = {
    "check": meha.check,
    "estimate": meha.theory.estimate,
    "gap": lambda *call: meha.diagnostics.gap(*call, gamma=1.0),
    "prox_residual": lambda *call: meha.diagnostics.prox_residual(*call, gamma=1.0, c=1.0),
    "subgradient_residual": lambda *call: meha.diagnostics.subgradient_residual(*call, gamma=1.0, c=1.0),
    "hypergradient": meha.diagnostics.hypergradient,
    "solve": meha.solve,
    "solve, MEHA": lambda *call: meha.solve(*call, meha.MEHA(**NUMBERS), max_steps=3),
    "solve, compiled": lambda *call: meha.solve(*call, meha.MEHA(**NUMBERS), max_steps=3, compile=True),
    "a run": lambda *call: meha.RHG().start(*call),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_sees_the_subclass(use):
    problem, start = noting(), torch.ones(2, dtype=torch.float64)
    USES[use](problem, start, 2 * start)
    assert problem.notes


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_keep_the_subclass(variant):
    toy = collected(sine(2))
    titled = Titled(**{part.name: getattr(toy, part.name) for part in fields(toy)}, title="kept")
    changed = VARIANTS[variant](replace(titled, joint=False))
    assert type(changed) is Titled
    assert (changed.title, changed.joint, changed.presets) == ("kept", False, toy.presets)


def test_scaled_problems_keep_the_subclass():
    problem = noting(joint=False)
    blueprint = Blueprint(build=lambda cast: problem, x0=np.ones(2), y0=np.ones(2), x_star=np.ones(2))
    changed = scaled(lambda: blueprint, x=10.0).build(double)
    assert type(changed) is Noting
    assert changed.notes is problem.notes
    assert changed.joint is False


def test_a_blueprint_loses_no_field():
    """A known problem has all fields of a Problem; those of a subclass have no place in it, which is an error."""
    constants = meha.theory.Constants(L_F=2.0, L_f=2.0)
    plain = meha.Problem(noting().upper, noting().lower, joint=True, constants=constants)
    made = known_problem("plain", lambda: Blueprint(build=lambda cast: plain, x0=np.ones(2), y0=np.ones(2), x_star=np.ones(2)))
    assert all(getattr(made, part.name) is getattr(plain, part.name) for part in fields(meha.Problem))
    with pytest.raises(TypeError, match="notes"):
        known_problem("own", lambda: Blueprint(build=lambda cast: noting(), x0=np.ones(2), y0=np.ones(2), x_star=np.ones(2)))


def test_a_problem_is_shown_without_addresses():
    def loss(x, y):
        return (x - y).square().sum()

    problem = meha.Problem(loss, lambda x, y: y.square().sum(), x_set=meha.sets.NonNegative())
    assert repr(problem) == "Problem(upper=loss, lower=<lambda>, x_set=NonNegative())"
