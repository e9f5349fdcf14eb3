"""
Features for learning from one example
======================================

Few-shot learning: ``x`` is a small convolutional network shared by all tasks, ``y`` has a linear head for each task of a batch.
A task has five classes with one example each; the lower level fits its head to these five, the upper level judges the features
by 15 other examples per class. The network sees the digits 0 to 4 in four orientations; it is tested on 5 to 9.
"""

import matplotlib.pyplot as plt
import meha_lab.tasks

import meha

task = meha_lab.tasks.few_shot("digits", ways=5, tasks=8, width=16, test_tasks=50)
x0, y0 = task.start()
before = task.evaluate(x0)["accuracy"]

# %%
# Heads belong to their batch, so they start over with each (``warm_start=False``). An observer measures the accuracy on tasks
# with digits that were not seen.

accuracies = []


def watch(run, info):
    if info.step % 40 == 0:
        accuracies.append((info.step, task.evaluate(run.x)["accuracy"]))


method = meha.StochasticMEHA(warm_start=False)
solution = meha.solve(task.problem, x0, y0, method, batches=task.batches(), max_steps=120, callbacks=watch)
print(solution)
print(f"accuracy on digits 5 to 9 from one example each: {before:.2f} before, {accuracies[-1][1]:.2f} after")

figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.plot(*zip((0, before), *accuracies, strict=True), marker="o")
axis.axhline(0.2, color="0.6", linestyle=":", label="chance")
axis.set(xlabel="batches", ylabel="test accuracy", ylim=(0, 1))
axis.legend(frameon=False)
plt.show()
