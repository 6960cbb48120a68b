"""Known and unknown classes (KerDEQ §4.3): sure on what was learned, unsure on what was not.

    KL(p, q) = Σ_i p_i log p_i − p_i log q_i        (Eq 13)

Known KL: p the one-hot label, q the prediction, so it is the NLL. Unknown KL: p the prediction, q
uniform, so it is ln K − H(p), from 0 (unsure, as it should be) to ln K.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData

from .checks import check_whole
from .extras import rich_module
from .metrics import check_finite
from .plain import plain
from .running import (
    batches,
    check_logits,
    check_pair,
    device_of,
    evaluating,
    model_input,
    model_name,
    on_device,
    progress_bar,
    steps_in,
)

__all__ = ["KnownUnknown", "known_unknown_kl", "select_classes"]


@dataclass(frozen=True)
class KnownUnknown:
    """Means over the samples of known and of unknown classes; lower is better for both KL."""

    classes: tuple[str, ...]
    """The known ones, in the order of the model's outputs."""
    known_samples: int
    unknown_samples: int
    accuracy: float
    known_kl: float
    unknown_kl: float

    @property
    def unknown_limit(self) -> float:
        """ln K: the unknown KL of a network that is always certain."""
        return math.log(len(self.classes))

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = plain(
            {**dataclasses.asdict(self), "unknown_limit": self.unknown_limit}
        )
        return made

    def table(self) -> Any:
        """For ``rich.print``."""
        table = rich_module().table.Table(
            title=f"known and unknown classes (known: {', '.join(self.classes)})"
        )
        table.add_column("")
        for name in ("samples", "accuracy", "KL"):
            table.add_column(name, justify="right")
        table.add_row(
            "known",
            f"{self.known_samples:,}",
            f"{100 * self.accuracy:.2f}%",
            f"{self.known_kl:.4f}",
        )
        limit = f"{self.unknown_kl:.4f} of {self.unknown_limit:.4f}"
        table.add_row("unknown", f"{self.unknown_samples:,}", "–", limit)
        return table


def _class_numbers(dataset: ImageData, given: Sequence[int | str]) -> list[int]:
    if isinstance(given, str) or not isinstance(given, Sequence | range):
        raise TypeError(f"classes={given!r}: expected a list of class numbers or names.")
    numbers = []
    for item in given:
        if isinstance(item, str):
            if item not in dataset.classes:
                raise ValueError(
                    f"{dataset.name} has no class {item!r}; it has: {', '.join(dataset.classes)}."
                )
            numbers.append(dataset.classes.index(item))
        else:
            number = check_whole("class", item, 0)
            if number >= len(dataset.classes):
                raise ValueError(
                    f"class {number} is out of range: {dataset.name} has the classes 0 to "
                    f"{len(dataset.classes) - 1}."
                )
            numbers.append(number)
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"classes={list(given)!r}: expected at least one, none of them twice.")
    return numbers


def _targets(dataset: ImageData) -> Tensor:
    if dataset.task != "classification" or not isinstance(dataset.targets, Tensor):
        raise ValueError(f"{dataset.name} is a data set for {dataset.task}; this needs classes.")
    return dataset.targets


def select_classes(dataset: ImageData, classes: Sequence[int | str]) -> ImageData:
    """The samples of these classes alone, labeled 0, 1, … in the order given: to train on."""
    numbers = _class_numbers(dataset, classes)
    targets = _targets(dataset)
    table = torch.full((len(dataset.classes),), -1, dtype=torch.long, device=targets.device)
    table[torch.tensor(numbers, device=targets.device)] = torch.arange(
        len(numbers), device=targets.device
    )
    chosen = (table[targets] >= 0).nonzero()[:, 0].cpu()
    if len(chosen) == 0:
        raise ValueError(
            f"{dataset.name} ({dataset.split_name}) has no sample of the classes {list(classes)}."
        )
    part = dataset.subset(chosen)
    names = tuple(dataset.classes[k] for k in numbers)
    return dataclasses.replace(part, targets=table[_targets(part)], classes=names)


@torch.no_grad()
def known_unknown_kl(
    model: nn.Module,
    dataset: ImageData,
    known_classes: Sequence[int | str],
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> KnownUnknown:
    """Judge a model trained on ``select_classes(train, known_classes)`` on all of ``dataset``.

    Its output i stands for ``known_classes[i]`` (the paper: the first five of CIFAR-10).
    """
    numbers = _class_numbers(dataset, known_classes)
    targets = _targets(dataset)
    model = on_device(model, device)
    check_pair(model, dataset, classes=len(numbers), task="classification")
    table = torch.full((len(dataset.classes),), -1, dtype=torch.long)
    table[torch.tensor(numbers)] = torch.arange(len(numbers))
    known_total = int((table[targets.cpu()] >= 0).sum())
    if known_total in (0, len(dataset)):
        kind = "known" if known_total == 0 else "unknown"
        raise ValueError(
            f"{dataset.name} ({dataset.split_name}) has no sample of {kind} classes "
            f"(known: {', '.join(dataset.classes[k] for k in numbers)}); both are needed."
        )
    at, name = device_of(model), model_name(model)
    table = table.to(at)
    sums = torch.zeros(3, dtype=torch.float64, device=at)
    bad = []
    total = steps_in(dataset, batch_size)
    with evaluating(model), progress_bar(total, "known and unknown", progress) as advance:
        for images, y in batches(dataset, batch_size, at):
            logits = check_logits(
                model(model_input(model, dataset, images)), dataset, len(numbers), name
            )
            bad.append(~logits.isfinite().all(1))
            log_p = logits.double().log_softmax(1)
            own = table[y]
            known = own >= 0
            right = known & (log_p.argmax(1) == own)
            loss = -log_p.gather(1, own.clamp_min(0)[:, None])[:, 0]
            # p·log p is 0 at p = 0, where log p may be −inf.
            certainty = math.log(len(numbers)) + torch.xlogy(log_p.exp(), log_p.exp()).sum(1)
            sums += torch.stack([right.double().sum(), loss[known].sum(), certainty[~known].sum()])
            advance()
    check_finite(tuple(torch.cat(bad).nonzero()[:, 0].tolist()), len(dataset), name)
    right_sum, loss_sum, certainty_sum = sums.tolist()
    unknown_total = len(dataset) - known_total
    return KnownUnknown(
        classes=tuple(dataset.classes[k] for k in numbers),
        known_samples=known_total,
        unknown_samples=unknown_total,
        accuracy=right_sum / known_total,
        known_kl=loss_sum / known_total,
        unknown_kl=certainty_sum / unknown_total,
    )
