"""Superclasses (GEQ §4.3): learn them from some of their classes, judge on the others.

CIFAR-100 has 20 superclasses of five classes. A network learns to tell the superclasses apart from
the first four classes of each ("known"); the fifth ("unknown") is met in the test only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData

from .checks import check_whole
from .extras import rich_module
from .judging import judge
from .metrics import ClassificationMetrics
from .plain import plain
from .running import on_device

__all__ = ["SuperclassResult", "superclass_accuracy", "superclass_split"]


def _held_out(dataset: ImageData, seed: int | None, held_out: int) -> Tensor:
    """[K] bool: the classes that are not learned, the same for every split of the data set."""
    above = dataset.superclass_of
    if above is None or not dataset.superclass_names:
        raise ValueError(
            f"{dataset.name} has no superclasses; CIFAR-100 (data.load('cifar100')) has."
        )
    missing = [dataset.classes[k] for k in range(len(above)) if int(above[k]) < 0]
    if missing:
        raise ValueError(
            f"{dataset.name} ({dataset.split_name}) has no sample of {', '.join(missing[:5])}, so "
            "their superclass is not known: split the whole data set, not a part of it."
        )
    check_whole("held_out", held_out, 1)
    mask = torch.zeros(len(above), dtype=torch.bool)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for number, name in enumerate(dataset.superclass_names):
        members = (above == number).nonzero()[:, 0]
        if len(members) <= held_out:
            raise ValueError(
                f"superclass {name!r} has {len(members)} classes: {held_out} cannot be held out, "
                "for at least one must stay to learn from."
            )
        if generator is not None:
            members = members[torch.randperm(len(members), generator=generator)]
        mask[members[-held_out:]] = True
    return mask


def superclass_split(
    dataset: ImageData, seed: int | None = None, *, held_out: int = 1
) -> tuple[ImageData, ImageData]:
    """(known, unknown): the samples of learned classes and of unseen ones, labeled by superclass.

    ``seed=None`` is the paper's choice: of each superclass the last ``held_out`` classes are
    unseen. A number draws them at random. Train and test split alike for the same seed.
    """
    unseen = _held_out(dataset, seed, held_out)
    targets = dataset.targets
    assert isinstance(targets, Tensor)
    mask = unseen[targets.cpu()]
    parts = []
    for chosen, name in ((~mask, "known classes"), (mask, "unseen classes")):
        part = dataset.subset(chosen)
        assert part.superclasses is not None
        parts.append(
            dataclasses.replace(
                part,
                targets=part.superclasses.long(),
                classes=dataset.superclass_names,
                split_name=f"{dataset.split_name}, {name}",
            )
        )
    return parts[0], parts[1]


@dataclass(frozen=True, eq=False)
class SuperclassResult:
    """Accuracy on superclasses, for test samples of learned classes and of unseen ones."""

    known: ClassificationMetrics
    unknown: ClassificationMetrics

    @property
    def known_accuracy(self) -> float:
        return self.known.accuracy

    @property
    def unknown_accuracy(self) -> float:
        return self.unknown.accuracy

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = plain(
            {"known": self.known.to_dict(), "unknown": self.unknown.to_dict()}
        )
        return made

    def table(self) -> Any:
        """For ``rich.print``."""
        table = rich_module().table.Table(title="superclasses")
        table.add_column("")
        for name in ("samples", "accuracy", "NLL", "ECE"):
            table.add_column(name, justify="right")
        for name, part in (("known classes", self.known), ("unseen classes", self.unknown)):
            cells = (f"{part.samples:,}", f"{100 * part.accuracy:.2f}%")
            table.add_row(name, *cells, f"{part.nll:.4f}", f"{part.ece:.4f}")
        return table


def superclass_accuracy(
    model: nn.Module,
    dataset: ImageData,
    seed: int | None = None,
    *,
    held_out: int = 1,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> SuperclassResult:
    """Judge a model trained on ``superclass_split(train, seed)[0]`` on the test set ``dataset``."""
    known, unknown = superclass_split(dataset, seed, held_out=held_out)
    model = on_device(model, device)
    found = [
        judge(
            model,
            part,
            batch_size=batch_size,
            progress=progress,
            text=part.split_name,
        )
        for part in (known, unknown)
    ]
    return SuperclassResult(*found)
