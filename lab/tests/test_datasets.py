"""Data sets: small files made here, damaged files, a server on this machine, and the real files where MEHA_DATA has them."""

import contextlib
import gzip
import hashlib
import io
import os
import struct
import subprocess
import sys
import tarfile
import threading
import tracemalloc
import zipfile
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from meha_lab.datasets import DataError, archives, cifar10, digits, download, fashion_mnist, fetch, load, mnist, omniglot
from meha_lab.datasets.cifar10 import CLASSES, EACH
from meha_lab.datasets.images import COUNTS
from meha_lab.datasets.omniglot import CHARACTERS, LARGEST
from meha_lab.datasets.sources import SOURCES, cache_folder

Image = pytest.importorskip("PIL.Image")

REAL = os.environ.get("MEHA_DATA")
needs_real_files = pytest.mark.skipif(not REAL, reason="MEHA_DATA names no folder with the real files")
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
BACKGROUND, EVALUATION = CHARACTERS
BINARY, FOLDERS = "cifar-10-binary.tar.gz", "cifar-10-images.tar.gz"


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    """Nothing outside ``tmp_path`` is read or written, and no proxy stands before the server of these tests."""
    monkeypatch.delenv("MEHA_DATA", raising=False)
    monkeypatch.setenv("MEHA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def small(monkeypatch):
    """Data sets of the published layout with 6 + 4 images, 3 + 2 characters, and 20 + 10 colour images."""
    tables = (
        (COUNTS, {"train": 6, "test": 4}),
        (CHARACTERS, {BACKGROUND: 3, EVALUATION: 2}),
        (EACH, {"train": 2, "test": 1}),
    )
    for table, numbers in tables:
        for name, number in numbers.items():
            monkeypatch.setitem(table, name, number)


# Files made by hand


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def pixels(count):
    return (np.arange(count * 784) % 251).reshape(count, 28, 28)


def write_mnist(folder, packed=True):
    folder.mkdir(parents=True)
    for prefix, count in (("train", 6), ("t10k", 4)):
        for kind, array in (("images-idx3", pixels(count)), ("labels-idx1", np.arange(count))):
            name = f"{prefix}-{kind}-ubyte"
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return folder


def drawing(seed, side=105):
    """A drawing as a 1-bit PNG: 1 is paper, 0 is ink."""
    paper = np.random.default_rng(seed).random((side, side)) > 0.2
    buffer = io.BytesIO()
    Image.fromarray(paper).save(buffer, "PNG")
    return buffer.getvalue()


def names_in(archive, characters):
    stem = archive.removesuffix(".zip")
    return [f"{stem}/Greek/character{c:02}/{c:04}_{d:02}.png" for c in range(1, characters + 1) for d in range(1, 21)]


def write_omniglot(folder, change=lambda content: None):
    """Both archives; ``change`` may alter the names and contents of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive, count in ((BACKGROUND, 3), (EVALUATION, 2)):
        content = {name: drawing(seed) for seed, name in enumerate(names_in(archive, count))}
        if archive == BACKGROUND:
            change(content)
        with zipfile.ZipFile(folder / archive, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in content.items():
                file.writestr(name, data)
    return folder


def pack(content, mode="w:gz", **options):
    """A tar archive of names with contents; a content may be a ``TarInfo`` without a name, for all that is no plain file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, **options) as archive:
        for name, data in content.items():
            if isinstance(data, tarfile.TarInfo):
                data.name = name
                archive.addfile(data)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def colours(seed):
    return np.random.default_rng(seed).integers(0, 256, (3, 32, 32), np.uint8)


def records(labels, seed):
    return b"".join(bytes([label]) + colours(seed + place).tobytes() for place, label in enumerate(labels))


def binary_content():
    """Five batches of 4 and one of 10 records; image number i was made with the seed i, or 100 + i for the test."""
    labels = [*range(10), *reversed(range(10))]
    content = {"cifar-10-batches-bin/readme.html": b"<html>", "cifar-10-batches-bin/test_batch.bin": records(range(10), 100)}
    for place in range(5):
        content[f"cifar-10-batches-bin/data_batch_{place + 1}.bin"] = records(labels[4 * place : 4 * place + 4], 4 * place)
    return content


def picture(seed, kind="PNG", side=32, mode="RGB"):
    buffer = io.BytesIO()
    Image.fromarray(np.resize(colours(seed).transpose(1, 2, 0), (side, side, 3))).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def image_content(kind="PNG"):
    """Image number i of a class was made with the seed 10 i + class, or 100 + class for the test."""
    content = {}
    for label, name in enumerate(CLASSES):
        for place in range(2):
            content[f"train/{name}/{place:04}.{kind.lower()}"] = picture(10 * place + label, kind)
        content[f"test/{name}/0000.{kind.lower()}"] = picture(100 + label, kind)
    return content


def write_cifar10(folder, name=FOLDERS, change=lambda content: None, **options):
    """One of the two archives; ``change`` may alter its names and contents."""
    folder.mkdir(parents=True, exist_ok=True)
    content = binary_content() if name.startswith("cifar-10-binary") else image_content()
    change(content)
    (folder / name).write_bytes(pack(content, **options))
    return folder


