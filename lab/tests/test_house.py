"""The measures of the house, on trees so small that every figure can be counted by hand."""

import xml.etree.ElementTree as ElementTree
from textwrap import dedent

import pytest
from meha_lab import house

CONTRACT = """
    [[tool.importlinter.contracts]]
    type = "forbidden"

    [[tool.importlinter.contracts]]
    type = "layers"
    containers = ["meha"]
    layers = ["(extra) | absent", "top", "low"]
"""


def plant(root, files):
    for place, text in files.items():
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(dedent(text))
    return root


@pytest.fixture
def tree(tmp_path):
    return plant(
        tmp_path,
        {
            "pyproject.toml": CONTRACT,
            "meha_cli.py": "from meha.top.run import go\n",
            "meha/__init__.py": """\
                from meha import low
                from meha.low.tools import hammer
                from meha.top import go
                __all__ = ["go", "hammer"]
                __all__ += ["low"]
            """,
            "meha/low/__init__.py": """\
                \"\"\"Tools & nails. They know nothing.\"\"\"
                from meha.low.tools import hammer, saw
                __all__ = ["hammer", "saw"]
            """,
            "meha/low/tools.py": "class Hammer: pass\n\n\ndef hammer(): pass\nsaw = hammer\n",
            "meha/low/nails.py": "",
            "meha/top/__init__.py": """\
                \"\"\"Run.\"\"\"
                from meha.top.run import go
                from meha.top.check import looks
                def look(): return looks
            """,
            "meha/top/run.py": """\
                import math
                from meha.low import saw as blade
                from . import check
                from ..low import nails
                def go():
                    from meha.low.nails import nail
            """,
            "meha/top/check.py": "import meha.low.tools\nfrom meha.top import looks as own\nlooks = 1\n",
            "meha/extra.py": "class Hammer: pass\n",
            "lab/meha_lab/__init__.py": "",
            "lab/meha_lab/bench.py": "from meha.extra import Hammer\nclass Bench:\n    class Row: pass\nclass Row: pass\n",
            "lab/tests/test_bench.py": "class Bench: pass\n",
            "docs/conf.py": "class Bench: pass\n",
        },
    )


def names(root, paths):
    return {path.relative_to(root).as_posix() for path in paths}


def test_files_are_of_the_library_or_of_the_laboratory(tree):
    assert names(tree, house.laboratory(tree)) == {"lab/meha_lab/__init__.py", "lab/meha_lab/bench.py"}
    assert len(house.shipped(tree)) == len(house.proper(tree)) == 9
    assert house.lines(house.laboratory(tree)) == 4
    assert house.lines([tree / "meha/low/tools.py"]) == 5


def test_a_tree_without_a_laboratory_has_it_inside(tmp_path):
    inside = {"meha/reproduce/race.py", "meha/problems/games.py", "meha/tasks/few_shot.py", "benchmarks/peers/jax.py"}
    proper = {"meha/problems/base.py", "meha/tasks/_cleaning_files.py", "meha/sets.py"}
    plant(tmp_path, dict.fromkeys(inside | proper | {"tools/release_check.py"}, ""))
    assert names(tmp_path, house.laboratory(tmp_path)) == inside
    assert names(tmp_path, house.proper(tmp_path)) == proper
    assert len(house.shipped(tmp_path)) == 6


def test_layers_are_those_of_the_contract(tree):
    assert house.layers(tree) == [["extra", "absent"], ["top"], ["low"]]


def test_imports_lead_to_the_module_that_defines_a_name(tree):
    assert house.imports(tree) == {
        ("meha_cli", "meha.top.run"),
        ("meha.top", "meha.top.check"),  # its own code uses it; what it only passes on is no import
        ("meha.top.run", "meha.low.tools"),
        ("meha.top.run", "meha.top.check"),
        ("meha.top.run", "meha.low.nails"),
        ("meha.top.check", "meha.low.tools"),
    }


def test_modules_with_one_importer(tree):
    assert house.single_importers(tree) == ["meha.low.nails", "meha.top.run"]
    plant(tree, {"meha/extra.py": "from meha.top import go\n"})
    assert house.single_importers(tree) == ["meha.low.nails"]


def test_public_names_are_those_of_meha_and_of_its_public_modules(tree):
    found = ["meha.go", "meha.hammer", "meha.low", "meha.low.hammer", "meha.low.saw"]
    assert house.public_names(tree) == found
    plant(tree, {"meha/sklearn/__init__.py": "__all__ = ['Ridge']\n"})
    assert house.public_names(tree) == [*found, "meha.sklearn.Ridge"]
    plant(tree, {"meha/low/__init__.py": "saw = 1\n"})
    with pytest.raises(ValueError, match=r"low/__init__\.py: is public and has no __all__"):
        house.public_names(tree)


