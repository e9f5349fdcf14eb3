"""Users' problems of the benchmark newton, each with a hand-written solver: closed form or Newton below, L-BFGS-B above."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.func import vmap

import meha

F64 = torch.float64


@dataclass
class UserProblem:
    """A problem with its start, a hand-written solver that returns x and y, and other ways to solve it."""

    problem: meha.Problem
    x0: Tensor
    y0: Tensor
    by_hand: Callable[[], tuple[Tensor, Tensor]]
    limits: tuple[float, float] | None = field(default=None)
    others: dict[str, Callable[[], tuple[Tensor, Tensor]]] = field(default_factory=dict)


def tensor(array: Any) -> Tensor:
    return torch.as_tensor(np.asarray(array), dtype=F64)


def lbfgsb(value: Callable[[np.ndarray], tuple[float, np.ndarray]], x0: Tensor, limits: tuple[Any, Any] | None) -> Tensor:
    low, high = limits if limits is not None else (-np.inf, np.inf)
    bounds = list(zip(*(np.broadcast_to(np.asarray(end), x0.shape).ravel() for end in (low, high)), strict=True))
    options = {"maxcor": 30, "maxiter": 1000, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(value, x0.numpy().ravel(), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return tensor(found.x).reshape(x0.shape)


def closed_form(problem: meha.Problem, response: Callable[[Tensor], Tensor], x0: Tensor, limits: Any) -> tuple[Tensor, Tensor]:
    """Differentiate through the closed form of the lower level."""

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        at = tensor(x).reshape(x0.shape).requires_grad_()
        F = problem.upper(at, response(at))
        return F.item(), torch.autograd.grad(F, at)[0].numpy().ravel()

    x = lbfgsb(value, x0, limits)
    with torch.no_grad():
        return x, response(x)


def dense_newton(problem: meha.Problem, x0: Tensor, y0: Tensor, limits: Any) -> tuple[Tensor, Tensor]:
    """Newton's method below with dense Hessians, the implicit gradient, L-BFGS-B above."""
    y, n = [y0.clone()], y0.numel()
    eye = torch.eye(n, dtype=F64).reshape(n, *y0.shape)

    def expand(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at = at.detach().requires_grad_()
        f = problem.lower(x, at)
        (gradient,) = torch.autograd.grad(f, at, create_graph=True)
        return f.detach(), gradient, at

    def hessian(gradient: Tensor, at: Tensor) -> Tensor:
        return vmap(lambda row: torch.autograd.grad(gradient, at, row, retain_graph=True)[0])(eye).reshape(n, n)

    def inverse(H: Tensor) -> Callable[[Tensor], Tensor]:
        factor, info = torch.linalg.cholesky_ex(H)
        if not int(info):
            return lambda right: torch.cholesky_solve(right.reshape(-1, 1), factor).reshape(y0.shape)
        values, vectors = torch.linalg.eigh(H)
        sizes = values.abs().clamp(min=1e-8 * float(values.abs().max()))
        return lambda right: (vectors @ ((vectors.T @ right.reshape(-1)) / sizes)).reshape(y0.shape)

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        at_x = tensor(x).reshape(x0.shape).requires_grad_()
        f, gradient, at = expand(at_x, y[0])
        last = np.inf
        for _ in range(100):
            solve = inverse(hessian(gradient, at))
            step = solve(gradient.detach())
            size = float(step.norm()) / (1 + float(at.detach().norm()))
            if size <= 1e-10 or (size <= 1e-6 and size > 0.5 * last):  # the second is rounding
                break
            last = size
            length, slope = 1.0, float((gradient.detach() * step).sum())
            while True:
                new = expand(at_x, at.detach() - length * step)
                if float(new[0]) <= float(f) - 1e-4 * length * slope + 1e-14 * abs(float(f)) or length < 1e-8:
                    break
                length /= 2
            f, gradient, at = new
        y[0] = at.detach()
        F = problem.upper(at_x, at)
        F_x, F_y = torch.autograd.grad(F, (at_x, at), allow_unused=True)
        v = solve(F_y)
        through = torch.autograd.grad(gradient, at_x, v)[0]
        return F.item(), ((0 if F_x is None else F_x) - through).numpy().ravel()

    x = lbfgsb(value, x0, limits)
    value(x.numpy().ravel())
    return x, y[0]


def _split(A: np.ndarray, b: np.ndarray, seed: int = 0, train: float = 0.5) -> list[Tensor]:
    order = np.random.default_rng(seed).permutation(len(A))
    cut = int(train * len(A))
    A = (A - A[order[:cut]].mean(0)) / A[order[:cut]].std(0)
    b = (b - b[order[:cut]].mean()) / b[order[:cut]].std()
    return [tensor(part) for part in (A[order[:cut]], b[order[:cut]], A[order[cut:]], b[order[cut:]])]


def ridge(degree: int) -> UserProblem:
    """Diabetes: one penalty for each feature."""
    from sklearn.datasets import load_diabetes
    from sklearn.preprocessing import PolynomialFeatures

    A, b = load_diabetes(return_X_y=True)
    A = PolynomialFeatures(degree, include_bias=False).fit_transform(A / A.std(0))
    A, b, A_val, b_val = _split(A, b)
    p, limits = A.shape[1], (-10.0, 10.0)
    training, validation = meha.losses.LeastSquares(A, b), meha.losses.LeastSquares(A_val, b_val)
    problem = meha.Problem(
        lambda x, y: validation(y), lambda x, y: training(y) + 0.5 * (x.exp() * y * y).sum(), x_set=meha.sets.Box(*limits)
    )
    G, c = A.T @ A / len(A), A.T @ b / len(A)
    x0 = torch.zeros(p, dtype=F64)

    def response(x: Tensor) -> Tensor:
        return torch.linalg.solve(G + torch.diag(x.exp()), c)

    return UserProblem(problem, x0, torch.zeros(p, dtype=F64), lambda: closed_form(problem, response, x0, limits), limits)


def folds() -> UserProblem:
    """Breast cancer: logistic regression, five folds, one penalty for each feature."""
    from sklearn.datasets import load_breast_cancer

    A, b = load_breast_cancer(return_X_y=True)
    A, signs = tensor((A - A.mean(0)) / A.std(0)), tensor(2.0 * b - 1)
    fold = torch.arange(len(A)) % 5
    inside = torch.stack([fold != k for k in range(5)]).to(F64)
    inside, outside = inside / inside.sum(1, keepdim=True), (1 - inside) / (1 - inside).sum(1, keepdim=True)
    p, limits = A.shape[1], (-10.0, 5.0)

    def losses(y: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-signs * (y @ A.T))

    problem = meha.Problem(
        lambda x, y: (outside * losses(y)).sum() / 5,
        lambda x, y: (inside * losses(y)).sum() + 0.5 * (x.exp() * y * y).sum(),
        x_set=meha.sets.Box(*limits),
    )
    x0, y0 = torch.full((p,), -3.0, dtype=F64), torch.zeros(5, p, dtype=F64)
    return UserProblem(problem, x0, y0, lambda: dense_newton(problem, x0, y0, limits), limits)


def kernel_ridge(data: str, widths: int) -> UserProblem:
    """Kernel ridge regression with one width, or one for each feature."""
    from sklearn.datasets import load_diabetes, make_friedman1

    A, b = load_diabetes(return_X_y=True) if data == "diabetes" else make_friedman1(300, 10, noise=0.5, random_state=0)
    A, b, A_val, b_val = _split(A, b)
    limits = (-6.0, 3.0)
    squares = (A[:, None] - A[None]).square()
    squares_val = (A_val[:, None] - A[None]).square()
    if widths == 1:
        squares, squares_val = squares.sum(2, keepdim=True), squares_val.sum(2, keepdim=True)
    eye = 0.1 * torch.eye(len(A), dtype=F64)

    def kernel(D: Tensor, x: Tensor) -> Tensor:
        return torch.exp(-(D @ x.exp()))

    problem = meha.Problem(
        lambda x, y: 0.5 * (kernel(squares_val, x) @ y - b_val).square().mean(),
        lambda x, y: 0.5 * y @ (kernel(squares, x) @ y) + 0.05 * y @ y - b @ y,
        x_set=meha.sets.Box(*limits),
    )
    x0 = torch.full((widths,), -3.0, dtype=F64)

    def response(x: Tensor) -> Tensor:
        return torch.linalg.solve(kernel(squares, x) + eye, b)

    return UserProblem(problem, x0, torch.zeros(len(A), dtype=F64), lambda: closed_form(problem, response, x0, limits), limits)


def digits(examples: int = 1000) -> UserProblem:
    """Digits: weights of training examples, three in ten with wrong labels, softmax regression."""
    from sklearn.datasets import load_digits

    A, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(A))
    A, labels = A[order] / 16, labels[order]
    noisy = labels[:examples].copy()
    wrong = rng.random(examples) < 0.3
    noisy[wrong] = rng.integers(0, 10, wrong.sum())
    training = meha.losses.Softmax(tensor(A[:examples]), torch.as_tensor(noisy), classes=10)
    validation = meha.losses.Softmax(tensor(A[examples:]), torch.as_tensor(labels[examples:]), classes=10)
    problem = meha.Problem(
        lambda x, y: validation(y),
        lambda x, y: training(y, weights=x.sigmoid()) + 0.005 * y.square().sum(),
        x_set=meha.sets.Box(-5.0, 5.0),
    )
    x0, y0 = torch.zeros(examples, dtype=F64), torch.zeros(64, 10, dtype=F64)
    return UserProblem(problem, x0, y0, lambda: dense_newton(problem, x0, y0, (-5.0, 5.0)), (-5.0, 5.0))