def peak_memory(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Reading


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(("read", "subfolder"), [(mnist, "mnist"), (fashion_mnist, "fashion_mnist")])
def test_idx_files_are_read(small, tmp_path, read, subfolder, packed):
    folder = write_mnist(tmp_path / subfolder, packed)
    train = read(folder=folder)
    assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
    assert train.images.numpy().tolist() == pixels(6).tolist()
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(train) == 6
    assert len(train.classes) == 10
    both = read("all", folder=tmp_path)  # the folder above it does as well
    assert both.labels.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert torch.equal(both.images[6:], read("test", folder=str(folder)).images)
    train.images[0] = 7  # may be changed by who asked for it


def test_a_file_may_be_unpacked_whatever_its_name(small, tmp_path):
    """Browsers unpack some downloads and leave the name."""
    folder = write_mnist(tmp_path / "mnist")
    (folder / IMAGES).write_bytes(idx(pixels(6)))
    assert mnist(folder=folder).images.shape == (6, 28, 28)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data = digits()
    assert data.images.shape == (1797, 8, 8)
    assert data.images.dtype == torch.uint8
    assert (int(data.images.min()), int(data.images.max())) == (0, 255)
    assert np.abs(data.images.numpy() / 255 - load_digits().images / 16).max() <= 0.5 / 255 + 1e-12
    assert data.labels.tolist() == load_digits().target.tolist()
    assert data.classes == tuple("0123456789")


def test_load_by_name(small, tmp_path):
    write_mnist(tmp_path / "mnist")
    write_mnist(tmp_path / "fashion_mnist")
    assert repr(load("digits")) == "Images(1797 of 8x8, 10 classes)"
    assert len(load("mnist", folder=tmp_path)) == len(mnist(folder=tmp_path)) == 6
    assert len(load("mnist", "all", folder=tmp_path)) == 10
    assert len(load("mnist", "test", folder=tmp_path)) == 4
    for name in ("fashion-mnist", "fashion_mnist", "Fashion-MNIST"):
        assert load(name, folder=tmp_path).classes[1] == "Trouser"
    write_cifar10(tmp_path / "cifar10")
    assert repr(load("CIFAR10", "test", folder=tmp_path)) == "Images(10 of 3x32x32, 10 classes)"


def test_omniglot_is_read(small, tmp_path):
    data = omniglot(folder=write_omniglot(tmp_path / "omniglot"))
    assert data.images.shape == (5, 20, 28, 28)
    assert data.images.dtype == torch.uint8
    assert data.alphabets == ("Greek",) * 5
    assert data.characters == ("character01", "character02", "character03", "character01", "character02")
    assert data.background.tolist() == [True, True, True, False, False]
    assert len(data) == 5
    whole = omniglot(folder=tmp_path, size=105).images
    for character, place, seed in ((0, 0, 0), (2, 5, 45), (4, 19, 39)):
        paper = np.asarray(Image.open(io.BytesIO(drawing(seed))))
        assert np.array_equal(whole[character, place].numpy(), np.where(paper, 0, 255))
        ink = float(data.images[character, place].double().mean())  # a filter that keeps the mean, but for its clipping
        assert ink == pytest.approx(float(whole[character, place].double().mean()), rel=0.1)


def test_omniglot_ignores_what_is_no_drawing_and_the_order_in_the_archive(small, tmp_path):
    plain = omniglot(folder=write_omniglot(tmp_path / "plain"))

    def repack(content):
        for name in reversed(list(content)):
            content[name] = content.pop(name)
        content["images_background/"] = b""
        content["images_background/.DS_Store"] = b"x"
        content["__MACOSX/images_background/Greek/character01/._0001_01.png"] = b"x"

    repacked = omniglot(folder=write_omniglot(tmp_path / "other", repack))
    assert torch.equal(plain.images, repacked.images)
    assert plain.characters == repacked.characters


@pytest.mark.parametrize("name", [BINARY, "cifar-10-binary.tar"])
def test_cifar10_is_read_from_the_published_archive(small, tmp_path, name):
    folder = write_cifar10(tmp_path / "cifar10", name, mode="w:gz" if name == BINARY else "w:")
    train = cifar10(folder=folder)
    assert (train.images.dtype, train.labels.dtype) == (torch.uint8, torch.int64)
    assert train.labels.tolist() == [*range(10), *reversed(range(10))]
    assert np.array_equal(train.images.numpy(), [colours(seed) for seed in range(20)])
    assert train.classes == CLASSES
    assert CLASSES[3] == "cat"
    test = cifar10("test", folder=folder)
    assert test.labels.tolist() == list(range(10))
    assert np.array_equal(test.images.numpy(), [colours(100 + seed) for seed in range(10)])
    both = cifar10("all", folder=tmp_path)
    assert repr(both) == "Images(30 of 3x32x32, 10 classes)"
    assert torch.equal(both.images, torch.cat([train.images, test.images]))
    assert torch.equal(both.labels, torch.cat([train.labels, test.labels]))
    both.images[0] = 7  # may be changed by who asked for it
    assert torch.equal(cifar10("all", folder=tmp_path).images[:20], train.images)


def test_cifar10_is_read_from_folders_of_images(small, tmp_path):
    """The classes take turns, whatever the order in the archive, and what is no image is ignored."""
    train, test = (cifar10(part, folder=write_cifar10(tmp_path / "plain")) for part in ("train", "test"))
    assert train.labels.tolist() == [*range(10), *range(10)]
    assert np.array_equal(train.images.numpy(), [colours(seed) for seed in range(20)])
    assert test.labels.tolist() == list(range(10))
    assert np.array_equal(test.images.numpy(), [colours(100 + seed) for seed in range(10)])

    def repack(content):
        plain = dict(content)
        content.clear()
        for name in reversed(list(plain)):
            content[f"./CIFAR-10/{name}"] = plain[name]
        content["CIFAR-10/train/cat/._0000.png"] = b"x"
        content["CIFAR-10/list.csv"] = bytes(100_000)

    other = write_cifar10(tmp_path / "other", "cifar-10-images.tar", repack, mode="w:")
    assert torch.equal(cifar10("all", folder=other).images, torch.cat([train.images, test.images]))


def test_cifar10_takes_jpeg_and_grey_images(small, tmp_path):
    first, second = "train/airplane/0000.png", "train/airplane/0001.png"
    jpeg, grey = picture(5, "JPEG"), picture(6, mode="L")

    def change(content):
        del content[first]
        content.update({"train/airplane/0000.JPEG": jpeg, second: grey})

    images = cifar10(folder=write_cifar10(tmp_path, change=change)).images
    assert np.array_equal(images[0].numpy().transpose(1, 2, 0), np.asarray(Image.open(io.BytesIO(jpeg))))
    assert np.array_equal(images[10].numpy(), [np.asarray(Image.open(io.BytesIO(grey)))] * 3)


def test_the_published_archive_is_preferred(small, tmp_path, monkeypatch):
    """Wherever it is: their orders of labels tell them apart."""
    monkeypatch.setenv("MEHA_DATA", str(tmp_path / "data"))
    write_cifar10(tmp_path / "data" / "cifar10", FOLDERS)
    assert cifar10().labels[10] == 0
    assert cifar10(download=True).labels[10] == 0  # nothing is missing
    write_cifar10(tmp_path / "cache" / "cifar10", BINARY)
    assert cifar10().labels[10] == 9
    (tmp_path / "cache" / "cifar10" / BINARY).unlink()
    assert cifar10().labels[10] == 0


# The cache of decoded images


def cache_file(size=28):
    return cache_folder() / "omniglot" / f"drawings-{size}.npz"


def no_decoding(monkeypatch):
    def fail(*args):
        raise AssertionError("decoded again")

    monkeypatch.setattr(sys.modules["meha_lab.datasets.omniglot"], "_decode", fail)
    for name in ("_decode_batches", "_decode_folders"):
        monkeypatch.setattr(sys.modules["meha_lab.datasets.cifar10"], name, fail)


def test_drawings_are_decoded_once(small, tmp_path, monkeypatch):
    folder = write_omniglot(tmp_path / "omniglot")
    first = omniglot(folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == [BACKGROUND, EVALUATION]
    no_decoding(monkeypatch)
    again = omniglot(folder=folder)
    assert torch.equal(first.images, again.images)
    with pytest.raises(AssertionError, match="decoded again"):
        omniglot(folder=folder, size=14)


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def store_other_shape(path):
    with np.load(path) as stored:
        key = stored["key"]
    np.savez(path, key=key, images=np.zeros((5, 20, 28, 27), np.uint8))


def store_other_type(path):
    with np.load(path) as stored:
        key, images = stored["key"], stored["images"]
    np.savez(path, key=key, images=images.astype(np.float32))


def make_folder(path):
    path.unlink()
    path.mkdir()


HARMS = {
    "flipped": flip_byte,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello"),
    "plain array": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': '|u1'"),
    "no arrays": lambda path: np.savez(path, other=np.zeros(1)),
    "other shape": store_other_shape,
    "other type": store_other_type,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_cache_is_made_again(small, tmp_path, harm, monkeypatch):
    folder = write_omniglot(tmp_path / "omniglot")
    first = omniglot(folder=folder)
    harm(cache_file())
    assert torch.equal(omniglot(folder=folder).images, first.images)
    no_decoding(monkeypatch)
    assert torch.equal(omniglot(folder=folder).images, first.images)


def test_other_drawings_are_not_taken_from_the_cache(small, tmp_path):
    first = omniglot(folder=write_omniglot(tmp_path / "one"))
    name = names_in(BACKGROUND, 3)[25]
    other = omniglot(folder=write_omniglot(tmp_path / "two", lambda content: content.update({name: drawing(1000)})))
    differ = (first.images != other.images).flatten(2).any(2)
    assert differ.nonzero().tolist() == [[1, 5]]


def test_a_cache_that_cannot_be_written_is_a_warning(small, tmp_path, monkeypatch):
    folder = write_omniglot(tmp_path / "omniglot")
    first = omniglot(folder=folder)
    make_folder(cache_file())
    with pytest.warns(UserWarning, match="MEHA_CACHE"):
        assert torch.equal(omniglot(folder=folder).images, first.images)


@pytest.mark.parametrize("name", [BINARY, FOLDERS])
def test_cifar10_is_decoded_once(small, tmp_path, monkeypatch, name):
    folder = write_cifar10(tmp_path / "cifar10", name)
    first = cifar10("all", folder=folder)
    assert files_under(folder) == [name]
    cache = cache_folder() / "cifar10" / name.replace(".tar.gz", ".npz")
    assert files_under(cache_folder()) == [cache.name]
    for harm in (flip_byte, lambda path: path.write_bytes(path.read_bytes()[:1000])):
        harm(cache)
        assert torch.equal(cifar10("all", folder=folder).images, first.images)
    with monkeypatch.context() as patch:
        no_decoding(patch)
        again = cifar10("all", folder=folder)
        assert torch.equal(again.images, first.images)
        assert torch.equal(again.labels, first.labels)
        assert torch.equal(cifar10("test", folder=folder).images, first.images[20:])

    def swap(content):
        one, other = list(content)[-2:]
        content[one], content[other] = content[other], content[one]

    other = cifar10("all", folder=write_cifar10(folder, name, swap))
    assert not torch.equal(other.images, first.images)
    make_folder(cache)
    with pytest.warns(UserWarning, match=r"cifar10: .*MEHA_CACHE") as caught:
        assert torch.equal(cifar10("all", folder=folder).images, other.images)
    assert caught[0].filename == __file__


# Where files are looked for


def test_order_of_folders(small, tmp_path, monkeypatch):
    for place, label in (("given", 1), ("data", 2), ("cache", 3)):
        folder = write_mnist(tmp_path / place / "mnist")
        (folder / LABELS).write_bytes(gzip.compress(idx(np.full(6, label))))
    assert mnist().labels[0] == 3
    monkeypatch.setenv("MEHA_DATA", str(tmp_path / "data"))
    assert mnist().labels[0] == 2
    assert mnist(folder=tmp_path / "given").labels[0] == 1
    (tmp_path / "data" / "mnist" / LABELS).unlink()  # images and labels come from one folder
    assert mnist().labels[0] == 3


def test_folders_may_be_relative_to_home_or_to_where_we_are(small, tmp_path, monkeypatch):
    write_mnist(tmp_path / "home" / "mnist")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    for folder in ("~", "~/mnist", ".", "mnist", Path("mnist")):
        assert len(mnist(folder=folder)) == 6
    monkeypatch.setenv("MEHA_DATA", "~")
    assert len(mnist()) == 6


def test_cache_folder(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MEHA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "meha"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "meha"


@pytest.mark.parametrize(
    ("read", "name"), [(mnist, "mnist"), (fashion_mnist, "fashion-mnist"), (omniglot, "omniglot"), (cifar10, "cifar10")]
)
def test_missing_files_are_named_with_remedies(read, name, tmp_path, monkeypatch):
    monkeypatch.setenv("MEHA_DATA", str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError) as caught:
        read()
    message = str(caught.value)
    subfolder = name.replace("-", "_")
    files = {omniglot: (BACKGROUND, EVALUATION), cifar10: (BINARY, FOLDERS)}.get(read, (IMAGES, LABELS))
    places = (str(tmp_path / "data" / subfolder), str(tmp_path / "cache" / subfolder))
    for part in (name, *files, *places, "MEHA_DATA", "folder=", "download=True", f"meha download {name}"):
        assert part in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mnist("valid"), r"part: must be 'train', 'test' or 'all', got 'valid'\."),
        (lambda: load("digits", "train"), r"part: must be 'all' for 'digits', got 'train'\."),
        (lambda: cifar10("valid"), r"part: must be 'train', 'test' or 'all', got 'valid'\."),
        (lambda: load("cifar"), r"name: must be one of 'digits', 'mnist', 'fashion-mnist', 'cifar10', got 'cifar'\."),
        (lambda: load(None), r"name: must be one of .*, got None\."),
        (lambda: download("digits"), r"name: must be one of 'mnist', 'fashion-mnist', 'omniglot', 'cifar10', got 'digits'\."),
        (lambda: omniglot(size=106), r"size: must be a whole number from 1 to 105, got 106\."),
        (lambda: omniglot(size=28.0), r"size: .*got 28\.0\."),
        (lambda: omniglot(size=True), r"size: .*got True\."),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Damaged files

PACKED = gzip.compress(idx(pixels(6)))
BAD_IMAGES = {
    "empty": (b"", "got none"),
    "text": (b"<html>Not found</html>", "must start with the bytes 00000803"),
    "labels": (gzip.compress(idx(np.arange(6))), "must start with the bytes 00000803, got 00000801"),
    "cut gzip": (PACKED[: len(PACKED) // 2], "cannot be unpacked"),
    "gzip without its end": (PACKED[:-8], "cannot be unpacked"),
    "gzip with a wrong checksum": (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "cannot be unpacked"),
    "damaged gzip": (PACKED[:20] + bytes([PACKED[20] ^ 255]) + PACKED[21:], "cannot be unpacked|must"),
    "magic only": (b"\0\0\x08\x03", "got () in its header"),
    "cut header": (b"\0\0\x08\x03\0\0\0\x06\0", "got (6,) in its header"),
    "too few": (idx(pixels(5)), "must have shape (6, 28, 28), got (5, 28, 28) in its header"),
    "other size": (idx(np.zeros((6, 32, 32))), "got (6, 32, 32) in its header"),
    "header of terabytes": (
        struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1) + b"x",
        "got (4294967295, 4294967295, 4294967295) in its header",
    ),
    "cut content": (idx(pixels(6))[:-1], "must have 4,704 bytes after its header, got 4,703"),
    "no content": (idx(pixels(6))[:16], "got 0"),
    "surplus": (idx(pixels(6)) + b"x", "got more"),
}


@pytest.mark.parametrize(("content", "message"), BAD_IMAGES.values(), ids=BAD_IMAGES)
def test_damaged_idx_files(small, tmp_path, content, message):
    folder = write_mnist(tmp_path / "mnist")
    (folder / IMAGES).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        mnist(folder=folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / IMAGES}: ")
    assert text.endswith(". Delete this file and download it again: meha download mnist")
    assert any(part in text for part in message.split("|"))


def test_damaged_labels(small, tmp_path):
    folder = write_mnist(tmp_path / "mnist")
    (folder / LABELS).write_bytes(gzip.compress(idx(np.arange(5))))
    with pytest.raises(ValueError, match=r"train-labels.*must have shape \(6,\), got \(5,\) in its header"):
        mnist(folder=folder)
    (folder / LABELS).write_bytes(gzip.compress(idx(np.arange(5, 11))))
    with pytest.raises(ValueError, match=r"train-labels.*must have labels up to 9, got 10"):
        mnist(folder=folder)


def test_a_gzip_bomb_is_not_unpacked(small, tmp_path):
    folder = write_mnist(tmp_path / "mnist")
    (folder / IMAGES).write_bytes(gzip.compress(idx(pixels(6)) + bytes(50_000_000), 1))

    def read():
        with pytest.raises(ValueError, match="got more"):
            mnist(folder=folder)

    assert peak_memory(read) < 3_000_000


def test_a_folder_or_a_pipe_in_place_of_a_file(small, tmp_path):
    folder = write_mnist(tmp_path / "mnist")
    make_folder(folder / IMAGES)
    with pytest.raises(ValueError, match=r"train-images.*is a folder or a device"):
        mnist(folder=folder)
    (folder / IMAGES).rmdir()
    os.mkfifo(folder / IMAGES)
    with pytest.raises(ValueError, match=r"train-images.*is a folder or a device"):
        mnist(folder=folder)
    folder = write_omniglot(tmp_path / "omniglot")
    make_folder(folder / EVALUATION)
    with pytest.raises(ValueError, match=r"images_evaluation\.zip: is a folder or a device"):
        omniglot(folder=folder)


def test_a_file_that_may_not_be_read(small, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    folder = write_mnist(tmp_path / "mnist")
    (folder / IMAGES).chmod(0)
    with pytest.raises(PermissionError, match="train-images"):
        mnist(folder=folder)


FIRST = names_in(BACKGROUND, 3)[0]


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png():
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")


BAD_DRAWINGS = {
    "missing drawing": (lambda c: c.pop(FIRST), "must have 20 drawings of Greek/character01, got 19"),
    "one drawing more": (lambda c: c.update({FIRST + "x.png": b""}), "must have 20 drawings of Greek/character01, got 21"),
    "missing character": (lambda c: [c.pop(name) for name in list(c)[:20]], "must have 3 characters, got 2"),
    "nothing": (lambda c: c.clear(), "must have 3 characters, got 0"),
    "text": (lambda c: c.update({FIRST: b"hello"}), f"{FIRST} cannot be read"),
    "empty drawing": (lambda c: c.update({FIRST: b""}), f"{FIRST} cannot be read"),
    "cut drawing": (lambda c: c.update({FIRST: c[FIRST][:-200]}), f"{FIRST} cannot be read"),
    "other size": (lambda c: c.update({FIRST: drawing(0, 28)}), "must have 105x105 pixels, got 28x28"),
    "huge drawing": (lambda c: c.update({FIRST: huge_png()}), f"{FIRST} cannot be read"),
    "bomb": (lambda c: c.update({FIRST: bytes(10_000_000)}), f"{FIRST} has 10,000,000 bytes"),
}


@pytest.mark.parametrize(("change", "message"), BAD_DRAWINGS.values(), ids=BAD_DRAWINGS)
def test_damaged_drawings(small, tmp_path, change, message):
    folder = write_omniglot(tmp_path / "omniglot", change)
    with pytest.raises(ValueError) as caught:
        omniglot(folder=folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / BACKGROUND}: ")
    assert text.endswith("Delete this file and download it again: meha download omniglot")
    assert message in text
    assert not cache_file().exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x05\x06" + b"\xff" * 18], ids=["empty", "text", "end only"])
def test_what_is_no_archive(small, tmp_path, content):
    folder = write_omniglot(tmp_path / "omniglot")
    (folder / EVALUATION).write_bytes(content)
    with pytest.raises(ValueError, match=r"images_evaluation\.zip: is not a readable zip archive.*meha download omniglot"):
        omniglot(folder=folder)


def test_a_cut_or_altered_archive(small, tmp_path):
    folder = write_omniglot(tmp_path / "omniglot")
    whole = (folder / BACKGROUND).read_bytes()
    (folder / BACKGROUND).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"images_background\.zip: is not a readable zip archive"):
        omniglot(folder=folder)
    (folder / BACKGROUND).write_bytes(whole[:1000] + bytes(100) + whole[1100:])
    with pytest.raises(ValueError, match=r"images_background\.zip: .*0001_01\.png cannot be read"):
        omniglot(folder=folder)


def test_an_archive_that_lies_about_sizes_is_not_unpacked(small, tmp_path):
    """A drawing of 50 million bytes that its entry says to have 1000."""
    folder = write_omniglot(tmp_path / "omniglot", lambda content: content.update({FIRST: bytes(50_000_000)}))
    path = folder / BACKGROUND
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", 50_000_000), struct.pack("<I", 1000)))

    def read():
        with pytest.raises(ValueError, match=r"0001_01\.png cannot be read"):
            omniglot(folder=folder)

    assert peak_memory(read) < 3_000_000 + LARGEST


def member(kind, size=0, **fields):
    info = tarfile.TarInfo()
    info.type, info.size = kind, size
    for name, value in fields.items():
        setattr(info, name, value)
    return info


HOSTILE = {
    "parent": ({"../x": b""}, "its member '../x' leads out of the archive"),
    "hidden parent": ({"train/../../x": b""}, "its member 'train/../../x' leads out of the archive"),
    "absolute": ({"/etc/passwd": b""}, "its member '/etc/passwd' leads out of the archive"),
    "symbolic link": ({"x": member(tarfile.SYMTYPE, linkname="/etc/passwd")}, "its member 'x' is a link"),
    "hard link": ({"x": member(tarfile.LNKTYPE, linkname="train/cat/0000.png")}, "its member 'x' is a link"),
    "character device": ({"x": member(tarfile.CHRTYPE)}, "its member 'x' is neither a plain file nor a folder"),
    "block device": ({"x": member(tarfile.BLKTYPE)}, "its member 'x' is neither a plain file nor a folder"),
    "pipe": ({"x": member(tarfile.FIFOTYPE)}, "its member 'x' is neither a plain file nor a folder"),
    "holes": ({"x": member(tarfile.REGTYPE, pax_headers={"GNU.sparse.size": "9" * 12, "GNU.sparse.map": "0,0"})}, "with holes"),
    "control characters": ({"\x1b[2J/../x": b""}, r"its member '\x1b[2J/../x' leads out"),
    "long header": ({"x": member(tarfile.REGTYPE, pax_headers={"comment": "x" * 10_000})}, "it has a header of"),
    "negative header": ({"x": member(tarfile.XHDTYPE, -512)}, "it has a header of -512 bytes"),
    "negative size": ({"x": member(tarfile.REGTYPE, -1024)}, "its member 'x' has a negative size"),
    "huge size": ({"x": member(tarfile.REGTYPE, 2**60)}, "its member 'x' has 1,152,921,504,606,846,976 bytes, more than"),
}


@pytest.mark.parametrize("name", [BINARY, FOLDERS])
@pytest.mark.parametrize(("extra", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_archives(small, tmp_path, name, extra, message):
    def change(content):
        whole = dict(content)
        content.clear()
        content.update({**extra, **whole})

    extended = any(isinstance(data, tarfile.TarInfo) and data.pax_headers for data in extra.values())
    form = tarfile.PAX_FORMAT if extended else tarfile.GNU_FORMAT
    folder = write_cifar10(tmp_path / "cifar10", name, change, format=form)
    refuse_cifar10(folder / name, message)


def refuse_cifar10(path, message):
    before = files_under(path.parent.parent)
    with pytest.raises(DataError) as caught:
        cifar10(folder=path.parent)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    remedy = "download it again" if path.name == BINARY else "Replace this file, or delete it and download the published one"
    assert text.endswith(f"{remedy}: meha download cifar10")
    assert any(part in text for part in message.split("|")), text
    assert files_under(path.parent.parent) == before  # nothing was unpacked or cached


CAT = "train/cat/0000.png"
BAD_PICTURES = {
    "missing image": (lambda c: c.pop(CAT), "must have 2 train images of cat, got 1"),
    "one image more": (lambda c: c.update({"test/frog/1.png": picture(0)}), "must have 1 test images of frog, got 2"),
    "nothing": (lambda c: c.clear(), "must have 2 train images of airplane, got 0"),
    "unknown class": (lambda c: c.update({"train/zebra/0.png": b""}), "its image 'train/zebra/0.png' must be in train/<class>"),
    "unknown part": (lambda c: c.update({"valid/cat/0.png": b""}), "its image 'valid/cat/0.png' must be in train/<class>"),
    "no folder": (lambda c: c.update({"0.png": b""}), "its image '0.png' must be in train/<class>"),
    "twice": (lambda c: c.update({f"x/{CAT}": c[CAT]}), f"has two images '{CAT}'"),
    "text": (lambda c: c.update({CAT: b"hello"}), f"its image '{CAT}' cannot be read"),
    "empty": (lambda c: c.update({CAT: b""}), f"its image '{CAT}' cannot be read"),
    "other kind": (lambda c: c.update({CAT: picture(0, "BMP")}), f"its image '{CAT}' cannot be read"),
    "cut PNG": (lambda c: c.update({CAT: c[CAT][:-200]}), f"its image '{CAT}' cannot be read"),
    "cut JPEG": (lambda c: c.update({CAT: picture(0, "JPEG")[:-200]}), f"its image '{CAT}' cannot be read"),
    "other size": (lambda c: c.update({CAT: picture(0, side=31)}), "must have 32x32 pixels, got 31x31"),
    "huge image": (lambda c: c.update({CAT: huge_png()}), f"its image '{CAT}' cannot be read"),
    "large file": (lambda c: c.update({CAT: bytes(70_000)}), f"its member '{CAT}' has 70,000 bytes, more than 65,536"),
}


@pytest.mark.parametrize(("change", "message"), BAD_PICTURES.values(), ids=BAD_PICTURES)
def test_damaged_pictures(small, tmp_path, change, message):
    refuse_cifar10(write_cifar10(tmp_path / "cifar10", change=change) / FOLDERS, message)


FIRST_BATCH = "cifar-10-batches-bin/data_batch_1.bin"
BAD_BATCHES = {
    "missing batch": (lambda c: c.pop(FIRST_BATCH), "must have data_batch_1.bin"),
    "batch twice": (lambda c: c.update({"data_batch_1.bin": c[FIRST_BATCH]}), "has two files data_batch_1.bin"),
    "cut record": (lambda c: c.update({FIRST_BATCH: c[FIRST_BATCH][:-1]}), "must have 12,292 bytes, got 12,291"),
    "one record more": (lambda c: c.update({FIRST_BATCH: c[FIRST_BATCH] + bytes(3073)}), "must have 12,292 bytes, got 15,365"),
    "large batch": (
        lambda c: c.update({FIRST_BATCH: bytes(50_000)}),
        f"its member '{FIRST_BATCH}' has 50,000 bytes, more than",
    ),
    "label": (
        lambda c: c.update({FIRST_BATCH: records([0, 1, 2, 10], 0)}),
        "data_batch_1.bin must have labels up to 9, got 10",
    ),
    "other classes": (lambda c: c.update({FIRST_BATCH: records([0, 1, 2, 2], 0)}), "must have 2 train images of bird, got 3"),
}


@pytest.mark.parametrize(("change", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_damaged_batches(small, tmp_path, change, message):
    refuse_cifar10(write_cifar10(tmp_path / "cifar10", BINARY, change) / BINARY, message)


@pytest.mark.parametrize("name", [BINARY, FOLDERS])
def test_cut_archives(small, tmp_path, name):
    """Wherever it is cut, packed or not, the archive is refused, but for the empty blocks at its end."""
    path = write_cifar10(tmp_path / "cifar10", name) / name
    packed = path.read_bytes()
    plain = gzip.decompress(packed)
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        end = max(file.offset_data + file.size for file in archive)
    cuts = [packed[:at] for at in (0, 1, 5, 100, len(packed) // 2, len(packed) - 8, len(packed) - 1)]
    cuts += [plain[:at] for at in (100, 512, 600, 5000, 10_240, end // 2)]
    for content in [*cuts, packed[:-8] + b"\0\0\0\0" + packed[-4:], b"hello", b"hello" * 1000]:
        path.write_bytes(content)
        refuse_cifar10(path, "is not a readable tar archive|must have")
    path.write_bytes(plain[: end - 1])
    refuse_cifar10(path, "it ends after")
    path.write_bytes(plain[: end + -end % 512])
    assert len(cifar10(folder=path.parent)) == 20


def test_archive_bombs_are_not_unpacked(small, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "UNPACKED", 20_000_000)
    monkeypatch.setattr(archives, "MEMBERS", 100)
    path = write_cifar10(tmp_path / "cifar10", change=lambda content: content.update({"x": bytes(50_000_000)})) / FOLDERS
    bombs = [(path.read_bytes(), "its member 'x' has 50,000,000 bytes, more than 20,000,000")]
    many = {**image_content(), **{f"{i}.txt": bytes(1_000_000) for i in range(30)}}
    bombs += [(pack(many), "it unpacks to more than 20,000,000 bytes")]
    bombs += [(gzip.compress(pack(image_content(), "w:") + bytes(50_000_000), 1), "it unpacks to more than 20,000,000 bytes")]
    bombs += [(pack({**image_content(), **{f"{i}": b"" for i in range(71)}}), "has more than 100 members")]
    bombs += [(pack({"x": member(tarfile.XHDTYPE, 50_000_000)}) + gzip.compress(bytes(50_000_000)), "it has a header of")]
    del many
    for bomb, message in bombs:
        path.write_bytes(bomb)
        assert peak_memory(lambda message=message: refuse_cifar10(path, message)) < 3_000_000
    path.write_bytes(pack({**image_content(), **{f"{i}": b"" for i in range(70)}}))
    assert len(cifar10(folder=path.parent)) == 20
    with path.open("wb") as file:
        file.truncate(20_000_001)
    refuse_cifar10(path, "has 20,000,001 bytes, more than 20,000,000")


def test_a_folder_or_a_pipe_in_place_of_an_archive(small, tmp_path):
    path = tmp_path / "cifar10" / BINARY
    path.mkdir(parents=True)
    refuse_cifar10(path, "is a folder or a device")
    path.rmdir()
    os.mkfifo(path)
    refuse_cifar10(path, "is a folder or a device")


# Download, from a server on this machine


@pytest.fixture
def server(monkeypatch):
    """A server whose ``answers`` a test fills: path to bytes, or to a function of the request."""
    answers, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            answer = answers.get(self.path)
            if answer is None:
                self.send_error(404)
            elif callable(answer):
                answer(self)
            else:
                send(self, answer, len(answer))

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads, http.closing = False, threading.Event()
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    http.answers, http.asked, http.address = answers, asked, f"http://127.0.0.1:{http.server_port}/"
    yield http
    http.closing.set()
    http.shutdown()
    http.server_close()
    thread.join()


def send(request, content, length):
    request.send_response(200)
    if length is not None:
        request.send_header("Content-Length", str(length))
    request.end_headers()
    request.wfile.write(content)


def publish(server, monkeypatch, folder, name="mnist"):
    """Serve the files of a folder as the published ones."""
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.answers.update({f"/{file}": data for file, data in content.items()})
    sums = {file: hashlib.md5(content[file]).hexdigest() for file in SOURCES[name].files}
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], address=server.address, files=sums))
    return content


def files_under(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_download_and_read(small, server, tmp_path, monkeypatch, capsys):
    content = publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    assert download("mnist") == tmp_path / "cache" / "mnist"
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache" / "mnist").iterdir()} == content
    assert len(mnist("all")) == 10
    shown = capsys.readouterr()
    assert not shown.out
    assert [line.split()[1] for line in shown.err.splitlines()] == [server.address + file for file in SOURCES["mnist"].files]
    asked = len(server.asked)
    download("mnist")  # what is there is not asked for again
    assert len(server.asked) == asked == 4


def test_readers_download_what_they_miss_if_they_may(small, server, tmp_path, monkeypatch, capsys):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    publish(server, monkeypatch, write_omniglot(tmp_path / "zips"), "omniglot")
    with pytest.raises(FileNotFoundError):
        mnist("test", folder=tmp_path / "own")
    assert not server.asked
    assert len(mnist("test", folder=tmp_path / "own", download=True)) == 4
    assert files_under(tmp_path / "own" / "mnist") == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    assert len(mnist("test", folder=tmp_path / "own")) == 4
    assert len(omniglot(download=True)) == 5
    assert files_under(tmp_path / "cache") == ["drawings-28.npz", BACKGROUND, EVALUATION]
    assert len(server.asked) == 4
    publish(server, monkeypatch, write_cifar10(tmp_path / "tar", BINARY), "cifar10")
    assert len(cifar10("all", folder=tmp_path / "own", download=True)) == 30
    assert files_under(tmp_path / "own" / "cifar10") == [BINARY]
    assert server.asked[4:] == [f"/{BINARY}"]


def test_download_without_progress_is_silent(small, server, tmp_path, monkeypatch, capsys):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    assert download("mnist", folder=tmp_path / "own", progress=False) == tmp_path / "own" / "mnist"
    assert capsys.readouterr() == ("", "")


def test_download_shows_bars_on_a_terminal(small, server, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    download("mnist")
    shown = sys.stderr.getvalue()
    assert all(file in shown for file in SOURCES["mnist"].files)
    assert "downloading" not in shown


def test_download_without_rich(small, server, tmp_path, monkeypatch, capsys):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    download("mnist")
    assert capsys.readouterr().err.count("downloading http://") == 4


def test_wrong_checksum_leaves_nothing(small, server, tmp_path, monkeypatch):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    server.answers[f"/{LABELS}"] = b"<html>Please log in</html>"
    with pytest.raises(ValueError, match=rf"{LABELS}: the download has the checksum [0-9a-f]+, .*save the file as"):
        download("mnist", progress=False)
    assert files_under(tmp_path / "cache") == [IMAGES]


def never_ending(request):
    send(request, b"", None)
    with contextlib.suppress(OSError):
        while True:
            request.wfile.write(bytes(2**16))


def silence(request):
    request.server.closing.wait(600)  # until the test is over


SILENT = 0.3
"""Seconds after which a silent server counts as dead; everywhere else the generous default holds, however busy the machine."""


FAILURES = {
    "not there": (None, "HTTP Error 404"),
    "cut": (lambda request: send(request, b"abc", 1000), "ended after 3 of 1,000 bytes|IncompleteRead"),
    "silent": (silence, "timed out"),
    "silent after a start": (lambda request: (send(request, b"abc", 1000), silence(request)), "timed out"),
    "no answer": (lambda request: request.connection.close(), "Remote end closed|reset|Bad file|closed"),
    "no HTTP": (lambda request: request.wfile.write(b"hello\r\n\r\n"), "hello"),
    "never ending": (never_ending, "sends more than 1,000,000 bytes"),
}


@pytest.mark.parametrize(("answer", "reason"), FAILURES.values(), ids=FAILURES)
def test_network_failures_leave_nothing(small, server, tmp_path, monkeypatch, answer, reason):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    monkeypatch.setattr(fetch, "LIMIT", 1_000_000)
    if reason == "timed out":
        patient = fetch.urlopen
        monkeypatch.setattr(fetch, "urlopen", lambda url, timeout: patient(url, timeout=SILENT if LABELS in url else timeout))
    server.answers[f"/{LABELS}"] = answer
    with pytest.raises(ConnectionError) as caught:
        download("mnist", progress=False)
    text = str(caught.value)
    assert text.startswith(f"{server.address}{LABELS}: the download failed (")
    assert any(part in text for part in reason.split("|")), text
    assert str(tmp_path / "cache" / "mnist" / LABELS) in text
    assert files_under(tmp_path / "cache") == [IMAGES]


def test_no_network(small, server, tmp_path, monkeypatch):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    for address in ("http://127.0.0.1:1/", "http://no-such-host.invalid/"):
        monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], address=address))
        with pytest.raises(ConnectionError, match=r"the download failed.*Check the network and try again"):
            mnist(download=True)
        assert files_under(tmp_path / "cache") == []


def test_download_destroys_nothing(small, server, tmp_path, monkeypatch):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))
    place = tmp_path / "cache" / "mnist"
    place.mkdir(parents=True)
    (place / IMAGES).write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="exists, but is not the published file"):
        download("mnist", progress=False)
    assert (place / IMAGES).read_bytes() == b"mine"
    assert not server.asked
    make_folder(place / IMAGES)
    with pytest.raises(FileExistsError):
        download("mnist", progress=False)


def test_an_interrupted_download_leaves_nothing(small, server, tmp_path, monkeypatch):
    publish(server, monkeypatch, write_mnist(tmp_path / "published"))

    def interrupt(request, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "urlopen", interrupt)
    with pytest.raises(KeyboardInterrupt):
        download("mnist", progress=False)
    assert files_under(tmp_path / "cache") == []


# Extras


def test_extras_are_imported_where_they_are_needed_and_named():
    code = """
import sys
import meha_lab.datasets as datasets
assert not {"PIL", "sklearn", "rich"} & set(sys.modules), sorted(sys.modules)
sys.modules["PIL"] = sys.modules["sklearn"] = sys.modules["sklearn.datasets"] = None
from pathlib import Path
omniglot, cifar10 = sys.modules["meha_lab.datasets.omniglot"], sys.modules["meha_lab.datasets.cifar10"]
for call in (datasets.digits, lambda: omniglot._decode(Path("x"), {}, 28), lambda: cifar10._decode_folders(Path("x"))):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("pip install pillow") == 2
    assert result.stdout.count("pip install scikit-learn") == 1


# The real files


@needs_real_files
@pytest.mark.parametrize(
    ("read", "mean", "std", "counts", "labels"),
    [
        (mnist, 0.1307, 0.3081, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], [5, 0, 4, 1, 9]),
        (fashion_mnist, 0.2860, 0.3530, [6000] * 10, [9, 0, 0, 3, 0]),
    ],
)
def test_training_parts_are_the_published_ones(read, mean, std, counts, labels):
    data = read(folder=REAL)
    values = data.images.float() / 255
    assert data.images.shape == (60_000, 28, 28)
    assert float(values.mean()) == pytest.approx(mean, abs=5e-5)
    assert float(values.std()) == pytest.approx(std, abs=5e-5)
    assert data.labels.bincount().tolist() == counts
    assert data.labels[:5].tolist() == labels


@needs_real_files
@pytest.mark.parametrize(
    ("read", "counts"),
    [(mnist, [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]), (fashion_mnist, [1000] * 10)],
)
def test_test_parts_are_the_published_ones(read, counts):
    data = read("test", folder=REAL)
    assert data.images.shape == (10_000, 28, 28)
    assert data.labels.bincount().tolist() == counts


@needs_real_files
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_published_checksums(name):
    source = SOURCES[name]
    for file, published in source.files.items():
        kind = hashlib.sha256 if len(published) == 64 else hashlib.md5
        assert kind((Path(REAL) / source.subfolder / file).read_bytes()).hexdigest() == published


@needs_real_files
def test_omniglot_is_the_published_one(monkeypatch):
    """One test, because decoding takes some seconds."""
    data = omniglot(folder=REAL)
    assert data.images.shape == (1623, 20, 28, 28)
    assert int(data.background.sum()) == 964
    alphabets = np.array(data.alphabets)
    first, second = (set(alphabets[data.background.numpy() == part]) for part in (True, False))
    assert (len(first), len(second), len(first & second)) == (30, 20, 0)
    assert data.alphabets.count("Greek") == 24
    ink = data.images.double().mean((2, 3)) / 255
    assert 0.05 < float(ink.mean()) < 0.12
    assert float(ink.min()) > 0

    greek = data.alphabets.index("Greek")
    with zipfile.ZipFile(Path(REAL) / "omniglot" / BACKGROUND) as archive:
        name = next(n for n in archive.namelist() if "/Greek/character05/" in n and n.endswith("_07.png"))
        paper = Image.open(io.BytesIO(archive.read(name)))
        assert paper.mode == "1"
        expected = 255 - np.asarray(paper.convert("L").resize((28, 28), Image.Resampling.LANCZOS))
    assert data.characters[greek + 4] == "character05"
    assert np.array_equal(data.images[greek + 4, 6].numpy(), expected)
    black = 1 - np.asarray(paper).mean()
    assert float(ink[greek + 4, 6]) == pytest.approx(black, rel=0.1)

    monkeypatch.setattr(sys.modules["meha_lab.datasets.omniglot"], "_decode", None)
    again = omniglot(folder=REAL)  # from the cache
    assert torch.equal(again.images, data.images)


@needs_real_files
def test_cifar10_has_the_published_images(monkeypatch):
    """One test, because decoding takes some seconds; the images may be the published ones, compressed again."""
    path = Path(REAL) / "cifar10" / FOLDERS
    if not path.is_file():
        pytest.skip(f"MEHA_DATA has no {FOLDERS}")
    data = cifar10("all", folder=path.parent)
    assert data.images.shape == (60_000, 3, 32, 32)
    assert data.labels[:50_000].bincount().tolist() == [5000] * 10
    assert data.labels[50_000:].bincount().tolist() == [1000] * 10
    train = data.images[:50_000]
    mean = [float(train[:, channel].float().mean()) / 255 for channel in range(3)]
    assert mean == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-4)  # of the published training images

    with tarfile.open(path) as archive:
        first = archive.extractfile("test/airplane/0000.jpg").read()
    assert np.array_equal(data.images[50_000].numpy().transpose(1, 2, 0), np.asarray(Image.open(io.BytesIO(first))))

    no_decoding(monkeypatch)
    assert torch.equal(cifar10("test", folder=path.parent).images, data.images[50_000:])
