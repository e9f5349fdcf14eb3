"""The report as files: what is read in the page, the tables and the figures is what was measured."""

import csv
import re
from collections import Counter
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup
from matplotlib.figure import Figure
from meha_lab.reproduce import figures
from meha_lab.reproduce.figures import DASH, MINUS, TIMES, Curve, Panel, band, curves, limits, render, style
from meha_lab.reproduce.page import Details, Mark, Page, Picture, Prose, Section, Table, show, write

HOSTILE = '<script>alert("1 & 2")</script>'


def panel(*runs, **options) -> Panel:
    return Panel("t", "x", "y", [Curve("MEHA", list(runs))], **options)


def picture(name: str, label: str = "MEHA") -> Picture:
    runs = [([1, 10, 100], [1.0, 0.1, value]) for value in (0.01, 0.02)]
    panels = [Panel("t", "seconds", "error", [Curve(label, runs), Curve("RHG", runs)], target=0.05)]
    return Picture(name, "c", curves(panels), HOSTILE, narrow=curves(panels, columns=1))


def page(*blocks, summary: Table | None = None) -> Page:
    table = summary or Table("summary", "s", ["claim", "value"], [["holds", 1.0]])
    return Page(HOSTILE, [HOSTILE, Markup("<i>lead</i>")], table, [Section("one", HOSTILE, blocks)], {"Command": HOSTILE})


def read(index: Path) -> str:
    """All pages of a report."""
    return index.read_text() + "".join(path.read_text() for path in sorted(index.parent.glob("*.html")) if path != index)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def text_of(figure: Figure) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", render(figure, "svg").decode()))


def test_hostile_text_is_shown_and_not_obeyed(tmp_path):
    table = Table("t", HOSTILE, [HOSTILE], [[HOSTILE], [Mark(HOSTILE, "failed")], [Mark(HOSTILE, "head")]], note=HOSTILE)
    blocks = (Prose(HOSTILE), Prose(Markup("<sub>0</sub>")), table, picture("p", HOSTILE), Details(HOSTILE, [Prose(HOSTILE)]))
    html = read(write(page(*blocks), tmp_path))
    assert html.count("<script") == 2  # the page's own, on both pages
    assert html.count("&lt;script&gt;") >= 14
    assert "<sub>0</sub>" in html
    assert "<i>lead</i>" in html
    assert re.search(r'aria-label="&lt;script&gt;alert\(&quot;1 &amp; 2', html)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (0.5, "0.500"),
        (0.00099951, "0.00100"),
        (99.96, "100"),
        (1234.5, "1230"),
        (99999.0, f"1.00{TIMES}10⁵"),
        (-2.345e-9, f"{MINUS}2.35{TIMES}10⁻⁹"),
        (0.0, "0"),
        (inf, "∞"),
        (nan, "NaN"),
        (123456, "123456"),
        (None, DASH),
        (Mark("", "best", 0.25), "0.250"),
        (Mark("in words", "failed", 0.25), "in words"),
    ],
)
def test_cells(cell, expected):
    assert show(cell) == expected


def test_table_in_html_and_csv(tmp_path):
    rows = [
        [Mark("Group", "head")],
        ["MEHA", Mark("", "best", 1 / 3), 7],
        ["NS", Mark("diverged", "failed"), None],
        ["a, b", Mark("3.2 s", "paper", 3.2), 8],
    ]
    html = read(write(page(Details("more", [Table("t", "c", ["method", "s", "n"], rows)])), tmp_path))
    with (tmp_path / "tables/t.csv").open(newline="") as file:
        found = list(csv.reader(file))
    assert found == [["method", "s", "n"], ["Group"], ["MEHA", repr(1 / 3), "7"], ["NS", "diverged", ""], ["a, b", "3.2", "8"]]
    assert re.search(
        r'<td class="best num" data-value="0\.3333[^"]*">0\.333</td>\s*<td class="num" data-value="7">7</td>', html
    )
    assert re.search(rf'<td class="failed num">diverged</td>\s*<td class="num">{DASH}</td>', html)
    assert '<td class="paper num" data-value="3.2">3.2 s</td>' in html
    assert '<th scope="rowgroup" colspan="3" class="head"><span>Group</span></th>' in html
    assert '<th scope="row">MEHA</th>' in html
    assert 'href="tables/t.csv"' in html


