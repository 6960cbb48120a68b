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

import torch
from torch import Tensor, nn

from equilibria.data import ImageData
from equilibria.evaluation import batches, classification_metrics, evaluating, model_input


def _labels(dataset: ImageData, classes: Sequence[int]) -> Tensor:
    """Of each sample: the place of its class in ``classes``, −1 where it is not among them."""
    table = torch.full((len(dataset.classes),), -1)
    table[list(classes)] = torch.arange(len(classes))
    return table[dataset.targets[:].cpu()]


def select_classes(dataset: ImageData, classes: Sequence[int]) -> ImageData:
    """The samples of these classes alone, labeled 0, 1, … in the order given: to train on."""
    labels = _labels(dataset, classes)
    part, names = dataset.subset(labels >= 0), tuple(dataset.classes[k] for k in classes)
    return dataclasses.replace(part, targets=labels[labels >= 0], classes=names)


@torch.no_grad()
def _logits(model: nn.Module, dataset: ImageData, batch_size: int, device: torch.device) -> Tensor:
    with evaluating(model):
        found = [
            model(model_input(model, dataset, images)).double().cpu()
            for images, _ in batches(dataset, batch_size, device)
        ]
    logits = torch.cat(found)
    if not bool(logits.isfinite().all()):
        raise ValueError(f"some logits on {dataset.name} are not finite: did a solve diverge?")
    return logits


def known_unknown_kl(
    model: nn.Module,
    dataset: ImageData,
    known: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> tuple[float, float, float]:
    """Accuracy and KL on the known classes, and the KL on the others, on all of ``dataset``.

    The model was trained on ``select_classes(train, known)``: its output i stands for ``known[i]``.
    """
    labels = _labels(dataset, known)
    own = labels >= 0
    if not 0 < int(own.sum()) < len(own):
        raise ValueError(f"{dataset.name}: samples of known and of unknown classes are needed.")
    logits = _logits(model, dataset, batch_size, device)
    judged = classification_metrics(logits[own], labels[own])
    p = logits[~own].softmax(1)
    certainty = math.log(len(known)) + torch.xlogy(p, p).sum(1)  # 0 at p = 0
    return judged.accuracy, judged.nll, float(certainty.mean())


def superclass_split(dataset: ImageData) -> tuple[ImageData, ImageData]:
    """(known, unknown): the samples of learned classes and of unseen ones, labeled by superclass.

    Of each superclass the last class is unseen.
    """
    above, names = dataset.superclass_of, dataset.superclass_names
    if above is None or not names or bool((above < 0).any()):
        raise ValueError(f"{dataset.name} needs a superclass and a sample of every class.")
    last = torch.tensor([int((above == k).nonzero().max()) for k in range(len(names))])
    unseen = torch.isin(dataset.targets[:].cpu(), last)

    def part(chosen: Tensor, name: str) -> ImageData:
        found, split = dataset.subset(chosen), f"{dataset.split_name}, {name}"
        assert found.superclasses is not None
        targets = found.superclasses.long()
        return dataclasses.replace(found, targets=targets, classes=names, split_name=split)

    return part(~unseen, "known classes"), part(unseen, "unseen classes")


def superclass_accuracy(
    model: nn.Module, dataset: ImageData, batch_size: int, device: torch.device
) -> tuple[float, float]:
    """On known and on unseen classes, of a model trained on ``superclass_split(train)[0]``."""
    found = []
    for part in superclass_split(dataset):
        logits = _logits(model, part, batch_size, device)
        found.append(classification_metrics(logits, part.targets[:].cpu()).accuracy)
    return found[0], found[1]
