"""MNIST as published: idx files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from equilibria import data
from equilibria.data import DataError
from tests.data.made_files import pictures, write_idx

PIXELS = pictures(7, 28, 28, channels=1)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2])


def write_mnist(folder: Path, dot: str = "-", packed: bool = False) -> None:
    end = ".gz" if packed else ""
    for prefix, count in (("train", 7), ("t10k", 3)):
        write_idx(folder / f"{prefix}-images{dot}idx3-ubyte{end}", PIXELS[:count], packed)
        write_idx(folder / f"{prefix}-labels{dot}idx1-ubyte{end}", LABELS[:count], packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_idx_files(tmp_path: Path, dot: str, packed: bool) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", dot, packed)
    found = data.load("mnist", root=tmp_path)
    assert np.array_equal(found.images[:, 0], PIXELS)
    assert found.targets.tolist() == LABELS.tolist()
    assert len(data.load("mnist", "test", root=tmp_path)) == 3
    assert np.array_equal(data.load(tmp_path / "MNIST" / "raw").images, found.images)


def test_resized_and_colored(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    found = data.load("mnist", root=tmp_path, image_size=14, channels=3)
    assert tuple(found.images.shape) == (7, 3, 14, 14)
    assert found.mean == (0.1307,) * 3


def rewrite(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


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
    rewrite(tmp_path / "train-images-idx3-ubyte", change)
    with pytest.raises(DataError, match=message):
        data.load("mnist", root=tmp_path)


def test_damaged_gzip(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    rewrite(tmp_path / "train-images-idx3-ubyte.gz", lambda b: b[:200])
    with pytest.raises(DataError, match="cannot be read"):
        data.load("mnist", root=tmp_path)


def test_a_gzip_bomb_is_read_no_further_than_its_head_says(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    body = gzip.decompress((tmp_path / "train-images-idx3-ubyte.gz").read_bytes())
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(body + bytes(10**7)))
    with pytest.raises(DataError, match=r"5489 are there"):
        data.load("mnist", root=tmp_path)


def test_images_and_labels_must_agree(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS[:5])
    with pytest.raises(DataError, match="7 images and 5 labels"):
        data.load("mnist", root=tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no labels of the train split"):
        data.load("mnist", root=tmp_path)
