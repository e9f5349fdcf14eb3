"""The README's examples run and print what it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_examples(block):
    code, expected = BLOCKS[block]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert rounded(out.getvalue()) == rounded(expected)


def rounded(text):
    """Seconds left out, and other numbers to three digits: float32 sums differ between machines."""
    text = re.sub(r"[\d.]+ s$", "s", text, flags=re.MULTILINE)
    return re.sub(r"\d+\.\d+(e[-+]\d+)?", lambda match: f"{float(match[0]):.2g}", text)


def test_there_are_examples():
    assert len(BLOCKS) == README.read_text().count("```python") == 3
