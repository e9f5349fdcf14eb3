"""
Prices against a buyer with a budget
====================================

A Stackelberg game: a seller sets prices, a buyer with a budget chooses what to buy.

The buyer maximises a concave utility of the quantities y at prices x, within a budget: x'y <= budget, a bilinear constraint.
The seller maximises the profit (x - cost)'y. With a small budget the seller takes all of it, and sells the good with the larger
margin first; beyond some budget nothing changes any more.
"""

import matplotlib.pyplot as plt
import torch

import meha

COST = torch.tensor([0.5, 1.0], dtype=torch.float64)
TASTE = torch.tensor([4.0, 5.0], dtype=torch.float64)


def problem(budget):
    return meha.Problem(
        upper=lambda x, y: -((x - COST) * y).sum(),
        lower=lambda x, y: -(TASTE @ y) + y.square().sum() + 0.5 * y[0] * y[1] + x @ y,
        x_set=meha.sets.Box(0.1, 6.0),
        y_set=meha.sets.NonNegative(),
        lower_constraints=meha.constraints.Smooth(lambda x, y: x @ y - budget),
    )


def main():
    start = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor([0.1, 0.1], dtype=torch.float64)
    print("budget   prices           quantities       profit   spent    status")
    profits = {}
    for budget in (0.5, 1.0, 2.0, 4.0, 8.0):
        solution = meha.solve(problem(budget), *start)
        (prices, quantities) = ([f"{number:.3f}" for number in part.tolist()] for part in (solution.x, solution.y))
        profit = profits[budget] = float(((solution.x - COST) * solution.y).sum())
        spent = float(solution.x @ solution.y)
        print(f"{budget:<8} {', '.join(prices):<16} {', '.join(quantities):<16} {profit:<8.4f} {spent:<8.4f} {solution.status}")
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.plot(list(profits), list(profits.values()), "o-")
    axes.set(xlabel="budget of the buyer", ylabel="profit of the seller", ylim=0)
    figure.tight_layout()
    plt.show()


if __name__ == "__main__":
    main()
