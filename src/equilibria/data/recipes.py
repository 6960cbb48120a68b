"""Augmentations from a configuration: a list of names, each with its options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .color import ColorJitter
from .geometry import Crop, Cutout, Flip, ResizedCrop
from .mixing import CutMix, Mixup
from .rand_augment import RandAugment
from .transform import Augmentation, Transform

__all__ = ["build_augmentation"]

_KINDS: dict[str, type[Transform]] = {
    "crop": Crop,
    "flip": Flip,
    "cutout": Cutout,
    "resized_crop": ResizedCrop,
    "color_jitter": ColorJitter,
    "rand_augment": RandAugment,
    "mixup": Mixup,
    "cutmix": CutMix,
}


def build_augmentation(
    parts: Sequence[str | Mapping[str, Any] | Transform], *, num_classes: int | None = None
) -> Augmentation | None:
    """``["crop", "flip", {"cutout": {"size": 8}}]`` as an Augmentation; None for an empty list.

    ``num_classes`` is given to the parts that mix labels. Names may be written as the classes are,
    too: ``RandAugment`` is ``rand_augment``.
    """
    made = [part if isinstance(part, Transform) else _made(part, num_classes) for part in parts]
    return Augmentation(made) if made else None


def _made(part: Any, num_classes: int | None) -> Transform:
    if isinstance(part, str):
        name, chosen = part, {}
    elif isinstance(part, Mapping) and len(part) == 1:
        ((name, given),) = part.items()
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"augmentation {name}: options are a mapping, got {given!r}.")
        chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in (given or {}).items()}
    else:
        raise TypeError(f"an augmentation is a name or {{name: options}}, got {part!r}.")
    key = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower().replace("-", "_")
    key = {"cut_mix": "cutmix", "mix_up": "mixup", "cut_out": "cutout"}.get(key, key)
    kind = _KINDS.get(key)
    if kind is None:
        close = difflib.get_close_matches(key, _KINDS, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"there is no augmentation {name!r}.{hint} Known: {', '.join(_KINDS)}.")
    if kind in (Mixup, CutMix) and num_classes is not None:
        chosen.setdefault("num_classes", num_classes)
    return kind(**chosen)
