"""Images in folders: ``train/cat/1.png``, or ``cat/1.png`` alone; images beside masks."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import torch
from torch import Tensor

from .catalog import CITYSCAPES_IDS, IMAGENETTE_WNIDS, DataCard, camvid_ids, resolve_split, split_of
from .sources import IGNORE, DataError, Found

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_SPLITS = ("train", "training", "val", "valid", "validation", "test")


def read_class_folders(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the class folders in ``folder``; None where there are none.

    Classes are numbered in the order of their folders' names, by the training split where there is
    one. A folder without splits is one set ("all"); ``load`` splits it.
    """
    named = {name: _class_folders(folder / name) for name in _SPLITS if (folder / name).is_dir()}
    # A folder called train may be a class among others: then it has no folders of images. And
    # images that wait for their labels are no class.
    known = set(named.get("training", named.get("train", {"images"})))
    named = {
        name: found
        for name, found in named.items()
        if _any_image(found) and (set(found) != {"images"} or set(found) == known)
    }
    parts = {split_of(name): found for name, found in named.items()}
    if len(parts) < len(named):
        both = ", ".join(named)
        raise DataError(f"{folder} has one split under two names ({both}): keep one of them.")
    if parts:
        split = resolve_split(asked, tuple(parts), str(folder))
        inside, classes = parts[split], tuple(parts.get("train", parts[split]))
    else:
        split, inside = "all", _class_folders(folder)
        classes = tuple(inside)
        if card is not None or not _any_image(inside):
            return None
    extra = [name for name in inside if name not in classes]
    if extra:
        raise DataError(
            f"{folder}: {split} has {len(extra)} class(es) that train does not have: "
            f"{', '.join(extra[:5])}."
        )
    images = {name: sorted(files_in(path)) for name, path in inside.items()}
    empty = [path for name, path in inside.items() if not images[name]]
    if empty:
        kinds = ", ".join(sorted(SUFFIXES))
        raise DataError(f"{empty[0]}: the class {empty[0].name!r} has no image ({kinds}).")
    if len(classes) < 2:
        raise DataError(
            f"{folder}: one class only ({classes[0]}); to tell classes apart there must be two at "
            "least, each in a folder of its own."
        )
    paths = tuple(path for group in images.values() for path in group)
    labels = [k for name, group in images.items() for k in [classes.index(name)] * len(group)]
    shown = tuple(IMAGENETTE_WNIDS.get(name, name) for name in classes)
    return Found(paths, torch.tensor(labels), shown, split, paths)


def _class_folders(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.iterdir() if path.is_dir())
    return {path.name: path for path in paths if not path.name.startswith((".", "__"))}


def files_in(folder: Path, suffixes: Set[str] = SUFFIXES) -> Iterator[Path]:
    """The files of these endings in a folder and those in it, without what is hidden."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in suffixes and not hidden:
            yield path


def _any_image(classes: dict[str, Path]) -> bool:
    return any(True for folder in classes.values() for _ in files_in(folder))


def read_camvid(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """CamVid in the SegNet tutorial's folders: ``train/1.png`` and ``trainannot/1.png``."""
    if card is None or card.name != "camvid":
        return None
    there = tuple(s for s in ("train", "val", "test") if (folder / f"{s}annot").is_dir())
    if not there:
        return None
    split = resolve_split(asked, there, str(folder))
    images = sorted(p for p in files_in(folder / split) if p.parent == folder / split)
    masks = [folder / f"{split}annot" / path.name for path in images]
    return _paired(images, masks, folder / split, split, card, camvid_ids())


def read_cityscapes(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """Cityscapes: ``leftImg8bit/train/*/*_leftImg8bit.png`` with ``gtFine/…_labelIds.png``.

    Labels of the test split are withheld, so "test" is the validation split.
    """
    if card is None or card.name != "cityscapes" or not (folder / "leftImg8bit").is_dir():
        return None
    split = resolve_split(asked, card.splits, card.name)
    images = sorted((folder / "leftImg8bit" / split).glob("*/*_leftImg8bit.png"))
    masks = [
        folder / "gtFine" / split / path.parent.name
        / path.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
        for path in images
    ]  # fmt: skip
    # The 34 ids of labelIds.png to the 19 classes that count; all else to IGNORE.
    ids = torch.full((256,), IGNORE, dtype=torch.long)
    ids[list(CITYSCAPES_IDS.values())] = torch.arange(len(CITYSCAPES_IDS))
    return _paired(images, masks, folder / "leftImg8bit" / split, split, card, ids)


def _paired(
    images: list[Path], masks: list[Path], where: Path, split: str, card: DataCard, ids: Tensor
) -> Found:
    if not images:
        raise DataError(f"{where}: there are no images.")
    alone = [pair for pair in zip(images, masks, strict=True) if not pair[1].is_file()]
    if alone:
        raise DataError(
            f"{where}: {len(alone)} of {len(images)} images have no mask; the first is "
            f"{alone[0][0]}, whose mask would be {alone[0][1]}."
        )
    files = tuple(path for pair in zip(images, masks, strict=True) for path in pair)
    return Found(images, None, card.classes, split, files, masks, ids)
