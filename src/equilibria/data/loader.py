"""``load``: a data set by name or folder, from the folder you name, the cache, or the hub.

``check`` reads all of one and compares it with what is known of it.
"""

from __future__ import annotations

import os
import urllib.parse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equilibria.engine.optional import needs

from .catalog import DataCard, describe, names, resolve_split, split_of
from .classic import read_cifar_batches, read_digits, read_idx
from .decoding import LazyImages, OnCorrupt, decode
from .folders import read_camvid, read_cityscapes, read_class_folders
from .image_data import ImageData
from .parquet import read_parquet
from .sampling import held_out
from .sources import (
    CACHE_VARIABLE,
    IGNORE,
    DataError,
    DataNotFoundError,
    Found,
    PartMissingError,
    cache_dir,
)

if TYPE_CHECKING:
    from rich.table import Table

HUB_VARIABLE = "HF_ENDPOINT"
_TOLERANCE = 1e-3  # of the means, in units of 0–255: they are known to three digits
_FOLDER = DataCard(name="folder", text="a folder of class folders", num_classes=2)
_LAYOUTS: dict[str, Callable[[Path, str, DataCard | None], Found | None]] = {
    "Parquet files": read_parquet,
    "CIFAR batches": read_cifar_batches,
    "idx files": read_idx,
    "train and trainannot": read_camvid,
    "leftImg8bit and gtFine": read_cityscapes,
    "class folders": read_class_folders,
}
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
        root: a folder that holds the files of the named set, or a folder with its name.
        download: fetch what is in neither ``root`` nor the cache from the hub, into ``root`` if
            given.
        image_size: of the middle square (classification) or the shorter side (segmentation) after
            resizing, or (height, width). None: what is usual for the set, or as the files are.
        on_corrupt: "raise" names the first image that cannot be read; "skip" leaves such images out
            and warns once.
        progress: show a bar while decoding or downloading.
        channels: 1 (gray) or 3 (color); None: what is usual for the set, color for folders.
        lazy: decode by the batch, not at once. None: when the split is larger than 4 GiB.
        cache: keep a decoded copy in the cache, and use one that is there.
    """
    if on_corrupt not in ("raise", "skip"):
        raise ValueError(f"on_corrupt={on_corrupt!r}: expected 'raise' or 'skip'.")
    if channels not in (None, 1, 3):
        raise ValueError(f"channels={channels!r}: expected 1 (gray), 3 (color) or None.")
    split_of(split)
    if isinstance(name, str) and name in names():
        card = describe(name)
        found = find_named(name, split, None if root is None else Path(root), download, progress)
    elif root is not None:
        raise ValueError(
            f"root={os.fspath(root)!r} goes with the name of a data set, and {str(name)!r} is a "
            f"folder. Names: {', '.join(names())}."
        )
    else:
        card, found = _FOLDER, _find_folder(Path(name), split)
    size = card.image_size
    if image_size is not None:
        size = _side(image_size, square=card.task == "classification")
    if channels is None:
        channels = found.images.shape[1] if isinstance(found.images, Tensor) else card.channels
    images, targets, found = decode(
        found, card.task, str(name), channels, size, on_corrupt, lazy, cache, progress
    )
    # Statistics of color for gray, or the other way: near enough, and the same every time.
    mean, std = (
        values if len(values) == channels else (sum(values) / len(values),) * channels
        for values in (card.mean, card.std)
    )
    return ImageData(
        images=images,
        targets=targets,
        classes=found.classes,
        name=str(name),
        split_name=found.split,
        mean=mean,
        std=std,
        task=card.task,
        ignore_index=IGNORE if card.task == "segmentation" else None,
        superclasses=found.superclasses,
        superclass_names=found.superclass_names,
    )


def _side(image_size: int | Sequence[int], square: bool) -> int:
    """The side that is meant: of the square, or the shorter one of a scene."""
    pair = list(image_size) if isinstance(image_size, Sequence) else [image_size, image_size]
    fits = len(pair) == 2 and all(type(n) is int and 1 <= n <= 8192 for n in pair)
    if not fits or (square and pair[0] != pair[1]):
        raise ValueError(
            f"image_size={image_size!r}: expected a number of pixels from 1 to 8192; images to "
            "classify are square."
        )
    return min(pair)


def find_named(
    name: str, split: str, root: Path | None = None, download: bool = False, progress: bool = False
) -> Found:
    """The split of a named set, not yet decoded, from the first place that has it."""
    card = describe(name)
    if name == "digits":
        return _part(read_digits(), split, name)
    places = {cache_dir(): f"the cache {cache_dir() / name} (set by the variable {CACHE_VARIABLE})"}
    if root is not None:
        root = root.expanduser()
        if not root.is_dir() and not download:
            raise DataNotFoundError(f"root={str(root)!r}: there is no such folder.")
        places = {root: f"the folder {root} (root=…)", **places}
    # A download that was interrupted goes on; a split that no copy has is an error at once.
    fetches = download and bool(card.hub) and split_of(split) in (*card.splits, "test")
    tried = []
    for place, text in places.items():
        try:
            found = _inside(place, split, card)
            if found is not None:
                return found
            tried.append(text)
        except PartMissingError as error:
            if not fetches:
                raise
            tried.append(f"{text}: {error}")
    if download:
        target = (cache_dir() if root is None else root) / name
        try:
            fetch(card, target, progress=progress)
            found = _inside(target, split, card)
            if found is not None:
                return found
            tried.append(f"the hub: {card.hub} has no split {split}")
        except DataNotFoundError as error:
            tried.append(f"the hub (set by the variable {HUB_VARIABLE}): {error}")
    elif card.hub:
        tried.append(
            f"the hub, {card.hub}: not asked; pass download=True, or run "
            f"`equilibria data download {name}`, to fetch it from there"
        )
    else:
        tried.append(f"the hub: does not have it, {card.hub_note}")
    listed = "\n".join(f"  - {place}" for place in tried)
    raise DataNotFoundError(
        f"{name} ({split}) was not found. Tried:\n{listed}\nThe folder of the data "
        f"(root; --data-root) may hold {', '.join(_LAYOUTS)}, in itself or in a folder {name} "
        "inside it. digits needs no files."
    )


def _find_folder(path: Path, split: str) -> Found:
    """The split of a folder of the user's own."""
    folder = path.expanduser()
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "is no folder"
        raise DataNotFoundError(
            f"{str(path)!r} {kind}, and no data set has that name. Known names: "
            f"{', '.join(names())}; or a folder with one folder of images for each class."
        )
    there = sorted(p.name for p in folder.iterdir())
    if not there:
        raise DataNotFoundError(f"{folder} is empty; expected one folder of images for each class.")
    found = _first((folder, folder / "data"), split, None)
    if found is None:
        raise DataError(
            f"{folder} holds no data that can be read (it holds: {', '.join(there[:6])}); expected "
            "one folder of images for each class, or Parquet files with an image and a label."
        )
    return _part(found, split, str(path)) if found.split == "all" else found


