"""Digits, CIFAR's batches, idx files; pickles of arrays are read, and nothing in them runs."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import pickletools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from equilibria import data
from equilibria.data import DataError
from equilibria.data.classic import read_pickle
from tests.data.made_files import pictures, write_cifar10_pickles, write_idx


def test_every_digit_is_in_one_split_which_never_changes() -> None:
    train, test = data.load("digits"), data.load("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    bunch = load_digits()
    # round(255 v / 16) is invertible: v = round(16 u / 255)
    seen = [
        (int(y), np.rint(x.numpy()[0] / 255 * 16).tobytes())
        for part in (train, test)
        for x, y in zip(part.images, part.targets, strict=True)
    ]
    there = [(int(y), x.tobytes()) for x, y in zip(bunch.images, bunch.target, strict=True)]
    assert sorted(seen) == sorted(there)
    fifth = np.bincount(bunch.target) / 5
    assert np.all(np.abs(torch.bincount(test.targets).numpy() - fifth) < 1)
    mean, std = train.measure()
    np.testing.assert_allclose([mean[0], std[0]], [train.mean[0], train.std[0]], atol=0.002)
    checksum = int((test.images.long().sum(dim=(1, 2, 3)) * torch.arange(1, 360)).sum())
    assert checksum == 321_476_096
    large = data.load("digits", "test", image_size=16, channels=3)
    assert tuple(large.images.shape) == (359, 3, 16, 16)
    assert torch.equal(large.images[:, 0], large.images[:, 2])
    with pytest.raises(DataError, match=r"digits has no split 'val'; it has: train, test"):
        data.load("digits", "val")


def test_cifar10_pickles(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    rows = write_cifar10_pickles(folder)
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": []}))
    for found in (data.load("cifar10", root=tmp_path), data.load(folder)):  # recognized, too
        assert np.array_equal(found.images, rows.reshape(-1, 3, 32, 32))
        assert found.targets.tolist() == [(k + i) % 10 for k in range(5) for i in range(4)]
        assert found.classes[0] == "airplane"
    test = data.load("cifar10", "test", root=folder)
    assert test.targets.tolist() == [5, 6, 7, 8]
    small = data.load("cifar10", "test", root=tmp_path, image_size=16, channels=1)
    assert tuple(small.images.shape) == (4, 1, 16, 16)
    assert len(small.mean) == 1


def test_cifar10_binary(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for k, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        rows = np.random.default_rng(k).integers(0, 256, (3, 3073), dtype=np.uint8)
        rows[:, 0] = [1, 9, 4]
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    found = data.load("cifar10", "test", root=tmp_path)
    assert found.targets.tolist() == [1, 9, 4]
    assert np.array_equal(found.images, rows[:, 1:].reshape(3, 3, 32, 32))
    assert len(data.load(folder)) == 15


@pytest.mark.parametrize("binary", [False, True])
def test_cifar100_has_superclasses(tmp_path: Path, binary: bool) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    fine, coarse = [99, 1, 1, 0], [13, 1, 1, 4]
    batch = {b"data": rows, b"fine_labels": fine, b"coarse_labels": coarse}
    for name in ("train", "test", "meta"):
        path = tmp_path / f"{name}{'.bin' if binary and name != 'meta' else ''}"
        plain = np.column_stack([coarse, fine, rows]).astype(np.uint8).tobytes()
        path.write_bytes(plain if binary else pickle.dumps(batch))
    for found in (data.load("cifar100", root=tmp_path), data.load(tmp_path)):
        assert np.array_equal(found.images, rows.reshape(-1, 3, 32, 32))
        assert found.targets.tolist() == fine
        assert found.superclasses is not None
        assert found.superclasses.tolist() == coarse


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({b"labels": [1]}, "has no data; it has: labels"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "has no labels"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}, r"expected uint8 \[N, 3072\]"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, r"labels are \(1,\) for 2"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["1"]}, "not a list of integers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, "sample 0 has label 10"),
    ],
)
def test_wrong_batches_are_named(tmp_path: Path, batch: dict[bytes, object], message: str) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=message):
        data.load("cifar10", "test", root=tmp_path)


def test_missing_and_short_files_are_named(tmp_path: Path) -> None:
    write_cifar10_pickles(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(DataError, match="no data_batch_3; the train split needs it"):
        data.load("cifar10", root=tmp_path)
    with pytest.raises(DataError, match=r"no split 'val'.*Hold out part of train"):
        data.load("cifar10", "val", root=tmp_path)
    for size in (0, 5000):
        (tmp_path / "test_batch.bin").write_bytes(bytes(size))
        with pytest.raises(DataError, match="no whole number of records of 3073"):
            data.load("cifar10", "test", root=tmp_path)


GRAY, DIGITS = pictures(7, 28, 28, channels=1), np.array([3, 1, 4, 1, 5, 9, 2])


def write_mnist(folder: Path, dot: str = "-", packed: bool = False) -> None:
    end = ".gz" if packed else ""
    for prefix, count in (("train", 7), ("t10k", 3)):
        write_idx(folder / f"{prefix}-images{dot}idx3-ubyte{end}", GRAY[:count], packed)
        write_idx(folder / f"{prefix}-labels{dot}idx1-ubyte{end}", DIGITS[:count], packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_idx_files(tmp_path: Path, dot: str, packed: bool) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", dot, packed)
    found = data.load("mnist", root=tmp_path)
    assert np.array_equal(found.images[:, 0], GRAY)
    assert found.targets.tolist() == DIGITS.tolist()
    assert len(data.load("mnist", "test", root=tmp_path)) == 3
    assert np.array_equal(data.load(tmp_path / "MNIST" / "raw").images, found.images)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:100], r"\[7, 28, 28\] values are promised, 84 are there"),
        (lambda b: b + b"x", "are there"),
        (lambda b: b"\0\0\x0d\x03" + b[4:], "not an idx file"),
        (lambda b: b[:6], "not an idx file"),
        (lambda b: b[:4] + b"\xff" * 12 + b[16:], "refused"),
        (lambda b: b[:4] + bytes(4) + b[8:16], "0 are there"),
    ],
)
def test_damage_is_named(tmp_path: Path, change, message: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        data.load("mnist", root=tmp_path)


def test_images_that_are_not_square(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte", GRAY[:, :, 4:24])
    assert np.array_equal(data.load(tmp_path).images[:, 0], GRAY[:, :, 4:24])
    assert tuple(data.load(tmp_path, image_size=28).images.shape) == (7, 1, 28, 28)
    assert np.array_equal(data.load(tmp_path, image_size=20).images[:, 0], GRAY[:, 4:24, 4:24])


def test_damaged_gzip_and_a_bomb(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(DataError, match="cannot be read"):
        data.load("mnist", root=tmp_path)
    # It is read no further than its head says.
    path.write_bytes(gzip.compress(gzip.decompress(whole) + bytes(10**7)))
    with pytest.raises(DataError, match=r"5489 are there"):
        data.load("mnist", root=tmp_path)


def test_images_and_labels_must_agree(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", DIGITS[:5])
    with pytest.raises(DataError, match="7 images and 5 labels"):
        data.load("mnist", root=tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no labels of the train split"):
        data.load("mnist", root=tmp_path)


DATA = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)


def stored(tmp_path: Path, value: object, protocol: int = 2) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("key", ["data", b"data"])
def test_arrays_of_every_protocol(tmp_path: Path, protocol: int, key: object) -> None:
    plain = {"labels": [1, 2], "names": ["a", b"b"], "nothing": None}
    arrays = {key: DATA, "wide": np.asfortranarray(DATA), "ids": np.arange(3)}
    found = read_pickle(stored(tmp_path, {**plain, **arrays}, protocol))
    assert np.array_equal(found["data"], DATA)
    assert np.array_equal(found["wide"], DATA)
    assert found["data"].dtype == torch.uint8
    assert found["ids"].tolist() == [0, 1, 2]
    assert (found["labels"], found["names"], found["nothing"]) == ([1, 2], ["a", "b"], None)


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    """Strings as Python 2 wrote them: the opcode that only it knows, and numpy's old module."""
    raw = DATA.tobytes()
    text = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01K\x05K\x07\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U"
    ) + bytes([len(raw), *raw, *b"tbs."])
    pickletools.dis(text, out=io.StringIO())  # it is a valid program
    path = tmp_path / "batch"
    path.write_bytes(text)
    assert np.array_equal(read_pickle(path)["data"], DATA)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    path = stored(tmp_path, {"data": DATA, "extra": Evil(marker)}, protocol)
    pickle.loads(path.read_bytes())
    assert marker.exists()  # the attack works where it is let in
    marker.unlink()
    with pytest.raises(DataError, match=r"batch: refused.*system"):
        read_pickle(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nscalar\n.",
        b"c_codecs\ndecode\n.",
        b"\x80\x02cnumpy\nndarray.__class__\n.",
        b"Pid\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    ],
)
def test_other_names_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"refused|not a readable pickle"):
        read_pickle(path)


