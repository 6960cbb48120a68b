"""Where a named data set is: the folder the user names, the cache, the hub, in this order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .cards import DataCard, describe, names
from .encoded import Found
from .errors import DataError, DataNotFoundError
from .from_batches import read_cifar_batches
from .from_digits import read_digits
from .from_folders import read_class_folders
from .from_idx import read_idx
from .from_pairs import read_camvid, read_cityscapes
from .from_parquet import read_parquet
from .hub import HUB_VARIABLE, download, endpoint
from .places import CACHE_VARIABLE, cache_dir

__all__ = ["find_folder", "find_named"]

Reader = Callable[[Path, str, DataCard | None], Found | None]

_LAYOUTS: tuple[tuple[str, Reader], ...] = (
    ("Parquet files", read_parquet),
    ("CIFAR batches", read_cifar_batches),
    ("idx files", read_idx),
    ("train and trainannot", read_camvid),
    ("leftImg8bit and gtFine", read_cityscapes),
    ("class folders", read_class_folders),
)
# The folders that archives unpack to, tried inside a folder that is named.
_INNER = {
    "mnist": ("mnist", "MNIST/raw", "raw"),
    "cifar10": ("plain_text", "cifar-10-batches-py", "cifar-10-batches-bin"),
    "cifar100": ("cifar100", "cifar-100-python", "cifar-100-binary"),
    "imagenette": ("imagenette2-320", "imagenette2", "imagenette2-160", "320px", "data"),
    "imagenet-100": ("imagenet100", "ImageNet100", "data"),
    "tiny-imagenet": ("tiny-imagenet-200", "data"),
    "camvid": ("CamVid", "data"),
    "cityscapes": ("data",),
}


def find_named(
    name: str, split: str, root: Path | None, download_it: bool, progress: bool
) -> Found:
    """The split of a named set, from the first place that has it."""
    card = describe(name)
    if name == "digits":
        return read_digits(split)
    tried: list[str] = []
    if root is not None:
        root = root.expanduser()
        if not root.is_dir() and not download_it:
            raise DataNotFoundError(f"root={str(root)!r}: there is no such folder.")
        found = _inside(root, split, card)
        if found is not None:
            return found
        tried.append(f"the folder {root} (root=…)")
    found = _inside(cache_dir(), split, card)
    if found is not None:
        return found
    tried.append(f"the cache {cache_dir() / name} (set by the variable {CACHE_VARIABLE})")
    if download_it:
        target = (root if root is not None else cache_dir()) / name
        try:
            download(card, target, progress=progress)
        except DataNotFoundError as error:
            tried.append(f"the hub (set by the variable {HUB_VARIABLE}): {error}")
        else:
            found = _inside(target, split, card)
            if found is not None:
                return found
            tried.append(f"the hub: {endpoint()}/datasets/{card.hub} has no split {split}")
    elif card.hub:
        tried.append(f"the hub, {card.hub}: not asked; pass download=True to fetch it from there")
    else:
        tried.append(f"the hub: does not have it, {card.hub_note}")
    places = "\n".join(f"  - {place}" for place in tried)
    forms = ", ".join(label for label, _ in _LAYOUTS)
    raise DataNotFoundError(
        f"{name} ({split}) was not found. Tried:\n{places}\nA folder may hold {forms}, in itself "
        f"or in a folder {name} inside it. digits needs no files."
    )


def find_folder(path: Path, split: str) -> Found:
    """The split of a folder of the user's own."""
    folder = path.expanduser()
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "is no folder"
        raise DataNotFoundError(
            f"{str(path)!r} {kind}, and no data set has that name. Known names: "
            f"{', '.join(names())}; or a folder with one folder of images for each class."
        )
    if next(folder.iterdir(), None) is None:
        raise DataNotFoundError(f"{folder} is empty; expected one folder of images for each class.")
    for inner in (folder, folder / "data"):
        if inner.is_dir():
            for _, read in _LAYOUTS:
                found = read(inner, split, None)
                if found is not None:
                    return found
    there = ", ".join(sorted(p.name for p in folder.iterdir())[:6])
    raise DataError(
        f"{folder} holds no data that can be read (it holds: {there}); expected one folder of "
        "images for each class, or Parquet files with an image and a label."
    )


def _inside(root: Path, split: str, card: DataCard) -> Found | None:
    """The split from a folder, or from a folder in it that is called like the set."""
    for base in (root / card.name, root):
        for folder in (base, *(base / inner for inner in _INNER.get(card.name, ()))):
            if not folder.is_dir() or (folder == cache_dir()):
                continue
            for _, read in _LAYOUTS:
                found = read(folder, split, card)
                if found is not None:
                    return found
    return None
