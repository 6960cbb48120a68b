"""What a network says of an image: label, confidence, solver steps, certified radius."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints.graph import blown_up
from equilibria.certify import LabelStopping, certify_network
from equilibria.engine.result import ConvergenceWarning
from equilibria.nn import observe

from .preprocessing import InputWarning


@dataclass(frozen=True)
class Prediction:
    """What a network says of one image."""

    labels: tuple[tuple[str, float], ...]
    """The likeliest classes with their probabilities, best first."""
    steps: int | None
    """Evaluations of the map, the most that any layer took; None without equilibrium layers."""
    converged: bool | None
    """Whether every layer's solve passed its tolerance; None where it runs fixed steps. False also
    where fixed steps diverged or met NaN, and where the scores are not finite."""
    radius: float | None = None
    """No image within this ℓ2 distance, pixels from 0 to 1 after resizing, has another label; None:
    not asked."""
    file: Path | None = None
    """The file that held the image, if any."""
    proven: bool | None = None
    """Whether few steps prove the label to be that of the converged network; None: not asked."""

    @property
    def label(self) -> str:
        return self.labels[0][0]

    @property
    def confidence(self) -> float:
        return self.labels[0][1]

    def to_dict(self) -> dict[str, Any]:
        labels = [{"label": label, "confidence": p} for label, p in self.labels]
        file = None if self.file is None else str(self.file)
        return {**vars(self), "file": file, "labels": labels}


def predictions(
    model: nn.Module,
    x: Tensor,
    classes: Sequence[str],
    *,
    top: int = 1,
    radius_unit: float | None = None,
) -> list[Prediction]:
    """One Prediction for each normalized image of x [B, C, H, W], by the model in eval mode.

    ``radius_unit``: certify the labels too, a distance of 1 in x being at least this in pixels.
    """
    if any(module.training for module in model.modules()):
        model = copy.deepcopy(model).eval()
    with torch.no_grad(), observe(model) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # convergence is a field of the answer
        warnings.simplefilter("ignore", InputWarning)  # preprocess has looked at the images
        logits = model(x)
    solved = [solution for each in seen.solutions.values() for solution in each]
    steps: list[int | None] = [None] * len(x)
    converged: list[bool | None] = [None] * len(x)
    if solved:
        steps = torch.stack([s.stats.steps.cpu() for s in solved]).amax(0).tolist()
    tested = [s.converged.cpu() for s in solved if s.stats.syncs > 0]
    if tested:
        converged = torch.stack(tested).all(0).tolist()
    failed = ~torch.isfinite(logits).all(1).cpu()
    for solution in solved:
        failed |= blown_up(solution.result).cpu()
    converged = [
        False if bad else state for bad, state in zip(failed.tolist(), converged, strict=True)
    ]
    answers = list(map(Prediction, _best(logits, classes, top), steps, converged))
    if radius_unit is None:
        return answers
    proven = certify_network(model, x)
    # 0 where the network at its exact equilibria has another label.
    same = (proven.label == logits.argmax(1)).cpu()
    radii = torch.where(same, radius_in_pixels(proven.radius, x, radius_unit).cpu(), 0.0)
    return [replace(a, radius=r) for a, r in zip(answers, radii.tolist(), strict=True)]


def radius_in_pixels(radius: Tensor, x: Tensor, unit: float, norm: str = "2") -> Tensor:
    """Radii [B] around normalized images x as radii around the images, in pixels from 0 to 1.

    A distance of 1 in x is at least ``unit`` in pixels. x was normalized in float32, with five
    roundings of numbers of 1 at most, and put into its own type: it lies so far from the image.
    """
    entry = 3.0 * torch.finfo(torch.float32).eps + 0.5 * torch.finfo(x.dtype).eps
    off = entry * (math.sqrt(x[0].numel()) if norm == "2" else 1.0)
    return (radius * unit - off).clamp_min(0.0) * (1.0 - 1e-6)


def _best(logits: Tensor, classes: Sequence[str], top: int) -> list[Any]:
    best = logits.float().softmax(1).topk(min(top, len(classes)), dim=1)
    named = [[classes[k] for k in row] for row in best.indices.tolist()]
    return [tuple(zip(*row, strict=True)) for row in zip(named, best.values.tolist(), strict=True)]


def stopped_predictions(
    stopping: LabelStopping, model: nn.Module, x: Tensor, classes: Sequence[str], *, top: int = 1
) -> list[Prediction]:
    """``predictions`` of samples that stop when their label is proven; the model does the rest."""
    found = stopping.certify(x)
    rest = x[~found.proven]
    full = iter(predictions(model, rest, classes, top=top) if len(rest) else ())
    early = zip(_best(found.logits, classes, top), found.steps.tolist(), strict=True)
    return [
        Prediction(labels, steps, None, proven=True) if done else replace(next(full), proven=False)
        for (labels, steps), done in zip(early, found.proven.tolist(), strict=True)
    ]
