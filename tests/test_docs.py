"""The documentation: complete, in plain words, with formulas that are mathematics. The site is built by make docs-check."""

import importlib
import importlib.util
import inspect
import re
import runpy
from pathlib import Path

import matplotlib as mpl
import pytest

import meha

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TESTED = ("llm_domain_weights",)
"""Examples with options, and tests of their own."""
MODULES = [
    "nonsmooth",
    "sets",
    "constraints",
    "losses",
    "responses",
    "schedules",
    "stopping",
    "observers",
    "loggers",
    "loaders",
    "diagnostics",
    "theory",
    "problems",
    "cleaning",
    "contrib",
    "stochastic",
    "methods",
]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formulas = load(DOCS / "formulas.py")


def listed():
    """The names on the page of the API reference."""
    found, module = set(), ""
    for line in (DOCS / "api/index.md").read_text().splitlines():
        if line.startswith(".. currentmodule::"):
            module = line.split()[-1]
        elif re.fullmatch(r"   \w+", line):
            found.add(f"{module}.{line.strip()}")
    return found


@pytest.mark.parametrize("module", ["", *MODULES])
def test_the_reference_has_everything_public(module):
    part = getattr(meha, module) if module else meha
    names = [name for name in part.__all__ if not (not module and name in (*MODULES, "compiled"))]
    shown = {name.rpartition(".")[2] for name in listed()}
    assert not [name for name in names if name not in shown]


def test_the_reference_has_nothing_else():
    for name in listed():
        package, *path = name.split(".")
        found = importlib.import_module(package)
        for part in path:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("x <- proj_X( x - alpha h )", r"x \leftarrow  \operatorname{proj}_{X}( x - \alpha  h )"),
        ("y_{t+1} = y_t - beta f_y(x, y_t)", r"y_{t+1} = y_{t} - \beta  f_{y}(x, y_{t})"),
        ("prox_{eta g(x,.)}(z)", r"\operatorname{prox}_{\eta  g(x, \cdot )}(z)"),
        ("||y^(j)||^2 <= r_j", r"\|y^{(j)}\|^{2} \le  r_{j}"),
        ("x+ = D^-1 v,  T times", r"x^{+} = D^{-1} v, \quad T \text{ times }"),
    ],
)
def test_formulas(text, latex):
    assert formulas.latex(text) == latex


def test_formulas_of_a_docstring_become_mathematics():
    lines = [
        "A step is",
        "",
        "    x <- x - h",
        "    y <- y - d",
        "",
        "with",
        "",
        "    f(x): a list, not a formula",
        "",
        ">>> 1",
        "1",
    ]
    found = formulas.translate(lines)
    assert found[2:8] == [".. math::", "", r"   \begin{aligned}", *found[5:7], r"   \end{aligned}"]
    assert "    f(x): a list, not a formula" in found
    text = "\n".join(formulas.translate(inspect.getdoc(meha.MEHA).splitlines()))
    assert text.count(".. math::") == 3
    assert "<-" not in re.sub(r"``.*?``", "", text)


def test_shared_attributes_get_an_entry_each():
    lines = ["Attributes:", "    x, y: both", "        and more", "    z: one", "", "End, of: it"]
    expected = [
        "Attributes:",
        "    x: both",
        "        and more",
        "    y: both",
        "        and more",
        "    z: one",
        "",
        "End, of: it",
    ]
    assert formulas.one_each(lines) == expected


def test_the_faq_has_every_status():
    text = (DOCS / "faq.md").read_text()
    for status in meha.Status:
        assert f"\n{status}\n: " in text, status


def test_plain_words():
    """Words that a reader stumbles over are gone from what users read."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md"), *(DOCS / "tutorial").glob("*.md"), *EXAMPLES]
    pages += [
        *(ROOT / "meha").rglob("*.py"),
        *(ROOT / "lab/meha_lab").rglob("*.html"),
        *(ROOT / "lab/meha_lab").rglob("*.py"),
        ROOT / "meha_cli.py",
    ]
    strange = re.compile(
        r"\bso many\b|(?<!import )(?<!continuation\.)\banew\b|\btold\b|what can be had|speaks against", re.IGNORECASE
    )
    found = [f"{page.name}: {match[0]}" for page in pages for match in strange.finditer(page.read_text())]
    assert not found


def test_examples_have_a_title_and_a_place_in_the_gallery():
    assert len(EXAMPLES) >= 14
    for path in EXAMPLES:
        text = path.read_text()
        title = re.match(r'r?"""\n(.+)\n(=+)\n', text)
        assert title, path.name
        assert len(title[1]) == len(title[2])
        assert "plt.show()" in text or ".plot()" in text, path.name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")  # of numpy, where matplotlib draws tensors
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in TESTED], ids=lambda path: path.stem)
def test_examples_run(path, capsys):
    mpl.use("Agg")
    from matplotlib import pyplot

    runpy.run_path(str(path), run_name="__main__")
    assert pyplot.get_fignums()
    pyplot.close("all")
    if path.stem == "clean_digits":
        share = re.search(r"it finds ([\d.]+) % of the wrong ones", (ROOT / "README.md").read_text())[1]
        assert f"{share} % of them are found" in capsys.readouterr().out