def test_row_of_wrong_length(tmp_path):
    table = Table("t", "c", ["a", "b"], [[1, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match="'t' has 3 cells, expected 2"):
        write(page(table), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ids_are_unique_and_links_lead_somewhere(tmp_path):
    index = write(page(picture("a"), picture("b"), Table("a", "c", ["x"], [])), tmp_path).read_text()
    html = (tmp_path / "one.html").read_text()
    ids = Counter(re.findall(r'\bid="([^"]*)"', html))
    assert len(ids) > 50
    assert ids.most_common(1)[0][1] == 1
    targets = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)|aria-labelledby="([^"]*)"', html)
    assert {"".join(target) for target in targets} <= set(ids)
    links = re.findall(r'href="([^#"][^"]*)"', index + html)
    assert {"figures/a.png", "figures/b.svg", "tables/a.csv", "one.html", "index.html"} <= set(links)
    assert all((tmp_path / link).is_file() for link in links)
    assert not re.search(r'(src|href)="(https?:|//)', html)


def test_same_input_same_bytes(tmp_path):
    write(page(picture("a")), tmp_path)
    first = contents(tmp_path)
    write(page(picture("a")), tmp_path)
    assert first == contents(tmp_path)
    assert set(first) == {"index.html", "one.html", "tables/summary.csv", "tables/summary.md", "figures/a.png", "figures/a.svg"}
    assert first["figures/a.png"].startswith(b"\x89PNG")


def test_the_conclusion_comes_first(tmp_path):
    sections = [
        Section("one", "One", [], "Table 2", (2, 1, 0, 0), "One is fastest: yes"),
        Section("two", "Two", [], "", (0, 0, 1, 1), "Two is fastest: no"),
        Section("three", "Three", []),
    ]
    assert [section.mark for section in sections] == ["some", "none", ""]
    report = Page("Report", ["about"], Table("summary", "s", ["c"], [["all"]]), sections, {}, home="../index.html")
    html = write(report, tmp_path).read_text()
    sentence = "Of 5 claims of the paper, 2 hold, 1 hold in part, 1 do not, and 1 is open."
    places = [html.index(text) for text in (sentence, "One is fastest: yes", "All claims, one by one", "<p>about</p>")]
    assert places == sorted(places)
    assert 'href="../index.html"' in html
    assert "In the paper: Table 2." in (tmp_path / "one.html").read_text()
    assert "three.html" in html


def test_curves_and_their_entries_in_the_legend_have_names(tmp_path):
    """By which the script hides them: two curves, with a band, a line and a dot each, in two forms of the figure."""
    write(page(picture("a")), tmp_path)
    html = (tmp_path / "one.html").read_text()
    for i in (0, 1):
        assert len(re.findall(rf'id="a\.curve{i}\.\d"', html)) == 3
        assert len(re.findall(rf'id="a\.narrow\.curve{i}\.\d"', html)) == 3
        assert len(re.findall(rf'id="a\.legend{i}\.\d"', html)) == 2