def sparse_data(n: int, p: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = np.zeros(p)
    y[: p // 20] = rng.normal(size=p // 20) + np.sign(rng.normal(size=p // 20))
    A = rng.normal(size=(2 * n, p))
    b = A @ y + 0.5 * np.linalg.norm(A @ y) / np.sqrt(2 * n) * rng.normal(size=2 * n)
    return tensor(A[:n]), tensor(b[:n]), tensor(A[n:]), tensor(b[n:])


def lasso(n: int, p: int, kind: str) -> UserProblem:
    """Lasso with one weight or one for each feature, or elastic net with two."""
    A, b, A_val, b_val = sparse_data(n, p)
    training, validation = meha.losses.LeastSquares(A, b), meha.losses.LeastSquares(A_val, b_val)
    top = float((A.T @ b / n).abs().max().log())
    limits = (top - 7, top + 2)
    net = kind == "elastic net"
    size = {"one": 1, "each": p, "elastic net": p}[kind]
    ridge = 0.01
    term = meha.nonsmooth.ElasticNet(lambda x: x.exp(), ridge) if net else meha.nonsmooth.L1(lambda x: x.exp())
    problem = meha.Problem(lambda x, y: validation(y), lambda x, y: training(y), nonsmooth=term, x_set=meha.sets.Box(*limits))
    x0, y0 = torch.full((size,), top - 1.5, dtype=F64), torch.zeros(p, dtype=F64)
    data = A, b, A_val, b_val
    others: dict[str, Any] = {}
    if not net:
        others["implicit forward"] = lambda: implicit_forward(*data, x0, limits)
    if size == 1:
        others["LassoCV"] = lambda: _lasso_cv(*data)
    return UserProblem(problem, x0, y0, lambda: _lasso_by_hand(*data, x0, limits, ridge if net else 0.0), limits, others)


def _lasso_cv(A: Tensor, b: Tensor, A_val: Tensor, b_val: Tensor) -> tuple[Tensor, Tensor]:
    """scikit-learn's path of 100 weights, with the validation set as the only fold."""
    from sklearn.linear_model import LassoCV
    from sklearn.model_selection import PredefinedSplit

    fold = PredefinedSplit(np.concatenate([np.full(len(A), -1), np.zeros(len(A_val))]))
    model = LassoCV(cv=fold, fit_intercept=False, tol=1e-10, max_iter=100_000)
    model.fit(torch.cat([A, A_val]).numpy(), torch.cat([b, b_val]).numpy())
    weights = np.full(A.shape[1], model.alpha_)
    return tensor([np.log(model.alpha_)]), _lasso(A.numpy(), b.numpy(), weights, np.zeros_like(weights))


def _lasso(X: np.ndarray, t: np.ndarray, w: np.ndarray, start: np.ndarray) -> Tensor:
    """The lasso with one weight for each feature, by coordinate descent in C."""
    from sklearn.linear_model import Lasso

    model = Lasso(alpha=1.0, fit_intercept=False, tol=1e-10, max_iter=100_000, warm_start=True)
    model.coef_ = start * w
    model.fit(np.asfortranarray(X / w), t)
    return tensor(model.coef_ / w)


def implicit_forward(A: Tensor, b: Tensor, A_val: Tensor, b_val: Tensor, x0: Tensor, limits: Any) -> tuple[Tensor, Tensor]:
    """Coordinate descent below; then forward differentiation of its updates on the support (Bertrand and others, 2020)."""
    X, t, X_val, t_val = (part.numpy() for part in (A, b, A_val, b_val))
    n, p = X.shape
    state = {"y": np.zeros(p)}

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = np.broadcast_to(np.exp(x), (p,))
        y = state["y"] = _lasso(X, t, w, state["y"]).numpy()
        S = np.flatnonzero(y)
        part, residual = X[:, S], X_val @ y - t_val
        squares, signs = (part**2).sum(0) / n, np.sign(y[S]) * w[S]
        jacobian = np.zeros((len(S), 1 if len(x) == 1 else len(S)))
        image = np.zeros((n, jacobian.shape[1]))
        for _ in range(1000):
            largest = 0.0
            for j in range(len(S)):
                change = -(part[:, j] @ image) / n / squares[j]
                if len(x) == 1:
                    change[0] -= signs[j] / squares[j]
                else:
                    change[j] -= signs[j] / squares[j]
                jacobian[j] += change
                image += np.outer(part[:, j], change)
                largest = max(largest, float(np.abs(change).max()))
            if largest <= 1e-10 * (1 + np.abs(jacobian).max(initial=0.0)):
                break
        reduced = jacobian.T @ (X_val[:, S].T @ residual) / len(t_val)
        gradient = np.zeros(len(x))
        if len(x) == 1:
            gradient[:] = reduced
        else:
            gradient[S] = reduced
        return 0.5 * residual @ residual / len(t_val), gradient

    x = lbfgsb(value, x0, limits)
    value(x.numpy())
    return x, tensor(state["y"])


def sparse_logistic(n: int = 1000, p: int = 10_000) -> UserProblem:
    """Logistic regression with 10,000 features, 20 of 1,000 non-zero in each row, one penalty; by hand L-BFGS and CG."""
    rng = np.random.default_rng(0)

    def make() -> tuple[Tensor, Tensor]:
        columns = rng.integers(0, p, size=(n, p // 500))
        rows = np.repeat(np.arange(n), p // 500)
        values = rng.normal(size=columns.size)
        A = torch.sparse_coo_tensor(np.stack([rows, columns.ravel()]), values, (n, p), dtype=F64).coalesce()
        return A, torch.sign(torch.sparse.mm(A, truth[:, None])[:, 0] + 0.1 * tensor(rng.normal(size=n)))

    truth = tensor(rng.normal(size=p) * (rng.random(p) < 0.1))
    (A, b), (A_val, b_val) = make(), make()
    softplus, limits = torch.nn.functional.softplus, (-15.0, 3.0)

    def loss(M: Tensor, signs: Tensor, y: Tensor) -> Tensor:
        return softplus(-signs * torch.sparse.mm(M, y[:, None])[:, 0]).mean()

    problem = meha.Problem(
        lambda x, y: loss(A_val, b_val, y),
        lambda x, y: loss(A, b, y) + 0.5 * x.exp() * y.square().sum(),
        x_set=meha.sets.Box(*limits),
    )
    x0, y0 = torch.tensor(-5.0, dtype=F64), torch.zeros(p, dtype=F64)
    return UserProblem(problem, x0, y0, lambda: lbfgs_and_cg(problem, x0, y0, limits), limits)


def lbfgs_and_cg(problem: meha.Problem, x0: Tensor, y0: Tensor, limits: Any) -> tuple[Tensor, Tensor]:
    """scipy's L-BFGS below, conjugate gradients for the implicit gradient, L-BFGS-B above."""
    from scipy.sparse.linalg import LinearOperator, cg

    state = [y0.numpy().ravel()]

    def lower(x: Tensor, y: np.ndarray) -> tuple[float, np.ndarray]:
        at = tensor(y).reshape(y0.shape).requires_grad_()
        f = problem.lower(x, at)
        return f.item(), torch.autograd.grad(f, at)[0].numpy().ravel()

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        at_x = tensor(x).reshape(x0.shape)
        options = {"maxcor": 30, "maxiter": 5000, "ftol": 1e-16, "gtol": 1e-9}
        state[0] = minimize(lambda y: lower(at_x, y), state[0], jac=True, method="L-BFGS-B", options=options).x
        at_x.requires_grad_()
        y = tensor(state[0]).reshape(y0.shape).requires_grad_()
        (f_y,) = torch.autograd.grad(problem.lower(at_x, y), y, create_graph=True)
        F = problem.upper(at_x, y)
        F_x, F_y = torch.autograd.grad(F, (at_x, y), allow_unused=True)

        def product(v: np.ndarray) -> np.ndarray:
            return torch.autograd.grad(f_y, y, tensor(v).reshape(y0.shape), retain_graph=True)[0].numpy().ravel()

        n = y.numel()
        v, _ = cg(LinearOperator((n, n), matvec=product, dtype=float), F_y.numpy().ravel(), rtol=1e-10, maxiter=1000)
        (through,) = torch.autograd.grad(f_y, at_x, tensor(v).reshape(y0.shape))
        return F.item(), np.atleast_1d(((0 if F_x is None else F_x) - through).numpy()).ravel()

    x = lbfgsb(value, x0, limits)
    value(x.numpy().ravel())
    return x, tensor(state[0]).reshape(y0.shape)


def _lasso_by_hand(A: Tensor, b: Tensor, A_val: Tensor, b_val: Tensor, x0: Tensor, limits: Any, ridge: float) -> Any:
    """Coordinate descent in C below, the implicit gradient on the support, L-BFGS-B above."""
    from sklearn.linear_model import ElasticNet

    X, t, X_val, t_val = (part.numpy() for part in (A, b, A_val, b_val))
    n, p = X.shape
    state = {"y": np.zeros(p)}

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = np.broadcast_to(np.exp(x), (p,))
        alpha, scaled = 1.0, X / w  # ||X y - t||^2 / 2n + sum w |y| with u = w y
        if ridge:  # rows for the ridge, whose scale depends on the feature
            scaled = np.vstack([scaled, np.sqrt(n * ridge) * np.diag(1 / w)])
        target = np.concatenate([t, np.zeros(p)]) if ridge else t
        m = len(target)
        model = ElasticNet(alpha=alpha * n / m, l1_ratio=1.0, fit_intercept=False, tol=1e-10, max_iter=100_000, warm_start=True)
        model.coef_ = state["y"] * w
        model.fit(np.asfortranarray(scaled), target)
        y = model.coef_ / w
        state["y"] = y
        S = np.flatnonzero(y)
        H = X[:, S].T @ X[:, S] / n + ridge * np.eye(len(S))
        residual = X_val @ y - t_val
        v = np.linalg.solve(H, X_val[:, S].T @ residual / len(t_val)) if len(S) else np.zeros(0)
        gradient = np.zeros(p)
        gradient[S] = -v * w[S] * np.sign(y[S])
        return 0.5 * residual @ residual / len(t_val), gradient if len(x) == p else gradient.sum(keepdims=True)

    x = lbfgsb(value, x0, limits)
    value(x.numpy())
    return x, tensor(state["y"])


def group_lasso(n: int, p: int, group: int = 10) -> UserProblem:
    """Group lasso with one weight for each group."""
    A, b, A_val, b_val = sparse_data(n, p, seed=1)
    training, validation = meha.losses.LeastSquares(A, b), meha.losses.LeastSquares(A_val, b_val)
    groups = [group] * (p // group)
    top = float((A.T @ b / n).reshape(-1, group).norm(dim=1).max().log())
    limits = (top - 7, top + 2)
    problem = meha.Problem(
        lambda x, y: validation(y),
        lambda x, y: training(y),
        nonsmooth=meha.nonsmooth.GroupL2(groups, weight=lambda x: x.exp()),
        x_set=meha.sets.Box(*limits),
    )
    x0, y0 = torch.full((len(groups),), top - 1.5, dtype=F64), torch.zeros(p, dtype=F64)
    return UserProblem(problem, x0, y0, lambda: _groups_by_hand(A, b, A_val, b_val, x0, limits, group), limits)


def _groups_by_hand(A: Tensor, b: Tensor, A_val: Tensor, b_val: Tensor, x0: Tensor, limits: Any, size: int) -> Any:
    """Accelerated proximal gradients below, the implicit gradient on the active groups, L-BFGS-B above."""
    X, t, X_val, t_val = (part.numpy() for part in (A, b, A_val, b_val))
    n, p = X.shape
    gram, right = X.T @ X / n, X.T @ t / n
    step = 1 / np.linalg.eigvalsh(gram)[-1]
    state = {"y": np.zeros(p)}

    def lower(w: np.ndarray) -> np.ndarray:
        y = z = state["y"]
        momentum = 1.0
        for _ in range(20_000):
            u = (z - step * (gram @ z - right)).reshape(-1, size)
            norms = np.linalg.norm(u, axis=1)
            new = (u * np.maximum(1 - step * w / np.maximum(norms, 1e-300), 0)[:, None]).ravel()
            if (new - y) @ (z - new) > 0:
                momentum = 1.0
            ahead = 0.5 + np.sqrt(0.25 + momentum**2)
            z = new + (momentum - 1) / ahead * (new - y)
            moved = np.abs(new - y).max()
            y, momentum = new, ahead
            if moved <= 1e-11 * (1 + np.abs(y).max()):
                break
        return y

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        w = np.exp(x)
        y = state["y"] = lower(w)
        blocks = y.reshape(-1, size)
        norms = np.linalg.norm(blocks, axis=1)
        active = np.flatnonzero(norms)
        S = (active[:, None] * size + np.arange(size)).ravel()
        H = gram[np.ix_(S, S)].copy()
        for k, j in enumerate(active):
            unit, part = blocks[j] / norms[j], slice(k * size, (k + 1) * size)
            H[part, part] += w[j] / norms[j] * (np.eye(size) - np.outer(unit, unit))
        residual = X_val @ y - t_val
        v = np.linalg.solve(H, X_val[:, S].T @ residual / len(t_val)).reshape(-1, size)
        gradient = np.zeros(len(w))
        gradient[active] = -w[active] * (v * (blocks[active] / norms[active, None])).sum(1)
        return 0.5 * residual @ residual / len(t_val), gradient

    x = lbfgsb(value, x0, limits)
    value(x.numpy())
    return x, tensor(state["y"])


CASES: dict[str, Callable[[], UserProblem]] = {
    "ridge, diabetes, 10 penalties": lambda: ridge(1),
    "ridge, diabetes, 65 penalties": lambda: ridge(2),
    "logistic, 5 folds, 30 penalties": folds,
    "kernel ridge, diabetes, 1 width": lambda: kernel_ridge("diabetes", 1),
    "kernel ridge, Friedman, 1 width": lambda: kernel_ridge("Friedman", 1),
    "kernel ridge, diabetes, 10 widths": lambda: kernel_ridge("diabetes", 10),
    "kernel ridge, Friedman, 10 widths": lambda: kernel_ridge("Friedman", 10),
    "digits, 1000 weights, softmax": digits,
    "lasso 100 x 300, 1 weight": lambda: lasso(100, 300, "one"),
    "lasso 100 x 300, 300 weights": lambda: lasso(100, 300, "each"),
    "lasso 100 x 600, 600 weights": lambda: lasso(100, 600, "each"),
    "elastic net 100 x 300, 300 weights": lambda: lasso(100, 300, "elastic net"),
    "elastic net 100 x 600, 600 weights": lambda: lasso(100, 600, "elastic net"),
    "group lasso 100 x 300, 30 weights": lambda: group_lasso(100, 300),
    "group lasso 100 x 600, 60 weights": lambda: group_lasso(100, 600),
    "sparse logistic, 10,000 unknowns": sparse_logistic,
}


def clocked(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and its processor seconds."""
    begin = time.process_time()
    result = work()
    return result, time.process_time() - begin
