"""Beyond the paper: the rates of its two theorems, measured."""

from __future__ import annotations

from meha_lab.reproduce.cells import Case, Cell
from meha_lab.reproduce.contenders import AUTOMATIC, CONTENDERS
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Records, holds, prose
from meha_lab.reproduce.experiments.racing import picture
from meha_lab.reproduce.figures import Curve, Panel
from meha_lab.reproduce.page import Block, Item, Mark, Section, Table
from meha_lab.reproduce.rates import TRIALS, Rate, predicted
from meha_lab.reproduce.tuning import Tuning

__all__ = ["ConvergenceRates"]


QUICK_STEPS = 200

GUIDE = 0.25
"""The p whose bounds are drawn."""

COLUMNS = {
    "theta": "distance of theta to its target",
    "residual": "residual R",
    "gap": "gap of the lower level",
    "hypergradient": "hypergradient",
}


def _label(p: float) -> str:
    return f"p = {p:g}"


class ConvergenceRates(Experiment):
    """Slopes of the theorems' quantities."""

    name = "rates"
    title = "The rates of the two theorems"
    about = "beyond the paper: how fast the quantities of its convergence theorems fall"

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells = []
        for name, trial in TRIALS.items():
            steps = QUICK_STEPS if options.quick else trial.steps
            case = Case(f"rates, {name}", trial.problem.func, tuple(trial.problem.keywords.items()), steps=steps)
            settings = [{"trial": name, "p": p, "c": trial.c} for p in trial.powers]
            cells += [
                Cell("rates", case, CONTENDERS["MEHA"], setting, 0, _label(p))
                for setting, p in zip(settings, trial.powers, strict=True)
                if options.wants("MEHA")
            ]
            cells += [
                Cell("rates", case, CONTENDERS[method], {"trial": name}, 0) for method in AUTOMATIC if options.wants(method)
            ]
        return cells

    def _rates(self, results: Records) -> list[tuple[str, float, Rate]]:
        rates = []
        for name, trial in TRIALS.items():
            for p in trial.powers:
                for record in results.get(f"rates, {name}", _label(p), "rates"):
                    rates += [(name, p, rate) for rate in trial.rates(p, record["curve"])]
        return rates

    def section(self, results: Records) -> Section:
        rows: list[list[Item]] = []
        for name, trial in TRIALS.items():
            lines = [(p, rate) for found, p, rate in self._rates(results) if found == name]
            if lines:
                rows.append([Mark(f"Theorem {trial.theorem}, {name}", "head")])
            for p, rate in lines:
                agrees: Item = "yes" if rate.agrees else Mark("shallower", "failed")
                bound, slope = (Mark(f"{value:.2f}", "number", value) for value in (rate.predicted, rate.measured))
                rows.append([COLUMNS[rate.column], Mark(f"{p:g}", "number", p), bound, slope, agrees])
        panels = []
        for name, trial in TRIALS.items():
            for column in ("residual", "gap") if trial.theorem == 1 else ("hypergradient",):
                drawn = [
                    Curve(_label(p), [(record["curve"]["K"], record["curve"][column])])
                    for p in trial.powers
                    for record in results.get(f"rates, {name}", _label(p), "rates")
                    if column in trial.columns(p)
                ]
                if drawn:
                    guide = (predicted(GUIDE)[column], "bound")
                    panels.append(Panel(f"{COLUMNS[column]}, {name}", "K", COLUMNS[column], drawn, slopes=[guide]))
        blocks: list[Block] = [prose(self.name, "about")]
        if panels:
            blocks += [
                Table(
                    "rates",
                    "Exponents of K: the theorems' bounds, and the slopes of the last decade of each run.",
                    ["quantity", "p", "bound", "measured", "agrees"],
                    rows,
                    "Slopes of -1 and less are of curves that fall faster than the bound asks. A tolerance of 0.05 is given.",
                ),
                picture(
                    "rates",
                    f"The theorems' quantities against the number of steps; dotted: slope of the bound for {_label(GUIDE)}.",
                    "Falling curves in logarithmic scales, one for each p.",
                    panels,
                ),
            ]
        return Section(self.name, self.title, [*blocks, *self._without(results), prose(self.name, "why")])

    def _without(self, results: Records) -> list[Table]:
        """Where the automatic forms end, beside a run of given numbers."""
        rows: list[list[Item]] = []
        for name, trial in TRIALS.items():
            column = "gap" if trial.theorem == 1 else "hypergradient"
            lines: list[list[Item]] = []
            for label in (*AUTOMATIC, _label(GUIDE)):
                for record in results.get(f"rates, {name}", label, "rates"):
                    steps, value = (record["curve"][of][-1] for of in ("K", column))
                    lines.append([label, int(steps), record.get("gradients"), value])
            if any(line[0] in AUTOMATIC for line in lines):
                rows += [[Mark(f"{name}: {COLUMNS[column]}", "head")], *lines]
        caption = f"What the theorems bound, where the automatic forms stop; below, the run of {_label(GUIDE)}."
        note = "A step with given numbers takes six gradients, five on the lasso, where F does not have x."
        return [Table("rates-without", caption, ["", "steps", "gradients", "quantity"], rows, note)] if rows else []

    def claims(self, results: Records) -> list[Claim]:
        rates = self._rates(results)
        if not rates:
            return []
        given = [record for record in results.all() if record["method"] not in AUTOMATIC]
        short = max(record["curve"]["K"][-1] for record in given) <= QUICK_STEPS
        claims = []
        for theorem in (1, 2):
            own = [rate for name, _, rate in rates if TRIALS[name].theorem == theorem]
            good = sum(rate.agrees for rate in own)
            measured = f"{good} of {len(own)} slopes agree with the bounds"
            if short:
                measured += f", but after {QUICK_STEPS} steps they have not settled"
            claims.append(Claim(f"The rates of Theorem {theorem}", measured, "open" if short else holds(good == len(own))))
        return claims
