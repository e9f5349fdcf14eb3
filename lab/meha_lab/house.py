"""Measure a tree of the library: its size, imports, names, numbers and comments, and the walk of one call of ``solve``.

``python -m meha_lab.house`` prints the figures as a table in Markdown; ``--before FOLDER`` adds those of an older checkout, and
``--draw FILE`` draws the rooms. All figures but the walk are read from the source, so a tree need not be installed. In a tree
without a folder ``lab``, the files that moved there count as the laboratory.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from xml.sax.saxutils import escape

import typer

from meha_lab.paths import ROOT

__all__ = [
    "WALKS",
    "comments",
    "draw",
    "figures",
    "imports",
    "laboratory",
    "layers",
    "lines",
    "named_numbers",
    "proper",
    "public_names",
    "repeated_classes",
    "shipped",
    "single_importers",
    "trace",
    "walk",
]

WALKS = ("ridge", "coupled", "network")
"""The problems on which a call of ``solve`` is followed."""

OLD_LABORATORY = ("meha/reproduce", "meha/problems", "meha/tasks", "meha/datasets", "benchmarks", "tools")
"""Where the laboratory was before it had a folder of its own."""

OLD_LIBRARY = re.compile(
    r"meha/problems/(base|synthetic|group_lasso)\.py|meha/tasks/_(cleaning\w*|command)\.py"
    r"|tools/(check_links|readme_pictures|release_check)\.py"
)
"""What lay in those folders and is not of the laboratory: the toys, ``meha clean``, scripts of the site and of releases."""

AUTOMATIC = re.compile(
    r"meha/(engines|evidence|lower|numerics)/.*|meha/methods/(default|stochastic_meha|contrib/adaptive_meha)\.py"
    r"|meha/methods/(continuation|newton|constrained|adaptive)/.*|meha/methods/(_(?!parameters)\w+|stochastic|vfidca/quadratic)\.py"
    r"|meha/(_lower|_quadratic|_linear|_second_order|theory/estimation)\.py"
)
"""Modules of the methods that choose their own numbers, and of what they run on: today's rooms, then where these came from."""

DIRECTIVE = re.compile(r"#\s*(noqa|type:|pragma|fmt:|ruff:|mypy:)")
"""A comment for a tool."""

Imported = tuple[str, str | None]
"""A module and a name in it; no name for the module itself."""


# Files


def shipped(root: Path) -> list[Path]:
    """The Python files of the wheel: the package and the command beside it."""
    return [*sorted(root.glob("meha/**/*.py")), *root.glob("meha_cli.py")]


def laboratory(root: Path) -> list[Path]:
    """The Python files of the laboratory, without its tests."""
    if (root / "lab").is_dir():
        return sorted(root.glob("lab/meha_lab/**/*.py"))
    found = sorted(path for folder in OLD_LABORATORY for path in root.glob(f"{folder}/**/*.py"))
    return [path for path in found if not OLD_LIBRARY.fullmatch(path.relative_to(root).as_posix())]


def proper(root: Path) -> list[Path]:
    """The Python files of the library: what is shipped and not of the laboratory."""
    others = set(laboratory(root))
    return [path for path in shipped(root) if path not in others]


def lines(paths: Iterable[Path]) -> int:
    """The number of all lines of the files, blank ones and comments included."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def _modules(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """Files by the names of their modules."""
    names = {path: path.relative_to(root).with_suffix("").parts for path in paths}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


# Imports


def layers(root: Path) -> list[list[str]]:
    """The rooms of each layer, highest first, as the contract of import-linter in pyproject.toml states them."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    stated = next(contract["layers"] for contract in contracts if contract.get("containers") == ["meha"])
    return [re.findall(r"\w+", layer) for layer in stated]


