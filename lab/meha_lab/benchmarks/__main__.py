"""The benchmarks, and their tables in the documentation.

python -m meha_lab.benchmarks            # what there is
python -m meha_lab.benchmarks --draw     # draw all tables of docs/ that come from records, and both figures
"""

import argparse
import ast
from pathlib import Path

from meha_lab import pages
from meha_lab.benchmarks import (
    asked_tasks,
    batches,
    domain_weights,
    estimators,
    hollow_networks,
    loops,
    newton,
    speed,
    structured,
)
from meha_lab.paths import RECORDS
from meha_lab.store import Store
from meha_lab.tools import learning_tasks

OWNERS = (speed, structured, newton, estimators, learning_tasks, batches, domain_weights, hollow_networks, loops, asked_tasks)
TABLES: pages.Tables = {name: table for owner in OWNERS for name, table in owner.TABLES.items()}


def described() -> list[str]:
    """The commands, each with the first sentence of its module."""
    lines = []
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if "__main__" in text:
            lines.append(f"python -m meha_lab.benchmarks.{path.stem}\n    {ast.get_docstring(ast.parse(text)).splitlines()[0]}")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the tables and the figures from the records")
    if parser.parse_args().draw:
        pages.draw(TABLES)
        speed.figure(Store(RECORDS))
        domain_weights.figure(Store(RECORDS))
    else:
        print("\n".join(described()))
