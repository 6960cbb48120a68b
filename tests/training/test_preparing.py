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


@pytest.mark.parametrize("samples", [50, 100, 150, 200])
def test_as_many_samples_as_asked_for(samples: int) -> None:
    images = eq.data.load("digits", "train", progress=False).subset(range(200))
    assert int(few(images, samples, 0).sum()) == samples