def test_the_best_so_far():
    p = Panel("t", "x", "y", [Curve("automatic", [([1, 2, 4], [0.1, 5.0, 0.01])], best=True)])
    _, (_, median, _) = band(p, p.curves[0])
    np.testing.assert_allclose(median, [0.1, 0.1, 0.01])
    high = Panel("t", "x", "y", [Curve("automatic", [([1, 2], [0.5, 0.2])], best=True)], logy=False, better="high")
    np.testing.assert_allclose(band(high, high.curves[0])[1][1], [0.5, 0.5])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([Picture("a", "c", Figure(), ""), Details("d", [Picture("A", "c", Figure(), "")])], "'A' is taken"),
        ([Table("summary", "c", ["x"], [])], "'summary' is taken"),
        ([Table("../t", "c", ["x"], [])], "'../t' needs"),
        ([Picture("", "c", Figure(), "")], "'' needs"),
    ],
)
def test_names_are_safe_and_unique(blocks, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        write(page(*blocks), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_anchor_of_a_section_is_not_that_of_a_table(tmp_path):
    section = Section("table-summary", "t", [])
    with pytest.raises(ValueError, match="anchor of a section: 'table-summary' is taken"):
        write(Page("t", [], Table("summary", "s", [], []), [section], {}), tmp_path)


def test_band_of_runs_on_one_grid():
    values = np.random.default_rng(0).uniform(0.1, 1, (5, 4))
    p = panel(*(([1, 2, 4, 8], row) for row in values))
    x, quantiles = band(p, p.curves[0])
    np.testing.assert_array_equal(x, [1, 2, 4, 8])
    np.testing.assert_allclose(quantiles, np.exp(np.quantile(np.log(values), (0.2, 0.5, 0.8), axis=0)))


def test_band_interpolates_along_the_lines_of_the_plot_and_holds_the_last_value():
    short, long = ([1, 100], [1.0, 0.01]), ([0, 1, 10, 1000], [9.0, 1.0, 1.0, 1.0])
    p = panel(short, long)
    x, (_, median, _) = band(p, p.curves[0])
    np.testing.assert_array_equal(x, [1, 10, 100, 1000])
    np.testing.assert_allclose(median, [1, 0.1**0.5, 0.01**0.5, 0.01**0.5])  # geometric means of 1, 0.1, 0.01, 0.01 with 1
    p = panel(([0, 2], [0.0, 1.0]), ([0, 1, 4], [0.0, 0.0, 0.0]), logx=False, logy=False)
    x, (low, median, high) = band(p, p.curves[0])
    np.testing.assert_array_equal(x, [0, 1, 2, 4])
    np.testing.assert_allclose([low, median, high], np.outer([0.2, 0.5, 0.8], [0, 0.5, 1, 1]), atol=1e-15)


def test_band_of_many_points_is_thinned():
    p = panel((np.arange(1, 5001), 1 / np.arange(1, 5001)))
    x, (_, median, _) = band(p, p.curves[0], points=50)
    assert len(x) == 50
    np.testing.assert_allclose(median, 1 / x, rtol=1e-5)


@pytest.mark.parametrize("bad", [None, nan, inf, 1e30])
@pytest.mark.parametrize("logy", [True, False])
def test_diverged_runs_are_clipped_to_a_readable_range(bad, logy):
    fine = [([1, 10], [1.0, 0.01])] * 4
    p = Panel("t", "x", "y", [Curve("MEHA", fine), Curve("NS", [([1, 10, 20], [1.0, 3.0, bad])])], logy=logy)
    low, high = limits(p)
    assert low <= 0.01
    assert 3 < high < 10
    _, (_, median, _) = band(p, p.curves[1])
    np.testing.assert_allclose(median, [1, 3, high])
    assert "NS" in text_of(curves([p]))


def test_diverged_is_the_bottom_where_high_is_good():
    p = panel(([1, 2], [0.5, nan]), ([1, 2], [0.5, nan]), logy=False, better="high")
    _, (_, median, _) = band(p, p.curves[0])
    np.testing.assert_allclose(median, [0.5, limits(p)[0]])


def test_zero_is_the_bottom_of_a_logarithmic_axis():
    p = panel(([1, 2, 3], [1.0, 0.5, 0.0]))
    _, (_, median, _) = band(p, p.curves[0])
    np.testing.assert_allclose(median, [1, 0.5, limits(p)[0]])


@pytest.mark.parametrize("logy", [True, False])
def test_figures_of_next_to_nothing(logy):
    empty = [panel(logy=logy), panel(([], []), logy=logy), panel(([1], [None]), logy=logy), panel(([0], [1.0]), logy=logy)]
    assert "MEHA" in text_of(curves(empty))
    flat = panel(([1, 2], [0.0, 0.0]), logy=logy, slopes=[(-0.5, "slope")], target=0.5)
    assert {"slope", "target"} <= set(text_of(curves([flat])).split())
    with pytest.raises(ValueError, match="at least 1 panel"):
        curves([])


def test_run_of_unequal_lengths():
    with pytest.raises(ValueError, match="a run of 'MEHA' has 2 xs and 1 ys"):
        curves([panel(([1, 2], [1.0]))])


def test_slope_starts_on_the_curve():
    ax = curves([panel(([4, 64], [2.0, 1.0]), slopes=[(-0.5, "x^-0.5")])]).axes[0]
    x, y = next(line for line in ax.lines if line.get_linestyle() == ":").get_data()
    np.testing.assert_allclose((x, y), [[4, 64], [2, 0.5]])


def test_styles_differ_and_last():
    named = [*figures.STYLES, "p = 0.1", "p = 0.2", "p = 0.3", "p = 0.4"]
    looks = figures.styles(named)
    assert len({(look.color, look.dash) for look in looks.values()}) == len(named)
    assert all(style(label) == figures.styles(["BDA", label])[label] for label in named)
    assert style("VF-iDCA") != style("IGJO")
    assert style("MEHA").width > max(look.width for label, look in looks.items() if label != "MEHA")
    assert "Grid search" in text_of(curves([Panel("t", "x", "y", [Curve("Grid search", [([1, 2], [1.0, 2.0])])])]))
