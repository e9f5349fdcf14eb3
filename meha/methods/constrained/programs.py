"""The programs that a coupled problem gives rise to: both levels together, the lower level at one x, and pieces.

A piece fixes which lower constraints are active. On it, the optimality conditions of the lower level are smooth equations:

    min F(x, y)  subject to  G(x, y) <= 0,  E(x, y) = 0,
        f_y + sum_{i in A} lambda_i h_i,y + sum_j nu_j e_j,y = 0,
        h_i = 0 and lambda_i >= 0 for i in A,  h_i <= 0 for the others,  e = 0,

in the unknowns x, y, lambda_A and nu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meha._coupling import Coupling
from meha._quadratic import Array

__all__ = ["Cut", "Lower", "Piece", "Relaxed"]

Cut = Callable[[Array], tuple[float, Array]]
"""The value of another valley of the lower level at z = (x, y), which depends on x alone, and its gradient."""


def _weighted(hessians: Array, weights: Array) -> Array:
    return np.einsum("k,kij->ij", weights, hessians)


@dataclass(eq=False)
class Relaxed:
    """min F(x, y) over all constraints, without the lower level; or the point nearest to ``target`` that meets them."""

    coupling: Coupling
    target: Array | None = None
    lower_only: bool = False

    def values(self, w: Array) -> tuple[float, Array, Array]:
        values, rows = self.coupling.values(w), self.coupling.rows
        phi = float(values[rows.F]) if self.target is None else 0.5 * float((w - self.target) @ (w - self.target))
        if self.lower_only:
            return phi, values[rows.lower_equations], values[rows.lower]
        equations = np.concatenate([values[rows.lower_equations], values[rows.upper_equations]])
        return phi, equations, np.concatenate([values[rows.lower], values[rows.upper]])

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        J, rows = self.coupling.jacobian(w), self.coupling.rows
        g = J[rows.F] if self.target is None else w - self.target
        if self.lower_only:
            return g, J[rows.lower_equations], J[rows.lower]
        equations = np.vstack([J[rows.lower_equations], J[rows.upper_equations]])
        return g, equations, np.vstack([J[rows.lower], J[rows.upper]])

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        coupling, rows = self.coupling, self.coupling.rows
        weights = np.zeros(coupling.count)
        weights[rows.F] = float(self.target is None)
        split = rows.lower_equations.stop - rows.lower_equations.start
        weights[rows.lower_equations] = mu[:split]
        inner = rows.lower.stop - rows.lower.start
        weights[rows.lower] = lam[:inner]
        if not self.lower_only:
            weights[rows.upper_equations], weights[rows.upper] = mu[split:], lam[inner:]
        H = _weighted(coupling.hessians(w, weights != 0), weights)
        return H if self.target is None else H + np.eye(len(w))


@dataclass(eq=False)
class Lower:
    """The lower level at one x: min f(x, y) over y, its constraints, and perhaps F among its solutions.

    Args:
        level: with a number, min F over the y whose f is at most that.
    """

    coupling: Coupling
    x: Array
    level: float | None = None

    def at(self, y: Array) -> Array:
        """(x, y)."""
        return np.concatenate([self.x, y])

    def values(self, w: Array) -> tuple[float, Array, Array]:
        values, rows = self.coupling.values(self.at(w)), self.coupling.rows
        if self.level is None:
            return float(values[rows.f]), values[rows.lower_equations], values[rows.lower]
        equations = np.concatenate([values[rows.lower_equations], values[rows.upper_equations]])
        beyond = [values[rows.f] - self.level]
        return float(values[rows.F]), equations, np.concatenate([values[rows.lower], values[rows.upper], beyond])

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        J, rows = self.coupling.jacobian(self.at(w))[:, self.coupling.n :], self.coupling.rows
        if self.level is None:
            return J[rows.f], J[rows.lower_equations], J[rows.lower]
        equations = np.vstack([J[rows.lower_equations], J[rows.upper_equations]])
        return J[rows.F], equations, np.vstack([J[rows.lower], J[rows.upper], J[rows.f]])

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        coupling, rows = self.coupling, self.coupling.rows
        weights = np.zeros(coupling.count)
        if self.level is None:
            weights[rows.f], weights[rows.lower_equations], weights[rows.lower] = 1.0, mu, lam
        else:
            split, inner = rows.lower_equations.stop - rows.lower_equations.start, rows.lower.stop - rows.lower.start
            weights[rows.F], weights[rows.f] = 1.0, lam[-1]
            weights[rows.lower_equations], weights[rows.upper_equations] = mu[:split], mu[split:]
            weights[rows.lower], weights[rows.upper] = lam[:inner], lam[inner:-1]
        return _weighted(coupling.hessians(self.at(w), weights != 0), weights)[coupling.n :, coupling.n :]


@dataclass(eq=False)
class Piece:
    """Both levels with the lower constraints of ``active`` active; unknowns (x, y, lambda of those, nu).

    Args:
        active: a mask of the lower inequalities.
        cuts: values of other valleys, which f must not exceed.
    """

    coupling: Coupling
    active: Array
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        rows = self.coupling.rows
        self.size = self.coupling.n + self.coupling.m
        inequalities = np.arange(rows.lower.start, rows.lower.stop)
        self.on, self.off = inequalities[self.active], inequalities[~self.active]
        self.nu = np.arange(rows.lower_equations.start, rows.lower_equations.stop)
        self.held = np.concatenate([self.on, self.nu])

    def start(self, z: Array, lam: Array, nu: Array) -> Array:
        """The unknowns from a point and all multipliers of the lower level."""
        return np.concatenate([z, np.maximum(lam[self.active], 0.0), nu])

    def multipliers(self, w: Array) -> tuple[Array, Array]:
        """Those of all lower inequalities, and of the lower equations."""
        lam = np.zeros(len(self.active))
        lam[self.active] = w[self.size : self.size + len(self.on)]
        return lam, w[self.size + len(self.on) :]

    def values(self, w: Array) -> tuple[float, Array, Array]:
        coupling, rows = self.coupling, self.coupling.rows
        z, multipliers = w[: self.size], w[self.size :]
        values = coupling.values(z)
        J = coupling.jacobian(z)[:, coupling.n :]
        gradient = J[rows.f] + multipliers @ J[self.held]
        equations = np.concatenate([gradient, values[self.held], values[rows.upper_equations]])
        excess = [float(values[rows.f]) - cut(z)[0] for cut in self.cuts]
        inequalities = np.concatenate([-multipliers[: len(self.on)], values[self.off], values[rows.upper], excess])
        return float(values[rows.F]), equations, inequalities

    def jacobians(self, w: Array) -> tuple[Array, Array, Array]:
        coupling, rows = self.coupling, self.coupling.rows
        z, multipliers = w[: self.size], w[self.size :]
        J = coupling.jacobian(z)
        extra = len(multipliers)
        g = np.concatenate([J[rows.F], np.zeros(extra)])
        weights = self._weights(multipliers)
        bent = _weighted(coupling.hessians(z, weights != 0), weights)[coupling.n :]
        held, above = J[self.held], J[rows.upper_equations]
        equations = np.vstack(
            [
                np.hstack([bent, held[:, coupling.n :].T]),
                np.hstack([held, np.zeros((len(held), extra))]),
                np.hstack([above, np.zeros((len(above), extra))]),
            ]
        )
        signs = np.zeros((len(self.on), self.size + extra))
        signs[range(len(self.on)), range(self.size, self.size + len(self.on))] = -1.0
        cuts = [J[rows.f] - cut(z)[1] for cut in self.cuts]
        below = np.vstack([J[self.off], J[rows.upper], np.array(cuts).reshape(-1, self.size)])
        return g, equations, np.vstack([signs, np.hstack([below, np.zeros((len(below), extra))])])

    def _weights(self, multipliers: Array) -> Array:
        weights = np.zeros(self.coupling.count)
        weights[self.coupling.rows.f] = 1.0
        weights[self.held] = multipliers
        return weights

    def hessian(self, w: Array, mu: Array, lam: Array) -> Array:
        coupling, rows = self.coupling, self.coupling.rows
        z, multipliers = w[: self.size], w[self.size :]
        m, extra = coupling.m, len(multipliers)
        along, held, above = mu[:m], mu[m : m + extra], mu[m + extra :]
        weights = np.zeros(coupling.count)
        weights[rows.F], weights[self.held], weights[rows.upper_equations] = 1.0, held, above
        rest = lam[len(self.on) :]
        weights[self.off] = rest[: len(self.off)]
        count = rows.upper.stop - rows.upper.start
        weights[rows.upper] = rest[len(self.off) : len(self.off) + count]
        weights[rows.f] = rest[len(self.off) + count :].sum()
        needed = weights != 0
        needed[self.held] |= bool(along.any())
        hessians = coupling.hessians(z, needed)
        H = np.zeros((self.size + extra, self.size + extra))
        H[: self.size, : self.size] = _weighted(hessians, weights) + coupling.third(z, self._weights(multipliers), along)
        if extra:
            cross = hessians[self.held][:, :, coupling.n :] @ along
            H[self.size :, : self.size], H[: self.size, self.size :] = cross, cross.T
        return H
