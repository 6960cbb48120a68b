"""CIFAR as published: pickled and binary, ten and a hundred classes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from equilibria import data
from equilibria.data import DataError
from tests.data.made_files import write_cifar10_pickles


def test_cifar10_pickles(tmp_path: Path) -> None:
    rows = write_cifar10_pickles(tmp_path / "cifar-10-batches-py")
    found = data.load("cifar10", root=tmp_path)
    assert np.array_equal(found.images, rows.reshape(-1, 3, 32, 32))
    assert found.targets.tolist() == [(k + i) % 10 for k in range(5) for i in range(4)]
    test = data.load("cifar10", "test", root=tmp_path / "cifar-10-batches-py")
    assert test.targets.tolist() == [5, 6, 7, 8]
    assert found.classes[0] == "airplane"


def test_a_folder_of_batches_is_recognized(tmp_path: Path) -> None:
    write_cifar10_pickles(tmp_path)
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": []}))
    assert data.load(tmp_path, "test").classes[9] == "truck"


def test_cifar10_binary(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        rows = rng.integers(0, 256, (3, 3073), dtype=np.uint8)
        rows[:, 0] = [1, 9, 4]
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    found = data.load("cifar10", "test", root=tmp_path)
    assert found.targets.tolist() == [1, 9, 4]
    assert np.array_equal(found.images, rows[:, 1:].reshape(3, 3, 32, 32))
    assert len(data.load(folder)) == 15


def test_cifar100_pickles_have_superclasses(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    batch = {b"data": rows, b"fine_labels": [99, 1, 1, 0], b"coarse_labels": [13, 1, 1, 4]}
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(pickle.dumps(batch))
    for found in (data.load("cifar100", root=tmp_path), data.load(folder)):
        assert np.array_equal(found.images, rows.reshape(-1, 3, 32, 32))
        assert found.targets.tolist() == [99, 1, 1, 0]
        assert found.superclasses is not None
        assert found.superclasses.tolist() == [13, 1, 1, 4]


def test_cifar100_binary(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (2, 3074), dtype=np.uint8)
    rows[:, :2] = [[4, 0], [13, 99]]
    for name in ("train", "test"):
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    found = data.load("cifar100", root=tmp_path)
    assert found.targets.tolist() == [0, 99]
    assert found.superclasses is not None
    assert found.superclasses.tolist() == [4, 13]
    assert np.array_equal(found.images, rows[:, 2:].reshape(2, 3, 32, 32))


def test_resizing_plain_pixels(tmp_path: Path) -> None:
    write_cifar10_pickles(tmp_path)
    found = data.load("cifar10", "test", root=tmp_path, image_size=16, channels=1)
    assert tuple(found.images.shape) == (4, 1, 16, 16)
    assert len(found.mean) == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({b"labels": [1]}, "has no data; it has: labels"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "has no labels"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}, r"expected uint8 \[N, 3072\]"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, r"labels are \(1,\) for 2"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, "sample 0 has label 10"),
    ],
)
def test_wrong_batches_are_named(tmp_path: Path, batch: dict[bytes, object], message: str) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError, match=message):
        data.load("cifar10", "test", root=tmp_path)


def test_missing_batches_are_named(tmp_path: Path) -> None:
    write_cifar10_pickles(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(DataError, match="no data_batch_3; the train split needs it"):
        data.load("cifar10", root=tmp_path)
    with pytest.raises(DataError, match=r"no split 'val'.*Hold out part of train"):
        data.load("cifar10", "val", root=tmp_path)


def test_a_binary_file_cut_off(tmp_path: Path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(bytes(5000))
    with pytest.raises(DataError, match="no whole number of records of 3073"):
        data.load("cifar10", "test", root=tmp_path)
