"""The images of a run: what is held out, what is trained on, and in which batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria.training import TrainConfig, fit
from equilibria.training.progress import Progress
from equilibria.training.run_data import TrainBatches, load_data

from .small import config, digits


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_rows_of_a_few_samples_point_into_the_data(validation: float) -> None:
    whole = eq.data.load("digits", "train", progress=False)
    settings = TrainConfig(validation=validation, samples=60, seed=3)
    made = load_data(settings, None, progress=False)
    assert len(made.train) == 60
    rows = made.rows(list(range(60)))
    assert len(set(rows)) == 60
    assert torch.equal(torch.as_tensor(whole.images)[rows], torch.as_tensor(made.train.images))
    assert int(torch.bincount(torch.as_tensor(made.train.targets)).min()) >= 5
    if made.valid is not None:  # the same whether few or all of the others are trained on
        held = torch.as_tensor(whole.split(validation, 3)[1].images)
        assert torch.equal(torch.as_tensor(made.valid.images), held)
    with pytest.raises(ValueError, match=r"samples=9999\): digits has \d+ training images"):
        load_data(TrainConfig(samples=9999), None, progress=False)


@pytest.mark.parametrize("samples", [1, 5, 12, 50, 100, 150, 200])
@pytest.mark.parametrize("sizes", [[20] * 10, [2] * 100, [191, *[1] * 9], [100, 93, 7]])
def test_as_many_samples_as_asked_for(samples: int, sizes: list[int]) -> None:
    """Also where classes are more than samples, or so small that none has a whole share."""
    targets = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    images = eq.data.load("digits", "train", progress=False).subset(range(200))
    images = replace(images, targets=targets, classes=tuple(map(str, range(len(sizes)))))
    chosen = images.few(samples, 0)
    assert int(chosen.sum()) == samples
    counts = torch.bincount(targets[chosen], minlength=len(sizes))
    assert int(counts.min()) >= (samples >= len(sizes) and min(sizes) > 1)
    assert bool(((counts - torch.tensor(sizes) * samples / 200).abs() < len(sizes)).all())


def batches(tmp_path: Path, progress: Progress, rank: int = 0, world: int = 1) -> TrainBatches:
    settings = config(tmp_path, augment=["flip", "crop"])
    data = load_data(settings, digits(), progress=False)
    return TrainBatches(data, settings, progress, device="cpu", rank=rank, world=world)


def test_an_epoch_goes_on_where_it_stood(tmp_path: Path) -> None:
    progress = Progress()
    made = batches(tmp_path, progress)
    whole = list(made)
    assert len(whole) == len(made) == made.per_epoch == 6
    progress.batch = 4
    assert len(made) == 2
    for (x, y), (a, b) in zip(list(made), whole[4:], strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    progress.epoch, progress.batch = 1, 0
    assert not torch.equal(next(iter(made))[0], whole[0][0])
    x, y = made.batch(0, 3)
    assert torch.equal(x, whole[3][0])
    assert torch.equal(y, whole[3][1])


def test_indices_are_those_of_the_batch(tmp_path: Path) -> None:
    made = batches(tmp_path, Progress())
    targets = torch.as_tensor(digits()[0].targets)
    for number, (_, y) in enumerate(made):
        assert torch.equal(targets[made.indices(0, number)], y)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_images_of_each_step(tmp_path: Path, world: int) -> None:
    alone = batches(tmp_path, Progress())
    ranks = [batches(tmp_path, Progress(), rank, world) for rank in range(world)]
    for number in range(alone.per_epoch):
        shares = [r.indices(0, number) for r in ranks]
        assert sorted(k for s in shares for k in s) == sorted(alone.indices(0, number))
        assert {len(s) for s in shares} == {32 // world}


def test_a_batch_that_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 3"):
        batches(tmp_path, Progress(), world=3)


def test_certified_networks_divide_all_channels_by_one_number(tmp_path: Path) -> None:
    """A radius in pixels counts the smallest deviation: unequal ones give some of it away."""
    colors = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8)
    whole = replace(
        digits()[0].subset(range(24)), images=colors, mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4)
    )
    options = {"widths": (4,), "depth": 1, "unshuffle": 1}
    settings = config(tmp_path, model="potential_certified_digits", model_options=options, epochs=1)
    fit(settings, data=(whole, whole), progress=False)
    saved = eq.models.load(tmp_path / "model.safetensors").preprocessing
    assert saved.mean == pytest.approx((0.1, 0.2, 0.3))
    assert saved.std == pytest.approx((0.3, 0.3, 0.3))
