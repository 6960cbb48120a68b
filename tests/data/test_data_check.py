"""check reads everything and says what is not as it should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from equilibria import data
from tests.data.made_files import pictures, png, write_class_folders, write_parquet


def test_digits_are_as_expected() -> None:
    report = data.check("digits")
    assert report.ok
    found = {(f.split, f.what): f.found for f in report.findings}
    assert found["train", "images"] == "1,438"
    assert found["test", "classes"] == "10"
    assert found["train", "size"] == "1×8×8"
    assert "as expected" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_a_folder_is_checked_without_expectations(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 3, "b": 5})
    write_class_folders(tmp_path / "val", {"a": 1, "b": 1})
    report = data.check(tmp_path)
    assert report.ok
    assert {f.split for f in report.findings} == {"train", "val"}
    found = {(f.split, f.what): f.found for f in report.findings}
    assert found["train", "images a class"] == "3 to 5"


def test_corrupt_images_and_wrong_counts_are_wrong(tmp_path: Path) -> None:
    encoded = [png(p) for p in pictures(3, 32, 32)] + [b"broken"]
    for split in ("train", "test"):
        columns = {"img": encoded, "label": [0, 1, 2, 3]}
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", columns)
    report = data.check("cifar10", root=tmp_path)
    assert not report.ok
    wrong = {f.what for f in report.findings if not f.ok}
    assert wrong == {"images", "unreadable", "images a class", "mean of 255"}
    (named, _) = [f.found for f in report.findings if f.what == "unreadable"]
    assert "row 3" in named
    console = Console(record=True, width=200, file=None, quiet=False, stderr=True)
    console.print(report.table())
    assert "wrong" in console.export_text()
    assert "NOT as expected" in str(report)


def test_masks(tmp_path: Path) -> None:
    ids = pictures(2, 6, 8, channels=1) % 12
    for split in ("train", "val", "test"):
        columns = {"image": [png(p) for p in pictures(2, 6, 8)], "mask": [png(i) for i in ids]}
        write_parquet(tmp_path / f"{split}.parquet", columns)
    found = {(f.split, f.what): f.found for f in data.check("camvid", root=tmp_path).findings}
    assert found["val", "pixels ignored"] == f"{(ids == 11).mean():.1%}"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(data.DataNotFoundError):
        data.check("cifar10", root=tmp_path)
    with pytest.raises(data.DataNotFoundError, match="is empty"):
        data.check(tmp_path)
