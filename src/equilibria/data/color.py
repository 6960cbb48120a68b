"""Brightness, contrast and saturation as blends a·x + (1 − a)·d, each sample with its own a."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.engine.options import check_number, options

from .transform import Transform

__all__ = ["ColorJitter", "autocontrast", "brightness", "contrast", "gray", "saturation"]


def gray(x: Tensor) -> Tensor:
    """0.299 R + 0.587 G + 0.114 B (ITU-R 601), [B, 1, H, W]; one channel stays as it is."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """a·x, with ``factor`` a [B]."""
    return (x * _wide(factor)).clamp(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """a·x + (1 − a)·(mean of gray)."""
    mean = gray(x).mean(dim=(1, 2, 3), keepdim=True)
    return (mean + _wide(factor) * (x - mean)).clamp(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """a·x + (1 − a)·gray(x)."""
    plain = gray(x)
    return (plain + _wide(factor) * (x - plain)).clamp(0, 1)


def autocontrast(x: Tensor) -> Tensor:
    """(x − min)/(max − min) of every channel; a channel of one value stays."""
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    flat = high <= low
    return torch.where(flat, x, (x - low) / torch.where(flat, 1.0, high - low))


@options
class ColorJitter(Transform):
    """Brightness, contrast and saturation by factors uniform in [1 − s, 1 + s]."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_number(self, name, low=0, high=1)

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Change the colors of every sample."""
        draws = 2 * torch.rand(3, len(x), device=x.device, generator=generator) - 1
        x = brightness(x, 1 + self.brightness * draws[0])
        x = contrast(x, 1 + self.contrast * draws[1])
        return (saturation(x, 1 + self.saturation * draws[2]) if x.shape[1] == 3 else x), y


def _wide(factor: Tensor) -> Tensor:
    return factor.view(-1, 1, 1, 1)
