"""Noise: gaussian, shot, impulse and speckle. x is [N, C, H, W] in 0 … 1, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .randomness import Noise

__all__ = ["gaussian_noise", "impulse_noise", "shot_noise", "speckle_noise"]


def gaussian_noise(x: Tensor, deviation: float, noise: Noise) -> Tensor:
    """x + σn."""
    return x + deviation * noise.normal(0, *x.shape[1:]).to(x.dtype)


def speckle_noise(x: Tensor, deviation: float, noise: Noise) -> Tensor:
    """x + σxn."""
    return x + deviation * x * noise.normal(0, *x.shape[1:]).to(x.dtype)


def _poisson_table(photons: float, device: torch.device) -> Tensor:
    """[256, K]: P(count ≤ k) for the mean v/255·photons of each pixel value v."""
    # Past the mean by 12 standard deviations and some, no 32-bit uniform number leads.
    terms = int(photons + 12 * photons**0.5 + 32)
    count = torch.arange(terms, dtype=torch.float64, device=device)
    mean = torch.arange(256, dtype=torch.float64, device=device)[:, None] / 255 * photons
    log_p = torch.xlogy(count, mean) - mean - torch.lgamma(count + 1)
    return log_p.exp().cumsum(1).clamp_max(1.0)


def shot_noise(x: Tensor, photons: float, noise: Noise) -> Tensor:
    """Poisson(x·photons)/photons, by inversion of the distribution function."""
    table = _poisson_table(photons, x.device)
    value = (x * 255).round().double()
    # Row v of the table holds numbers of 0 … 1: with v added, all rows are one sorted list.
    rows = torch.arange(256, dtype=torch.float64, device=x.device)[:, None]
    sought = noise.uniform(0, *x.shape[1:]) + value
    found = torch.searchsorted((table + rows).flatten(), sought)
    count = found - value.long() * table.shape[1]
    return (count.clamp(0, table.shape[1] - 1).double() / photons).to(x.dtype)


def impulse_noise(x: Tensor, share: float, noise: Noise) -> Tensor:
    """Each value becomes 0 or 1, half and half, with probability ``share``: salt and pepper."""
    hit = noise.uniform(0, *x.shape[1:]) <= share
    salt = (noise.uniform(1, *x.shape[1:]) <= 0.5).to(x.dtype)
    return torch.where(hit, salt, x)
