"""The examples of the README and of the pages run and print what is said there."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": 5,
    "docs/runs.md": 3,
    "docs/newton.md": 1,
    "docs/architecture-search.md": 2,
    "docs/trust.md": 2,
    "docs/responses.md": 2,
}
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]
NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")


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
