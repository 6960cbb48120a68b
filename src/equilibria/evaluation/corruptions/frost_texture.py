"""Frost on a window, made by rule: crystals that grow from random seeds, under a slow shade.

The published corruption crops five photographs, which we may not ship. Here each image gets a
texture of its own, with the mean color and the spread of one of the five: needles run along a
direction that is each crystal's own, finer between coarser ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .filters import gaussian
from .randomness import Noise

__all__ = ["frost_texture"]

_CRYSTALS = 24

# Mean red, green, blue of 255, and standard deviation of the brightness, measured on the five
# photographs; two of them are the same picture.
_PHOTOGRAPHS = (
    (78.0, 149.0, 166.0, 18.0),
    (201.0, 205.0, 215.0, 22.0),
    (201.0, 205.0, 215.0, 22.0),
    (138.0, 153.0, 165.0, 29.0),
    (112.0, 123.0, 135.0, 43.0),
)


def _line_noise(key: Tensor, at: Tensor) -> Tensor:
    """Noise of −1 … 1 along a line: random at whole numbers, linear between, one line a key."""
    low = at.floor()

    def value(place: Tensor) -> Tensor:
        mixed = torch.sin(place * 12.9898 + key * 78.233) * 43758.5453
        return 2.0 * (mixed - mixed.floor()) - 1.0

    first = value(low)
    return first + (at - low) * (value(low + 1.0) - first)


def frost_texture(height: int, width: int, noise: Noise) -> Tensor:
    """[N, 3, height, width] in 0 … 1, float64."""
    device = noise.keys[0].device
    side = float(max(height, width))
    rows = (torch.arange(height, device=device, dtype=torch.float64) / side)[:, None]
    columns = torch.arange(width, device=device, dtype=torch.float64) / side
    crystals = _crystals(rows, columns, noise)
    needles = _needles(crystals)

    grain = noise.normal(101, height, width)
    shade = gaussian(noise.normal(102, height, width), side / 6)
    parts = [(needles, 1.0), (grain, 0.45), (shade, 0.6)]
    relief = torch.stack([weight * _standard(part) for part, weight in parts]).sum(0)
    relief = _standard(relief)

    table = torch.tensor(_PHOTOGRAPHS, dtype=torch.float64, device=device) / 255
    chosen = table[noise.integers(103, 0, len(_PHOTOGRAPHS))]
    color, spread = chosen[:, :3, None, None], chosen[:, 3, None, None, None]
    return (color + spread * relief[:, None]).clamp(0.0, 1.0)


def _crystals(rows: Tensor, columns: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
    """Of the nearest crystal of each pixel: its key, and the pixel's place along and across it."""
    seeds = noise.uniform(100, _CRYSTALS, 4)
    reach_y, reach_x = float(rows.max()), float(columns.max())
    nearest = torch.full((), math.inf, dtype=torch.float64, device=rows.device)
    found = [torch.zeros_like(nearest)] * 3
    for crystal in range(_CRYSTALS):
        y, x, turn, key = seeds[:, crystal, :, None, None].unbind(1)
        down, right = rows - y * reach_y, columns - x * reach_x
        cosine, sine = torch.cos(math.pi * turn), torch.sin(math.pi * turn)
        along, across = right * cosine + down * sine, down * cosine - right * sine
        # Crystals are longer than wide: distance counts more across the needles.
        distance = along**2 + 4.0 * across**2
        closer = distance < nearest
        nearest = torch.where(closer, distance, nearest)
        found = [
            torch.where(closer, new, old)
            for new, old in zip((key, along, across), found, strict=True)
        ]
    return found[0], found[1], found[2]


def _needles(crystals: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Lines along each crystal, and branches that leave them at 60°, as ice grows."""
    key, along, across = crystals
    branch = 0.5 * along + 0.866 * across.abs()
    return _line_noise(key, 28.0 * across) + _line_noise(key + 0.37, 44.0 * branch)


def _standard(field: Tensor) -> Tensor:
    """Mean 0, deviation 1 for each image."""
    centered = field - field.mean((1, 2), keepdim=True)
    deviation = centered.square().mean((1, 2), keepdim=True).sqrt()
    return centered / deviation.clamp_min(1e-12)