def _part(found: Found, asked: str, where: str) -> Found:
    """The split of a set that comes without: a fifth of each class is test, the rest train."""
    split = resolve_split(asked, ("train", "test"), where)
    test = held_out(found.targets, len(found.images), 0.2, seed=0)
    return found.chosen((test if split == "test" else ~test).nonzero().flatten(), split)


def _inside(root: Path, split: str, card: DataCard) -> Found | None:
    """The split from a folder, or from a folder in it that has the name of the set."""
    inner = ("", *_INNER.get(card.name, ()))
    folders = [base / part for base in (root / card.name, root) for part in inner]
    return _first([folder for folder in folders if folder != cache_dir()], split, card)


def _first(folders: Sequence[Path], split: str, card: DataCard | None) -> Found | None:
    for folder in folders:
        for read in _LAYOUTS.values() if folder.is_dir() else ():
            found = read(folder, split, card)
            if found is not None:
                return found
    return None


def fetch(card: DataCard, folder: Path, *, progress: bool = True) -> None:
    """Fetch the Parquet files of ``card`` by huggingface_hub, and compare their checksums."""
    if not card.hub:
        raise DataNotFoundError(f"{card.name} cannot be downloaded: {card.hub_note}.")
    url = os.environ.get(HUB_VARIABLE, "").rstrip("/") or "https://huggingface.co"
    parts = urllib.parse.urlsplit(url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise DataError(f"{HUB_VARIABLE}={url}: expected an address that begins with https://")
    with needs("huggingface_hub", "download=True"):
        import huggingface_hub
        import huggingface_hub.utils
    utils: Any = huggingface_hub.utils  # its switch of the bars is not in its list of exports
    silenced = not progress and not utils.are_progress_bars_disabled()
    if silenced:
        utils.disable_progress_bars()
    here: dict[str, Any] = {"repo_type": "dataset", "local_dir": folder}
    pattern = f"{card.hub_folder}/*.parquet"
    try:
        huggingface_hub.snapshot_download(card.hub, allow_patterns=pattern, endpoint=url, **here)
        report = huggingface_hub.HfApi(endpoint=url).verify_repo_checksums(card.hub, **here)
    # The client may raise the errors of the HTTP library below it, which changed over the years.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataNotFoundError(f"{url}/datasets/{card.hub}: not fetched ({reason}).") from error
    finally:
        if silenced:
            utils.enable_progress_bars()
    wrong = [entry["path"] for entry in report.mismatches]
    for path in wrong:
        (folder / path).unlink()
    if wrong:
        raise DataError(
            f"{url}/datasets/{card.hub}: the bytes that came have another checksum than the hub "
            f"says, in {', '.join(wrong)}. They are deleted."
        )


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    split: str
    what: str
    found: str
    expected: str = ""
    ok: bool = True


@dataclass(frozen=True)
class CheckReport:
    """What was found in a data set, and whether it is what it should be."""

    name: str
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "findings": [asdict(f) for f in self.findings]}

    def table(self) -> Table:
        with needs("rich", "The table of a check"):
            from rich.table import Table
        table = Table("split", "what", "found", "expected", "", title=self.name)
        for f in self.findings:
            verdict = "ok" if f.ok else "wrong"
            table.add_row(f.split, f.what, f.found, f.expected, verdict)
        return table

    def __str__(self) -> str:
        lines = [f"{self.name}: {'as expected' if self.ok else 'NOT as expected'}"]
        for f in self.findings:
            wrong = "" if f.ok else f"  WRONG, not {f.expected}"
            lines.append(f"{f.split:6} {f.what:16} {f.found}{wrong}")
        return "\n".join(lines)


