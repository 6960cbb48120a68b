"""The data sets known by name, one DataCard each: contents, normalization, place on the hub."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.engine.options import hint

from .sources import IGNORE, DataError, PartMissingError, Task

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        return tuple(self.counts)

    @property
    def images(self) -> str:
        """How many images a split has, in words."""
        return ", ".join(f"{count:,} {split}" for split, count in self.counts.items())


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


# Names of classes, in the order of their labels.
# fmt: off
_DIGITS = tuple("0123456789")
_CIFAR10 = _names("airplane automobile bird cat deer dog frog horse ship truck")
_CIFAR100 = _names(
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus",
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch",
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo",
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse",
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy",
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper",
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television",
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm",
)
_CIFAR100_SUPERCLASSES = _names(
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables",
    "household_electrical_devices household_furniture insects large_carnivores",
    "large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores",
    "medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1",
    "vehicles_2",
)
# The eleven classes and their order are those of SegNet (Badrinarayanan et al. 2017).
_CAMVID = _names("sky building pole road pavement tree sign fence car pedestrian bicyclist")
IMAGENETTE_WNIDS = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player",
    "n03000684": "chain saw", "n03028079": "church", "n03394916": "French horn",
    "n03417042": "garbage truck", "n03425413": "gas pump", "n03445777": "golf ball",
    "n03888257": "parachute",
}
# The labels' ids in gtFine/*_labelIds.png that count, by class; every other id is void.
CITYSCAPES_IDS = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17,
    "traffic light": 19, "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23,
    "person": 24, "rider": 25, "car": 26, "truck": 27, "bus": 28, "train": 31, "motorcycle": 32,
    "bicycle": 33,
}

_ALL = (
    DataCard(
        name="digits", text="handwritten digits, 8×8 gray, inside scikit-learn: no download",
        counts={"train": 1438, "test": 359}, num_classes=10, classes=_DIGITS, channels=1,
        image_size=8, mean=(0.3053,), std=(0.3759,),
    ),
    DataCard(
        name="mnist", text="handwritten digits, 28×28 gray",
        counts={"train": 60_000, "test": 10_000}, num_classes=10, classes=_DIGITS, channels=1,
        image_size=28, mean=(0.1307,), std=(0.3081,), train_mean=(33.318,),
        hub="ylecun/mnist", hub_folder="mnist",
    ),
    DataCard(
        name="cifar10", text="objects and animals, 32×32 color",
        counts={"train": 50_000, "test": 10_000}, num_classes=10, classes=_CIFAR10,
        image_size=32, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
        train_mean=(125.307, 122.950, 113.865), hub="uoft-cs/cifar10", hub_folder="plain_text",
    ),
    DataCard(
        name="cifar100", text="objects and animals of 20 superclasses, 32×32 color",
        counts={"train": 50_000, "test": 10_000}, num_classes=100, classes=_CIFAR100,
        superclasses=_CIFAR100_SUPERCLASSES, image_size=32, mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762), hub="uoft-cs/cifar100", hub_folder="cifar100",
    ),
    DataCard(
        name="imagenette", text="ten easy classes of ImageNet",
        counts={"train": 9469, "val": 3925}, num_classes=10,
        classes=tuple(IMAGENETTE_WNIDS.values()), image_size=224,
        hub="frgfm/imagenette", hub_folder="320px",
    ),
    DataCard(
        name="imagenet-100", text="a hundred classes of ImageNet",
        counts={"train": 126_689, "val": 5000}, num_classes=100, image_size=224,
        hub="clane9/imagenet-100", hub_folder="data",
    ),
    DataCard(
        name="tiny-imagenet", text="two hundred classes of ImageNet, 64×64 color",
        counts={"train": 100_000, "val": 10_000}, num_classes=200, image_size=64,
        hub="zh-plus/tiny-imagenet", hub_folder="data",
    ),
    DataCard(
        name="camvid", text="street scenes, 11 classes of pixels", task="segmentation",
        counts={"train": 367, "val": 101, "test": 233}, num_classes=11, classes=_CAMVID,
        mean=(0.4118, 0.4255, 0.4322), std=(0.3015, 0.3054, 0.3016),
        hub_note="no copy there is known to us; the SegNet tutorial has it",
    ),
    DataCard(
        name="cityscapes", text="street scenes, 19 classes of pixels, 2048×1024 color",
        task="segmentation", counts={"train": 2975, "val": 500}, num_classes=19,
        classes=tuple(CITYSCAPES_IDS),
        hub_note="its license asks you to register at its site and download it yourself",
    ),
)
# fmt: on
_CARDS = {card.name: card for card in _ALL}
_ALIASES = {"valid": "val", "validation": "val", "dev": "val", "training": "train"}


def names() -> list[str]:
    """The names that ``load`` knows; the first, digits, needs no download."""
    return list(_CARDS)


def describe(name: str) -> DataCard:
    if name not in _CARDS:
        near = hint(name, _CARDS)
        raise DataError(f"there is no data set {name!r}.{near} Known: {', '.join(_CARDS)}.")
    return _CARDS[name]


def camvid_ids() -> Tensor:
    """The class of each value in CamVid's masks, long [256]: 11 (void) and 255 are IGNORE."""
    table = torch.full((256,), -1, dtype=torch.long)
    table[:11] = torch.arange(11)
    table[[11, 255]] = IGNORE
    return table


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
    raise PartMissingError(f"{where} has no split {asked!r}; it has: {', '.join(there)}.{hint}")
