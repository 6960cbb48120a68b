"""Certified accuracy: how many labels are right and proven not to change within a radius."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.certify.network import TrackedNetwork, check_norm
from equilibria.data.image_data import ImageData
from equilibria.models.prediction import radius_in_pixels

from .figures import save_certified
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
    """What is proven of the labels of a data set. Radii are in pixels from 0 to 1, in ``norm``."""

    model: str
    right: Tensor
    """Whether the label is the true one, [N] bool."""
    radius: Tensor
    """No image within this has another label, [N]; 0 where nothing is proven."""
    lipschitz: float
    """A Lipschitz constant of the logits, per pixel from 0 to 1."""
    notes: tuple[str, ...]
    norm: str = "2"

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
            "norm": self.norm,
            "accuracy": self.accuracy,
            "certified": [{"radius": r, "accuracy": self.at(r)} for r in radii],
            "median_radius": float(self.radius.median()),
            "lipschitz": self.lipschitz,
            "notes": list(self.notes),
        }

    def save(self, path: Path | str) -> Path:
        """The curve of certified accuracy over the radius, as a PNG."""
        return save_certified(self.right, self.radius, self.norm, path, self.model)


def certified_accuracy(
    model: nn.Module,
    dataset: ImageData,
    *,
    batch_size: int = 64,
    norm: str = "2",
    progress: bool = False,
) -> CertifiedAccuracy:
    """``certify`` on every image; the normalization of the input is counted in the radius.

    What is judged is the network at its exact equilibria (``certify_network``); ``norm`` is that of
    the radius, "2" or "inf".
    """
    check_pair(model, dataset, task="classification")
    scale = min(dataset.std)
    right, radius, lipschitz = [], [], 0.0
    notes: list[str] = []
    network = TrackedNetwork(model)
    with progress_bar(steps_in(dataset, batch_size), "certifying", progress) as advance:
        for images, y in batches(dataset, batch_size, device_of(model)):
            x = model_input(model, dataset, images)
            found = network.certify(x, norm)
            right.append((found.label == y).cpu())
            radius.append(radius_in_pixels(found.radius, x, scale, norm).cpu())
            lipschitz = max(lipschitz, found.lipschitz / scale)
            notes += found.notes
            advance()
    return CertifiedAccuracy(
        model=model_name(model),
        right=torch.cat(right),
        radius=torch.cat(radius),
        lipschitz=lipschitz,
        notes=tuple(dict.fromkeys(notes)),
        norm=norm,
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
    norm: str = "2",
    certified: CertifiedAccuracy | None = None,
    progress: bool = False,
) -> float:
    """Accuracy under an attack: projected gradient descent on the margin, in a ball of ``radius``.

    Pixels stay from 0 to 1. The true robust accuracy lies between the certified one and this. An
    image whose label is lost leaves the attack.

    Args:
        norm: of the ball, "2" or "inf".
        certified: ``certified_accuracy(model, dataset, norm=norm)``. An image that has another
            label inside its certified radius is then a RuntimeError: the certificate is wrong. It
            is judged at the exact equilibria, as the certificate is; where only the model's own
            solves, which stop early, give another label, a warning counts such images.
    """
    check_pair(model, dataset, task="classification")
    check_whole("steps", steps, 1)
    check_whole("restarts", restarts, 1)
    if not radius > 0.0:
        raise ValueError(f"radius={radius!r}: expected a positive number of pixels from 0 to 1.")
    check_norm(norm)
    generator = torch.Generator().manual_seed(seed)
    lost, points, seen = list[Tensor](), list[Tensor](), 0
    with (
        evaluating(model),
        progress_bar(steps_in(dataset, batch_size), "attacking", progress) as advance,
    ):
        for images, y in batches(dataset, batch_size, device_of(model)):
            pixels = images.float() / 255.0
            noises = (torch.randn(pixels.shape, generator=generator) for _ in range(restarts))
            starts = (_within(n.to(pixels), radius, norm) * (i > 0) for i, n in enumerate(noises))
            point, holds = _attack(model, dataset, pixels, y, starts, radius, norm, steps)
            lost.append((~holds).nonzero()[:, 0].cpu() + seen)
            if certified is not None:  # many images do not fit on the device
                points.append(point[~holds].cpu())
            seen += len(y)
            advance()
    found = torch.cat(lost)
    if certified is not None and len(found):
        _check_certified(model, dataset, certified, found, torch.cat(points))
    return (len(dataset) - len(found)) / len(dataset)


def _check_certified(
    model: nn.Module, dataset: ImageData, certified: CertifiedAccuracy, lost: Tensor, point: Tensor
) -> None:
    """Raise where a point [L, ...] at which an image of ``lost`` [L] has another label refutes its
    certificate."""
    refuted, early, network = list[int](), 0, TrackedNetwork(model)
    for rows in torch.arange(len(lost)).split(64):
        index = lost[rows]
        near = point[rows].to(device_of(model))
        both = (dataset.images[index].to(near) / 255.0, near)
        before, after = (model_input(model, dataset, t).double() for t in both)
        far = torch.linalg.vector_norm((after - before).flatten(1), float(certified.norm), 1)
        reach = certified.radius[index] / min(dataset.std) * certified.right[index]
        inside = far.cpu() < reach
        if inside.any():
            exact = network.certify(after[inside])
            moved = exact.label.cpu() != dataset.targets[index[inside]].cpu()
            wrong = moved & (exact.radius > 0.0).cpu()
            refuted += index[inside][wrong].tolist()
            early += int((~wrong).sum())
    if refuted:
        shown = ", ".join(map(str, refuted[:8])) + (", …" if len(refuted) > 8 else "")
        raise RuntimeError(
            f"the certificate of {certified.model} is wrong: inside the proven radius an attack "
            f"found another label for {len(refuted)} of {len(dataset)} images of {dataset.name} "
            f"({dataset.split_name}): {shown}. This is a bug of equilibria; please report it with "
            "the weights."
        )
    if early:
        warnings.warn(
            f"{early} images have another label inside their certified radius where the solves of "
            "the model stop early; at its equilibria, which are certified, none has.",
            stacklevel=3,
        )


def _within(step: Tensor, radius: float, norm: str) -> Tensor:
    """The nearest point of the ball, sample by sample."""
    if norm == "inf":
        return step.clamp(-radius, radius)
    length = step.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
    near: Tensor = step * (radius / length).clamp_max(1.0)
    return near


def _attack(
    model: nn.Module,
    dataset: ImageData,
    pixels: Tensor,
    y: Tensor,
    starts: Iterable[Tensor],
    radius: float,
    norm: str,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Images near ``pixels``, and whether each still has its label, [B]."""
    point, holds = pixels.clone(), torch.ones_like(y, dtype=torch.bool)
    for start in starts:
        rest = holds.nonzero()[:, 0]
        step = start[rest]
        for _ in range(steps + 1):
            if not len(rest):
                break
            moved = (pixels[rest] + step).clamp(0.0, 1.0).requires_grad_()
            logits = model(model_input(model, dataset, moved))
            own = F.one_hot(y[rest], logits.shape[1]).bool()
            margin = logits[own] - logits.masked_fill(own, -torch.inf).amax(1)
            (slope,) = torch.autograd.grad(margin.sum(), moved)
            keep = margin.detach() > 0.0
            lost = rest[~keep]
            holds[lost], point[lost] = False, moved.detach()[~keep]
            unit = slope.sign() if norm == "inf" else F.normalize(slope.flatten(1), dim=1)
            moved_on = step - 2.5 * radius / steps * unit.view_as(step)
            rest, step = rest[keep], _within(moved_on, radius, norm)[keep]
    return point, holds
