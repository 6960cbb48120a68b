"""Augmentations from lists of names."""

from __future__ import annotations

from typing import Any

import pytest

from equilibria import data
from equilibria.data import build_augmentation


def test_names_and_options() -> None:
    made = build_augmentation(
        ["crop", {"cutout": {"size": 5}}, {"resized_crop": {"scale": [0.5, 1.0]}}, {"flip": None}]
    )
    assert made is not None
    assert made.parts == (
        data.Crop(),
        data.Cutout(size=5),
        data.ResizedCrop(scale=(0.5, 1.0)),
        data.Flip(),
    )


@pytest.mark.parametrize("name", ["RandAugment", "rand_augment", "rand-augment"])
def test_names_may_be_written_as_the_classes_are(name: str) -> None:
    made = build_augmentation([name, "CutMix", data.Flip()], num_classes=7)
    assert made is not None
    assert made.parts == (data.RandAugment(), data.CutMix(num_classes=7), data.Flip())


def test_nothing() -> None:
    assert build_augmentation([]) is None


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("cropp", "Did you mean 'crop'"),
        ({"crop": 4}, "options are a mapping"),
        ({"crop": {"padding": 4}, "flip": {}}, "a name or"),
        (3, "a name or"),
        ({"crop": {"pad": 4}}, "Crop has no option 'pad'"),
        ("mixup", "num_classes"),
    ],
)
def test_wrong_parts(part: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build_augmentation([part])
