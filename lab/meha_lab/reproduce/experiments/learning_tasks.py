"""The default for networks on a declared set of learning tasks, beside three methods with their defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meha_lab.reproduce.cells import Case, Cell, Record
from meha_lab.reproduce.contenders import CONTENDERS
from meha_lab.reproduce.experiments.base import Claim, Experiment, Options, Records, holds, mean_of, plus_minus, prose
from meha_lab.reproduce.experiments.learning import lacking
from meha_lab.reproduce.learning_tasks import TASKS, Declared
from meha_lab.reproduce.page import Block, Item, Mark, Section, Table
from meha_lab.reproduce.task_runs import REFERENCES
from meha_lab.reproduce.tuning import Tuning

__all__ = ["LearningTasks"]


OTHERS = ("F2SA", "VPBGD", "RHG")

LONGER = 4
"""A second run of the default has this many times the work."""

CLOSE = 2.0
"""Points by which the default may be behind the best of the others, and a longer run behind a shorter one."""

QUICK_WORK = 120

LOOKS = 8


def _case(name: str, task: Declared, work: int) -> Case:
    return Case(name, task.build, tuple(task.arguments.items()), work=work, seconds=3600.0, looks=LOOKS, data=True)


def _score(task: str, records: Sequence[Record], what: str = "") -> tuple[float, float]:
    """Mean and deviation of what counts for a task: the y returned, or one trained afresh; NaN if a run failed."""
    return mean_of([record[what or TASKS[task].judged] for record in records])


class LearningTasks(Experiment):
    """Test scores of the default, of references without a bilevel method, and of three methods."""

    name = "learning-tasks"
    title = "Learning tasks: what the default for networks is worth on test data"
    about = f"{len(TASKS)} learning tasks, half of them held out: scores of the default, of references, and of three methods"
    in_quick = False

    def lacks(self, options: Options) -> str:
        return lacking(("mnist", "fashion-mnist", "omniglot"), options)

    def cells(self, options: Options, tuning: Tuning) -> list[Cell]:
        cells: list[Cell] = []
        for name, task in TASKS.items():
            if options.quick and task.arguments.get("data", "generated") not in ("digits", "generated"):
                continue
            case = _case(name, task, QUICK_WORK if options.quick else task.work)
            longer = replace(case, name=f"{name}, longer", work=LONGER * case.work)
            automatic = CONTENDERS["automatic"]
            for seed in options.trained:
                cells.append(Cell("task", case, automatic, {}, seed, REFERENCES))
                if options.wants("automatic"):
                    cells += [Cell("task", case, automatic, {}, seed), Cell("task", longer, automatic, {}, seed)]
                cells += [Cell("task", case, CONTENDERS[other], {}, seed) for other in OTHERS if options.wants(other)]
        return cells

    def section(self, results: Records) -> Section:
        blocks: list[Block] = [prose(self.name, "about")]
        for split in ("tuning", "held out"):
            names = [name for name, task in TASKS.items() if task.split == split and results.methods(name, "task")]
            if names:
                blocks.append(self._table(results, split, names))
        blocks.append(prose(self.name, "why"))
        return Section(self.name, self.title, blocks)

    def _table(self, results: Records, split: str, names: Sequence[str]) -> Table:
        rows: list[list[Item]] = []
        for name in names:
            own, longer = (results.get(case, "automatic", "task") for case in (name, f"{name}, longer"))
            references = [record["references"] for record in results.get(name, REFERENCES, "task")]
            words = [f"{key} {mean_of([r[key] for r in references])[0]:.1f}" for key in (references[0] if references else ())]
            row: list[Item] = [name, TASKS[name].judged, ", ".join(words)]
            row += [_shown(mean_of([r[what] for r in own])) if own else None for what in ("returned", "fresh")]
            row.append(_shown(_score(name, longer)) if longer else None)
            for other in OTHERS:
                records = results.get(name, other, "task")
                row.append(_shown(_score(name, records)) if records else None)
            rows.append(row)
        columns = [
            "task",
            "what counts",
            "references",
            "default: returned",
            "default: fresh",
            f"{LONGER} times the work",
            *OTHERS,
        ]
        half = split.replace(" ", "-")
        caption = f"The {half} half: scores on test data, in percent; mean ± standard deviation over seeds."
        return Table(f"{self.name}-{half}", caption, columns, rows)

    def claims(self, results: Records) -> list[Claim]:
        claims = []
        for split in ("tuning", "held out"):
            behind: dict[str, list[str]] = {"references": [], "others": [], "longer": []}
            count = 0
            for name, task in TASKS.items():
                own = results.get(name, "automatic", "task")
                references = [record["references"] for record in results.get(name, REFERENCES, "task")]
                if task.split != split or not own or not references:
                    continue
                count += 1
                score = _score(name, own)[0]
                first = mean_of([next(iter(reference.values())) for reference in references])[0]
                others = [_score(name, records)[0] for other in OTHERS if (records := results.get(name, other, "task"))]
                best = max((value for value in others if not math.isnan(value)), default=-math.inf)
                longer = results.get(f"{name}, longer", "automatic", "task")
                behind["references"] += [] if score >= first else [name]
                behind["others"] += [] if score >= best - CLOSE else [name]
                behind["longer"] += [] if not longer or _score(name, longer)[0] >= score - CLOSE else [name]
            words = {
                "references": "the default is never below what a user has without a bilevel method",
                "others": f"the default is within {CLOSE:g} points of the best of {', '.join(OTHERS)} with their defaults",
                "longer": f"{LONGER} times the work costs at most {CLOSE:g} points",
            }
            for key, claim in words.items() if count else ():
                missed = f"not on {'; '.join(behind[key])}" if behind[key] else f"on all {count}"
                claims.append(Claim(f"{split.capitalize()} tasks: {claim}", missed, holds(not behind[key])))
        return claims


def _shown(score: tuple[float, float]) -> Mark:
    return Mark("failed", "failed") if math.isnan(score[0]) else plus_minus(score)
