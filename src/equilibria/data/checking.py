"""``check``: read a whole data set and compare what is known of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .cards import DataCard, describe, names
from .errors import DataError, missing_extra
from .image_data import IGNORE, ImageData
from .lazy import LazyImages
from .loading import load

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CheckReport", "Finding", "check"]

_TOLERANCE = 1e-3  # of the means, in units of 0–255: they are known to three digits


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    split: str
    what: str
    found: str
    expected: str
    ok: bool


@dataclass(frozen=True)
class CheckReport:
    """What was found in a data set, and whether it is what it should be."""

    name: str
    findings: tuple[Finding, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """Whether everything is as expected."""
        return all(finding.ok for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "name": self.name,
            "ok": self.ok,
            "findings": [dict(vars(finding)) for finding in self.findings],
        }

    def table(self) -> Table:
        """The same as a rich table."""
        try:
            from rich.table import Table
        except ImportError as error:
            raise missing_extra("rich", "The table of a check") from error
        table = Table("split", "what", "found", "expected", "", title=self.name)
        for f in self.findings:
            mark = "ok" if f.ok else "[red]wrong[/red]"
            table.add_row(f.split, f.what, f.found, f.expected, mark)
        return table

    def __str__(self) -> str:
        lines = [
            f"{f.split:6} {f.what:16} {f.found}" + ("" if f.ok else f"  WRONG, not {f.expected}")
            for f in self.findings
        ]
        return "\n".join(
            [f"{self.name}: {'as expected' if self.ok else 'NOT as expected'}", *lines]
        )


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
    known = isinstance(name, str) and name in names()
    card = describe(str(name)) if known else None
    findings: list[Finding] = []
    for split in card.splits if card is not None else ("train", "val", "test"):
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                data = load(
                    name,
                    split,
                    root=root,
                    on_corrupt="skip",
                    image_size=image_size,
                    progress=progress,
                )
        except DataError as error:
            # A folder may lack a split; all of them missing is told below.
            if card is not None or "has no split" not in str(error):
                raise
            continue
        if data.split_name == split or card is not None:
            skipped = [str(w.message) for w in seen if "skipped" in str(w.message)]
            findings += _findings(data, card, split, skipped)
    return CheckReport(str(name), tuple(findings))


def _findings(
    data: ImageData, card: DataCard | None, split: str, skipped: list[str]
) -> list[Finding]:
    def one(what: str, found: object, expected: object = "", ok: bool = True) -> Finding:
        return Finding(split, what, str(found), str(expected), ok)

    count = card.counts.get(split) if card is not None else None
    found = [
        one("images", f"{len(data):,}", f"{count:,}" if count else "", count in (None, len(data))),
        one("unreadable", skipped[0] if skipped else "none", "none", not skipped),
        one("size", "×".join(str(n) for n in data.images.shape[1:])),
        one("classes", data.num_classes, card.num_classes if card else "",
            card is None or card.num_classes == data.num_classes),
    ]  # fmt: skip
    if isinstance(data.targets, LazyImages):
        pass  # masks of a lazy set are checked as they are read
    elif data.task == "classification":
        sizes = torch.bincount(data.targets, minlength=data.num_classes)
        empty = [data.classes[k] for k in (sizes == 0).nonzero().flatten().tolist()]
        found.append(one("images a class", f"{int(sizes.min()):,} to {int(sizes.max()):,}",
                         "none empty", not empty))  # fmt: skip
    else:
        ignored = float(torch.eq(data.targets, IGNORE).double().mean())
        found.append(one("pixels ignored", f"{ignored:.1%}"))
    mean = [255 * m for m in data.measure()[0]]
    expected = card.train_mean if card is not None and split == "train" else ()
    close = not expected or all(
        abs(a - b) < _TOLERANCE for a, b in zip(mean, expected, strict=True)
    )
    found.append(one("mean of 255", _numbers(mean), _numbers(expected), close))
    return found


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
