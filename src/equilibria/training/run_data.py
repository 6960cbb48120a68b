"""The images of a run: what is trained on, what is held out, and the batches of each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from equilibria import data as sets
from equilibria.data import Batches, ImageData, build_augmentation, held_out

from .config import TrainConfig, refuse
from .progress import Progress


@dataclass(frozen=True)
class RunData:
    """Training and validation images."""

    train: ImageData
    valid: ImageData | None
    kept: Tensor | None = None
    """Where the training images stand in the data before a part was held out, long [N]; None where
    the two parts were given."""

    def describe(self) -> dict[str, Any]:
        counts = {"train": len(self.train), "validation": len(self.valid or ())}
        return {"name": self.train.name, **counts, "classes": self.train.num_classes}

    def one_scale(self) -> RunData:
        """The same data, all channels divided by the mean of their standard deviations."""
        mean, std = self.train.mean, self.train.std
        std = (sum(std) / len(std),) * len(std)
        valid = None if self.valid is None else self.valid.with_normalization(mean, std)
        return replace(self, train=self.train.with_normalization(mean, std), valid=valid)

    def rows(self, indices: list[int]) -> list[int]:
        """Training images by their place in the data as it was loaded."""
        return [int(k if self.kept is None else self.kept[k]) for k in indices]


def load_data(config: TrainConfig, given: Any, *, progress: bool) -> RunData:
    found = _load(config, progress) if given is None else _check(given)
    if found.valid is None and (config.early_stop is not None or config.select == "best"):
        raise ValueError(
            "early_stop and select='best' compare validation results, and there is no validation "
            "data: give data=(training, validation)."
        )
    return found


def _load(config: TrainConfig, progress: bool) -> RunData:
    whole = sets.load(
        config.data,
        "train",
        root=None if config.data_root is None else Path(config.data_root),
        download=config.download,
        image_size=config.image_size,
        on_corrupt=config.on_corrupt,  # type: ignore[arg-type]
        progress=progress,
    )
    train, valid, kept = whole, None, None
    if config.validation > 0.0:
        mask = held_out(whole.labels, len(whole), config.validation, config.seed)
        train, valid, kept = whole.subset(~mask), whole.subset(mask), (~mask).nonzero().flatten()
    if config.samples is not None:
        if config.samples > len(train):
            why = f"{train.name} has {len(train)} training images; give at most as many"
            refuse("samples", config.samples, f"{why}, or leave samples out for all of them")
        chosen = train.few(config.samples, config.seed)
        train = train.subset(chosen)
        kept = chosen.nonzero().flatten() if kept is None else kept[chosen]
    return RunData(train, valid, kept)


def _check(given: Any) -> RunData:
    train, valid = given if isinstance(given, tuple) and len(given) == 2 else (None, None)
    if not isinstance(train, ImageData) or not isinstance(valid, (ImageData, type(None))):
        kind = type(given).__name__
        raise TypeError(f"data must be two ImageData, (training, validation or None), got {kind}.")
    if valid is not None:
        for name in ("classes", "task", "ignore_index"):
            mine, other = getattr(train, name), getattr(valid, name)
            if mine != other:
                raise ValueError(
                    f"training and validation data differ in {name}: {mine!r} and {other!r}."
                )
        if (train.mean, train.std) != (valid.mean, valid.std):
            # One network sees one normalization: that of the images that it is trained on.
            valid = valid.with_normalization(train.mean, train.std)
    return RunData(train, valid)


class TrainBatches:
    """The batches of the epoch that ``progress`` is in, from its batch on; a loader for Lightning.

    ``batch_size`` counts over all processes: a run on two devices takes the same steps as on one.
    """

    def __init__(
        self, data: RunData, config: TrainConfig, progress: Progress, **place: Any
    ) -> None:
        self._progress = progress
        if config.batch_size % place["world"]:
            why = f"{place['world']} processes share a batch; take a multiple of {place['world']}"
            refuse("batch_size", config.batch_size, why)
        size = config.batch_size // place["world"]
        place |= {"channels_last": config.channels_last, "prefetch": max(1, config.workers)}
        self.uneven = len(data.train) < config.batch_size
        """Whether processes may have batches of different sizes."""
        self._batches = Batches(
            data.train,
            size,
            shuffle=True,
            seed=config.seed,
            augment=build_augmentation(config.augment, num_classes=data.train.num_classes),
            # Whole batches, so that every step weighs the same and compiles once; a set smaller
            # than one batch is a batch.
            drop_last=not self.uneven,
            **place,
        )
        # Without gradients twice as many fit.
        self.valid: Any = [] if data.valid is None else Batches(data.valid, 2 * size, **place)
        """The batches of the held-out images."""
        self.per_epoch = len(self._batches)
        """Steps of a whole epoch."""

    def __len__(self) -> int:
        # Lightning does not begin an epoch of length 0, and one of which only the validation is
        # left has to be ended.
        return max(1, self.per_epoch - self._progress.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._from(self._progress.epoch, self._progress.batch)

    def _from(self, epoch: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        self._batches.set_epoch(epoch, batch)
        return iter(self._batches)

    def batch(self, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """Batch ``number`` of an epoch once more, as it was."""
        return next(self._from(epoch, number))

    def indices(self, epoch: int, number: int) -> list[int]:
        """Which training images batch ``number`` of an epoch is made of, in this process."""
        shards = self._batches.shards
        first, last = shards.bounds()[number]
        order = shards.order(self._batches.seed, epoch, shuffle=True)
        return [int(k) for k in order[first:last]]
