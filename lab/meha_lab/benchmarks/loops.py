"""Lines, concepts, accuracy and time of one task in five programs: Betty, BOAT, by hand, ``meha.start`` and ``meha.solve``.

A network weighs the examples of another one (``peers/weighing.py``): two loaders, validation, a learning-rate schedule, and a
checkpoint. Lines are those of code between ``# begin`` and ``# end`` in each program. Concepts are the distinct names of the
library that are written there (functions, classes, methods, hooks, keyword arguments, keys and strings of configurations), and
the numbers that somebody must choose. Each program's numbers are the best of six settings on other seeds, by accuracy on
validation examples. A run is killed after half of its epochs and started again, and its networks are compared with those of a
whole run.
"""

import argparse
import ast
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from meha_lab import pages
from meha_lab.benchmarks.peers.environments import HERE, Peer
from meha_lab.paths import RECORDS
from meha_lab.store import Record, Store
from meha_lab.tasks import hyper_cleaning
from torch import nn
from torch.nn.functional import cross_entropy

SEEDS, TUNING_SEEDS = (0, 1, 2), (10, 11)
SIZES = (5000, 1700, 10_000)  # noisy, clean and validation, test
CLEAN = 700  # of them
KILLED = 5  # epochs

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


class PeerProgram(NamedTuple):
    """A file, the environment that it runs in ("" for the one at hand), its library, and the settings to choose from."""

    file: str
    environment: str
    library: str
    settings: Sequence[dict[str, float]]


