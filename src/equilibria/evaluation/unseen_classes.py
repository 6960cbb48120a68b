"""Classes that were never seen in training: is a network unsure of them, does it place them right?

Known and unknown classes (KerDEQ §4.3): sure on what was learned, unsure on what was not.

    KL(p, q) = Σ_i p_i log p_i − p_i log q_i        (Eq 13)

Known KL: p the one-hot label, q the prediction, so it is the NLL. Unknown KL: p the prediction, q
uniform, so it is ln K − H(p), from 0 (unsure, as it should be) to ln K.

Superclasses (GEQ §4.3): CIFAR-100 has 20 superclasses of five classes. A network learns to tell
them apart from the first four classes of each ("known"); the fifth is met in the test only.
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

from .metrics import ClassificationMeter, ClassificationMetrics, check_finite
from .model_on_data import check_pair, check_whole, device_of, judge_batches, model_name, on_device


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


def _class_number(dataset: ImageData, given: object) -> int:
    if isinstance(given, str):
        if given not in dataset.classes:
            raise ValueError(
                f"{dataset.name} has no class {given!r}; it has: {', '.join(dataset.classes)}."
            )
        return dataset.classes.index(given)
    number = check_whole("class", given, 0)
    if number >= len(dataset.classes):
        raise ValueError(
            f"class {number} is out of range: {dataset.name} has the classes 0 to "
            f"{len(dataset.classes) - 1}."
        )
    return number


def _labels(
    dataset: ImageData, classes: Sequence[int | str]
) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """(names, label of each class of the data, of each sample): 0, 1, … as given, −1 for others."""
    if isinstance(classes, str) or not isinstance(classes, Sequence | range):
        raise TypeError(f"classes={classes!r}: expected a list of class numbers or names.")
    numbers = [_class_number(dataset, given) for given in classes]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"classes={list(classes)!r}: expected at least one, none of them twice.")
    if dataset.task != "classification" or not isinstance(dataset.targets, Tensor):
        raise ValueError(f"{dataset.name} is a data set for {dataset.task}; this needs classes.")
    table = torch.full((len(dataset.classes),), -1)
    table[numbers] = torch.arange(len(numbers))
    labels = table[dataset.targets.cpu()]
    return tuple(dataset.classes[k] for k in numbers), table, labels


def select_classes(dataset: ImageData, classes: Sequence[int | str]) -> ImageData:
    """The samples of these classes alone, labeled 0, 1, … in the order given: to train on."""
    names, _, labels = _labels(dataset, classes)
    chosen = (labels >= 0).nonzero()[:, 0]
    if len(chosen) == 0:
        raise ValueError(
            f"{dataset.name} ({dataset.split_name}) has no sample of the classes {list(classes)}."
        )
    part = dataset.subset(chosen)
    targets = labels[chosen].to(dataset.targets.device)
    return dataclasses.replace(part, targets=targets, classes=names)


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
    names, table, labels = _labels(dataset, known_classes)
    model = on_device(model, device)
    check_pair(model, dataset, classes=len(names), task="classification")
    known_total = int((labels >= 0).sum())
    if known_total in (0, len(dataset)):
        kind = "known" if known_total == 0 else "unknown"
        raise ValueError(
            f"{dataset.name} ({dataset.split_name}) has no sample of {kind} classes "
            f"(known: {', '.join(names)}); both are needed."
        )
    sums = torch.zeros(3, dtype=torch.float64, device=device_of(model))
    bad: list[Tensor] = []
    table = table.to(sums.device)

    def judge(_: None, logits: Tensor, y: Tensor) -> None:
        bad.append(~logits.isfinite().all(1))
        log_p = logits.double().log_softmax(1)
        own = table[y]
        known = own >= 0
        right = known & (log_p.argmax(1) == own)
        loss = -log_p.gather(1, own.clamp_min(0)[:, None])[:, 0]
        # p·log p is 0 at p = 0, where log p may be −inf.
        certainty = math.log(len(names)) + torch.xlogy(log_p.exp(), log_p.exp()).sum(1)
        sums.add_(torch.stack([right.double().sum(), loss[known].sum(), certainty[~known].sum()]))

    text = "known and unknown"
    judge_batches(
        model, dataset, len(names), judge, batch_size=batch_size, progress=progress, text=text
    )
    check_finite(tuple(torch.cat(bad).nonzero()[:, 0].tolist()), len(dataset), model_name(model))
    right_sum, loss_sum, certainty_sum = sums.tolist()
    unknown_total = len(dataset) - known_total
    return KnownUnknown(
        classes=names,
        known_samples=known_total,
        unknown_samples=unknown_total,
        accuracy=right_sum / known_total,
        known_kl=loss_sum / known_total,
        unknown_kl=certainty_sum / unknown_total,
    )


def _held_out(dataset: ImageData, seed: int | None) -> Tensor:
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
    mask = torch.zeros(len(above), dtype=torch.bool)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for number, name in enumerate(dataset.superclass_names):
        members = (above == number).nonzero()[:, 0]
        if len(members) < 2:
            raise ValueError(
                f"superclass {name!r} has {len(members)} classes: one is held out, and at least "
                "one must stay to learn from."
            )
        if generator is not None:
            members = members[torch.randperm(len(members), generator=generator)]
        mask[members[-1]] = True
    return mask


def superclass_split(dataset: ImageData, seed: int | None = None) -> tuple[ImageData, ImageData]:
    """(known, unknown): the samples of learned classes and of unseen ones, labeled by superclass.

    ``seed=None`` is the paper's choice: of each superclass the last class is unseen. A number draws
    it at random. Train and test split alike for the same seed.
    """
    mask = _held_out(dataset, seed)[dataset.targets[:].cpu()]
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


def superclass_accuracy(
    model: nn.Module,
    dataset: ImageData,
    seed: int | None = None,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> SuperclassResult:
    """Judge a model trained on ``superclass_split(train, seed)[0]`` on the test set ``dataset``."""
    model = on_device(model, device)
    found = []
    for part in superclass_split(dataset, seed):
        check_pair(model, part, task="classification")
        meter = ClassificationMeter(len(part.classes))

        def judge(_: None, logits: Tensor, y: Tensor, meter: Any = meter) -> None:
            meter.update(logits, y)

        how: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
        judge_batches(model, part, len(part.classes), judge, text=part.split_name, **how)
        found.append(meter.compute())
        check_finite(found[-1].nonfinite, len(part), model_name(model))
    return SuperclassResult(*found)
