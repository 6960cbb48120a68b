"""A split from Parquet files in the hub's layout: ``train-00000-of-00002.parquet`` and so on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .cards import DataCard, resolve_split
from .class_names import CAMVID_VOID
from .encoded import Found
from .errors import DataError
from .image_data import IGNORE
from .parquet_columns import ImageColumn, Schema, label_column, read_schema

__all__ = ["camvid_ids", "parquet_files", "read_parquet"]

_STEMS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_IMAGES = ("img", "image", "images")
_LABELS = ("label", "fine_label", "labels", "target")
_MASKS = ("mask", "label", "annotation", "segmentation")
_COARSE = "coarse_label"


def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split; under "" those that name no split."""
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]):
        inside = file.parent != folder
        named = file.parent.name if inside else file.name
        for split, stems in _STEMS.items():
            end = r"$" if inside else r"([-_.]\d.*)?\.parquet$"
            if re.match(rf"({'|'.join(stems)}){end}", named):
                found.setdefault(split, []).append(file)
                break
        else:
            if not inside:
                found.setdefault("", []).append(file)
    return found


def read_parquet(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the Parquet files in ``folder``; None where there are none.

    Files of the user's own that name no split are one set ("all"); ``load`` splits it.
    """
    groups = parquet_files(folder)
    named = {split: files for split, files in groups.items() if split}
    if not named and (card is not None or not groups):
        return None
    if named:
        split = resolve_split(asked, tuple(named), str(folder))
        files = named[split]
    else:
        split, files = "all", groups[""]
    _check_shards(files)
    schema = read_schema(files)
    if sum(schema.rows) == 0:
        raise DataError(f"{files[0]}: the {split} split has no rows.")
    image = _choose(schema, schema.images(), _IMAGES, "an image column", files[0])
    if card is not None and card.task == "segmentation":
        return _segmentation(schema, image, split, card)
    label = _choose(schema, schema.labels(), _LABELS, "a column of integer labels", files[0])
    labels = label_column(schema, label)
    classes = schema.class_names(label) or (card.classes if card is not None else ())
    if not classes:
        highest = card.num_classes if card is not None else int(labels.max()) + 1
        classes = tuple(str(k) for k in range(highest))
    if len(classes) < 2:
        raise DataError(f"{files[0]}: one class only; to tell classes apart there must be two.")
    _check_labels(labels, len(classes), schema, label)
    above: Tensor | None = None
    above_names: tuple[str, ...] = ()
    if _COARSE in schema.labels():
        above = label_column(schema, _COARSE)
        above_names = schema.class_names(_COARSE) or (card.superclasses if card else ())
        above_names = above_names or tuple(str(k) for k in range(int(above.max()) + 1))
        _check_labels(above, len(above_names), schema, _COARSE)
    return Found(
        images=ImageColumn(schema, image),
        targets=labels,
        classes=classes,
        split=split,
        files=tuple(files),
        superclasses=above,
        superclass_names=above_names,
    )


def camvid_ids() -> Tensor:
    """Values of CamVid's masks to classes: 0–10 as they are, 11 (void) and 255 to IGNORE.

    Any other value becomes −1, which no set accepts.
    """
    table = torch.full((256,), -1, dtype=torch.long)
    table[:CAMVID_VOID] = torch.arange(CAMVID_VOID)
    table[CAMVID_VOID] = IGNORE
    table[255] = IGNORE
    return table


def _segmentation(schema: Schema, image: str, split: str, card: DataCard) -> Found:
    others = [column for column in schema.images() if column != image]
    mask = _choose(schema, others, _MASKS, "a second image column with the masks", schema.files[0])
    return Found(
        images=ImageColumn(schema, image),
        targets=None,
        masks=ImageColumn(schema, mask),
        mask_ids=camvid_ids(),
        classes=card.classes,
        split=split,
        files=schema.files,
    )


def _choose(
    schema: Schema, fitting: Sequence[str], usual: Sequence[str], wanted: str, file: Path
) -> str:
    """The column with a usual name, or the only one that fits."""
    for name in usual:
        if name in fitting:
            return name
    if len(fitting) == 1:
        return fitting[0]
    raise DataError(
        f"{file} has no {wanted.split(' ', 1)[1]}: expected {' or '.join(usual)}; "
        f"its columns are {', '.join(schema.columns)}."
        if not fitting
        else f"{file}: which of {', '.join(fitting)} is {wanted}? Rename it to {usual[0]}."
    )


def _check_labels(labels: Tensor, classes: int, schema: Schema, column: str) -> None:
    wrong = (labels < 0) | (labels >= classes)
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    value = int(labels[row])
    why = " The split has no labels." if value == -1 and bool((labels == -1).all()) else ""
    raise DataError(
        f"{ImageColumn(schema, column).name(row)}: {column} is {value}, and there are {classes} "
        f"classes: labels go from 0 to {classes - 1}.{why}"
    )


def _check_shards(files: Sequence[Path]) -> None:
    """Raise where a set says it has more parts than there are."""
    for file in files:
        match = re.search(r"-(\d{5})-of-(\d{5})", file.name)
        if match is None:
            continue
        there = {found[1] for f in files if (found := re.search(r"-(\d{5})-of-\d{5}", f.name))}
        missing = [k for k in range(int(match[2])) if f"{k:05d}" not in there]
        if missing:
            name = file.name.replace(f"-{match[1]}-of", f"-{missing[0]:05d}-of")
            raise DataError(
                f"{file.parent} holds {len(there)} of {int(match[2])} parts; missing: {name}. "
                "Fetch it again."
            )
