"""meha clean: wrong labels are found, files are exact, and bad input is refused in words."""

from __future__ import annotations

import csv
import re
import sys
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from meha_lab.datasets import digits
from typer.testing import CliRunner

from meha.cleaning import Cleaning, CleaningWarning, clean
from meha.cleaning import network as module
from meha.cleaning.files import Examples, picture, read, table
from meha.cleaning.memory import BASE, _needed, check_memory
from meha.cleaning.network import _scaled
from meha_cli import app


@pytest.fixture
def quick(monkeypatch):
    """A training of a moment, where its quality does not matter."""
    monkeypatch.setattr(module, "STEPS", 12)
    monkeypatch.setattr(module, "EPOCHS", 1)
    monkeypatch.setattr(module, "PRETRAINING", 12)


def clouds(count=60, seed=0):
    """Two clouds of points, each ninth label from row 19 on wrong."""
    truth = np.arange(count) % 2
    features = np.random.default_rng(seed).normal(size=(count, 3)) + 4 * truth[:, None]
    labels = truth.copy()
    labels[19::9] = 1 - labels[19::9]
    return features, labels, truth


def auc(scores, wrong):
    """The share of pairs (wrong, right) in which the wrong one has the lower score."""
    a, b = scores[wrong][:, None], scores[~wrong][None, :]
    return float(((a < b) + 0.5 * (a == b)).mean())


# --- quality ------------------------------------------------------------------------------------------------------------------


def test_wide_inputs_are_not_memorised(monkeypatch):
    """With as many inputs as examples, the steps that suit few inputs would fit wrong labels."""
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 3, 400)
    features = generator.normal(size=(400, 400)) + 2 * generator.normal(size=(3, 400))[truth] * (np.arange(400) < 20)
    wrong = (np.arange(400) >= 60) & (generator.random(400) < 0.4)
    labels = np.where(wrong, (truth + 1) % 3, truth)

    def area():
        return auc(clean(features, labels, np.arange(60)).weights[60:], wrong[60:])

    few = area()
    monkeypatch.setattr(module, "WIDE", 1000)
    assert few > area() + 0.01


def test_wrong_labels_of_digits_are_found():
    images = digits()
    generator = np.random.default_rng(0)
    order = generator.permutation(len(images))
    pixels, truth = images.images.numpy()[order], images.labels.numpy()[order]
    wrong = (np.arange(len(order)) >= 180) & (generator.random(len(order)) < 0.3)
    labels = np.where(wrong, (truth + generator.integers(1, 10, len(order))) % 10, truth)

    found = clean(pixels, labels, np.arange(180))

    doubtful = np.arange(len(order)) >= 180
    assert auc(found.weights[doubtful], wrong[doubtful]) > 0.99
    for name in range(10):
        given = doubtful & (labels == name)
        assert auc(found.weights[given], wrong[given]) > 0.95
    flagged = found.weights < 0.5
    assert wrong[flagged].mean() > 0.85
    assert flagged[wrong].mean() > 0.95
    assert (found.suggested[wrong] == truth[wrong]).mean() > 0.85


def test_columns_of_different_size_and_an_outlier_do_no_harm():
    features, labels, truth = clouds(200)
    features = features * [1e200, 1.0, 1e-200]
    features[20, 1] = 1e9
    features = np.column_stack([features, np.full(200, 7.0)])
    found = clean(features, labels, np.arange(10))
    assert auc(found.weights[10:], (labels != truth)[10:]) > 0.97


# --- what is returned ---------------------------------------------------------------------------------------------------------


def test_parts_of_a_cleaning_agree(quick):
    features, labels, _ = clouds()
    found = clean(features, labels, range(10))
    assert found.weights.shape == (60,)
    assert found.weights.min() >= 0
    assert found.weights.max() <= 1
    assert (found.weights[:10] == 1).all()
    assert (found.suggested[:10] == labels[:10]).all()
    assert sorted(found.order) == list(range(60))
    assert set(found.order[50:]) == set(range(10))
    assert (np.diff(found.weights[found.order]) >= 0).all()
    judged = ~found.trusted
    assert ((found.suggested != labels) == (found.weights < 0.5))[judged].all()
    assert set(found.suspicious()) == set(np.flatnonzero(found.weights < 0.5))
    assert list(found.suspicious(1.0)) == list(found.order[:50])
    assert len(found.suspicious(0.0)) == 0
    with pytest.raises(ValueError, match=r"threshold: must be in \[0, 1\], got 2"):
        found.suspicious(2)


