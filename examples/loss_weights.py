"""
Loss weights of several heads
=============================

A linear model has one part that all tasks share, and a head for each. The main task has 9 examples and 12 features. Six more
have 40 examples each: two are nearly the same task, one is the same with much noise, two have nothing to do with it, and one is
the opposite. How much should each count? Weights of their losses are learned from 40 validation examples of the main task.
"""

import matplotlib.pyplot as plt
import torch

import meha

names = ["close", "similar", "noisy", "other 1", "other 2", "opposite"]


def tasks(seed):
    """Training examples of the main task and of the others, then validation and test examples of the main task."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def sample(coefficients, n, noise=0.5):
        A = normal(n, 12)
        return A, A @ coefficients + noise * normal(n)

    truth = normal(12)
    others = [truth + 0.1 * normal(12), truth + 0.3 * normal(12), truth, normal(12), normal(12), -truth]
    further = [sample(other, 40, noise) for other, noise in zip(others, (0.5, 0.5, 3.0, 0.5, 0.5, 0.5), strict=True)]
    return [sample(truth, 9), *further], sample(truth, 40), sample(truth, 2000)


def loss(y, task, examples):
    A, b = examples
    return (A @ (y["shared"] + y["heads"][task]) - b).square().mean()


# %%
# ``x`` has the logarithms of the six weights, ``y`` the shared coefficients and the heads. A head is small where it can be.


def posed(train, valid):
    def lower(x, y):
        losses = torch.stack([loss(y, task, examples) for task, examples in enumerate(train)])
        return losses[0] + x.exp() @ losses[1:] + 0.1 * y["heads"].square().sum() + 1e-3 * y["shared"].square().sum()

    return meha.Problem(upper=lambda x, y: loss(y, 0, valid), lower=lower, x_set=meha.sets.Box(-6.0, 3.0))


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


start = {"shared": zeros(12), "heads": zeros(7, 12)}
train, valid, test = tasks(0)
problem = posed(train, valid)
solution = meha.solve(problem, zeros(6), start)
print(solution)

# %%
# The baselines: the main task alone, equal weights, and a random search. It trains at as many x as the gradients and products
# of the solution pay for, and takes the x with the least validation loss.


def trained(problem, x):
    """The model at x, and its work."""
    fixed = meha.Problem(upper=lambda y: 0.0 * y["shared"].sum(), lower=lambda y: problem.lower(x, y))
    found = meha.solve(fixed, None, start, meha.Default(verify=False))
    return found.y, found.counts.lower + found.counts.hvp


def random_search(problem, budget):
    """The best x, and how many there were."""
    generator, spent, trials = torch.Generator().manual_seed(0), 0, []
    while spent < budget:
        x = 9 * torch.rand(6, generator=generator, dtype=torch.float64) - 6
        y, work = trained(problem, x)
        trials.append((float(problem.upper(x, y)), x))
        spent += work
    return min(trials, key=lambda trial: trial[0])[1], len(trials)


counts = solution.counts
searched, trials = random_search(problem, counts.upper + counts.lower + counts.hvp)
points = {
    "main task alone": zeros(6) - 30,
    "equal weights": zeros(6),
    f"best of {trials} random": searched,
    "learned weights": solution.x,
}
found = {name: float(loss(trained(problem, x)[0], 0, test)) for name, x in points.items()}
print("test loss:", ", ".join(f"{name} {value:.2f}" for name, value in found.items()))

# %%
# With ``tasks(1)``, ``tasks(2)`` and ``tasks(3)`` the learned weights are the best, too, by less. It need not be so for the
# heads of a network, where a random search can be as good: `what to expect <../loss-weights.html>`_.

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
left.barh(list(found), list(found.values()), color=["0.7", "0.7", "tab:orange", "tab:blue"])
left.set(title="test loss of the main task")
for (name, x), shift, color in zip([*points.items()][2:], (-0.2, 0.2), ("tab:orange", "tab:blue"), strict=True):
    right.bar(torch.arange(6) + shift, x.exp(), width=0.4, color=color, label=name)
right.axhline(1.0, color="0.6", linestyle=":")
right.set(title="weight of each further task", xticks=range(6), xticklabels=names, yscale="log")
right.legend(frameon=False)
plt.show()
