"""The cases of the synthetic experiments: group_lasso, targets and limits."""

from __future__ import annotations

from dataclasses import replace

from meha.problems import group_lasso, lasso, merely_convex, sine, strong_convex
from meha_lab.reproduce.cells import Case

__all__ = [
    "GROUP_LASSO",
    "GROUP_LASSO_READING",
    "GROUP_LASSO_READINGS",
    "HIGH_DIMENSION",
    "LASSO",
    "MERELY_CONVEX",
    "SINE",
    "STRONG_CONVEX",
]


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

REST = 0.002
"""The paper's rule for the group lasso: a step that changes x by 0.2 %; "0.2" is printed, which 2 to 4 steps would meet."""

GROUP_LASSO_READING = {
    m: replace(case, arguments=(("m", m), ("start", 0.0)), seconds=600.0, steps=1000, rest=REST)
    for m, case in GROUP_LASSO.items()
}
"""The group lasso from the start and with the end that fit the paper's numbers."""

GROUP_LASSO_READINGS = {
    m: {
        (start, rule): replace(
            case,
            name=f"{case.name}, readings",
            arguments=(("m", m), ("start", start)),
            seconds=600.0,
            steps=500 if rest is None else 1000,
            rest=rest,
            looks=0,
        )
        for start in (0.0, 0.01, 0.1)
        for rule, rest in {"500 steps": None, "change of 0.2 %": REST, "change of 20 %": 0.2}.items()
        if rest != 0.2 or not start
    }
    for m, case in GROUP_LASSO.items()
}
"""What the paper may have done, by m, start and end."""
