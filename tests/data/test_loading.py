"""Options of load, lazy and in memory alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria import data
from equilibria.data import making
from tests.data.made_files import write_class_folders


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, "expected 'train', 'val' or 'test'"),
        ({"image_size": 0}, "image_size=0"),
        ({"image_size": 10**6}, "image_size=1000000"),
        ({"image_size": True}, "image_size=True"),
        ({"image_size": (8, 9)}, "images to classify are square"),
        ({"image_size": (8, 8, 8)}, "image_size="),
        ({"image_size": 8.5}, "image_size=8.5"),
        ({"channels": 2}, "channels=2"),
        ({"on_corrupt": "ignore"}, "on_corrupt='ignore'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load("digits", **options)


@pytest.mark.parametrize("size", [None, 4])
def test_lazy_is_the_same(tmp_path: Path, size: int | None) -> None:
    write_class_folders(tmp_path, {"a": 8, "b": 7})
    now = data.load(tmp_path, image_size=size)
    later = data.load(tmp_path, image_size=size, lazy=True)
    assert later.is_lazy
    assert torch.equal(later.images[:], now.images)
    assert torch.equal(later.targets, now.targets)
    assert later.measure() == now.measure()


def test_large_sets_are_lazy_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "train", {"a": 4, "b": 4})
    size = 8 * 3 * 6 * 6
    monkeypatch.setattr(making, "MEMORY_LIMIT", size)
    assert not data.load(tmp_path).is_lazy
    monkeypatch.setattr(making, "MEMORY_LIMIT", size - 1)
    assert data.load(tmp_path).is_lazy
    assert not data.load(tmp_path, lazy=False).is_lazy


def test_the_name_is_kept(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 4, "b": 4})
    found = data.load(tmp_path)
    assert (found.name, found.split_name) == (str(tmp_path), "train")
    assert data.load(found.name).name == found.name
    assert data.load("digits").name == "digits"


def test_a_pair_says_the_same() -> None:
    one, two = data.load("digits", image_size=12), data.load("digits", image_size=[12, 12])
    assert torch.equal(one.images, two.images)
