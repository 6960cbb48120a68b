"""Batches for Lightning: begun anywhere, the same images over any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equilibria.training.standing import Standing
from equilibria.training.streams import ImageStreams

from .small import config, digits


def streams(tmp_path: Path, standing: Standing, rank: int = 0, world: int = 1) -> ImageStreams:
    train, valid = digits()
    settings = config(tmp_path, augment=["flip", "crop"])
    device = torch.device("cpu")
    return ImageStreams(train, valid, settings, standing, device=device, rank=rank, world=world)


def test_an_epoch_goes_on_where_it_stood(tmp_path: Path) -> None:
    standing = Standing()
    made = streams(tmp_path, standing)
    whole = list(made.train_dataloader())
    assert len(whole) == len(made.train_dataloader()) == made.per_epoch == 6
    standing.batch = 4
    rest = made.train_dataloader()
    assert len(rest) == 2
    for (x, y), (a, b) in zip(list(rest), whole[4:], strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    standing.epoch, standing.batch = 1, 0
    other = list(made.train_dataloader())
    assert not torch.equal(other[0][0], whole[0][0])
    x, y = made.batch(0, 3)
    assert torch.equal(x, whole[3][0])
    assert torch.equal(y, whole[3][1])


def test_indices_are_those_of_the_batch(tmp_path: Path) -> None:
    made = streams(tmp_path, Standing())
    train, _ = digits()
    for number, (_, y) in enumerate(made.train_dataloader()):
        assert torch.equal(train.targets[torch.tensor(made.indices(0, number))], y)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_images_of_each_step(tmp_path: Path, world: int) -> None:
    alone = streams(tmp_path, Standing())
    ranks = [streams(tmp_path, Standing(), rank, world) for rank in range(world)]
    for number in range(alone.per_epoch):
        shares = [r.indices(0, number) for r in ranks]
        assert sorted(k for s in shares for k in s) == sorted(alone.indices(0, number))
        assert {len(s) for s in shares} == {32 // world}
