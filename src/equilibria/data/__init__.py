"""Images and labels: digits, MNIST, CIFAR, folders of yours, in batches on the device."""

from .batches import Batches
from .cards import DataCard, describe, names
from .checking import CheckReport, check
from .color import ColorJitter
from .errors import CorruptImageError, DataError, DataNotFoundError
from .finding import find_named
from .geometry import Crop, Cutout, Flip, ResizedCrop
from .image_data import IGNORE, ImageData
from .lazy import LazyImages
from .loading import load
from .mixing import CutMix, Mixup
from .pixels import read_image
from .places import cache_dir
from .rand_augment import RandAugment
from .recipes import build_augmentation
from .transform import Augmentation, Transform

__all__ = [
    "IGNORE",
    "Augmentation",
    "Batches",
    "CheckReport",
    "ColorJitter",
    "CorruptImageError",
    "Crop",
    "CutMix",
    "Cutout",
    "DataCard",
    "DataError",
    "DataNotFoundError",
    "Flip",
    "ImageData",
    "LazyImages",
    "Mixup",
    "RandAugment",
    "ResizedCrop",
    "Transform",
    "build_augmentation",
    "cache_dir",
    "check",
    "describe",
    "find_named",
    "load",
    "names",
    "read_image",
]
