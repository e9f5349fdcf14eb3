"""
Tolls on a road network
=======================

The operator of two roads sets tolls, and travellers take the cheapest roads, within capacities.

Travellers go from A to D over six roads, two of which belong to an operator. The lower level is a linear program: the flows
y >= 0 meet the demand at every node, stay within the capacities, and cost as little as possible, tolls x included. The operator
collects x'y. Where two ways cost the same, the flows that are best for the operator are meant (optimistic).
"""

import matplotlib.pyplot as plt
import torch

import meha

ROADS = ["A-B (toll)", "A-C", "B-C", "B-D", "C-D (toll)", "A-D"]
TOLLED = [0, 4]
COST = torch.tensor([1.0, 4.0, 0.5, 4.0, 1.0, 8.0], dtype=torch.float64)
CAPACITY = torch.tensor([0.8, 1.0, 1.0, 0.6, 0.9, 1.0], dtype=torch.float64)
BALANCE = torch.tensor([[1.0, 1, 0, 0, 0, 1], [-1, 0, 1, 1, 0, 0], [0, -1, -1, 0, 1, 0]], dtype=torch.float64)  # at A, B, C
DEMAND = torch.tensor([1.0, 0, 0], dtype=torch.float64)


def problem():
    return meha.Problem(
        upper=lambda x, y: -(x * y[TOLLED]).sum(),
        lower=lambda x, y: COST @ y + (x * y[TOLLED]).sum(),
        x_set=meha.sets.Box(0.0, 9.0),
        y_set=meha.sets.Box(torch.zeros(6, dtype=torch.float64), CAPACITY),
        lower_constraints=meha.constraints.Linear(A_eq=None, B_eq=BALANCE, b_eq=DEMAND),
    )


def main():
    stated = problem()
    solution = meha.solve(stated, torch.ones(2, dtype=torch.float64), torch.full((6,), 0.5, dtype=torch.float64))
    print(solution)
    print(f"  active     {solution.report['active']}")
    for road, flow in zip(ROADS, solution.y.tolist(), strict=True):
        print(f"  {road:<12} flow {flow:.3f}")
    tolls = [round(toll, 3) for toll in solution.x.tolist()]
    revenue = -float(stated.upper(solution.x, solution.y))
    print(f"  tolls {tolls}, revenue {revenue:.4f}")
    figure, axes = plt.subplots(figsize=(6, 3.2))
    axes.barh(ROADS, CAPACITY.numpy(), color="0.9", label="capacity")
    axes.barh(ROADS, solution.y.numpy(), color=["C1" if road in TOLLED else "C0" for road in range(6)], label="flow")
    axes.set(xlabel="travellers", title=f"tolls {tolls[0]} and {tolls[1]}: revenue {revenue:.2f}")
    axes.legend()
    figure.tight_layout()
    plt.show()


if __name__ == "__main__":
    main()
