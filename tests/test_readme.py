"""The README's examples run and print what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
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
    assert len(BLOCKS) == README.read_text().count("```python") == 5
