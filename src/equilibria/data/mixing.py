"""Mixup and CutMix: samples blended in pairs, with labels that say how much of which."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor
from torch.nn import functional

from equilibria.engine.options import check_number, options

from .counting import host_seed
from .transform import Transform

__all__ = ["CutMix", "Mixup"]


@options
class Mixup(Transform):
    """λ x_i + (1 − λ) x_j and the same of the labels, λ ~ Beta(α, α) (Zhang et al. 2018, eq. 1).

    One λ a batch, partners by a random permutation. Labels [B] become soft, float [B, num_classes].
    """

    num_classes: int
    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_number(self, "num_classes", low=2, integer=True)
        check_number(self, "alpha", low=0, low_open=True)

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Blend every sample with another."""
        soft = _soft(self, y, self.num_classes)
        share = random.Random(host_seed(generator)).betavariate(self.alpha, self.alpha)
        other = torch.randperm(len(x), device=x.device, generator=generator)
        return torch.lerp(x[other], x, share), torch.lerp(soft[other], soft, share)


@options
class CutMix(Transform):
    """A rectangle of x_i comes from x_j; labels by area (Yun et al. 2019, eq. 1 and 2).

    The rectangle has 1 − λ of the area, λ ~ Beta(α, α), its middle anywhere; the labels count the
    pixels that are really there. One rectangle a batch, partners by a random permutation.
    """

    num_classes: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "num_classes", low=2, integer=True)
        check_number(self, "alpha", low=0, low_open=True)

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Paste a part of another sample into every sample."""
        soft = _soft(self, y, self.num_classes)
        draw = random.Random(host_seed(generator))
        h, w = x.shape[2], x.shape[3]
        side = math.sqrt(1 - draw.betavariate(self.alpha, self.alpha))
        middle = (draw.randrange(h), draw.randrange(w))
        half = (int(side * h) // 2, int(side * w) // 2)
        (top, left) = (max(m - r, 0) for m, r in zip(middle, half, strict=True))
        bottom, right = min(middle[0] + half[0], h), min(middle[1] + half[1], w)
        other = torch.randperm(len(x), device=x.device, generator=generator)
        mixed = x.clone()
        mixed[:, :, top:bottom, left:right] = x[other, :, top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (h * w)
        return mixed, torch.lerp(soft[other], soft, share)


def _soft(owner: object, y: Tensor | None, classes: int) -> Tensor:
    name = type(owner).__name__
    if y is None:
        raise ValueError(f"{name} mixes labels too: call it with (x, y, generator).")
    if y.ndim == 2 and y.is_floating_point():
        return y
    if y.ndim != 1:
        raise ValueError(f"{name} is for labels [B], not for masks of shape {tuple(y.shape)}.")
    return functional.one_hot(y, classes).float()
