"""What Run.step costs above a bare hand-written loop of the same gradients, on the sine toy; both in one run.

    python benchmarks/overhead.py [--n 1] [--steps 1000] [--rounds 9]

The bare loop is Algorithm 1 for this one problem and nothing else: three backward passes a step, no checks, no counts, no
numbers reported. The rounds alternate, so that a change of the machine's speed hits both.
"""

import argparse
import statistics
import time

import torch

import meha


def bare(problem, method, steps):
    """The fastest loop that one would write by hand in eager torch."""
    F, f = problem.upper, problem.lower
    alpha, beta, eta, gamma, c0, p = method.alpha, method.beta, method.eta, method.gamma, method.c, method.p
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


def ours(problem, method, steps):
    run = method.start(problem, problem.x0, problem.y0)
    for _ in range(steps):
        run.step()
    return run.x, run.y


def whole(problem, method, steps):
    solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=steps, tol=None)
    return solution.x, solution.y


def seconds(function, *arguments):
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description="Overhead of Run.step and solve over a bare loop.")
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    problem = meha.problems.sine(options.n)
    method = problem.preset("recipe")
    for a, b in zip(bare(problem, method, 50), ours(problem, method, 50), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10), "the two loops must take the same steps"

    times = {function: [] for function in (bare, ours, whole)}
    for _ in range(options.rounds):
        for function, spent in times.items():
            spent.append(seconds(function, problem, method, options.steps) / options.steps)
    print(f"sine toy, n = {options.n}, {options.steps} steps, {options.rounds} rounds, torch {torch.__version__}")
    for function, label in ((bare, "bare loop"), (ours, "Run.step"), (whole, "solve")):
        ratios = sorted(a / b for a, b in zip(times[function], times[bare], strict=True))
        low, middle, high = ratios[len(ratios) // 5], statistics.median(ratios), ratios[-1 - len(ratios) // 5]
        spent = statistics.median(times[function]) * 1e6
        print(f"{label:>10}: {spent:7.0f} us a step, {middle:.2f} times the bare loop (20-80 %: {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
