"""What a peer's program does: answer questions, one JSON object a line, until there are no more."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def serve(answer: Callable[..., dict[str, Any]], **versions: str) -> None:
    """The first line tells versions; then ``answer(**question)`` for each line of the input."""
    out, sys.stdout = sys.stdout, sys.stderr  # what the peer itself prints is no answer
    print(json.dumps(versions), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=out, flush=True)