def check(
    name: str | Path,
    root: str | Path | None = None,
    *,
    image_size: int | Sequence[int] | None = None,
    progress: bool = True,
) -> CheckReport:
    """Read every image of every split: counts, classes, unreadable images, channel means.

    ``image_size`` is for folders whose images differ in size; it changes no finding but the means.
    """
    card = describe(name) if isinstance(name, str) and name in names() else None
    options: dict[str, Any] = {"root": root, "image_size": image_size, "progress": progress}
    findings: list[Finding] = []
    for split in card.splits if card is not None else ("train", "val", "test"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                data = load(name, split, on_corrupt="skip", **options)
            except PartMissingError:
                if card is not None:
                    raise
                continue  # a folder may lack a split
        if data.split_name == split or card is not None:
            skipped = [str(w.message) for w in seen if "skipped" in str(w.message)]
            findings += _findings(data, card, split, skipped)
    return CheckReport(str(name), tuple(findings))


def _findings(
    data: ImageData, card: DataCard | None, split: str, skipped: list[str]
) -> list[Finding]:
    def one(what: str, found: str, expected: str = "", ok: bool | None = None) -> Finding:
        return Finding(split, what, found, expected, found == expected if ok is None else ok)

    count, classes = f"{len(data):,}", str(data.num_classes)
    found = [
        one("images", count, f"{card.counts[split]:,}" if card else count),
        one("unreadable", skipped[0] if skipped else "none", "none"),
        one("size", "×".join(str(n) for n in data.images.shape[1:]), ok=True),
        one("classes", classes, str(card.num_classes) if card else classes),
    ]
    if isinstance(data.targets, LazyImages):
        pass  # masks of a lazy set are checked when read
    elif data.task == "classification":
        sizes = torch.bincount(data.targets, minlength=data.num_classes)
        least, most = int(sizes.min()), int(sizes.max())
        found.append(one("images per class", f"{least:,} to {most:,}", "none empty", least > 0))
    else:
        ignored = float(torch.eq(data.targets, IGNORE).double().mean())
        found.append(one("pixels ignored", f"{ignored:.1%}", ok=True))
    mean = [255 * m for m in data.measure()[0]]
    known = card.train_mean if card is not None and split == "train" else ()
    close = all(abs(a - b) < _TOLERANCE for a, b in zip(mean, known, strict=False))
    shown, wanted = (", ".join(f"{value:.3f}" for value in values) for values in (mean, known))
    return [*found, one("mean of 255", shown, wanted, close)]