def test_classes_of_the_same_name(tree):
    assert house.repeated_classes(tree) == ["Hammer", "Row"]


def test_named_numbers(tmp_path):
    plant(
        tmp_path,
        {
            "meha/engines/search.py": """\
                import math
                STEPS = 10
                TOL: float = -2 / 3
                LENGTHS = (1.0, 10.0)
                FEW, MANY = 3, math.inf
                TWICE = 2 * STEPS
                NAMES, ON, NONE, lower = ("a", 1), True, (), 5
                class SearchTuning:
                    a: int = 3  # counts
                    b: float = (
                        0.25
                    )
                    on: bool = False
                    name: str = "x"
                    TUNING = 4
                class Other:
                    c: int = 3
                def f():
                    LOCAL = 7
            """,
            "meha/methods/default.py": "SMALL = 300\n",
            "meha/methods/rhg.py": "ROUNDS = 5\n",
            "lab/meha_lab/bench.py": "REPEATS = 5\n",
        },
    )
    constants = ["FEW", "LENGTHS", "MANY", "STEPS", "SearchTuning.TUNING", "SearchTuning.a", "SearchTuning.b", "TOL", "TWICE"]
    expected = [f"meha/engines/search.py:{name}" for name in constants]
    assert house.named_numbers(tmp_path) == [*expected, "meha/methods/default.py:SMALL"]


def test_comments_and_lines_of_code(tmp_path):
    source = '''\
        """Docstring # no comment.

        Second line."""

        # one
        import a  # noqa: F401
        import b  # two

        LIMIT = 3
        """Docstring of LIMIT."""
        TEXT = """
        # no comment
        """
        def f(x):  # type: ignore
            "Docstring."
            return (
                x,

                # three
                "alone, but no docstring",
            )
    '''
    plant(tmp_path, {"meha/a.py": source, "lab/meha_lab/b.py": "# of the laboratory\nx = 1\n"})
    assert house.comments(tmp_path) == (3, 2 + 1 + 3 + 1 + 4)


def test_a_walk_counts_files_functions_calls_and_hops(tmp_path):
    plant(
        tmp_path,
        {
            "meha/__init__.py": """\
                from types import SimpleNamespace
                from meha import other
                sets = SimpleNamespace(Box=lambda *bounds: None)
                constraints = SimpleNamespace(Linear=lambda **matrices: None)
                def Problem(**parts): return other.first()
                def solve(problem, x0, y0):
                    other.first()  # a hop
                    other.first()
                    back()  # a hop
                def back():
                    other.second()  # a hop
            """,
            "meha/other.py": "def first(): return len('not ours')\ndef second(): pass\n",
        },
    )
    assert house.walk(tmp_path, "coupled") == {"files": 2, "functions": 4, "calls": 5, "hops": 3}
    with pytest.raises(RuntimeError, match=r"walk of ridge failed(.|\n)*losses"):
        house.walk(tmp_path, "ridge")


def test_the_table_has_a_column_for_each_tree(tree, tmp_path_factory, capsys):
    before = plant(tmp_path_factory.mktemp("before"), {"pyproject.toml": CONTRACT, "meha/__init__.py": "__all__ = ['a']\n"})
    house.main(tree, before, walked=False)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["", "before", "after"]
    found = {row[0]: row[1:] for row in rows[2:]}
    assert found["lines / files of the laboratory"] == ["0 / 0", "4 / 2"]
    assert found["modules with one importer"] == ["0 of 1", "2 of 9"]
    assert found["comments per 100 lines of code"][0] == "0.0 (0 in 1)"
    house.main(tree, None, walked=False)
    assert capsys.readouterr().out.startswith("|  | now |\n")


def test_the_picture_has_a_box_for_each_room_and_a_circle_for_each_import(tree):
    picture = ElementTree.fromstring(house.draw(tree))
    texts = ["".join(node.itertext()) for node in picture if node.tag.endswith("}text")]
    circles = [node for node in picture if node.tag.endswith("}circle")]
    boxes = [node for node in picture if node.tag.endswith("}rect") and node.get("rx")]
    assert len(circles) == 1  # from top to low: three pairs of modules
    assert texts[0] == "3"
    assert [text for text in texts if text in ("extra", "top", "low", "absent")] == ["extra", "top", "low"]
    assert len(boxes) == 3
    assert "8 lines, 3 files" in texts  # low
    assert "Tools & nails" in texts
