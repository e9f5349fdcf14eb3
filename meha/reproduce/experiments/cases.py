"""The cases of the synthetic experiments: problems, targets and limits."""

from __future__ import annotations

from meha.problems import group_lasso, lasso, merely_convex, sine, strong_convex
from meha.reproduce.cells import Case

__all__ = ["GROUP_LASSO", "HIGH_DIMENSION", "LASSO", "MERELY_CONVEX", "SINE", "STRONG_CONVEX"]

STRONG_CONVEX = Case("strong convex, n = 100", strong_convex, (("n", 100),), target=1e-2)

HIGH_DIMENSION = [
    Case(
        f"strong convex, n = {n:,}",
        strong_convex,
        (("n", n),),
        target=1e-2,
        seconds=300.0 if n == 1_000_000 else 120.0,
        stay=200,
        tuned_at=STRONG_CONVEX.name,
    )
    for n in (10_000, 30_000, 1_000_000)
]

MERELY_CONVEX = Case("merely convex, n = 10", merely_convex, (("n", 10),), target=1e-3)

SINE = {n: Case(f"sine, n = {n}", sine, (("n", n),), target=5e-2) for n in (1, 10, 50, 100, 200, 300, 500, 1000)}

LASSO = {n: Case(f"lasso, n = {n}", lasso, (("n", n),), target=5e-2) for n in (2, 100, 500, 1000, 2000)}

GROUP_LASSO = {
    m: Case(f"group lasso, m = {m}", group_lasso, (("m", m),), work=10**9, seconds=20.0, steps=500, data=True)
    for m in (600, 1200, 2400, 3600)
}
