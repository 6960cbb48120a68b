"""Sources in order: the folder named, the cache, the hub; the error names every place."""

from __future__ import annotations

from pathlib import Path

import pytest

from equilibria import data
from equilibria.data import DataNotFoundError
from tests.data.made_files import pictures, png, write_cifar10_pickles, write_parquet


def put(folder: Path, label: int) -> None:
    columns = {"img": [png(pictures(1, 32, 32)[0])], "label": [label]}
    write_parquet(folder / "train-00000-of-00001.parquet", columns)


def test_root_comes_before_the_cache(tmp_path: Path, own_cache: Path) -> None:
    put(own_cache / "cifar10", 3)
    assert data.load("cifar10").targets.tolist() == [3]
    put(tmp_path / "cifar10", 5)
    assert data.load("cifar10", root=tmp_path).targets.tolist() == [5]


def test_a_root_without_it_leaves_the_cache(tmp_path: Path, own_cache: Path) -> None:
    put(own_cache / "cifar10" / "plain_text", 3)
    assert data.load("cifar10", root=tmp_path).targets.tolist() == [3]


def test_root_may_be_text(tmp_path: Path) -> None:
    put(tmp_path, 5)
    assert data.load("cifar10", root=str(tmp_path)).targets.tolist() == [5]


def test_parquet_before_batches(tmp_path: Path) -> None:
    write_cifar10_pickles(tmp_path / "cifar-10-batches-py")
    assert len(data.load("cifar10", root=tmp_path)) == 20
    put(tmp_path, 5)
    assert len(data.load("cifar10", root=tmp_path)) == 1


def test_the_error_names_every_place_and_option(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(DataNotFoundError) as raised:
        data.load("cifar100", root=tmp_path)
    text = str(raised.value)
    for part in (
        "cifar100 (train) was not found",
        f"the folder {tmp_path} (root=…)",
        f"the cache {own_cache / 'cifar100'} (set by the variable EQUILIBRIA_DATA)",
        "the hub, uoft-cs/cifar100: not asked; pass download=True",
        "digits needs no files",
    ):
        assert part in text
    assert isinstance(raised.value, FileNotFoundError)


def test_a_root_that_does_not_exist_is_a_mistake(tmp_path: Path, own_cache: Path) -> None:
    put(own_cache / "cifar10", 3)
    with pytest.raises(DataNotFoundError, match="there is no such folder"):
        data.load("cifar10", root=tmp_path / "typo")


def test_sets_that_the_hub_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="does not have it, no copy"):
        data.load("camvid", root=tmp_path)


def test_root_goes_with_names_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="goes with the name of a data set"):
        data.load(tmp_path, root=tmp_path)


def test_a_set_of_another_name_in_root_is_not_taken(tmp_path: Path) -> None:
    put(tmp_path / "cifar10", 5)
    with pytest.raises(DataNotFoundError):
        data.load("mnist", root=tmp_path)
