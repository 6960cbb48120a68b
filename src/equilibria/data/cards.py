"""The data sets known by name: what they hold, how they are normalized, where the hub has them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from .class_names import (
    CAMVID,
    CIFAR10,
    CIFAR100,
    CIFAR100_SUPERCLASSES,
    CITYSCAPES,
    IMAGENETTE,
)
from .errors import DataError
from .image_data import Task

__all__ = ["DataCard", "describe", "names", "resolve_split", "split_of"]

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DIGITS = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class DataCard:
    """What is known of a data set before it is read; every value is plain and goes into JSON."""

    name: str
    text: str
    task: Task = "classification"
    counts: dict[str, int] = field(default_factory=dict)
    """Images of each split."""
    num_classes: int
    classes: tuple[str, ...] = ()
    """Empty where the files name them."""
    superclasses: tuple[str, ...] = ()
    channels: int = 3
    image_size: int | None = None
    """The size images are brought to if the caller asks for none; None: as they are."""
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD
    train_mean: tuple[float, ...] = ()
    """Channel means of the training images in units of 0–255, where they are known: ``check``."""
    hub: str = ""
    """The repository of the hub that has it as Parquet; empty where none may."""
    hub_folder: str = ""
    hub_note: str = ""
    """Why the hub does not have it."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits with labels."""
        return tuple(self.counts)

    @property
    def images(self) -> str:
        """How many images a split has, in words."""
        return ", ".join(f"{count:,} {split}" for split, count in self.counts.items())


_CARDS = {
    card.name: card
    for card in (
        DataCard(
            name="digits",
            text="handwritten digits, 8×8 gray, inside scikit-learn: no download",
            counts={"train": 1438, "test": 359},
            num_classes=10,
            classes=_DIGITS,
            channels=1,
            image_size=8,
            mean=(0.3053,),
            std=(0.3759,),
        ),
        DataCard(
            name="mnist",
            text="handwritten digits, 28×28 gray",
            counts={"train": 60_000, "test": 10_000},
            num_classes=10,
            classes=_DIGITS,
            channels=1,
            image_size=28,
            mean=(0.1307,),
            std=(0.3081,),
            train_mean=(33.318,),
            hub="ylecun/mnist",
            hub_folder="mnist",
        ),
        DataCard(
            name="cifar10",
            text="objects and animals, 32×32 color",
            counts={"train": 50_000, "test": 10_000},
            num_classes=10,
            classes=CIFAR10,
            image_size=32,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            train_mean=(125.307, 122.950, 113.865),
            hub="uoft-cs/cifar10",
            hub_folder="plain_text",
        ),
        DataCard(
            name="cifar100",
            text="objects and animals of 20 superclasses, 32×32 color",
            counts={"train": 50_000, "test": 10_000},
            num_classes=100,
            classes=CIFAR100,
            superclasses=CIFAR100_SUPERCLASSES,
            image_size=32,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            hub="uoft-cs/cifar100",
            hub_folder="cifar100",
        ),
        DataCard(
            name="imagenette",
            text="ten easy classes of ImageNet",
            counts={"train": 9469, "val": 3925},
            num_classes=10,
            classes=IMAGENETTE,
            image_size=224,
            hub="frgfm/imagenette",
            hub_folder="320px",
        ),
        DataCard(
            name="imagenet-100",
            text="a hundred classes of ImageNet",
            counts={"train": 126_689, "val": 5000},
            num_classes=100,
            image_size=224,
            hub="clane9/imagenet-100",
            hub_folder="data",
        ),
        DataCard(
            name="tiny-imagenet",
            text="two hundred classes of ImageNet, 64×64 color",
            counts={"train": 100_000, "val": 10_000},
            num_classes=200,
            image_size=64,
            hub="zh-plus/tiny-imagenet",
            hub_folder="data",
        ),
        DataCard(
            name="camvid",
            text="street scenes, 11 classes of pixels",
            task="segmentation",
            counts={"train": 367, "val": 101, "test": 233},
            num_classes=11,
            classes=CAMVID,
            mean=(0.4118, 0.4255, 0.4322),
            std=(0.3015, 0.3054, 0.3016),
            hub_note="no copy there is known to us; the SegNet tutorial has it",
        ),
        DataCard(
            name="cityscapes",
            text="street scenes, 19 classes of pixels, 2048×1024 color",
            task="segmentation",
            counts={"train": 2975, "val": 500},
            num_classes=19,
            classes=CITYSCAPES,
            hub_note="its license asks you to register at its site and download it yourself",
        ),
    )
}

_ALIASES = {"valid": "val", "validation": "val", "dev": "val", "training": "train"}


def names() -> list[str]:
    """The names that ``load`` knows; the first, digits, needs no download."""
    return list(_CARDS)


def describe(name: str) -> DataCard:
    """What is known of the data set ``name``."""
    if name not in _CARDS:
        close = difflib.get_close_matches(name, _CARDS, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise DataError(f"there is no data set {name!r}.{hint} Known: {', '.join(_CARDS)}.")
    return _CARDS[name]


def split_of(asked: str) -> str:
    """train, val or test, from any of their usual names."""
    split = _ALIASES.get(asked, asked)
    if split not in ("train", "val", "test"):
        raise DataError(f"split={asked!r}: expected 'train', 'val' or 'test'.")
    return split


def resolve_split(asked: str, there: tuple[str, ...], where: str) -> str:
    """The split to read: the one asked for, or "val" for "test" where no test labels exist."""
    split = split_of(asked)
    if split in there:
        return split
    if split == "test" and "val" in there:
        return "val"
    hint = " Hold out part of train: train, val = data.split(0.1, seed)." if split == "val" else ""
    raise DataError(f"{where} has no split {asked!r}; it has: {', '.join(there)}.{hint}")
