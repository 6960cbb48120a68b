"""Images in folders: ``train/cat/1.png``, or ``cat/1.png`` alone; images beside masks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .catalog import CITYSCAPES_IDS, IMAGENETTE_WNIDS, DataCard, resolve_split
from .parquet import camvid_ids
from .sources import IGNORE, IMAGE_SUFFIXES, DataError, Found

# "train.X1" … "train.X4" and "val.X": how ImageNet-100 is commonly packed.
_SPLITS = {
    "train": r"(train|training)(\.X\d+)?",
    "val": r"(val|valid|validation)(\.X\d*)?",
    "test": r"test",
}
Folders = dict[str, list[Path]]


def read_class_folders(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the class folders in ``folder``; None where there are none.

    Classes are numbered in the order of their folders' names, by the training split where there is
    one. A folder without splits is one set ("all"); ``load`` splits it.
    """
    parts: Folders = {}
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        for split, pattern in _SPLITS.items():
            if re.fullmatch(pattern, path.name):
                parts.setdefault(split, []).append(path)
    inside = {split: _class_folders(folders) for split, folders in parts.items()}
    # Tiny ImageNet's list of its validation images.
    lists = {s: f[0] / "val_annotations.txt" for s, f in parts.items()}
    lists = {split: path for split, path in lists.items() if path.is_file()}
    labelled = {s: found for s, found in inside.items() if s in lists or _any_image(found)}
    if not labelled:
        # A folder called train may be a class among others: nothing in it is labelled.
        classes = _class_folders([folder])
        if card is not None or not _any_image(classes):
            return None
        return _found(
            folder, _images(folder, "all", classes, tuple(classes)), tuple(classes), "all"
        )
    known = set(labelled.get("train", {"images"}))
    for split in set(labelled) - set(lists):
        if set(labelled[split]) == {"images"} != known:
            del labelled[split]  # Tiny ImageNet's test images have no labels
    split = resolve_split(asked, tuple(labelled), str(folder))
    names = tuple(labelled.get("train", labelled[split]))
    if split in lists:
        rows = _listed(lists[split], names)
    else:
        rows = _images(folder, split, labelled[split], names)
    return _found(folder, rows, names, split)


def _class_folders(folders: list[Path]) -> Folders:
    """The folders of each class, by name."""
    found: Folders = {}
    for folder in folders:
        for path in folder.iterdir():
            if path.is_dir() and not path.name.startswith((".", "__")):
                found.setdefault(path.name, []).append(path)
    return dict(sorted(found.items()))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def _any_image(classes: Folders) -> bool:
    return any(_is_image(p) for group in classes.values() for f in group for p in f.rglob("*"))


def _images(
    where: Path, split: str, inside: Folders, classes: tuple[str, ...]
) -> list[tuple[Path, str]]:
    """Every image of a split and its class."""
    extra = [name for name in inside if name not in classes]
    if extra:
        raise DataError(
            f"{where}: {split} has {len(extra)} class(es) that train does not have: "
            f"{', '.join(extra[:5])}."
        )
    rows = []
    for name, folders in inside.items():
        images = sorted(p for folder in folders for p in folder.rglob("*") if _is_image(p))
        if not images:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"{folders[0]}: the class {name!r} has no image ({kinds}).")
        rows += [(path, name) for path in images]
    return rows


def _listed(file: Path, classes: tuple[str, ...]) -> list[tuple[Path, str]]:
    """The images of Tiny ImageNet's list and their classes."""
    rows = []
    for line, text in enumerate(file.read_text("utf-8").splitlines(), 1):
        fields = text.split("\t")
        # Names come from a file: only a plain name stays inside the folder.
        if len(fields) < 2 or fields[1] not in classes or Path(fields[0]).name != fields[0]:
            raise DataError(f"{file} line {line}: expected 'image.JPEG<tab>class', got {text!r}.")
        rows.append((file.parent / "images" / fields[0], fields[1]))
    if not rows:
        raise DataError(f"{file}: the list is empty.")
    return rows


def _found(
    where: Path, rows: list[tuple[Path, str]], classes: tuple[str, ...], split: str
) -> Found:
    if len(classes) < 2:
        raise DataError(
            f"{where}: one class only ({classes[0] if classes else 'none'}); to tell classes apart "
            "there must be two at least, each in a folder of its own."
        )
    number = {name: k for k, name in enumerate(classes)}
    shown = _shown_names(where, classes) if split != "all" else {}
    paths = [path for path, _ in rows]
    return Found(
        paths,
        torch.tensor([number[name] for _, name in rows]),
        tuple(shown.get(name, name) for name in classes),
        split,
        tuple(path for path in paths if path.exists()),
    )


def _shown_names(folder: Path, classes: tuple[str, ...]) -> Mapping[str, str]:
    """Words for WordNet ids, where the set comes with them."""
    found = dict(IMAGENETTE_WNIDS)
    words, labels = folder / "words.txt", folder / "Labels.json"
    if words.is_file():
        pairs = (text.partition("\t") for text in words.read_text("utf-8").splitlines())
        found |= {key: word.split(",")[0] for key, _, word in pairs if word}
    if labels.is_file():
        try:
            table = json.loads(labels.read_text("utf-8"))
            found |= {str(k): str(v).split(",")[0] for k, v in table.items()}
        except (ValueError, AttributeError) as error:
            raise DataError(f"{labels} is not a JSON object of names ({error}).") from error
    # Two ids may share a word (there are two cranes): then the ids stay.
    taken = [found.get(name, name) for name in classes]
    return {n: found[n] for n in classes if n in found and taken.count(found[n]) == 1}


def read_camvid(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """CamVid in the SegNet tutorial's folders: ``train/1.png`` and ``trainannot/1.png``."""
    if card is None or card.name != "camvid":
        return None
    there = tuple(s for s in ("train", "val", "test") if (folder / f"{s}annot").is_dir())
    if not there:
        return None
    split = resolve_split(asked, there, str(folder))
    images = sorted(path for path in (folder / split).glob("*") if _is_image(path))
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