def _bindings(module: str, path: Path) -> list[tuple[str, Imported]]:
    """Names that import statements bind anywhere in a module, and what they stand for."""
    found: list[tuple[str, Imported]] = []
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            found += [(alias.asname or alias.name.partition(".")[0], (alias.name, None)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found += [(alias.asname or alias.name, (source, alias.name)) for alias in node.names]
    return found


def _passed_on(modules: Mapping[str, Path]) -> dict[str, dict[str, Imported]]:
    """What each package imports, by name: these names can be imported from it."""
    return {module: dict(_bindings(module, path)) for module, path in modules.items() if path.name == "__init__.py"}


def _defined(
    modules: Mapping[str, Path], packages: Mapping[str, Mapping[str, Imported]], source: str, name: str | None
) -> Imported | None:
    """Where a name is defined, through the packages that only pass it on; None if it is of another library."""
    if source not in modules:
        return None
    if name is None:
        return source, None
    passed = packages.get(source, {}).get(name)
    if passed is not None and passed != (source, name):
        return _defined(modules, packages, *passed) or (source, name)
    return (f"{source}.{name}", None) if f"{source}.{name}" in modules else (source, name)


def imports(root: Path) -> set[tuple[str, str]]:
    """Pairs of modules of the library of which the first imports the second, anywhere in its code.

    A name that is taken from a package is imported from the module that defines it. What an ``__init__`` only passes on is not
    an import of it; what its own code uses is.
    """
    modules = _modules(root, proper(root))
    packages = _passed_on(modules)
    found = set()
    for module, path in modules.items():
        used = {node.id for node in ast.walk(_parsed(path)) if isinstance(node, ast.Name)}
        for bound, (source, name) in _bindings(module, path):
            target = _defined(modules, packages, source, name)
            if target is not None and target[0] != module and (module not in packages or bound in used):
                found.add((module, target[0]))
    return found


def single_importers(root: Path) -> list[str]:
    """Modules of the library that exactly one other module of it imports (see :func:`imports`)."""
    importers = Counter(target for _, target in imports(root))
    return sorted(module for module, number in importers.items() if number == 1)


# Names and numbers


def _exported(path: Path) -> list[str]:
    """The names in ``__all__``."""
    found: list[str] = []
    for node in _parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Assign | ast.AugAssign) and any(getattr(target, "id", "") == "__all__" for target in targets):
            found += ast.literal_eval(node.value)
    if not found:
        raise ValueError(f"{path}: is public and has no __all__.")
    return found


def public_names(root: Path) -> list[str]:
    """Names in ``__all__`` of ``meha``, of the modules among them, and of ``meha.sklearn``, which a user imports by itself."""
    modules = _modules(root, shipped(root))
    packages = _passed_on(modules)
    names: list[str] = []
    seen: set[str] = set()
    waiting: list[str] = [module for module in ("meha", "meha.sklearn") if module in modules]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name in _exported(modules[module]):
            names.append(f"{module}.{name}")
            target = _defined(modules, packages, module, name)
            if target is not None and target[1] is None and target[0] not in {*seen, *waiting}:
                waiting.append(target[0])
    return sorted(names)


def repeated_classes(root: Path) -> list[str]:
    """Names that two or more classes of the library and the laboratory have, at whatever depth they are defined."""
    paths = {*shipped(root), *laboratory(root)}
    names = Counter(node.name for path in paths for node in ast.walk(_parsed(path)) if isinstance(node, ast.ClassDef))
    return sorted(name for name, number in names.items() if number > 1)


def _is_number(node: ast.expr | None, known: set[str]) -> bool:
    """Whether an expression is a number, a tuple of numbers, or made of numbers."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand, known)
        case ast.BinOp(left=left, right=right):
            return _is_number(left, known) and _is_number(right, known)
        case ast.Tuple(elts=parts):
            return bool(parts) and all(_is_number(part, known) for part in parts)
        case ast.Name(id=name):
            return name in known
        case ast.Attribute(value=ast.Name(id="math"), attr=attribute):
            return attribute in ("inf", "pi", "e")
    return False


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr | None]]:
    """Names and values of an assignment; ``A, B = 1, 2`` has two."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [(node.target.id, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    found: list[tuple[str, ast.expr | None]] = []
    for target in node.targets:
        if isinstance(target, ast.Name):
            found.append((target.id, node.value))
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=True)
            found += [(name.id, value) for name, value in pairs if isinstance(name, ast.Name)]
    return found


