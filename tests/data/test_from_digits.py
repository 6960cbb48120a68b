"""The embedded digits: all of them, split once and for all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from equilibria import data


def test_every_digit_is_in_one_split() -> None:
    train, test = data.load("digits"), data.load("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    bunch = load_digits()
    # round(255 v / 16) is invertible: v = round(16 u / 255)
    seen = [
        (int(y), np.rint(x.numpy()[0] / 255 * 16).tobytes())
        for part in (train, test)
        for x, y in zip(part.images, part.targets, strict=True)
    ]
    there = [(int(y), x.tobytes()) for x, y in zip(bunch.images, bunch.target, strict=True)]
    assert sorted(seen) == sorted(there)


def test_a_fifth_of_each_class_is_held_out() -> None:
    test = data.load("digits", "test")
    whole = np.bincount(load_digits().target)
    found = torch.bincount(test.targets).numpy()
    assert np.all(np.abs(found - whole / 5) < 1)


def test_the_split_never_changes() -> None:
    test = data.load("digits", "test")
    checksum = int((test.images.long().sum(dim=(1, 2, 3)) * torch.arange(1, 360)).sum())
    assert checksum == 321_476_096


def test_shapes_and_statistics() -> None:
    train = data.load("digits")
    assert tuple(train.images.shape[1:]) == (1, 8, 8)
    assert int(train.images.max()) == 255
    mean, std = train.measure()
    assert abs(mean[0] - train.mean[0]) < 0.002
    assert abs(std[0] - train.std[0]) < 0.002


def test_other_sizes() -> None:
    large = data.load("digits", "test", image_size=16, channels=3)
    assert tuple(large.images.shape) == (359, 3, 16, 16)
    assert torch.equal(large.images[:, 0], large.images[:, 2])


def test_there_is_no_val() -> None:
    with pytest.raises(data.DataError, match=r"digits has no split 'val'; it has: train, test"):
        data.load("digits", "val")
    with pytest.raises(data.DataError, match="expected 'train', 'val' or 'test'"):
        data.load("digits", "all")
