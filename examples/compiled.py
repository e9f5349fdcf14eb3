"""
Many steps as one compiled call
===============================

On small problems the time of a step goes into Python and the calls of torch. ``compile=True`` turns groups of steps into one
compiled call, with results equal up to rounding. It takes some seconds once, and is cached on disk.
"""

import time

import matplotlib.pyplot as plt

import meha

problem = meha.problems.sine(n=10)
method = problem.preset("recipe")


def seconds(steps, compiled):
    begin = time.perf_counter()
    solution = meha.solve(problem, problem.x0, problem.y0, method, max_steps=steps, tol=None, compile=compiled)
    return time.perf_counter() - begin, float(solution.x)


# %%
# The first compiled run includes the compiler; the second one of the same form does not.

counts = [500, 1000, 2000]
first, _ = seconds(500, compiled=True)
rows = {name: [seconds(steps, kind) for steps in counts] for name, kind in (("eager", False), ("compiled", True))}
for i, steps in enumerate(counts):
    (eager, x_eager), (compiled, x_compiled) = rows["eager"][i], rows["compiled"][i]
    print(f"{steps} steps: the same x up to {abs(x_eager - x_compiled):.0e}; compiled is faster: {compiled < eager}")

figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
for name, measured in rows.items():
    axis.plot(counts, [second for second, _ in measured], marker="o", label=name)
axis.set(xlabel="steps", ylabel="seconds (lower is better)", yscale="log", xscale="log")
axis.legend(frameon=False)
plt.show()