def named_numbers(root: Path) -> list[str]:
    """The numbers that steer the automatic methods, as ``file:name``.

    They are the upper-case constants of their modules that are numbers or tuples of numbers, and the fields with such a default
    of classes whose name ends with ``Tuning``.
    """
    found = []
    for path in proper(root):
        place = path.relative_to(root).as_posix()
        if not AUTOMATIC.fullmatch(place):
            continue
        known: set[str] = set()
        for node in _parsed(path).body:
            known |= {name for name, value in _assigned(node) if name.isupper() and _is_number(value, known)}
            if isinstance(node, ast.ClassDef) and node.name.endswith("Tuning"):
                fields = [pair for part in node.body for pair in _assigned(part)]
                found += [f"{place}:{node.name}.{name}" for name, value in fields if _is_number(value, known)]
        found += [f"{place}:{name}" for name in known]
    return sorted(found)


def comments(root: Path) -> tuple[int, int]:
    """The comments of the library and its lines of code.

    A comment is a ``#`` and the rest of its line, alone or behind code, unless it speaks to a tool (``# noqa``). A line of code
    holds something else than a comment or a docstring, where a docstring is any string that stands alone.
    """
    found, code = 0, 0
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
    for path in proper(root):
        alone = {
            (node.lineno, node.col_offset)
            for node in ast.walk(_parsed(path))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }
        used: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            found += token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)
            if token.type not in layout and not (token.type == tokenize.STRING and token.start in alone):
                used.update(range(token.start[0], token.end[0] + 1))
        code += len(used)
    return found, code


# The walk


def _ridge() -> Callable[[], Any]:
    """A penalty per feature: the README's first problem."""
    import torch

    import meha

    generator = torch.Generator().manual_seed(0)
    A, A2 = torch.randn(2, 60, 20, dtype=torch.float64, generator=generator)
    truth = (torch.arange(20) < 5).double()
    b, b2 = (a @ truth + torch.randn(60, dtype=torch.float64, generator=generator) for a in (A, A2))
    train, valid = meha.losses.LeastSquares(A, b), meha.losses.LeastSquares(A2, b2)
    problem = meha.Problem(
        upper=lambda x, y: valid(y),
        lower=lambda x, y: train(y) + 0.5 * (x.exp() * y.square()).sum(),
        x_set=meha.sets.Box(-8.0, 4.0),
    )
    zeros = torch.zeros(20, dtype=torch.float64)
    return lambda: meha.solve(problem, x0=zeros, y0=zeros.clone())


def _coupled() -> Callable[[], Any]:
    """One unknown on each level, and three linear constraints that couple them."""
    import torch

    import meha

    coupling = meha.constraints.Linear(
        A=torch.tensor([[-2.0], [1.0], [1.0]]).double(),
        B=torch.tensor([[1.0], [-2.0], [2.0]]).double(),
        b=torch.tensor([1.0, 2.0, 14.0]).double(),
    )
    problem = meha.Problem(
        upper=lambda x, y: ((x - 3) ** 2 + (y - 2) ** 2).sum(),
        lower=lambda x, y: ((y - 5) ** 2).sum(),
        x_set=meha.sets.Box(0.0, 8.0),
        lower_constraints=coupling,
    )
    return lambda: meha.solve(problem, x0=torch.ones(1).double(), y0=torch.ones(1).double())


def _network() -> Callable[[], Any]:
    """Weights of 500 examples with wrong labels, for a small network, in 20 batches."""
    import torch
    from torch.nn.functional import cross_entropy

    import meha

    torch.manual_seed(0)
    X = torch.randn(600, 2)
    truth = (X.prod(dim=1) > 0).long()
    labels = torch.where(torch.rand(600) < 0.4, 1 - truth, truth)
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))

    def lower(x: Any, y: Any, batch: Any) -> Any:
        i = batch[0]
        return (x[i].sigmoid() * cross_entropy(y(X[i]), labels[i], reduction="none")).mean()

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return cross_entropy(y(X[batch[1]]), truth[batch[1]])

    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randint(0, 500, (64,), generator=generator), torch.randint(500, 600, (64,), generator=generator))
        for _ in range(20)
    ]
    problem = meha.Problem(lower=lower, upper=upper)
    return lambda: meha.solve(problem, torch.zeros(500), network, max_steps=20, batches=batches)


