"""Formulas of docstrings, which are plain text for the terminal, as LaTeX for the site.

A formula is a paragraph that is indented further than the one before it and has a relation in it. :func:`latex` translates the
notation of the docstrings: ``<-`` for an assignment, ``grad_y``, ``prox_{eta g(x,.)}``, ``||y||^2``, names of Greek letters.
"""

import re

GREEK = ["alpha", "epsilon", "beta", "gamma", "delta", "eta", "theta", "lambda", "mu", "rho", "sigma", "psi", "phi", "Phi"]
OPERATORS = ["min", "max", "log", "exp", "argmin", "proj", "prox", "mean", "indicator"]
SYMBOLS = {
    "<-": r"\leftarrow ",
    "->": r"\to ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "...": r"\dots ",
    "||": r"\|",
    "*": r"\cdot ",
    "%": r"\%",
    "{": r"\{",
    "}": r"\}",
}
TOKEN = re.compile(
    r"(?P<sub>_(?:\{[^}]*\}|[A-Za-z0-9]+))"
    r"|(?P<power>\^(?:\([^)]*\)|-?\w+|\*))"
    r"|(?P<name>[A-Za-z]+)"
    r"|(?P<plus>(?<=[A-Za-z])\+(?=[\s,)]|$))"
    r"|(?P<gap>  +)"
    r"|(?P<symbol><-|->|<=|>=|\.\.\.|\|\||[*%{}])"
    r"|(?P<rest>.)"
)
RELATION = re.compile(r"<-|<=|(?<![<>])=|<")


def latex(text):
    """One line of a formula."""
    out = []
    for match in TOKEN.finditer(re.sub(r", ?\.\)", ", @)", text.strip())):
        kind, token = match.lastgroup, match.group()
        if kind == "sub":
            inner = token[1:].strip("{}")
            out.append(f"_{{{latex(inner)}}}")
        elif kind == "power":
            inner = token[1:]
            out.append("^{*}" if inner == "*" else f"^{{{latex(inner)}}}")
        elif kind == "name":
            out.append(_name(token))
        elif kind == "plus":
            out.append("^{+}")
        elif kind == "gap":
            out.append(r" \quad ")
        elif kind == "symbol":
            out.append(SYMBOLS[token])
        else:
            out.append(r"\cdot " if token == "@" else token)
    return "".join(out)


def _name(word):
    if word == "grad":
        return r"\nabla"
    if word == "sum":
        return r"\sum"
    if word in GREEK:
        return f"\\{word} "
    if word in OPERATORS:
        return rf"\operatorname{{{word}}}"
    if len(word) == 1 or word in ("xx", "xy", "yx", "yy"):
        return word
    return rf"\text{{ {word} }}" if word.islower() and word != "lr" else rf"\text{{{word}}} "


def display(lines):
    """Lines of a formula, aligned at their first relation."""
    rows = []
    for line in lines:
        match = RELATION.search(line)
        if match and match.start() > 0:
            rows.append(f"{latex(line[: match.start()])} &{latex(line[match.start() :].strip())}")
        else:
            rows.append(rf"&\quad {latex(line)}")
    return [r"\begin{aligned}", *(row + r" \\" for row in rows), r"\end{aligned}"]


def depth(line):
    """The indentation of a line."""
    return len(line) - len(line.lstrip())


def translate(lines):
    """A docstring with its formulas as ``.. math::``."""
    out, i = [], 0
    while i < len(lines):
        before = next((line for line in reversed(out) if line.strip()), "")
        start = i and lines[i].strip() and not lines[i - 1].strip() and depth(lines[i]) > depth(before)
        if start and not before.rstrip().endswith("::") and not re.match(r"\s*(>>>|\.\. |- |\* )", lines[i]):
            end = i
            while end < len(lines) and lines[end].strip() and depth(lines[end]) >= depth(lines[i]):
                end += 1
            block = lines[i:end]
            if any(RELATION.search(line) for line in block) and not re.match(r"\s*(Args|Returns|Raises|Attributes):$", before):
                indent = " " * depth(before)
                out += [f"{indent}.. math::", "", *(f"{indent}   {line}" for line in display(block))]
                if end < len(lines) and lines[end].strip():
                    out.append("")
                i = end
                continue
        out.append(lines[i])
        i += 1
    return out


SHARED = re.compile(r"    (\w+(?:, \w+)+): (.*)")


def one_each(lines):
    """A docstring in which every attribute has an entry of its own: ``x, y: both`` becomes two."""
    out, section, i = [], False, 0
    while i < len(lines):
        section = lines[i] == "Attributes:" or (section and (not lines[i] or lines[i].startswith("    ")))
        match = SHARED.fullmatch(lines[i]) if section else None
        i += 1
        if not match:
            out.append(lines[i - 1])
            continue
        rest = []
        while i < len(lines) and lines[i].startswith("        "):
            rest.append(lines[i])
            i += 1
        for name in match[1].split(", "):
            out += [f"    {name}: {match[2]}", *rest]
    return out


def setup(app):
    """Translate docstrings before other extensions read their sections."""

    def process(app, what, name, obj, options, lines):
        lines[:] = one_each(translate(lines))

    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True}
