"""Decoded copies: used when the sources are the same, never needed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria import data
from equilibria.data import decoded, decoding
from equilibria.data.decoded import copy_path, read_copy, write_copy
from tests.data.made_files import pictures, png, write_class_folders


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies of any size are kept; every image that is decoded is noted."""
    monkeypatch.setattr(decoded, "SMALLEST", 0)
    seen: list[str] = []
    original = decoding.Rows.__call__

    def noted(self: decoding.Rows, i: int) -> torch.Tensor:
        seen.append(self.column.name(i))
        return original(self, i)

    monkeypatch.setattr(decoding.Rows, "__call__", noted)
    return seen


def test_the_second_load_decodes_nothing(
    tmp_path: Path, own_cache: Path, counted: list[str]
) -> None:
    write_class_folders(tmp_path, {"a": 5, "b": 5})
    first = data.load(tmp_path, image_size=4)
    assert len(counted) == 8
    second = data.load(tmp_path, image_size=4)
    assert len(counted) == 8
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.targets, second.targets)
    test = data.load(tmp_path, "test", image_size=4)  # the other part of the same files
    assert len(counted) == 10
    assert len(test) == 2
    data.load(tmp_path, image_size=5)
    data.load(tmp_path, image_size=4, channels=1)
    assert len(counted) == 26
    assert len(list((own_cache / "decoded").iterdir())) == 4


def test_a_changed_source_is_decoded_anew(tmp_path: Path, counted: list[str]) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    data.load(tmp_path, image_size=6)
    other = pictures(1, seed=99)[0]
    path = tmp_path / "train" / "a" / "000.png"
    path.write_bytes(png(other))
    os.utime(path, ns=(5, 5))
    assert np.array_equal(data.load(tmp_path, image_size=6).images[0], other.transpose(2, 0, 1))


def test_cache_false_neither_reads_nor_writes(
    tmp_path: Path, own_cache: Path, counted: list[str]
) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    data.load(tmp_path, image_size=6, cache=False)
    assert not (own_cache / "decoded").exists()
    data.load(tmp_path, image_size=6)
    data.load(tmp_path, image_size=6, cache=False)
    assert len(counted) == 12


def test_a_damaged_copy_is_passed_over(tmp_path: Path, own_cache: Path, counted: list[str]) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    first = data.load(tmp_path, image_size=6)
    (copy,) = (own_cache / "decoded").iterdir()
    copy.write_bytes(copy.read_bytes()[:100])
    assert torch.equal(data.load(tmp_path, image_size=6).images, first.images)
    assert len(counted) == 8


def test_nothing_is_kept_of_a_set_with_corrupt_images(
    tmp_path: Path, own_cache: Path, counted: list[str]
) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    (tmp_path / "train" / "a" / "000.png").write_bytes(b"x")
    for _ in range(2):
        with pytest.warns(UserWarning, match="skipped 1 of 4"):
            data.load(tmp_path, image_size=6, on_corrupt="skip")
    assert not (own_cache / "decoded").exists()


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder would be")
    monkeypatch.setenv("EQUILIBRIA_DATA", str(blocked))
    write_class_folders(tmp_path / "set" / "train", {"a": 2, "b": 2})
    assert len(data.load(tmp_path / "set", image_size=6)) == 4


def test_a_full_disk_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoded, "SMALLEST", 0)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    path = copy_path("x", "train", "k")
    assert write_copy(path, {"images": torch.zeros(3)}) is False
    assert list(path.parent.iterdir()) == []


def test_copies_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_path("my/folder with spaces", "train", "k")
    assert path.name == "my_folder_with_spaces-train-k.safetensors"
    images = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2)
    assert write_copy(path, {"images": images}) is False  # too small to be worth it
    monkeypatch.setattr(decoded, "SMALLEST", 0)
    assert write_copy(path, {"images": images}) is True
    found = read_copy(path, {"images": (2, 3, 2, 2)})
    assert found is not None
    assert torch.equal(found["images"], images)
    assert read_copy(path, {"images": (2, 3, 2, 3)}) is None
    assert read_copy(path.with_name("none"), {}) is None