def test_same_seed_same_weights_and_the_random_state_is_left_alone(quick):
    features, labels, _ = clouds()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second, other = (clean(features, labels, range(10), seed=seed).weights for seed in (3, 3, 4))
    assert torch.equal(torch.rand(3), expected)
    assert (first == second).all()
    assert (first != other).any()


def test_arrays_tensors_lists_and_masks_are_the_same(quick):
    features, labels, _ = clouds()
    mask = np.arange(60) < 10
    expected = clean(features, labels, mask).weights
    for values in (
        (torch.tensor(features), torch.tensor(labels), torch.tensor(mask)),
        (features.tolist(), labels.tolist(), list(range(10))),
        (features, labels.astype(float), mask.astype(int)),
        (features, np.array(["no", "yes"])[labels], mask),
        (features, np.array(["no", "yes"], dtype=object)[labels], mask),
        (features, np.array([b"no", b"yes"])[labels], mask),
    ):
        assert (clean(*values).weights == expected).all()


def test_the_order_of_pixels_and_channels(quick):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (40, 5, 5), dtype=np.uint8)
    labels = np.arange(40) % 2
    expected = clean(pixels, labels, range(10)).weights
    assert (clean(pixels.reshape(40, 25), labels, range(10)).weights == expected).all()
    assert (clean(pixels[:, None], labels, range(10)).weights == expected).all()
    assert (clean(pixels[..., None], labels, range(10)).weights == expected).all()


def test_labels_without_a_trusted_example_are_not_judged(quick):
    features, labels, _ = clouds()
    labels = labels.copy()
    labels[50:55] = 7
    with pytest.warns(CleaningWarning, match=r"no examples of class 7, so 5 examples .* get weight 0.5"):
        found = clean(features, labels, range(10))
    assert (found.weights[50:55] == 0.5).all()
    assert (found.suggested[50:55] == 7).all()
    assert 7 not in found.suggested[10:50]
    assert not set(found.suspicious()) & set(range(50, 55))


def test_few_trusted_examples_are_warned_about(quick):
    features, labels, _ = clouds()
    with pytest.warns(CleaningWarning, match=r"fewer than 5 examples of class 0, 1, so weights are uncertain"):
        clean(features, labels, range(6))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_finds_the_same():
    features, labels, truth = clouds(200)
    found = clean(features, labels, range(10), device="cuda")
    assert auc(found.weights[10:], (labels != truth)[10:]) > 0.97


def test_progress_is_told(quick):
    features, labels, _ = clouds()
    shares = []
    clean(features, labels, range(10), watch=shares.append)
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


# --- bad arguments ------------------------------------------------------------------------------------------------------------