@pytest.mark.parametrize("name", [b"c_codecs\nencode\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"])
def test_a_file_cannot_change_how_the_next_is_read(tmp_path: Path, name: bytes) -> None:
    """BUILD on a name sets its attributes; what the name stands for belongs to that file alone."""
    path = tmp_path / "batch"
    for state in (b"(N}U\x0c__defaults__)s\x86", b"(N}U\x08__init__Ns\x86", b"}U\x05stateNs"):
        path.write_bytes(b"\x80\x02" + name + state + b"b.")
        with pytest.raises(DataError):
            read_pickle(path)
    test_arrays_of_every_protocol(tmp_path, 2, "data")


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x0f", b"p268435455\n"])
def test_a_number_of_a_value_that_takes_gigabytes_is_refused(tmp_path: Path, put: bytes) -> None:
    """The unpickler makes a table of twice that many places, 4 GiB."""
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02}" + put + b".")
    with pytest.raises(DataError, match="numbers value 2 as 268435455"):
        read_pickle(path)


def test_lists_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    """A few hundred bytes that would unfold to 10¹² numbers, or to a list within itself."""
    deep: list[object] = [0] * 10
    for _ in range(11):
        deep = [deep] * 10
    loop: list[object] = []
    loop.append(loop)
    shared = {f"k{k}": DATA for k in range(1000)}
    for value in ({"data": deep}, {"data": loop}, {"data": [DATA] * 9}, shared):
        with pytest.raises(DataError, match=r"refused.*it holds a"):
            read_pickle(stored(tmp_path, value))


