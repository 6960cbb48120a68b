"""The images of a job: classes learned, parts held out, what the smoke tests are made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from equilibria_papers.tables import images as supplying
from equilibria_papers.tables.images import Supplied, supply
from equilibria_papers.tables.plan import at_hand, plan_of
from tests.evaluation.standins import dataset

from . import tiny


def _supplied(tmp_path: Path, smoke: bool = False, **changes: Any) -> Supplied:
    (one,) = plan_of(tiny.job(**changes), tiny.choices(tmp_path, smoke=smoke))
    return supply(one, progress=False)


def test_superclasses_of_a_smoke_test_leave_a_class_unseen(tmp_path: Path) -> None:
    found = _supplied(tmp_path, smoke=True, classes="superclass")
    assert found.train.classes == ("below 5", "from 5 on")
    assert found.held_out is not None
    assert found.test.superclass_names == ("below 5", "from 5 on")


def test_cifar10_stands_in_with_vehicles_and_animals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship")
    images = dataset(torch.zeros(40, 3, 4, 4).byte(), torch.arange(40) % 10, 10, name="cifar10")
    images = dataclasses.replace(images, classes=(*names, "truck"))
    monkeypatch.setattr(supplying, "_read", lambda *given: images)
    found = _supplied(tmp_path, data="cifar10", classes="superclass")
    assert found.train.classes == ("vehicles", "animals")
    above = found.test.superclass_of
    assert above is not None
    assert [int(a) for a in above] == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    # Of each superclass the last class is unseen: the truck and the horse.
    assert found.held_out is not None
    assert len(found.train) + len(found.held_out) == 32


def test_images_are_read_once_for_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supplying._read.cache_clear()
    calls: list[str] = []
    load = supplying.module.load

    def counting(name: str, split: str, **options: Any) -> Any:
        calls.append(split)
        return load(name, split, **options)

    monkeypatch.setattr(supplying.module, "load", counting)
    for seed in (1, 2):
        (one,) = plan_of(tiny.job(), tiny.choices(tmp_path, seeds=(seed,)))
        supply(one, progress=False)
    assert sorted(calls) == ["test", "train"]


def test_segmentation_smoke_has_a_class_for_each_pixel(tmp_path: Path) -> None:
    found = _supplied(tmp_path, smoke=True, measures=("segmentation",))
    assert found.train.task == "segmentation"
    images, targets = torch.as_tensor(found.test.images), torch.as_tensor(found.test.targets)
    assert torch.equal(targets == 1, images[:, 0] >= 128)


def test_random_images_need_no_files(tmp_path: Path) -> None:
    assert at_hand("random", tmp_path)
    found = _supplied(tmp_path, data="random", recipe={"image_size": 16, "batch_size": 4})
    assert found.train.images.shape == (8, 3, 16, 16)


def test_unknown_classes_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 'all', 'first half' or 'superclass'"):
        _supplied(tmp_path, classes="some")


def test_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "cache"))
    assert at_hand("digits", None)
    assert not at_hand("cifar10", tmp_path)
    assert not at_hand("imagenet", tmp_path)
    (tmp_path / "imagenet").mkdir()
    assert at_hand("imagenet", tmp_path)


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for number, name in enumerate(("a", "b")):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for k in range(4):
                Image.new("RGB", (12, 10), (60 * number, 20 * k, 90)).save(folder / f"{k}.png")
    (one,) = plan_of(
        tiny.job(data="imagenet", recipe={**tiny.RECIPE, "image_size": 8}),
        tiny.choices(tmp_path, data_root=tmp_path),
    )
    assert not one.missing
    found = supply(one, progress=False)
    assert found.train.images.shape == (6, 3, 8, 8)
    assert found.held_out is not None
    assert (len(found.held_out), len(found.test)) == (2, 8)
    assert found.train.classes == ("a", "b")


def test_a_few_samples_leave_what_is_held_out(tmp_path: Path) -> None:
    every = _supplied(tmp_path)
    (one,) = plan_of(tiny.job(), tiny.choices(tmp_path, overrides={"samples": 50}))
    found = supply(one, progress=False)
    assert len(found.train) == 50
    counts = torch.bincount(torch.as_tensor(found.train.targets))
    assert int(counts.min()) >= 4  # ten classes, of each its share
    assert found.held_out is not None
    assert every.held_out is not None
    assert torch.equal(
        torch.as_tensor(found.held_out.images), torch.as_tensor(every.held_out.images)
    )
