"""The data profile: the share of problems that are solved, against the gradients that were taken; from the stored records."""

from pathlib import Path

from matplotlib.figure import Figure
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.experiments.automatic import ADAPTIVE, POINTS, reaches, rows
from meha_lab.reproduce.solving import GOOD
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

ROOT = Path(__file__).parent.parent
LABELS = {
    "automatic": "solve(problem, x0, y0)",
    ADAPTIVE: "AdaptiveMEHA()",
    "random": f"Algorithm 1, best of {POINTS} settings",
    "paper": "Algorithm 1, the paper's settings",
}


def solved():
    """The gradients of f and F of all runs that solved their problem, by column, and the number of problems."""
    cells = EXPERIMENTS["automatic"].cells(Options(), Tuning.shipped())
    records = Records(Store(ROOT / "lab/records"), cells)
    problems = [row for row in rows() if row.group in ("held-out", "tuning")]
    found = {column: [] for column in LABELS}
    for row in problems:
        for column, gradients in found.items():
            for record in records.get(row.name, column, "solve"):
                if reaches(record, GOOD):
                    gradients.append(sum(record["gradients"]) * (POINTS if column == "random" else 1))
    return found, len(problems)


def draw(path):
    """Write the figure."""
    found, count = solved()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    colors = {"automatic": "#0072B2", ADAPTIVE: "#009E73", "random": "#E69F00", "paper": "#999999"}
    end = 3 * max(gradient for gradients in found.values() for gradient in gradients)
    for column, gradients in found.items():
        ordered = sorted(gradients)
        shares = [100 * (i + 1) / count for i in range(len(ordered))]
        label = f"{LABELS[column]}: {len(ordered)} of {count}"
        axis.step(
            [10, *ordered, end], [0, *shares, shares[-1] if shares else 0], where="post", label=label, color=colors[column]
        )
    axis.set(xscale="log", xlim=(10, end), ylim=(-2, 102), xlabel="gradients of f and F (fewer is better)")
    axis.set(ylabel="problems solved to 1e-3, %")
    axis.grid(alpha=0.3)
    figure.legend(frameon=False, fontsize="small", loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=130)


def setup(app):
    """Draw the figure before pages are read."""
    app.connect("builder-inited", lambda app: draw(Path(app.srcdir) / "_static" / "data_profile.png"))
    return {"parallel_read_safe": True}
