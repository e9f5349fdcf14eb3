"""Run a method: solve, the loop, observers, stopping rules, checkpoints, solutions."""