def crossed(**values: Sequence[float]) -> list[dict[str, float]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


PROGRAMS = {
    "`meha.solve`": PeerProgram("weighing_solve.py", "", "meha", [{}]),
    "`meha.start`": PeerProgram("weighing_start.py", "", "meha", crossed(lr=RATES)),
    "by hand": PeerProgram("weighing_by_hand.py", "", "", crossed(lr=(1e-4, 3e-4, 1e-3), step=(0.1, 1.0))),
    "Betty": PeerProgram("weighing_betty.py", "betty", "betty", crossed(lr=RATES)),
    "BOAT": PeerProgram(
        "weighing_boat.py",
        "boat",
        "boat_torch",
        crossed(lr=(1e-4, 3e-4, 1e-3), c0=(0.5, 2.0), eta=(0.1,), gamma_1=(0.1,), y_hat_lr=(0.1,)),
    ),
}


# Lines and concepts


def region(text: str) -> str:
    """What lies between the marks of a program."""
    return text.partition("# begin\n")[2].partition("# end\n")[0]


def lines(text: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in region(text).splitlines())


def names(text: str, library: str) -> set[str]:
    """The names of a library that a program writes.

    >>> text = "import lib\\n# begin\\nrun = lib.start(problem, rate=0.1)\\nrun.step(batch)\\n# end\\n"
    >>> sorted(names(text, "lib"))
    ['rate', 'start', 'step']
    """
    if not library:
        return set()
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == library
        for alias in node.names
    }
    tree = ast.parse(region(text))
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {kind.name for kind in kinds if any(isinstance(base, ast.Name) and base.id in imported for base in kind.bases)}
    roots = {library, *imported, *own}
    found = imported & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    stored = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    # Objects of the library: what its calls return, and self in a class that derives from one of its own.
    objects = {"self"} if own else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and root(node.value.func) in roots:
            objects |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    given: set[str] = set()  # names that the program gives to things
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and root(node.func) in roots | objects):
        given |= {str(k.value.value) for k in call.keywords if k.arg == "name" and isinstance(k.value, ast.Constant)}
        found |= {keyword.arg for keyword in call.keywords if keyword.arg}
        found |= set(strings(call, tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root(node) in roots | objects:
            found.add(node.attr)
    found |= {part.name for kind in kinds if kind.name in own for part in kind.body if isinstance(part, ast.FunctionDef)}
    return found - stored - given - OURS


OURS = {"cpu", "batch", "task", "ended", "accuracy", "file"}
"""What hangs on objects of a library and is the program's own: a device, a key of its data, and the task."""


def root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def strings(call: ast.Call, tree: ast.AST) -> Iterator[str]:
    """The strings that a call hands over, also in dictionaries that were made before; not the places of functions."""
    made = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        value = made.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
        for part in ast.walk(value) if isinstance(value, ast.Dict | ast.Constant) else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and "." not in part.value:
                yield part.value


def numbers(text: str) -> set[str]:
    """The numbers that a program asks somebody to choose: settings, and literals that it hands over by name or by key.

    >>> sorted(numbers("# begin\\nf(lr=numbers['lr'], steps=3)\\n# end\\n"))
    ['lr', 'steps']
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(region(text))):
        pairs: list[tuple[object, ast.expr]] = []
        if isinstance(node, ast.Subscript) and root(node.value) == "numbers":
            found.add(ast.literal_eval(node.slice))
        elif isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        found |= {str(name) for name, value in pairs if isinstance(value, ast.Constant) and type(value.value) in (int, float)}
    return found


# Accuracy and time


def data(seed: int, folder: Path) -> str:
    """A file with the tensors of the task; of a noisy example the weigher knows its loss after training on the clean ones."""
    file = folder / f"{seed}.pt"
    if not file.exists():
        task = hyper_cleaning("mnist", sizes=SIZES, fraction=0.5, seed=seed)
        inputs, labels = task.validation
        torch.manual_seed(100 + seed)
        judge = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
        for _ in range(30):
            for i in torch.randperm(CLEAN).split(100):
                optimizer.zero_grad()
                cross_entropy(judge(inputs[i]), labels[i]).backward()
                optimizer.step()
        with torch.no_grad():
            known = cross_entropy(judge(task.train.inputs), task.train.labels, reduction="none")[:, None]
        clean, valid = (inputs[:CLEAN], labels[:CLEAN]), (inputs[CLEAN:], labels[CLEAN:])
        torch.save({"train": (*task.train, known), "clean": clean, "valid": valid, "test": tuple(task.test)}, file)
    return str(file)


def measure(store: Store) -> None:
    """Choose the numbers of each program, run all in turn, and add a record for each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = {name: stack.enter_context(Peer(p.environment, p.file)) for name, p in PROGRAMS.items()}

        def ask(name: str, seed: int, setting: dict[str, float], until: int | None = None, file: str = "") -> Record:
            path = folder / (file or f"{next(fresh)}.pt.run")
            return peers[name].ask(data=data(seed, folder), seed=seed, file=str(path), numbers=setting, until=until)

        fresh = itertools.count()
        chosen = {}
        for name, program in PROGRAMS.items():
            scores = [
                statistics.mean(ask(name, seed, setting)["valid"] for seed in TUNING_SEEDS)
                if len(program.settings) > 1
                else 0.0
                for setting in program.settings
            ]
            chosen[name] = program.settings[scores.index(max(scores))]
            print(name, chosen[name], [f"{score:.3f}" for score in scores], flush=True)
        runs: dict[str, list[Record]] = {name: [] for name in PROGRAMS}
        for seed in SEEDS:
            for name in PROGRAMS:  # in turn, since the machine may become slower
                runs[name].append(ask(name, seed, chosen[name]))
        for name, program in PROGRAMS.items():
            ask(name, SEEDS[0], chosen[name], KILLED, "killed-" + program.file)
            resumed = ask(name, SEEDS[0], chosen[name], None, "killed-" + program.file)["trail"]
            text = (HERE / program.file).read_text(encoding="utf-8")
            record = {
                "program": name,
                "lines": lines(text),
                "names": sorted(names(text, program.library)),
                "numbers": sorted(numbers(text)),
                "setting": chosen[name],
                "accuracy": [run["accuracy"] for run in runs[name]],
                "seconds": [run["seconds"] for run in runs[name]],
                "resumes": resumed == runs[name][0]["trail"][KILLED:],
                "versions": peers[name].versions,
            }
            store.add("loops", name, record)
            print(*cells(record), sep=" | ", flush=True)


HEAD = ("", "lines", "names of the library", "numbers to choose", "accuracy", "CPU seconds", "a killed run ends as a whole one")


def cells(record: Record) -> list[str]:
    accuracies, seconds = record["accuracy"], record["seconds"]
    share = f"{100 * statistics.mean(accuracies):.1f} % ({100 * min(accuracies):.1f} to {100 * max(accuracies):.1f})"
    spent = f"{statistics.mean(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
    counted = [str(record["lines"]), str(len(record["names"])), str(len(record["numbers"]))]
    return [record["program"], *counted, share, spent, "yes" if record["resumes"] else "no"]


def table(store: Store) -> list[str]:
    rows = {record["program"]: record for record in store.records("loops")}
    versions = {name: number for row in rows.values() for name, number in row["versions"].items()}
    made = ", ".join(f"{name} {number.partition('+')[0]}" for name, number in sorted(versions.items()))
    return [*pages.markdown(HEAD, (cells(rows[name]) for name in PROGRAMS)), "", f"Ran with {made}; three seeds, one thread."]


TABLES: pages.Tables = {"loops": ("migration.md", table)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--count", action="store_true", help="print the lines, names and numbers of each program, and run nothing"
    )
    if parser.parse_args().count:
        for name, program in PROGRAMS.items():
            text = (HERE / program.file).read_text(encoding="utf-8")
            print(f"{name}: {lines(text)} lines", sorted(names(text, program.library)), sorted(numbers(text)), sep="\n  ")
        return
    torch.set_num_threads(1)
    measure(Store(RECORDS))
    pages.draw(TABLES)


if __name__ == "__main__":
    main()
