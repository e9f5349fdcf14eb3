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
# The first compiled run of a form includes the compiler; it is left out here.

counts = [1000, 2000, 4000]
for steps in counts:
    seconds(steps, compiled=True)
rows = {name: [seconds(steps, kind) for steps in counts] for name, kind in (("eager", False), ("compiled", True))}
for steps, (_, eager), (_, compiled) in zip(counts, *rows.values(), strict=True):
    print(f"{steps} steps: the same x up to {abs(eager - compiled):.0e}")

figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
for name, measured in rows.items():
    axis.plot(counts, [1e6 * spent / steps for steps, (spent, _) in zip(counts, measured, strict=True)], marker="o", label=name)
axis.set(xlabel="steps of the run", ylabel="microseconds per step\n(lower is better)", yscale="log", xscale="log")
axis.legend(frameon=False)
plt.show()
