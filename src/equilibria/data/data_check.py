"""``check``: read a whole data set and compare it with what is known of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from equilibria.engine.optional import needs

from .catalog import DataCard, describe, names
from .decoding import LazyImages
from .image_data import ImageData
from .loader import load
from .sources import IGNORE, PartMissingError

if TYPE_CHECKING:
    from rich.table import Table

_TOLERANCE = 1e-3  # of the means, in units of 0–255: they are known to three digits


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
        """Whether everything is as expected."""
        return all(finding.ok for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"name": self.name, "ok": self.ok, "findings": [asdict(f) for f in self.findings]}

    def table(self) -> Table:
        """The same as a rich table."""
        with needs("rich", "The table of a check"):
            from rich.table import Table
        table = Table("split", "what", "found", "expected", "", title=self.name)
        for f in self.findings:
            table.add_row(
                f.split, f.what, f.found, f.expected, "ok" if f.ok else "[red]wrong[/red]"
            )
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
    if data.task == "classification" and not isinstance(data.targets, LazyImages):
        sizes = torch.bincount(data.targets, minlength=data.num_classes)
        least, most = int(sizes.min()), int(sizes.max())
        found.append(one("images a class", f"{least:,} to {most:,}", "none empty", least > 0))
    elif not isinstance(data.targets, LazyImages):  # masks of a lazy set are checked when read
        ignored = float(torch.eq(data.targets, IGNORE).double().mean())
        found.append(one("pixels ignored", f"{ignored:.1%}", ok=True))
    mean = [255 * m for m in data.measure()[0]]
    known = card.train_mean if card is not None and split == "train" else ()
    close = all(abs(a - b) < _TOLERANCE for a, b in zip(mean, known, strict=False))
    shown, wanted = (", ".join(f"{value:.3f}" for value in values) for values in (mean, known))
    return [*found, one("mean of 255", shown, wanted, close)]
