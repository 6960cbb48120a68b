"""The images of a job: loaded, cut to the classes that it learns, a part held out for choices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from equilibria import data as module
from equilibria.data import IGNORE, ImageData

from .plan import RANDOM, Planned, data_folder
from .unseen_classes import select_classes, superclass_split

_HELD_OUT_SEED = 0  # the same images for every seed of the training: choices never see another part
_SMOKE_TRAIN, _SMOKE_TEST = 96, 64
_VEHICLES = ("airplane", "automobile", "ship", "truck")  # of CIFAR-10; its other six are animals


@dataclass(frozen=True)
class Supplied:
    """What a job is trained on, what choices may look at, and what it is judged on once."""

    train: ImageData
    held_out: ImageData | None
    test: ImageData


def known_classes(dataset: ImageData) -> range:
    """The classes that a job of "first half" learns: five of CIFAR-10 (KerDEQ §4.3)."""
    return range(dataset.num_classes // 2)


def supply(planned: Planned, *, progress: bool = True) -> Supplied:
    """The images of the job, as its configuration says."""
    config, job = planned.config, planned.job
    if config.data == RANDOM:
        made = _random(2 * config.batch_size, config.image_size or 224, config.seed)
        return Supplied(made, None, made)
    whole, test = (_load(planned, split, progress) for split in ("train", "test"))
    if planned.smoke:
        whole, test = whole.subset(range(_SMOKE_TRAIN)), test.subset(range(_SMOKE_TEST))
        whole, test = (_made_of_digits(planned, part) for part in (whole, test))
    elif job.classes == "superclass" and config.data == "cifar10":
        # CIFAR-10 stands in for CIFAR-100, with two superclasses in place of its twenty.
        above = torch.tensor([int(name not in _VEHICLES) for name in whole.classes])
        names = ("vehicles", "animals")
        whole, test = (_grouped(part, above[part.targets[:]], names) for part in (whole, test))
    if job.classes == "first half":
        whole = select_classes(whole, known_classes(whole))
    elif job.classes == "superclass":
        whole = superclass_split(whole)[0]
    elif job.classes != "all":
        raise ValueError(
            f"{job.name}: classes={job.classes!r}; expected 'all', 'first half' or 'superclass'."
        )
    train, held_out = whole, None
    if config.data == "camvid":  # has a part of its own for choices
        held_out = _load(planned, "val", progress)
    elif config.validation:
        train, held_out = whole.split(config.validation, _HELD_OUT_SEED)
    if config.samples is not None:
        train = train.subset(train.few(config.samples, _HELD_OUT_SEED))
    if (test.mean, test.std) != (train.mean, train.std):
        test = test.with_normalization(train.mean, train.std)
    return Supplied(train, held_out, test)


def _load(planned: Planned, split: str, progress: bool) -> ImageData:
    config = planned.config
    return _read(config.data, split, config.data_root, config.image_size, progress)


@lru_cache(maxsize=6)
def _read(
    name: str, split: str, data_root: str | None, image_size: int | None, progress: bool
) -> ImageData:
    """Read from disk once for all jobs of a table: decoding takes longer than a short training."""
    root = None if data_root is None else Path(data_root)
    if name in module.names():
        return module.load(name, split, root=root, image_size=image_size, progress=progress)
    return module.load(data_folder(name, root), split, image_size=image_size, progress=progress)


def _grouped(images: ImageData, above: Tensor, names: tuple[str, ...]) -> ImageData:
    return dataclasses.replace(images, superclasses=above, superclass_names=names)


def _made_of_digits(planned: Planned, digits: ImageData) -> ImageData:
    """What a smoke test needs and the digits do not have: superclasses, or a class a pixel."""
    if planned.job.classes == "superclass":
        return _grouped(digits, digits.targets[:] // 5, ("below 5", "from 5 on"))
    if "segmentation" in planned.job.measures:
        assert isinstance(digits.images, Tensor)
        return dataclasses.replace(
            digits,
            targets=(digits.images[:, 0] > 127).long(),
            classes=("paper", "ink"),
            task="segmentation",
            ignore_index=IGNORE,
        )
    return digits


def _random(count: int, size: int, seed: int) -> ImageData:
    generator = torch.Generator().manual_seed(seed)
    classes = 1000
    return ImageData(
        images=torch.randint(0, 256, (count, 3, size, size), generator=generator).to(torch.uint8),
        targets=torch.randint(0, classes, (count,), generator=generator),
        classes=tuple(str(k) for k in range(classes)),
        name=RANDOM,
        split_name="random",
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )
