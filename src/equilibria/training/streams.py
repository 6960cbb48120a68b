"""Batches for Lightning: made on the device, sharded over processes, begun anywhere in an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from equilibria.data import Batches, ImageData, build_augmentation

from .config import TrainConfig
from .standing import Standing

__all__ = ["ImageStreams", "Stream"]

Batch = tuple[Tensor, Tensor]


class Stream:
    """The batches of one epoch from number ``start`` on."""

    def __init__(self, batches: Batches, epoch: int, start: int) -> None:
        self._batches, self._epoch, self._start = batches, epoch, start

    def __len__(self) -> int:
        # Lightning does not begin an epoch of length 0, and one that is left with its validation
        # has to be ended.
        return max(1, len(self._batches) - self._start)

    def __iter__(self) -> Iterator[Batch]:
        if self._start == len(self._batches):
            return iter(())
        self._batches.set_epoch(self._epoch, self._start)
        return iter(self._batches)


class ImageStreams(pl.LightningDataModule):
    """Training and validation batches of two ``ImageData``, on the device of this process.

    Order and augmentation of epoch k depend on (seed, k) alone. ``batch_size`` counts over all
    processes, so that a run on two devices takes the same steps as on one.
    """

    def __init__(
        self,
        train: ImageData,
        valid: ImageData | None,
        config: TrainConfig,
        standing: Standing,
        *,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__()
        if config.batch_size % world:
            raise ValueError(
                f"batch_size={config.batch_size} is shared by {world} processes and does not "
                f"divide evenly; take a multiple of {world}."
            )
        self._standing = standing
        share = config.batch_size // world
        common: dict[str, Any] = {
            "device": device,
            "channels_last": config.channels_last,
            "rank": rank,
            "world": world,
            "prefetch": max(1, config.workers),
        }
        self.train_batches = Batches(
            train,
            share,
            shuffle=True,
            seed=config.seed,
            augment=build_augmentation(config.augment, num_classes=train.num_classes),
            # Whole batches, so that every step weighs the same and compiles once; a set smaller
            # than one batch is a batch.
            drop_last=len(train) >= config.batch_size,
            **common,
        )
        self.valid_batches = None
        if valid is not None:
            # Without gradients twice as many fit.
            self.valid_batches = Batches(valid, 2 * share, **common)

    @property
    def per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return len(self.train_batches)

    def train_dataloader(self) -> Stream:
        """Asked for before every epoch: what is left of it."""
        return Stream(self.train_batches, self._standing.epoch, self._standing.batch)

    def val_dataloader(self) -> Any:
        return [] if self.valid_batches is None else self.valid_batches

    def batch(self, epoch: int, number: int) -> Batch:
        """Batch ``number`` of an epoch once more, as it was."""
        return next(iter(Stream(self.train_batches, epoch, number)))

    def indices(self, epoch: int, number: int) -> list[int]:
        """Which training images batch ``number`` of an epoch is made of, in this process."""
        shards = self.train_batches.shards
        first, last = shards.bounds()[number]
        order = shards.order(self.train_batches.seed, epoch, shuffle=True)
        found: list[int] = order[first:last].tolist()
        return found