GOOD = dict(features=np.eye(6, 3), labels=[0, 1, 0, 1, 0, 1], trusted=[0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(features=np.zeros(6)), r"features: must have shape \(n, ...\)"),
        (dict(features=np.zeros((0, 3))), r"features: must have shape \(n, ...\)"),
        (dict(features=np.zeros((6, 3))), r"features: all examples are identical"),
        (dict(features=[[1, 2], [3]]), r"features: must be an array"),
        (dict(features=np.full((6, 2), np.inf)), r"features: row 0, column 0 \(counted from 0\) is inf"),
        (dict(features=np.full((6, 2, 2), np.nan)), r"features: row 0, position \(0, 0\) \(counted from 0\) is nan"),
        (dict(features=np.array([["a", "b"]] * 6)), r"features: must be real numbers"),
        (dict(features=np.zeros((6, 2), complex)), r"features: must be real numbers"),
        (dict(features=np.array([[None, {}]] * 6)), r"features: must be real numbers"),
        (dict(features=np.broadcast_to(np.uint8(0), (6, 10**9))), r"features: .* exceeds 1,000,000,000 numbers"),
        (dict(labels=[0, 1]), r"labels: must have shape \(6,\), one per example, got shape \(2,\)"),
        (dict(labels=np.zeros((6, 2))), r"labels: must have shape \(6,\)"),
        (dict(labels=[0.5, 1, 0, 1, 0, 1]), r"labels: must be integers or strings, got 0.5"),
        (dict(labels=[np.nan, 1, 0, 1, 0, 1]), r"labels: must be integers or strings, got nan"),
        (dict(labels=np.array([None, "a", "b", "a", "b", "a"], dtype=object)), r"labels: must be integers or strings"),
        (dict(labels=[4] * 6), r"labels: all are 4"),
        (dict(trusted=[]), r"trusted: no example is marked"),
        (dict(trusted=[False] * 6), r"trusted: no example is marked"),
        (dict(trusted=[True] * 6), r"trusted: all examples are"),
        (dict(trusted=[True] * 5), r"trusted: must be a mask of length 6"),
        (dict(trusted=[0, 6]), r"trusted: row 6 does not exist; rows go from 0 to 5"),
        (dict(trusted=[-1, 2]), r"trusted: row -1 does not exist"),
        (dict(trusted=["yes"] * 6), r"trusted: must be a mask or row numbers"),
        (dict(trusted=[0, 2]), r"trusted: all are of class 0"),
        (dict(labels=[0, 1, 2, 2, 2, 2]), r"trusted: no other example has one of their labels"),
    ],
)
@pytest.mark.filterwarnings("ignore::meha.cleaning.CleaningWarning")
def test_bad_arguments_are_named(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        clean(**{**GOOD, **change})


# --- files --------------------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows(count=6, header="a,b,label", line="{i},{i},{name}"):
    return "\n".join([header, *(line.format(i=i, name="xy"[i % 2]) for i in range(count))])


def test_a_table_is_read_exactly(tmp_path):
    text = "\ufeffid;a;label;b;ok\np1;1.5;cat;-2e3;yes\n\np2;0;dog;4;No\np3;.25;cat;1;0\n"
    found = read(write(tmp_path / "t.csv", text), trusted="ok", ignore=["id"])
    assert found.features.tolist() == [[1.5, -2000.0], [0.0, 4.0], [0.25, 1.0]]
    assert found.labels.tolist() == ["cat", "dog", "cat"]
    assert found.trusted.tolist() == [True, False, False]
    assert found.columns == ("a", "b")


def test_the_first_examples_are_trusted(tmp_path):
    path = write(tmp_path / "t.csv", rows(10))
    assert read(path, clean_fraction=0.3).trusted.tolist() == [True] * 3 + [False] * 7


def test_arrays_are_found_by_their_names(tmp_path):
    path = tmp_path / "a.npz"
    features, labels, _ = clouds()
    for names in (("features", "labels"), ("images", "label"), ("X", "y"), ("data", "y")):
        np.savez(path, **dict(zip(names, (features, labels), strict=True)), trusted=np.arange(5))
        found = read(path)
        assert (found.features == features).all()
        assert (found.labels == labels).all()
        assert found.trusted.sum() == 5
    np.savez(path, x=features, y=labels, target=1 - labels, good=np.arange(60) < 4)
    found = read(path, label="target", trusted="good")
    assert (found.labels == 1 - labels).all()
    assert found.trusted.sum() == 4


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "is empty"),
        ("a,b,label\n", {}, "has a header but no rows"),
        (rows(), {}, "no labels are marked as trusted; give --clean-fraction, or put 'trusted' into the file"),
        (rows(), dict(clean_fraction=1.5), "--clean-fraction: must be between 0 and 1, got 1.5"),
        (rows(), dict(clean_fraction=float("nan")), "--clean-fraction: must be between 0"),
        (rows(), dict(clean_fraction=0.01), "trusted: no example is marked"),
        (rows(), dict(label="c", clean_fraction=0.5), "--label: .* has no column 'c'; .* 'a', 'b', 'label'"),
        (rows(), dict(trusted="c"), "--trusted: .* has no column 'c'"),
        (rows(), dict(ignore=["c"]), "--ignore: .* has no column 'c'"),
        (rows(), dict(ignore=["label"], clean_fraction=0.5), "must name different columns"),
        (rows(), dict(ignore=["a", "b"], clean_fraction=0.5), "no column is left for the features"),
        (
            rows(header="a,trusted,label", line="{i},1,{name}"),
            dict(clean_fraction=0.5),
            "both 'trusted' in the file and --clean",
        ),
        (rows(header="a,trusted,label", line="{i},2,{name}"), {}, "line 2, column 'trusted' must be 1 or 0, .* got '2'"),
        (rows(header="a,a,label"), dict(clean_fraction=0.5), "2 columns are named 'a'"),
        (rows(header=",a,label"), dict(clean_fraction=0.5), "column 1 has no name; .* --ignore ''"),
        (rows(line="{i},{name},{name}"), dict(clean_fraction=0.5), "column 'b' is 'x', not a number. .* --ignore 'b'"),
        (rows(line="{i},,{name}"), dict(clean_fraction=0.5), "line 2, column 'b' is empty"),
        (
            rows(line="{i},nan,{name}"),
            dict(clean_fraction=0.5),
            r"row 0 \(counted from 0\), column .b. is nan; .* --ignore",
        ),
        (rows(line="{i},1e999,{name}"), dict(clean_fraction=0.5), "column 'b' is inf"),
        (rows(line="{i},{name}"), dict(clean_fraction=0.5), "line 2 has 2 cells, the header has 3"),
        (rows(line="{i},1,same"), dict(clean_fraction=0.5), "labels: all are same"),
        ("no table at all", dict(clean_fraction=0.5), "--label: .* has no column 'label'"),
    ],
)
def test_bad_tables_are_refused(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "t.csv", text), **options)