@pytest.mark.parametrize("keep", [0, 1, 30, 0.5, 0.95])
def test_damaged_pickles_are_named(tmp_path: Path, keep: float) -> None:
    path = stored(tmp_path, {"data": DATA})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    with pytest.raises(DataError, match="batch is not a readable pickle"):
        read_pickle(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "holds a list"),
        ({"data": {"a": 1}}, "holds a dict"),
        ({"data": np.array([{"a": 1}], dtype=object)}, "type O"),
        ({"data": np.zeros(3)}, "type f8"),
        ({"data": np.array(["a"])}, "type U1"),
        ({"data": 1 + 2j}, "refused"),
        ({"data": np.zeros(3, dtype=">i4")}, "byte order|type"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_pickle(stored(tmp_path, value))


def test_an_array_with_too_few_bytes(tmp_path: Path) -> None:
    path = stored(tmp_path, {"data": DATA}, protocol=3)
    text = path.read_bytes().replace(b"K\x05K\x07\x86", b"K\x05K\x09\x86")
    assert text != path.read_bytes()
    path.write_bytes(text)
    with pytest.raises(DataError, match="35 bytes; the file is cut off"):
        read_pickle(path)


def test_a_packed_idx_file_that_expands_to_gigabytes_is_refused(tmp_path: Path) -> None:
    """51 MB of zeros, and no more than the header is read."""
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((2**16, 28, 28)), packed=True)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(2**16))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"idx3-ubyte\.gz: .* expand to 51,380,224 .*MOST_EXP"):
        data.load("mnist", root=tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
