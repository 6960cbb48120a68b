"""The images of a run: what is held out, what is trained on, and where each came from."""

from __future__ import annotations

import pytest
import torch

import equilibria as eq
from equilibria.training import TrainConfig
from equilibria.training.preparing import few, prepare


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_rows_of_a_few_samples_point_into_the_data(validation: float) -> None:
    whole = eq.data.load("digits", "train", progress=False)
    made = prepare(
        TrainConfig(validation=validation, samples=60, seed=3), None, None, progress=False
    )
    assert len(made.train) == 60
    rows = made.rows(range(60))
    assert len(set(rows)) == 60
    assert torch.equal(torch.as_tensor(whole.images)[rows], torch.as_tensor(made.train.images))
    assert int(torch.bincount(torch.as_tensor(made.train.targets)).min()) >= 5
    if validation:
        full = prepare(TrainConfig(validation=validation, seed=3), None, None, progress=False)
        assert made.valid is not None
        assert full.valid is not None
        held = torch.as_tensor(full.valid.images)
        assert torch.equal(torch.as_tensor(made.valid.images), held)


def test_more_samples_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"samples=9999: digits has \d+ training images"):
        prepare(TrainConfig(samples=9999), None, None, progress=False)


def test_all_samples_are_all() -> None:
    images = eq.data.load("digits", "train", progress=False).subset(range(40))
    assert bool(few(images, 40, 0).all())
    assert int(few(images, 30, 0).sum()) == 30
    assert int(few(images, 20, 0).sum()) == 20