def trace(name: str) -> dict[str, int]:
    """Follow one call of ``solve`` through the ``meha`` that is imported here.

    Returns:
        The files and the functions of ``meha`` that it enters, the calls of these, and how many of the calls, in their order,
        are in another file than the call before (``hops``).
    """
    import torch

    import meha

    torch.set_num_threads(1)
    call = {"ridge": _ridge, "coupled": _coupled, "network": _network}[name]()
    inside = str(Path(meha.__file__).parent) + os.sep
    functions: Counter[tuple[str, str]] = Counter()
    hops, last = 0, None

    def follow(frame: FrameType, event: str, _: Any) -> None:
        nonlocal hops, last
        place = frame.f_code.co_filename
        if event == "call" and place.startswith(inside):
            functions[place, frame.f_code.co_qualname] += 1
            hops += last not in (None, place)
            last = place

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = {place for place, _ in functions}
    return {"files": len(files), "functions": len(functions), "calls": functions.total(), "hops": hops}


def walk(root: Path, name: str) -> dict[str, int]:
    """:func:`trace` in a process of its own, with the ``meha`` of a tree."""
    code = f"import json; from meha_lab.house import trace; print(json.dumps(trace({name!r})))"
    path = os.pathsep.join(map(str, (root.resolve(), ROOT / "lab")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{root}: the walk of {name} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


# The table and the picture


def figures(root: Path, walks: Sequence[str] = WALKS) -> dict[str, str]:
    """All figures of a tree, as the table shows them."""
    library, number_of_comments = proper(root), comments(root)
    rows = {
        "lines / files of `meha` as shipped": _size(shipped(root)),
        "the same without the laboratory": _size(library),
        "lines / files of the laboratory": _size(laboratory(root)),
        "import layers": f"{len(layers(root))}",
        "modules with one importer": f"{len(single_importers(root))} of {len(library)}",
        "public names": f"{len(public_names(root))}",
        "class names used twice or more": f"{len(repeated_classes(root))}",
        "named numbers of the automatic methods": f"{len(named_numbers(root))}",
        "comments per 100 lines of code": "{:.1f} ({:,} in {:,})".format(
            100 * number_of_comments[0] / number_of_comments[1], *number_of_comments
        ),
    }
    for name in walks:
        rows[f"`solve`, {name}: files / functions / calls / hops"] = " / ".join(
            f"{number:,}" for number in walk(root, name).values()
        )
    return rows


def _size(paths: list[Path]) -> str:
    return f"{lines(paths):,} / {len(paths):,}"


def _table(columns: Mapping[str, dict[str, str]]) -> str:
    """Figures in Markdown, a column for each tree."""
    head = ["", *columns]
    body = [[label, *(column[label] for column in columns.values())] for label in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


WIDTH, HEIGHT, GAP, LANE, MARGIN = 400, 54, 8, 26, 20
"""Sizes in the picture: a box, the gap between two of them, the distance of two lines that lead to boxes, the margin."""


def draw(root: Path) -> str:
    """The rooms as an SVG picture.

    Each room is a box, in the order of the layers; boxes of one layer share a band. A line with an arrow leads down to each
    room that others import. A circle on it, in the row of an importing room, counts the pairs of modules behind this import.
    """
    modules = _modules(root, proper(root))
    bands = [[room for room in layer if f"meha.{room}" in modules] for layer in layers(root)]
    rooms = [room for band in bands for room in band]
    pairs = ((_room(a), _room(b)) for a, b in imports(root))
    edges = Counter(sorted((a, b) for a, b in pairs if a != b and {a, b} <= set(rooms)))
    row = {room: MARGIN + i * (HEIGHT + GAP) for i, room in enumerate(rooms)}
    lane = {room: MARGIN + WIDTH + (i + 1) * LANE for i, room in enumerate(rooms)}
    right, leaving, entering = MARGIN + WIDTH, HEIGHT // 3, 3 * HEIGHT // 4
    width, height = lane[rooms[-1]] + MARGIN, row[rooms[-1]] + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="Helvetica, Arial, sans-serif">',
        "<title>The rooms of meha and the imports between them</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for band in filter(None, bands[::2]):
        top, bottom = row[band[0]] - GAP // 2, row[band[-1]] + HEIGHT + GAP // 2
        parts.append(f'<rect x="0" y="{top}" width="{width}" height="{bottom - top}" fill="#f3f5f8"/>')
    for room in rooms:
        if any(a == room for a, _ in edges):
            end, y = max(lane[b] for a, b in edges if a == room), row[room] + leaving
            parts.append(f'<path d="M{right} {y} H{end}" stroke="#b8c4d4" fill="none"/>')
        if any(b == room for _, b in edges):
            top, y = min(row[a] for a, b in edges if b == room) + leaving, row[room] + entering
            parts.append(f'<path d="M{lane[room]} {top} V{y} H{right + 6}" stroke="#5b7aa6" stroke-width="1.5" fill="none"/>')
            parts.append(f'<path d="M{right} {y} L{right + 8} {y - 4} L{right + 8} {y + 4} Z" fill="#5b7aa6"/>')
    for (a, b), number in edges.items():
        x, y = lane[b], row[a] + leaving
        parts.append(f'<circle cx="{x}" cy="{y}" r="9" fill="#2f5597"/>')
        parts.append(f'<text x="{x}" y="{y + 3}" font-size="9" fill="#ffffff" text-anchor="middle">{number}</text>')
    for room in rooms:
        files = [path for module, path in modules.items() if _room(module) == room]
        said = textwrap.wrap(_first_sentence(modules[f"meha.{room}"]), 64, max_lines=2, placeholder=" ...")
        x, y = MARGIN + 12, row[room]
        parts += [
            f'<rect x="{MARGIN}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#ffffff" stroke="#2f5597"/>',
            f'<text x="{x}" y="{y + 18}" font-size="14" font-weight="bold" fill="#1c2b40">{room}</text>',
            f'<text x="{right - 12}" y="{y + 18}" font-size="11" fill="#1c2b40" text-anchor="end">{_words(files)}</text>',
        ]
        for i, text in enumerate(said):
            parts.append(f'<text x="{x}" y="{y + 33 + 13 * i}" font-size="11" fill="#56657a">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def _words(files: list[Path]) -> str:
    return f"{lines(files):,} lines, {len(files)} file{'s' * (len(files) > 1)}"


def _first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, as plain text."""
    text = (ast.get_docstring(_parsed(path)) or "").partition("\n\n")[0]
    return re.split(r"(?<=[.;]) ", re.sub(r"[`\\]", "", " ".join(text.split())))[0].rstrip(".;")


def main(
    tree: Annotated[Path, typer.Option(help="Checkout to measure; by default this one.")] = ROOT,
    before: Annotated[Path | None, typer.Option(help="Older checkout, for a column of its own.")] = None,
    walked: Annotated[bool, typer.Option("--walk/--no-walk", help="Whether to follow calls of solve.")] = True,
    drawn: Annotated[Path | None, typer.Option("--draw", help="File for an SVG picture of the rooms; no table then.")] = None,
) -> None:
    """Measure the library and print a table in Markdown, or draw its rooms."""
    if drawn is not None:
        drawn.write_text(draw(tree))
        return
    walks = WALKS if walked else ()
    columns = {} if before is None else {"before": figures(before, walks)}
    typer.echo(_table(columns | {"now" if before is None else "after": figures(tree, walks)}))


if __name__ == "__main__":
    typer.run(main)