def test_bad_files_are_refused(tmp_path):
    features, labels, _ = clouds()
    npz, table_, other = tmp_path / "a.npz", tmp_path / "a.csv", tmp_path / "a.txt"

    def refused(message, path=npz, **options):
        with pytest.raises(ValueError, match=message):
            read(path, **{"clean_fraction": 0.2, **options})

    refused("is a folder", tmp_path)
    refused("does not exist")
    refused(r"must be an NPZ file \(.npz\) or a table", write(other, "a"))
    table_.write_bytes(rows().encode("utf-16"))
    refused("is not UTF-8 text", table_)
    write(npz, "not a zip")
    refused("is not an NPZ file")
    np.savez(npz)
    refused(r"no array of features \('features' or 'images' .*\); its arrays: none")
    np.savez(npz, features=features)
    refused(r"no array of labels \('labels' or 'label' or 'y'\); its arrays: features")
    np.savez(npz, features=features, labels=labels)
    refused(r"no array of labels \('c'\)", label="c")
    refused(r"no array of trusted examples \('c'\)", trusted="c")
    refused("--ignore: works only with CSV files", ignore=["a"])
    np.savez(npz, features=features, labels=labels[:-1])
    refused(r"labels: must have shape \(60,\), one per example")
    np.savez(npz, features=features, labels=labels, trusted=np.arange(3))
    refused("both 'trusted' in the file and --clean-fraction .* leave one of them out")
    np.savez(npz, features=features, labels=labels.astype(object))
    refused("'labels' cannot be read .*; save plain numbers or strings")
    np.savez(npz, features=features, labels=labels)
    content = bytearray(npz.read_bytes())
    content[200:900] = bytes(700)
    npz.write_bytes(content)
    refused("'features' cannot be read .*; write the file again|is damaged")
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("features.npy", b"no array")
        file.writestr("labels.npy", b"")
    refused("features: must be real numbers")


def test_weights_are_written_in_the_order_of_the_data():
    found = Cleaning(
        weights=np.array([1.0, 0.123456789, 0.5, 0.9]),
        order=np.array([1, 2, 3, 0]),
        suggested=np.array(["a", "b, or c", "a", "ü"]),
        trusted=np.array([True, False, False, False]),
    )
    assert list(csv.reader(table(np.array(["a", 'say "a"', "a", "ü"]), found).splitlines())) == [
        ["row", "label", "weight", "rank", "suggested"],
        ["0", "a", "1", "4", "a"],
        ["1", 'say "a"', "0.123457", "1", "b, or c"],
        ["2", "a", "0.5", "2", "a"],
        ["3", "ü", "0.9", "3", "ü"],
    ]


@pytest.mark.parametrize("shape", [(6, 2), (6, 4, 5), (6, 4, 5, 3), (6, 3, 4, 5)])
@pytest.mark.parametrize("count", [0, 4])
def test_pictures_of_all_kinds_are_drawn(shape, count):
    features = np.random.default_rng(0).normal(size=shape)
    labels = np.array(["$a", "b_{", "一" * 40, "b_{", "$a", "$a"])
    weights = np.where(np.arange(6) < count, 0.1, 0.9)
    found = Cleaning(weights, np.arange(6), labels[::-1], np.arange(6) == 5)
    drawn = picture(Examples(features, labels, found.trusted), found)
    assert drawn.startswith(b"\x89PNG")
    assert drawn == picture(Examples(features, labels, found.trusted), found)


