"""``load``: a data set by name or folder, found, decoded, checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from .cards import DataCard, describe, names, resolve_split, split_of
from .decoding import OnCorrupt, check_on_corrupt
from .encoded import Found
from .finding import find_folder, find_named
from .image_data import IGNORE, ImageData, Task
from .making import Decoder
from .splitting import held_out

__all__ = ["load"]

_FOLDER = DataCard(name="folder", text="a folder of class folders", num_classes=2)


def load(
    name: str | Path,
    split: str = "train",
    *,
    root: str | Path | None = None,
    download: bool = False,
    image_size: int | Sequence[int] | None = None,
    on_corrupt: OnCorrupt = "raise",
    progress: bool = True,
    channels: int | None = None,
    lazy: bool | None = None,
    cache: bool = True,
) -> ImageData:
    """A split of a data set, from the first place that has it: ``root``, the cache, the hub.

    Args:
        name: one of ``names()``, or a folder: class folders of images (in train, val and test, or
            one set of which a fifth is held out as test), Parquet files, CIFAR's or MNIST's own
            files. A ``Path`` is always a folder.
        split: train, val or test. Where test labels are withheld, test is val.
        root: a folder that holds the named set, or a folder called like it.
        download: fetch from the hub what is in neither ``root`` nor the cache; into ``root`` if it
            is given.
        image_size: classification: the middle square, resized to this; segmentation: the shorter
            side, resized to this. A pair (height, width), as saved with weights, says the same.
            None: what is usual for the set, or as the files are.
        on_corrupt: "raise" names the first image that cannot be read; "skip" leaves such images out
            and warns once.
        progress: show a bar while decoding or downloading.
        channels: 1 (gray) or 3 (color); what is usual for the set if None, color for folders.
        lazy: decode by the batch, not at once. None: when the split is larger than 4 GiB.
        cache: keep a decoded copy in the cache, and use one that is there.
    """
    check_on_corrupt(on_corrupt)
    split_of(split)
    if channels not in (None, 1, 3):
        raise ValueError(f"channels={channels!r}: expected 1 (gray), 3 (color) or None.")
    if isinstance(name, str) and name in names():
        card = describe(name)
        where = Path(root) if root is not None else None
        found = find_named(name, split, where, download, progress)
    else:
        if root is not None:
            raise ValueError(
                f"root={os.fspath(root)!r} goes with the name of a data set, and {str(name)!r} is "
                f"a folder. Names: {', '.join(names())}."
            )
        card = _FOLDER
        found = find_folder(Path(name), split)
        if found.split == "all":
            found = _part(found, split, str(name))
    size = card.image_size if image_size is None else _side(image_size, card.task)
    plain = found.images.shape[1] if isinstance(found.images, Tensor) else card.channels
    wanted = channels if channels is not None else plain
    made = Decoder(found, card.task, str(name), wanted, size, progress)
    images, targets, found = made.run(on_corrupt, lazy, cache)
    return ImageData(
        images=images,
        targets=targets,
        classes=found.classes,
        name=str(name),
        split_name=found.split,
        mean=_for_channels(card.mean, wanted),
        std=_for_channels(card.std, wanted),
        task=card.task,
        ignore_index=IGNORE if card.task == "segmentation" else None,
        superclasses=found.superclasses,
        superclass_names=found.superclass_names,
    )


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Statistics of color for gray, or the other way: near enough, and the same every time."""
    return values if len(values) == channels else (sum(values) / len(values),) * channels


def _side(image_size: int | Sequence[int], task: Task) -> int:
    """The side that is meant: of the square, or the shorter one of a scene."""
    pair = list(image_size) if isinstance(image_size, Sequence) else [image_size, image_size]
    fits = len(pair) == 2 and all(type(n) is int and 1 <= n <= 8192 for n in pair)
    if not fits or (task == "classification" and pair[0] != pair[1]):
        raise ValueError(
            f"image_size={image_size!r}: expected a number of pixels from 1 to 8192; images to "
            "classify are square."
        )
    return min(pair)


def _part(found: Found, asked: str, where: str) -> Found:
    """Of a folder without splits: a fifth of each class is test, the rest train."""
    split = resolve_split(asked, ("train", "test"), where)
    count = len(found.images)
    test = held_out(found.targets, count, 0.2, seed=0)
    return found.chosen((test if split == "test" else ~test).nonzero().flatten(), split)
