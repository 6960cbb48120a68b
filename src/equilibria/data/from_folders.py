"""Class folders: ``train/cat/1.png``, or ``cat/1.png`` alone; Tiny ImageNet's list as well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from .cards import DataCard, resolve_split
from .class_names import IMAGENETTE_WNIDS
from .encoded import IMAGE_SUFFIXES, Files, Found
from .errors import DataError

__all__ = ["read_class_folders"]

# "train.X1" … "train.X4" and "val.X": how ImageNet-100 is commonly packed.
_SPLITS = {
    "train": re.compile(r"(train|training)(\.X\d+)?$"),
    "val": re.compile(r"(val|valid|validation)(\.X\d*)?$"),
    "test": re.compile(r"test$"),
}


def read_class_folders(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the class folders in ``folder``; None where there are none.

    Classes are numbered in the order of their folders' names, by the training split where there is
    one. A folder without splits is one set ("all"); ``load`` splits it.
    """
    labelled = {
        split: folders
        for split, folders in _parts(folder).items()
        if _annotations(folders) is not None or _any_image(_class_folders(folders))
    }
    if not labelled:
        # A folder called train may be a class among others: nothing in it is labelled.
        inside = _class_folders([folder])
        if card is not None or not _any_image(inside):
            return None
        return _found(folder, inside, tuple(inside), "all", {})
    known = set(_class_folders(labelled["train"])) if "train" in labelled else {"images"}
    for split in [s for s, folders in labelled.items() if _annotations(folders) is None]:
        if set(_class_folders(labelled[split])) == {"images"} != known:
            del labelled[split]  # Tiny ImageNet's test images have no labels
    split = resolve_split(asked, tuple(labelled), str(folder))
    classes = tuple(_class_folders(labelled.get("train", labelled[split])))
    shown = _shown_names(folder, classes)
    annotations = _annotations(labelled[split])
    if annotations is not None:
        return _annotated(annotations, classes, split, shown)
    return _found(folder, _class_folders(labelled[split]), classes, split, shown)


def _parts(folder: Path) -> dict[str, list[Path]]:
    """The folders of each split."""
    found: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        for split, pattern in _SPLITS.items():
            if pattern.match(path.name):
                found.setdefault(split, []).append(path)
    return found


def _class_folders(folders: list[Path]) -> dict[str, list[Path]]:
    """The folders of each class, by name."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in folder.iterdir():
            if path.is_dir() and not path.name.startswith((".", "__")):
                found.setdefault(path.name, []).append(path)
    return dict(sorted(found.items()))


def _walk(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith("."):
                yield path


def _any_image(classes: Mapping[str, list[Path]]) -> bool:
    return any(next(_walk(folders), None) is not None for folders in classes.values())


def _found(
    where: Path,
    inside: Mapping[str, list[Path]],
    classes: tuple[str, ...],
    split: str,
    shown: Mapping[str, str],
) -> Found:
    _check_classes(where, classes)
    extra = [name for name in inside if name not in classes]
    if extra:
        raise DataError(
            f"{where}: {split} has {len(extra)} class(es) that train does not have: "
            f"{', '.join(extra[:5])}."
        )
    number = {name: k for k, name in enumerate(classes)}
    paths: list[Path] = []
    labels: list[int] = []
    for name, folders in inside.items():
        images = sorted(_walk(folders))
        if not images:
            kinds = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"{folders[0]}: the class {name!r} has no image ({kinds}).")
        paths += images
        labels += [number[name]] * len(images)
    return Found(
        images=Files(paths),
        targets=torch.tensor(labels),
        classes=tuple(shown.get(name, name) for name in classes),
        split=split,
        files=tuple(paths),
    )


def _check_classes(where: Path, classes: tuple[str, ...]) -> None:
    if len(classes) < 2:
        raise DataError(
            f"{where}: one class only ({classes[0] if classes else 'none'}); to tell classes apart "
            "there must be two at least, each in a folder of its own."
        )


def _annotations(folders: list[Path]) -> Path | None:
    """Tiny ImageNet's list of its validation images."""
    path = folders[0] / "val_annotations.txt"
    return path if path.is_file() else None


def _annotated(file: Path, classes: tuple[str, ...], split: str, shown: Mapping[str, str]) -> Found:
    _check_classes(file.parent, classes)
    number = {name: k for k, name in enumerate(classes)}
    paths, labels = [], []
    for line, text in enumerate(file.read_text("utf-8").splitlines(), 1):
        fields = text.split("\t")
        # Names come from a file: only a plain name stays inside the folder.
        if len(fields) < 2 or fields[1] not in number or Path(fields[0]).name != fields[0]:
            raise DataError(f"{file} line {line}: expected 'image.JPEG<tab>class', got {text!r}.")
        paths.append(file.parent / "images" / fields[0])
        labels.append(number[fields[1]])
    if not paths:
        raise DataError(f"{file}: the list is empty.")
    return Found(
        images=Files(paths),
        targets=torch.tensor(labels),
        classes=tuple(shown.get(name, name) for name in classes),
        split=split,
        files=(file, *(path for path in paths if path.exists())),
    )


def _shown_names(folder: Path, classes: tuple[str, ...]) -> dict[str, str]:
    """Words for WordNet ids, where the set comes with them."""
    found = dict(IMAGENETTE_WNIDS)
    words, labels = folder / "words.txt", folder / "Labels.json"
    if words.is_file():
        wanted = set(classes)
        for text in words.read_text("utf-8").splitlines():
            key, _, word = text.partition("\t")
            if key in wanted and word:
                found[key] = word.split(",")[0]
    if labels.is_file():
        try:
            table = json.loads(labels.read_text("utf-8"))
            found |= {str(k): str(v).split(",")[0] for k, v in table.items()}
        except (ValueError, AttributeError) as error:
            raise DataError(f"{labels} is not a JSON object of names ({error}).") from error
    # Two ids may share a word (there are two cranes): then the ids stay.
    taken = [found.get(name, name) for name in classes]
    return {n: found[n] for n in classes if n in found and taken.count(found[n]) == 1}
