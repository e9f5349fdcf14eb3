"""The benchmarks: bare loops take MEHA's steps, ratios are of the same turn, and the pages have the numbers of the records."""

import meha_lab.tasks
import pytest
import torch
from meha_lab import pages
from meha_lab.benchmarks import speed
from meha_lab.benchmarks.__main__ import TABLES
from meha_lab.benchmarks.bare import FewShotPasses, Passes, loop
from meha_lab.paths import DOCS, RECORDS
from meha_lab.reproduce import learning
from meha_lab.store import Store
from meha_lab.tasks.few_shot import FewShot, Tasks

import meha
from meha.problems import sine


def test_the_bare_loop_takes_the_steps_of_meha():
    problem = sine(3)
    method = problem.preset("recipe")
    points = {"bare loop": loop(problem, method, 40), "Run.step": speed.stepped(problem, method, 40)}
    speed.agree(problem, points, 1e-12)
    points["one step more"] = speed.stepped(problem, method, 41)
    with pytest.raises(AssertionError, match="one step more"):
        speed.agree(problem, points, 1e-12)


def test_the_bare_passes_take_the_steps_of_meha():
    task = meha_lab.tasks.hyper_cleaning("digits", sizes=(60, 60, 10), hidden=8)
    bare = Passes(task.problem.upper, task.problem.lower, speed.CLEANING, *task.start())
    run = meha.MEHA(**speed.CLEANING, p=0.0).start(task.problem, *task.start())
    for _ in range(3):
        bare.step()
        run.step()
    torch.testing.assert_close(run.x, bare.x.detach())
    for a, b in zip(run.y.parameters(), bare.y.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Double(FewShot):
    """In single precision the first steps of Adam would multiply the rounding errors."""

    def start(self):
        x, y = super().start()
        return x.double(), y.double()


def test_the_bare_few_shot_passes_take_the_steps_of_meha():
    images = torch.randint(256, (6, 8, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    task = Double(images, images, ways=3, queries=5, tasks=2, width=4)
    setting = learning.chosen("few-shot", "MEHA")
    bare = FewShotPasses(task, setting, setting["lr"], setting["inner_steps"])
    run = learning.build(meha.MEHA, setting).start(task.problem, *task.start())
    for batch, _ in zip(task.batches(), range(3), strict=False):
        batch = Tasks(batch.support.double(), batch.query.double())
        bare.step(batch)
        run.step(batch)
    for a, b in zip(run.x.parameters(), bare.x.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_ratios_are_of_the_same_turn():
    turns = iter([4.0, 2.0, 30.0, 10.0, 8.0, 4.0])
    bench = speed.Bench("cpu", rounds=3, quick=True)
    times = bench.alternate({"slow": lambda: next(turns), "fast": lambda: next(turns)})
    assert times == {"slow": [4.0, 30.0, 8.0], "fast": [2.0, 10.0, 4.0]}
    bench.compare("part", "slow / fast", times, "slow", "fast", (">=", 2.5))
    (row,) = bench.rows["part"]
    assert row["ratio"] == [2.0, 2.0, 3.0]
    assert row["seconds"] == [8.0, 4.0]
    assert speed.met(row) is False
    assert speed.met({**row, "goal": ["<=", 2.5]}) is True
    assert speed.met({**row, "goal": []}) is None


def test_results_of_another_machine_are_not_shown(tmp_path):
    store = Store(tmp_path)

    def add(part, what, torch):
        row = {"what": what, "ratio": [1.0, 1.0, 1.0], "seconds": [], "goal": []}
        store.add("speed", part, {"about": {"torch": torch}, "rows": [row], "curves": {}})
        return [
            line.split(" | ")[0] for line in speed.tables(Store(tmp_path)) if line.startswith(("torch", "###", "| o", "| n"))
        ]

    add("a", "old", "1")
    assert add("b", "old", "1") == ["torch 1.", "### a", "| old", "### b", "| old"]
    assert add("a", "new", "1") == ["torch 1.", "### a", "| new", "### b", "| old"]
    assert add("b", "new", "2") == ["torch 2.", "### b", "| new"]


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_in_the_documentation_are_those_of_the_records(name):
    page, _ = TABLES[name]
    drawn = pages.current({name: TABLES[name]}, Store(RECORDS))[page]
    assert drawn == (DOCS / page).read_text(encoding="utf-8"), "run: python -m meha_lab.benchmarks --draw"
    assert pages.placed(drawn, name, ["another table"]) != drawn


def test_a_page_without_the_comments_is_refused():
    with pytest.raises(ValueError, match=r"speed: the page needs a line '<!-- speed: drawn by .* and a line"):
        pages.placed("<!-- end of speed -->", "speed", ["| a |"])
