"""Images beside masks: CamVid's train and trainannot, Cityscapes' leftImg8bit and gtFine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .cards import DataCard, resolve_split
from .class_names import CITYSCAPES_IDS
from .encoded import IMAGE_SUFFIXES, Files, Found
from .errors import DataError
from .from_parquet import camvid_ids
from .image_data import IGNORE

__all__ = ["cityscapes_ids", "read_camvid", "read_cityscapes"]


def read_camvid(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """CamVid in the SegNet tutorial's folders: ``train/1.png`` and ``trainannot/1.png``."""
    if card is None or card.name != "camvid":
        return None
    there = tuple(s for s in ("train", "val", "test") if (folder / f"{s}annot").is_dir())
    if not there:
        return None
    split = resolve_split(asked, there, str(folder))
    images = sorted(p for p in (folder / split).glob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
    pairs = [(path, folder / f"{split}annot" / path.name) for path in images]
    return _paired(pairs, folder / split, split, card, camvid_ids())


def read_cityscapes(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """Cityscapes: ``leftImg8bit/train/*/*_leftImg8bit.png`` with ``gtFine/…_labelIds.png``.

    Labels of the test split are withheld, so "test" is the validation split.
    """
    if card is None or card.name != "cityscapes" or not (folder / "leftImg8bit").is_dir():
        return None
    split = resolve_split(asked, card.splits, card.name)
    top = folder / "leftImg8bit" / split
    pairs = []
    for path in sorted(top.glob("*/*_leftImg8bit.png")):
        stem = path.name.removesuffix("_leftImg8bit.png")
        mask = folder / "gtFine" / split / path.parent.name / f"{stem}_gtFine_labelIds.png"
        pairs.append((path, mask))
    return _paired(pairs, top, split, card, cityscapes_ids())


def cityscapes_ids() -> Tensor:
    """The 34 ids of labelIds.png to the 19 classes that count; all else to IGNORE."""
    table = torch.full((256,), IGNORE, dtype=torch.long)
    table[list(CITYSCAPES_IDS.values())] = torch.arange(len(CITYSCAPES_IDS))
    return table


def _paired(
    pairs: list[tuple[Path, Path]], where: Path, split: str, card: DataCard, ids: Tensor
) -> Found:
    if not pairs:
        raise DataError(f"{where}: there are no images.")
    alone = [image for image, mask in pairs if not mask.is_file()]
    if alone:
        raise DataError(
            f"{where}: {len(alone)} of {len(pairs)} images have no mask; the first is {alone[0]}, "
            f"whose mask would be {dict(pairs)[alone[0]]}."
        )
    return Found(
        images=Files([image for image, _ in pairs]),
        targets=None,
        masks=Files([mask for _, mask in pairs]),
        mask_ids=ids,
        classes=card.classes,
        split=split,
        files=tuple(path for pair in pairs for path in pair),
    )
