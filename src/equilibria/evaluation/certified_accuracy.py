"""Certified accuracy: how many labels are right and proven not to change within a radius."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.certify import certify_network
from equilibria.data.image_data import ImageData

from .model_on_data import (
    batches,
    check_pair,
    check_whole,
    device_of,
    evaluating,
    model_input,
    model_name,
    steps_in,
)
from .rich_output import progress_bar

RADII = (36 / 255, 72 / 255, 108 / 255)
"""The radii of published comparisons on CIFAR-10, ℓ2, pixels from 0 to 1."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CertifiedAccuracy:
    """What is proven of the labels of a data set. Radii are ℓ2, in pixels from 0 to 1."""

    model: str
    right: Tensor
    """Whether the label is the true one, [N] bool."""
    radius: Tensor
    """No image within this has another label, [N]; 0 where nothing is proven."""
    lipschitz: float
    """A Lipschitz constant of the logits, per pixel from 0 to 1."""
    notes: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        return float(self.right.double().mean())

    def at(self, radius: float) -> float:
        """The share of images with the right label, proven within ``radius``."""
        return float((self.right & (self.radius >= radius)).double().mean())

    def to_dict(self, radii: Sequence[float] = RADII) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "model": self.model,
            "samples": len(self.right),
            "accuracy": self.accuracy,
            "certified": [{"radius": r, "accuracy": self.at(r)} for r in radii],
            "median_radius": float(self.radius.median()),
            "lipschitz": self.lipschitz,
            "notes": list(self.notes),
        }

    def save(self, path: Path | str) -> Path:
        """The curve of certified accuracy over the radius, as a PNG."""
        from .figures import save_certified

        return save_certified(self.right, self.radius, path, self.model)


def certified_accuracy(
    model: nn.Module, dataset: ImageData, *, batch_size: int = 64, progress: bool = False
) -> CertifiedAccuracy:
    """``certify`` on every image; the normalization of the input is counted in the radius.

    What is judged is the network at its exact equilibria (``certify_network``).
    """
    check_pair(model, dataset, task="classification")
    scale = min(dataset.std)
    right, radius, lipschitz = [], [], 0.0
    notes: list[str] = []
    with progress_bar(steps_in(dataset, batch_size), "certifying", progress) as advance:
        for images, y in batches(dataset, batch_size, device_of(model)):
            found = certify_network(model, model_input(model, dataset, images))
            right.append((found.label == y).cpu())
            radius.append((found.radius * scale * (1.0 - 1e-6)).cpu())
            lipschitz = max(lipschitz, found.lipschitz / scale)
            notes += found.notes
            advance()
    return CertifiedAccuracy(
        model=model_name(model),
        right=torch.cat(right),
        radius=torch.cat(radius),
        lipschitz=lipschitz,
        notes=tuple(dict.fromkeys(notes)),
    )


def attacked_accuracy(
    model: nn.Module,
    dataset: ImageData,
    radius: float,
    *,
    steps: int = 40,
    restarts: int = 2,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> float:
    """Accuracy under an attack: projected gradient descent on the margin, ℓ2 ball of ``radius``.

    Pixels stay from 0 to 1. The true robust accuracy lies between the certified one and this.
    """
    check_pair(model, dataset, task="classification")
    check_whole("steps", steps, 1)
    check_whole("restarts", restarts, 1)
    if not radius > 0.0:
        raise ValueError(f"radius={radius!r}: expected a positive number of pixels from 0 to 1.")
    generator = torch.Generator().manual_seed(seed)
    safe = 0
    with (
        evaluating(model),
        progress_bar(steps_in(dataset, batch_size), "attacking", progress) as advance,
    ):
        for images, y in batches(dataset, batch_size, device_of(model)):
            pixels = images.float() / 255.0
            holds = torch.ones_like(y, dtype=torch.bool)
            for restart in range(restarts):
                noise = torch.randn(pixels.shape, generator=generator).to(pixels)
                start = _within(noise, radius) * (restart > 0)
                holds &= _attack(model, dataset, pixels, y, start, radius, steps)
            safe += int(holds.sum())
            advance()
    return safe / len(dataset)


def _within(step: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball, sample by sample."""
    length = step.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
    near: Tensor = step * (radius / length).clamp_max(1.0)
    return near


def _attack(
    model: nn.Module,
    dataset: ImageData,
    pixels: Tensor,
    y: Tensor,
    start: Tensor,
    radius: float,
    steps: int,
) -> Tensor:
    """Whether the true label held at every point that was tried, [B]."""
    step, holds = start, torch.ones_like(y, dtype=torch.bool)
    for _ in range(steps + 1):
        moved = (pixels + step).clamp(0.0, 1.0).requires_grad_()
        logits = model(model_input(model, dataset, moved))
        own = F.one_hot(y, logits.shape[1]).bool()
        margin = logits[own] - logits.masked_fill(own, -torch.inf).amax(1)
        holds = holds & (margin.detach() > 0.0)
        (slope,) = torch.autograd.grad(margin.sum(), moved)
        direction = F.normalize(slope.flatten(1), dim=1).view_as(step)
        step = _within(step - 2.5 * radius / steps * direction, radius)
    return holds
