"""Data sets: found on disk or fetched, decoded, checked, and made into batches on the device.

What belongs here: a reader of a layout of files, the facts of a data set (catalog.py), an
augmentation. What does not: models, losses, metrics.
"""

from .augmentation import (
    Augmentation,
    ColorJitter,
    Crop,
    CutMix,
    Cutout,
    Flip,
    Mixup,
    RandAugment,
    ResizedCrop,
    Transform,
    build_augmentation,
)
from .batches import Batches
from .catalog import DataCard, describe, names
from .decoding import LazyImages, read_image
from .image_data import ImageData
from .loader import CheckReport, check, find_named, load
from .sampling import held_out
from .sources import IGNORE, CorruptImageError, DataError, DataNotFoundError, cache_dir

# fmt: off
__all__ = [
    "IGNORE", "Augmentation", "Batches", "CheckReport", "ColorJitter", "CorruptImageError", "Crop",
    "CutMix", "Cutout", "DataCard", "DataError", "DataNotFoundError", "Flip", "ImageData",
    "LazyImages", "Mixup", "RandAugment", "ResizedCrop", "Transform", "build_augmentation",
    "cache_dir", "check", "describe", "find_named", "held_out", "load", "names", "read_image",
]