# --- commands -----------------------------------------------------------------------------------------------------------------


def test_a_parquet_table_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": [0.1, 2.5, 1 / 3], "label": ["cat", "dog", "cat"], "trusted": [True, True, False]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "d.parquet")
    examples = read(tmp_path / "d.parquet")
    assert examples.features[:, 0].tolist() == columns["a"]
    assert examples.labels.tolist() == columns["label"]
    assert examples.trusted.tolist() == columns["trusted"]
    (tmp_path / "e.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not a Parquet table"):
        read(tmp_path / "e.parquet")


def test_without_pyarrow_a_parquet_file_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "d.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="pip install pyarrow"):
        read(tmp_path / "d.parquet")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_clean_command_on_images(tmp_path, quick):
    images = digits()
    np.savez(tmp_path / "d.npz", images=images.images[:300].numpy(), labels=images.labels[:300].numpy())
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    result = invoke("clean", tmp_path / "d.npz", "--clean-fraction", 0.3, "--out", out, "--seed", 2, "--top", 5)
    assert result.exit_code == 0, result.output
    found = clean(images.images[:300], images.labels[:300], np.arange(90), seed=2)
    lines = list(csv.DictReader((out / "weights.csv").read_text().splitlines()))
    assert [line["weight"] for line in lines] == [f"{weight:.6g}" for weight in found.weights]
    assert [line["suggested"] for line in lines] == [str(name) for name in found.suggested]
    assert [int(lines[row]["rank"]) for row in found.order] == list(range(1, 301))
    assert f"{len(found.suspicious())} of 210 unverified labels look wrong" in result.output
    assert re.search(rf"^ *{found.order[0]} ", result.output, re.MULTILINE)
    assert sorted(path.name for path in out.iterdir()) == ["mine.txt", "suspicious.png", "weights.csv"]


def test_clean_command_on_a_table_with_names(tmp_path):
    features, labels, truth = clouds(200)
    lines = [
        f"{i},{a},{b},{c},{('[red]cat', 'dog')[label]}"
        for i, ((a, b, c), label) in enumerate(zip(features, labels, strict=True))
    ]
    path = write(tmp_path / "t.csv", "\n".join(["id,a,b,c,kind", *lines]))
    result = invoke("clean", path, "--clean-fraction", 0.045, "--label", "kind", "--ignore", "id", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "fewer than 5 examples of class dog" in result.output
    assert "[red]cat" in result.output
    found = list(csv.DictReader((tmp_path / "out" / "weights.csv").read_text().splitlines()))
    weights = np.array([float(line["weight"]) for line in found])
    assert auc(weights[9:], (labels != truth)[9:]) > 0.97
    assert {line["label"] for line in found} == {"[red]cat", "dog"}
    assert (tmp_path / "out" / "suspicious.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["", "NA", "nan", "null", "None", "?", "N/A"])
def test_missing_labels_are_refused(tmp_path, name):
    text = rows(20, line="{i},{i}1,{name}") + f"\n3,4,{name}\n"
    with pytest.raises(ValueError, match=r"labels: 1 of 21 are missing, such as that of row 20 .*; fill them in, remove"):
        read(write(tmp_path / "t.csv", text), clean_fraction=0.5)
    np.savez(tmp_path / "t.npz", features=np.eye(4), labels=np.array(["a", "b", name, "a"]), trusted=[0, 1])
    with pytest.raises(ValueError, match=r"labels: 1 of 4 are missing, such as that of row 2 "):
        read(tmp_path / "t.npz")


@pytest.mark.parametrize("cell", ["1_0", "\uff11", "0x10"])
def test_only_plain_numbers_are_read(tmp_path, cell):
    with pytest.raises(ValueError, match=r"line 2, column 'b' is .*, not a number"):
        read(write(tmp_path / "t.csv", rows(20, line=f"{{i}},{cell},{{name}}")), clean_fraction=0.5)


def crafted(path, kind):
    """NPZ files that numpy and zipfile refuse in ways of their own."""
    np.savez(path, features=np.eye(4), labels=np.arange(4) % 2)
    content = bytearray(path.read_bytes())
    if kind == "encrypted":
        for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            start = content.find(mark)
            while start >= 0:
                content[start + at] |= 1
                start = content.find(mark, start + 1)
        path.write_bytes(content)
        return
    header = {"nested": b"(" * 3000, "huge": b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,)}"}[
        kind
    ] + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("features.npy", array)
        file.writestr("labels.npy", array)


