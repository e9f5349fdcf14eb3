"""Algorithm 1, and one-step unrolls, written by hand: what a step cannot do without, and nothing else.

No checks, no counts, no numbers reported; the same passes as the steps of the library, so that the iterates are the same to
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from meha_lab.tasks.few_shot import FewShot, Tasks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, pad

import meha
from meha.problems import KnownProblem


def loop(problem: KnownProblem, method: meha.MEHA, steps: int) -> tuple[Tensor, Tensor]:
    """The fastest loop for tensors that one would write by hand in eager torch: three backward passes a step."""
    F, f = problem.upper, problem.lower
    alpha, beta, eta, gamma, c0, p = (getattr(method, name) for name in ("alpha", "beta", "eta", "gamma", "c", "p"))
    x, y, theta = (t.clone().requires_grad_() for t in (problem.x0, problem.y0, problem.y0))
    for k in range(steps):
        c = c0 * (k + 1) ** p
        (d,) = torch.autograd.grad(f(x, theta), theta)
        with torch.no_grad():
            theta -= eta * (d + (theta - y) / gamma)
        (d,) = torch.autograd.grad(F(x, y) / c + f(x, y) - f(x, theta), x)
        with torch.no_grad():
            x -= alpha * d
        (d,) = torch.autograd.grad(F(x, y) / c + f(x, y), y)
        with torch.no_grad():
            y -= beta * (d - (y - theta) / gamma)
    return x.detach(), y.detach()


class Passes:
    """Steps on a network y: a forward and a backward pass for each term, and updates in place. c does not change."""

    def __init__(
        self, upper: Callable[..., Tensor], lower: Callable[..., Tensor], numbers: Mapping[str, float], x: Any, y: nn.Module
    ) -> None:
        self.upper, self.lower, self.numbers = upper, lower, numbers
        self.x, self.y, self.theta = x, y, copy.deepcopy(y)
        self.leaves = [x.requires_grad_()] if isinstance(x, Tensor) else list(x.parameters())

    def step(self, *batch: Any) -> None:
        alpha, beta, eta, gamma, c = (self.numbers[name] for name in ("alpha", "beta", "eta", "gamma", "c"))
        x, ys, thetas = self.leaves, list(self.y.parameters()), list(self.theta.parameters())
        d = list(torch.autograd.grad(self.lower(self.x, self.theta, *batch), thetas))
        _move(thetas, d, eta, thetas, ys, gamma)

        total = [torch.zeros_like(leaf) for leaf in x]
        for weight, function, at in ((1 / c, self.upper, self.y), (1.0, self.lower, self.y), (-1.0, self.lower, self.theta)):
            found = torch.autograd.grad(function(self.x, at, *batch), x, allow_unused=True)
            if found[0] is not None:
                torch._foreach_add_(total, found, alpha=weight)
        with torch.no_grad():
            torch._foreach_add_(x, total, alpha=-alpha)

        d = list(torch._foreach_mul(torch.autograd.grad(self.upper(self.x, self.y, *batch), ys), 1 / c))
        torch._foreach_add_(d, torch.autograd.grad(self.lower(self.x, self.y, *batch), ys))
        _move(ys, d, beta, thetas, ys, gamma)


class Unroll:
    """Steps of x along the gradient through one step of y, as most write it: y moves inside of the graph, which the loss of the
    upper level then goes through."""

    def __init__(
        self, upper: Callable[..., Tensor], lower: Callable[..., Tensor], numbers: Mapping[str, float], x: Any, y: nn.Module
    ) -> None:
        self.upper, self.lower, self.numbers, self.x, self.y = upper, lower, numbers, x, y
        self.leaves = [x.requires_grad_()] if isinstance(x, Tensor) else list(x.parameters())

    def step(self, *batch: Any) -> None:
        alpha, beta = (self.numbers[name] for name in ("alpha", "beta"))
        named = dict(self.y.named_parameters())
        d = torch.autograd.grad(self.lower(self.x, self.y, *batch), list(named.values()), create_graph=True)
        moved = {name: leaf - beta * part for (name, leaf), part in zip(named.items(), d, strict=True)}
        value = self.upper(self.x, lambda images: functional_call(self.y, moved, (images,)), *batch)
        found = torch.autograd.grad(value, self.leaves)
        with torch.no_grad():
            torch._foreach_copy_(list(named.values()), list(moved.values()))
            torch._foreach_add_(self.leaves, found, alpha=-alpha)


class DifferenceQuotient(Unroll):
    """Steps of DARTS of second order: five passes, one through F and four through f."""

    def step(self, *batch: Any) -> None:
        alpha, beta = (self.numbers[name] for name in ("alpha", "beta"))
        ys = list(self.y.parameters())
        kept = [leaf.detach().clone() for leaf in ys]
        d = torch.autograd.grad(self.lower(self.x, self.y, *batch), ys)
        with torch.no_grad():
            torch._foreach_add_(ys, d, alpha=-beta)
        q = list(torch.autograd.grad(self.upper(self.x, self.y, *batch), ys))
        with torch.no_grad():
            torch._foreach_mul_(q, beta)
            e = 0.01 / torch.linalg.vector_norm(torch.stack(torch._foreach_norm(q))).item()
            torch._foreach_copy_(ys, kept)
            slopes = []
            for by in (e, -2 * e):  # to one side, and from there to the other
                torch._foreach_add_(ys, q, alpha=by)
                with torch.enable_grad():
                    slopes.append(torch.autograd.grad(self.lower(self.x, self.y, *batch), self.leaves))
            torch._foreach_add_(self.leaves, torch._foreach_sub(slopes[0], slopes[1]), alpha=alpha / (2 * e))
            torch._foreach_copy_(ys, kept)
        d = torch.autograd.grad(self.lower(self.x, self.y, *batch), ys)
        with torch.no_grad():
            torch._foreach_add_(ys, d, alpha=-beta)


@torch.no_grad()
def _move(leaves: list[Tensor], direction: list[Tensor], step: float, a: list[Tensor], b: list[Tensor], gamma: float) -> None:
    """leaves <- leaves - step (direction + (a - b) / gamma)."""
    away = torch._foreach_sub(a, b)
    torch._foreach_add_(leaves, direction, alpha=-step)
    torch._foreach_add_(leaves, away, alpha=-step / gamma)


class FewShotPasses:
    """Steps on a few-shot task whose heads begin at zero with each batch: the features of the support and of the query images
    are computed once, the heads take their steps on them, and one pass goes back to the backbone, which Adam moves."""

    def __init__(self, task: FewShot, numbers: Mapping[str, float], lr: float, inner_steps: int) -> None:
        self.task, self.numbers, self.inner_steps = task, numbers, inner_steps
        self.x, self.start = task.start()
        self.optimizer = torch.optim.Adam(self.x.parameters(), lr=lr)

    def step(self, batch: Tasks) -> None:
        beta, eta, gamma, c = (self.numbers[name] for name in ("beta", "eta", "gamma", "c"))
        tasks, ways = self.start.shape[:2]
        features = [pad(self.x(images), (0, 1), value=1.0).unflatten(0, (tasks, -1)) for images in batch[:2]]
        labels = [torch.arange(ways, device=part.device).repeat(tasks * part.shape[1] // ways) for part in features]
        support, query = (part.detach() for part in features)

        def loss(part: Tensor, label: Tensor, heads: Tensor) -> Tensor:
            scores = torch.bmm(part, heads.transpose(1, 2))
            return cross_entropy(scores.flatten(0, 1), label, reduction="sum") * (tasks / len(label))

        y, theta = (self.start.clone().requires_grad_() for _ in range(2))
        for t in range(self.inner_steps):
            (d,) = torch.autograd.grad(loss(support, labels[0], theta), theta)
            with torch.no_grad():
                theta -= eta * (d + (theta - y) / gamma)
            if t < self.inner_steps - 1:
                (d,) = torch.autograd.grad(loss(query, labels[1], y) / c + loss(support, labels[0], y), y)
                with torch.no_grad():
                    y -= beta * (d - (y - theta) / gamma)

        y, theta = y.detach(), theta.detach()
        terms = loss(features[0], labels[0], y) - loss(features[0], labels[0], theta)
        self.optimizer.zero_grad()
        (loss(features[1], labels[1], y) / c + terms).backward()
        self.optimizer.step()
