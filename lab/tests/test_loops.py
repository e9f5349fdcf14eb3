"""The table of training loops: what counts as a line, a name and a number; and the page has the numbers of the records."""

import pytest
from meha_lab.benchmarks import loops
from meha_lab.benchmarks.peers.environments import HERE
from meha_lab.paths import RECORDS
from meha_lab.store import Store

PROGRAM = """
import copy

from lib.engine import Config, Engine, Unused


# begin
class Mine(Engine):
    def hook(self, batch):
        self.best = self.task.accuracy(self.inner.module)  # a comment

        return self.best


def train(task, numbers):
    # another one
    config = {"kind": "fast", "place": "__main__.loss", "inner": {"rate": numbers["rate"], "terms": 3}}
    engine = Mine("first", name="inner", config=config, every=task.steps)
    engine.task = task
    copy.copy(task)
    return engine.run(Config())


# end
Unused()
"""


def test_what_counts():
    assert loops.lines(PROGRAM) == 10
    found = {"Config", "Engine", "hook", "module", "kind", "fast", "place", "rate", "terms", "name", "config", "every", "run"}
    assert loops.names(PROGRAM, "lib") == found | {"first"}
    assert loops.numbers(PROGRAM) == {"rate", "terms"}
    assert loops.names(PROGRAM, "") == set()


@pytest.mark.parametrize("name", loops.PROGRAMS)
def test_the_record_has_the_counts_of_the_program(name):
    program = loops.PROGRAMS[name]
    text = (HERE / program.file).read_text()
    record = next(row for row in Store(RECORDS).records("loops") if row["program"] == name)
    assert record["lines"] == loops.lines(text)
    assert record["names"] == sorted(loops.names(text, program.library))
    assert record["numbers"] == sorted(loops.numbers(text))
    assert record["setting"] in program.settings