@pytest.mark.parametrize("kind", ["encrypted", "nested", "huge"])
def test_crafted_arrays_are_refused_in_words(tmp_path, kind):
    crafted(tmp_path / "d.npz", kind)
    result = invoke("clean", tmp_path / "d.npz", "--clean-fraction", 0.5, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert re.search(r"cannot be read .*; write the file again|GiB of memory", result.output.replace("\n", " "))
    assert not isinstance(result.exception, RecursionError | MemoryError | RuntimeError)


def test_what_memory_cannot_hold_is_refused(tmp_path):
    path = write(tmp_path / "t.csv", rows(2000, line="{i},{i}1,{name}"))
    with pytest.raises(ValueError, match=r"t.csv: needs about .* GiB of memory, and .* are left; clean a part of it"):
        check_memory(path, free=BASE)
    check_memory(path, free=BASE + 2000 * 600)
    np.savez(tmp_path / "d.npz", features=np.zeros((100, 100)))
    with pytest.raises(ValueError, match=r"d.npz: needs about"):
        check_memory(tmp_path / "d.npz", free=BASE + 100 * 100 * 8)
    check_memory(tmp_path / "d.npz", free=BASE + 100 * 100 * 28)
    np.savez(tmp_path / "names.npz", features=np.zeros((100, 1)), labels=np.full(100, "a" * 100))
    with pytest.raises(ValueError, match=r"names.npz: needs about"):
        check_memory(tmp_path / "names.npz", free=BASE + 100 * 1200)


def test_the_command_refuses_what_memory_cannot_hold_before_it_starts(tmp_path, monkeypatch):
    path = write(tmp_path / "t.csv", rows(2000, line="{i},{i}1,{name}"))
    monkeypatch.setattr("meha.cleaning.memory.available", lambda: BASE)
    monkeypatch.setattr("meha.cleaning.files.read", lambda *a, **o: pytest.fail("the file was read"))
    result = CliRunner().invoke(app, ["clean", str(path), "--clean-fraction", "0.5", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "GiB of memory" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_the_estimate_of_memory_is_that_of_reading_and_scaling(tmp_path):
    """The constants of the limits are measured; here in small, by what numpy and Python allocate."""
    generator = np.random.default_rng(0)
    for kind in ("float64", "float32", "uint8"):
        numbers = (100 * generator.random((4000, 50))).astype(kind)
        np.savez(tmp_path / "d.npz", features=numbers, labels=np.arange(4000) % 2, trusted=np.arange(4000) % 5 == 0)
        used = allocated(lambda: _scaled(read(tmp_path / "d.npz").features))
        assert 0.6 * used < _needed(tmp_path / "d.npz") - BASE < 2.5 * used, kind
    path = write(tmp_path / "t.csv", rows(4000, line="{i},{i}1,{name}"))
    used = allocated(lambda: _scaled(read(path, clean_fraction=0.5, label="label").features))
    assert used < _needed(path) - BASE < 10 * used  # few columns: most of it is for what comes later


def allocated(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("one", "other"), [("Cat", "cat"), ("1", "1.0"), ("1e0", "1")])
def test_two_spellings_of_a_class_are_pointed_out(one, other, quick):
    features, labels, _ = clouds()
    names = np.array([one, "dog", other])[np.where(np.arange(len(labels)) % 10 == 4, 2, labels)]
    with (
        warnings.catch_warnings(),
        pytest.warns(CleaningWarning, match=r"labels: .* and .* are two classes. If they are one, write them in the same way"),
    ):
        clean(features, names, range(50))


def test_a_text_is_no_label(tmp_path):
    """One long cell would make all labels as long."""
    path = write(tmp_path / "t.csv", "\n".join(["a,label", *(f"{i},{'xy'[i % 2]}" for i in range(20)), "1," + "z" * 201]))
    with pytest.raises(ValueError, match=r"t.csv: line 22, column 'label' has 201 letters, and a label at most 200; name"):
        read(path, clean_fraction=0.5)


def test_nothing_is_overwritten_unasked(tmp_path, quick):
    text = rows(60, line="{i},{i}1,{name}")
    data, out = write(tmp_path / "weights.csv", text), tmp_path / "out"
    for force in ((), ("--force",)):
        result = invoke("clean", data, "--clean-fraction", 0.5, "--out", tmp_path, *force)
        assert result.exit_code == 2
        assert "is the data, which would be overwritten" in result.output.replace("\n", " ")
        assert data.read_text() == text
    out.mkdir()
    write(out / "suspicious.png", "mine")
    result = invoke("clean", data, "--clean-fraction", 0.5, "--out", out)
    assert result.exit_code == 2
    assert "exists already; give another folder, or overwrite it with --force" in result.output.replace("\n", " ")
    assert [path.name for path in out.iterdir()] == ["suspicious.png"]
    assert (out / "suspicious.png").read_text() == "mine"
    assert invoke("clean", data, "--clean-fraction", 0.5, "--out", out, "--force").exit_code == 0
    assert (out / "weights.csv").exists()


def test_labels_reach_neither_spreadsheets_nor_terminals_as_commands(tmp_path, quick):
    names = ("=cmd|'/c calc'!A0", "cat\x1b]0;owned\x07")
    features, labels, _ = clouds(100)
    np.savez(tmp_path / "d.npz", features=features, labels=np.array(names)[labels])
    result = invoke("clean", tmp_path / "d.npz", "--clean-fraction", 0.4, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    found = list(csv.DictReader((tmp_path / "out" / "weights.csv").read_text().splitlines()))
    assert {line["label"] for line in found} >= {"'" + names[0]}
    assert not any(cell.startswith("=") for line in found for cell in line.values())


def test_clean_command_refuses_in_words(tmp_path):
    path = write(tmp_path / "t.csv", rows(20, line="{i},{i}1,{name}"))
    file = write(tmp_path / "file", "")
    for arguments, message in (
        ((tmp_path / "none.csv",), "does not exist"),
        ((path,), "no labels are marked as trusted"),
        ((path, "--clean-fraction", 0.05), "all are of class x"),
        ((path, "--clean-fraction", 0.5, "--out", file), "--out: .* is not a folder"),
        ((path, "--clean-fraction", 0.5, "--out", file / "sub"), "Not a directory"),
    ):
        result = invoke("clean", *arguments)
        assert result.exit_code == 2
        assert re.search(message, result.output)
        assert "Traceback" not in result.output


def test_download_command(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("meha_lab.datasets.fetch.download", lambda name: asked.append(name) or tmp_path / name)
    listed = invoke("download")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines() if line[:1].strip()] == [
        "mnist",
        "fashion-mnist",
        "omniglot",
        "cifar10",
    ]
    result = invoke("download", "Fashion_MNIST", "mnist")
    assert result.exit_code == 0
    assert result.output == f"fashion-mnist: {tmp_path / 'fashion-mnist'}\nmnist: {tmp_path / 'mnist'}\n"
    strange = invoke("download", "mnist", "cifar")
    assert strange.exit_code == 2
    assert "must be one of 'mnist', 'fashion-mnist', 'omniglot', 'cifar10', got 'cifar'" in strange.output
    assert asked == ["fashion-mnist", "mnist"]


def test_download_command_without_a_network(monkeypatch):
    def offline(name):
        raise ConnectionError(f"{name}: could not be downloaded")

    monkeypatch.setattr("meha_lab.datasets.fetch.download", offline)
    result = invoke("download", "mnist")
    assert result.exit_code == 2
    assert "mnist: could not be downloaded" in result.output


# Hostile files


@pytest.mark.parametrize("label", ["na", "NONE", "#NA", "Nan", "N/a"])
def test_labels_that_stand_for_missing_ones_in_any_case(label, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("a,label\n" + "\n".join(f"{k},{label if k == 3 else 'cat'}" for k in range(9)))
    with pytest.raises(ValueError, match=r"labels: 1 of 9 are missing, such as that of row 3"):
        read(path, clean_fraction=0.5)


def test_labels_that_are_no_text_are_refused(tmp_path):
    labels = np.array(["cat"] * 8 + ["\ud800"])
    np.savez(tmp_path / "data.npz", features=np.ones((9, 2)), labels=labels)
    with pytest.raises(ValueError, match=r"labels: that of row 8 .* is no text"):
        read(tmp_path / "data.npz", clean_fraction=0.5)


def test_control_characters_of_a_path_do_not_reach_the_terminal(tmp_path):
    result = CliRunner().invoke(app, ["clean", str(tmp_path / "no\x1b[31mfile.csv")])
    assert result.exit_code
    assert "\x1b" not in result.stderr
    assert "x1b[31m" in result.stderr
