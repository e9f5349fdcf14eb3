"""The examples of the README and of the pages run and print what is said there."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from meha_lab.benchmarks import hollow_networks
from meha_lab.reproduce.experiments import EXPERIMENTS, Options, Records
from meha_lab.reproduce.page import Table, flat, show
from meha_lab.reproduce.tuning import Tuning
from meha_lab.store import Store

import meha
from meha.methods import Method

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": 3,
    "docs/runs.md": 4,
    "docs/newton.md": 1,
    "docs/architecture-search.md": 2,
    "docs/trust.md": 2,
    "docs/verify.md": 1,
    "docs/responses.md": 4,
    "docs/training.md": 3,
    "docs/estimators.md": 6,
    "docs/label-noise.md": 2,
    "docs/long-tailed.md": 1,
    "docs/loss-weights.md": 1,
    "docs/augmentation.md": 1,
    "docs/tutorial/1-what.md": 1,
    "docs/tutorial/2-first-problem.md": 2,
    "docs/tutorial/3-report.md": 2,
    "docs/tutorial/4-networks.md": 4,
    "docs/tutorial/5-when-it-fails.md": 3,
}
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")


@pytest.mark.filterwarnings("ignore::meha.method.status.TrainingWarning")  # which some pages are about
@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_examples(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, expected = BLOCKS[block]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    found, expected = (re.sub(r"[\d.]+ s$", "s", text, flags=re.MULTILINE) for text in (out.getvalue(), expected))
    assert NUMBER.sub("#", found) == NUMBER.sub("#", expected)
    # Sums in single precision differ between machines.
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.02)


def test_every_example_is_followed_by_its_output():
    assert len(BLOCKS) == sum(PAGES.values())
    for page, count in PAGES.items():
        assert (ROOT / page).read_text().count("```python") == count


def records(name):
    """The records in the repository of an experiment, and the experiment."""
    experiment = EXPERIMENTS[name]
    return experiment, Records(Store(ROOT / "lab/records"), experiment.cells(Options(), Tuning.shipped()))


def table(name, of):
    """The rows of a table of an experiment, by their first entry, as text."""
    experiment, own = records(name)
    (found,) = [block for block in flat(experiment.section(own).blocks) if isinstance(block, Table) and block.name == of]
    return {show(row[0]): [show(entry) for entry in row[1:]] for row in found.rows}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_numbers_of_the_readme_are_those_of_the_records():
    text = " ".join((ROOT / "README.md").read_text().split())
    solved = table("automatic", "automatic-summary")["held-out, 44 problems: to 1e-03"]
    assert f"It solves {solved[3]} of [44 held-out problems" in text
    assert f"best of 200 random settings for each problem, solves {solved[1]}." in text
    networks = [
        hollow_networks.verdict(record)
        for record in Store(ROOT / "lab/records").records(hollow_networks.KIND)
        if record["method"] == "default" and record["seed"]  # the rules were chosen at seed 0
    ]
    good = sum(verdict in ("right", "warned") for verdict in networks)
    assert f"{good} of {len(networks)} answers of the default were [right, or had a warning]" in text
    experiment, own = records("trust")
    (rates,) = [block for block in flat(experiment.section(own).blocks) if getattr(block, "name", "") == "trust-rates"]
    (rate,) = [
        [show(entry) for entry in row] for row in rates.rows if [show(entry) for entry in row[:2]] == ["automatic", "all"]
    ]
    assert rate[5] == "0"  # wrong y
    assert f"on {rate[2]} problems, from ten starts each" in text
    assert f"{float(rate[7]):.1f} % of the answers were worse local optima" in text
    claims = [claim.answer for name in EXPERIMENTS for claim in EXPERIMENTS[name].claims(records(name)[1])]
    words = [claims.count(answer) for answer in ("holds", "in part", "does not hold", "open")]
    assert sum(words) == len(claims)
    expected = "Of {} claims {} hold, {} hold in part, {} do not, and {} {} open.".format(
        len(claims), *words, "is" if words[-1] == 1 else "are"
    )
    assert expected in text
    found = [value for value in vars(meha).values() if isinstance(value, type) and issubclass(value, Method)]
    assert f"{len(found) - 1} methods, one interface" in text  # without their base class
    assert f"{len(meha.stochastic.__all__)} more for batches" in text


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target
