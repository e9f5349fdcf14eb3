"""A smooth problem with its derivatives in numpy, against which methods are checked."""

import numpy as np
import torch

import meha

N, M = 3, 5


class Smooth:
    """F and f with sines on top of quadratics, f strongly convex in y: in torch for the library, in numpy with derivatives.

    f_xy[i, j] is the derivative in x_i and y_j. With ``bend = 0`` both are quadratic.
    """

    def __init__(self, seed, bend=0.5):
        rng = np.random.default_rng(seed)
        basis, _ = np.linalg.qr(rng.normal(size=(M, M)))
        self.H = basis @ np.diag(np.linspace(1.0, 2.5, M)) @ basis.T
        self.B, self.b, self.w = 0.5 * rng.normal(size=(N, M)), rng.normal(size=M), bend * rng.normal(size=N) / 3
        self.P, self.Q, self.r = 0.5 * rng.normal(size=(4, N)), 0.5 * rng.normal(size=(4, M)), rng.normal(size=4)
        self.bend = bend
        self.x0, self.y0 = 0.5 * rng.normal(size=N), 0.5 * rng.normal(size=M)
        self.t = {name: torch.tensor(value) for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def upper(self, x, y):
        x, y, t = joined(x), joined(y), self.t
        return 0.5 * (t["P"] @ x + t["Q"] @ y - t["r"]).square().sum() + self.bend * (y.cos().sum() + x.sin().sum())

    def lower(self, x, y):
        x, y, t = joined(x), joined(y), self.t
        return 0.5 * y @ t["H"] @ y + x @ t["B"] @ y + t["b"] @ y + 0.5 * x @ x + y.sin().sum() * (t["w"] @ x)

    def problem(self, **parts):
        return meha.Problem(self.upper, self.lower, **parts)

    def start(self, method, **parts):
        return method.start(self.problem(**parts), self.t["x0"], self.t["y0"])

    def residual(self, x, y):
        return self.P @ x + self.Q @ y - self.r

    def F(self, x, y):
        return 0.5 * self.residual(x, y) @ self.residual(x, y) + self.bend * (np.cos(y).sum() + np.sin(x).sum())

    def F_x(self, x, y):
        return self.P.T @ self.residual(x, y) + self.bend * np.cos(x)

    def F_y(self, x, y):
        return self.Q.T @ self.residual(x, y) - self.bend * np.sin(y)

    def F_xy(self, x, y):
        return self.P.T @ self.Q

    def F_yy(self, x, y):
        return self.Q.T @ self.Q - self.bend * np.diag(np.cos(y))

    def f(self, x, y):
        return 0.5 * y @ self.H @ y + x @ self.B @ y + self.b @ y + 0.5 * x @ x + np.sin(y).sum() * (self.w @ x)

    def f_x(self, x, y):
        return self.B @ y + x + np.sin(y).sum() * self.w

    def f_y(self, x, y):
        return self.H @ y + self.B.T @ x + self.b + np.cos(y) * (self.w @ x)

    def f_xy(self, x, y):
        return self.B + np.outer(self.w, np.cos(y))

    def f_yy(self, x, y):
        return self.H - np.diag(np.sin(y)) * (self.w @ x)


def joined(value):
    return torch.cat(list(value.values())) if isinstance(value, dict) else value
