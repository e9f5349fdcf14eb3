"""The benchmarks of speed: bare loops take MEHA's steps, ratios are of the same turn, and the page has the stored numbers."""

import meha_lab.tasks
import pytest
import torch
from meha_lab.benchmarks import speed, speed_page
from meha_lab.benchmarks.bare import FewShotPasses, Passes, loop
from meha_lab.reproduce import learning
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
    (row,) = bench.rows
    assert row["ratio"] == [2.0, 2.0, 3.0]
    assert row["seconds"] == [8.0, 4.0]
    assert speed_page.met(row) is False
    assert speed_page.met({**row, "goal": ["<=", 2.5]}) is True
    assert speed_page.met({**row, "goal": []}) is None


def test_results_of_another_machine_are_dropped():
    row = {"part": "a", "what": "", "ratio": [1.0, 1.0, 1.0], "seconds": [], "goal": []}
    before = speed_page.Results("cpu", {"torch": "1"}, [row, {**row, "part": "b"}], {"a": 1, "b": 2})
    new = {**row, "what": "new"}
    assert before.updated({"torch": "1"}, [new], {"a": 3}).rows == [new, {**row, "part": "b"}]
    assert before.updated({"torch": "2"}, [new], {"a": 3}) == speed_page.Results("cpu", {"torch": "2"}, [new], {"a": 3})


def test_the_tables_in_the_documentation_are_the_ones_that_were_measured():
    page = speed_page.PAGE.read_text()
    assert page == speed_page.text(page), "run: python -m meha_lab.benchmarks.speed --part none"
    assert {row["part"] for row in speed_page.load("cpu").rows}
