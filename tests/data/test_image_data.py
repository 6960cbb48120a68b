"""A split as an object: checked when made, subset, split, moved, normalized."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from equilibria.data import DataError
from tests.data.made_files import made


def test_normalize_is_the_formula() -> None:
    data = made()
    x = data.images[:7].numpy().astype(np.float64) / 255
    mean, std = np.array(data.mean).reshape(3, 1, 1), np.array(data.std).reshape(3, 1, 1)
    np.testing.assert_allclose(data.normalize(data.images[:7]), (x - mean) / std, atol=1e-5)
    already = data.normalize(torch.from_numpy(x))  # floats are x/255
    np.testing.assert_allclose(already, (x - mean) / std, atol=1e-12)
    assert torch.equal(data.normalize(data.images[0]), data.normalize(data.images[:1])[0])


def test_measure_is_numpys_mean_and_std() -> None:
    data = made()
    pixels = data.images.permute(1, 0, 2, 3).reshape(3, -1).numpy() / 255
    mean, std = data.measure()
    np.testing.assert_allclose(mean, pixels.mean(1), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(1), rtol=1e-12)


@pytest.mark.parametrize(
    "index", [[3, 1, 30], range(2, 9), slice(0, 40, 7), torch.tensor([39, 0]), [-1]]
)
def test_subset_takes_rows_of_everything(index: Any) -> None:
    data = made(superclasses=torch.arange(40) // 20, superclass_names=("x", "y"))
    part = data.subset(index)
    rows = np.arange(40)[index if isinstance(index, slice) else np.asarray(list(index))]
    assert torch.equal(part.images, data.images[torch.from_numpy(rows)])
    assert part.targets.tolist() == [int(data.targets[i]) for i in rows]
    assert part.superclasses is not None
    assert part.superclasses.tolist() == [i // 20 for i in rows]
    assert part.classes == data.classes


def test_split_holds_out_the_fraction_and_loses_nothing() -> None:
    data = made(images=torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1), mean=(0.5,), std=(1,))
    rest, held = data.split(0.2, seed=3)
    assert (len(rest), len(held)) == (32, 8)
    assert torch.bincount(held.targets).tolist() == [2, 2, 2, 2]
    both = sorted(rest.images.flatten().tolist() + held.images.flatten().tolist())
    assert both == list(range(40))
    again = data.split(0.2, seed=3)[1]
    assert torch.equal(held.images, again.images)
    assert not torch.equal(held.images, data.split(0.2, seed=4)[1].images)
    for part in (rest, held):
        assert part.images.flatten().tolist() == sorted(part.images.flatten().tolist())


def test_split_of_masks_is_by_the_whole() -> None:
    targets = torch.full((40, 6, 5), 255)  # no class: not refused as a label
    rest, held = made(targets=targets, task="segmentation", ignore_index=255).split(0.1)
    assert (len(rest), len(held)) == (36, 4)
    assert torch.equal(held.targets, targets[:4])


def test_superclass_of_is_the_table() -> None:
    data = made(superclasses=torch.tensor([0, 1, 1, 0]).repeat(10), superclass_names=("x", "y"))
    for part, table in ((data, [0, 1, 1, 0]), (data.subset([0, 1]), [0, 1, -1, -1])):
        assert part.superclass_of is not None
        assert part.superclass_of.tolist() == table
    assert made().superclass_of is None


def test_lazy_images_give_the_same_answers() -> None:
    data, same = made(), made(lazy=True)
    assert same.measure() == data.measure()
    a, b = same.split(0.25, 1), data.split(0.25, 1)
    assert torch.equal(a[1].images[:], b[1].images)
    assert (same.is_lazy, data.is_lazy) == (True, False)
    assert same.to("cpu").images is same.images
    assert torch.equal(data.to("cpu").images, data.images)


def test_normalization_of_saved_weights() -> None:
    data = made().with_normalization_of({"mean": [0, 0, 0], "std": [1, 1, 1], "classes": []})
    assert data.mean == (0.0, 0.0, 0.0)
    assert torch.equal(data.normalize(data.images[:2]), data.images[:2] / 255)
    with pytest.raises(DataError, match="std not given"):
        made().with_normalization_of({"mean": [0, 0, 0]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": torch.zeros(40, 3, 4, 5)}, "expected uint8"),
        ({"images": torch.zeros(40, 3, 4, dtype=torch.uint8)}, "expected uint8"),
        (
            {"images": torch.zeros(0, 3, 4, 5).byte(), "targets": torch.zeros(0).long()},
            "no images",
        ),
        ({"targets": torch.zeros(39).long()}, "expects int64"),
        ({"targets": torch.zeros(40)}, "expects int64"),
        ({"targets": torch.full((40,), 4)}, "sample 0 has label 4.*from 0 to 3"),
        ({"targets": torch.tensor([0] * 39 + [-1])}, "sample 39 has label -1"),
        ({"mean": (0.5,)}, "1 means and 3"),
        ({"std": (0.2, 0.0, 0.1)}, "must be positive"),
        ({"task": "detection"}, "task='detection'"),
        ({"superclasses": torch.zeros(3).long()}, "one per sample"),
        (
            {"targets": torch.full((40, 6, 5), 9), "task": "segmentation", "ignore_index": 255},
            "sample 0 has label 9",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        made(**changes)
