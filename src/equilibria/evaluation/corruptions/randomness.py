"""Random numbers that belong to an image: a function of its pixels, a seed and a place.

u = h(h(place ⊕ k₁) + k₂)/2³², h an integer hash and (k₁, k₂) the image's keys. So the noise of an
image depends neither on its batch mates nor on its place among them, and is the same on every
device. Products stay below 2⁶³: factors are below 2³¹, values below 2³².
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["Noise"]

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _hash(x: Tensor) -> Tensor:
    """32 bits to 32 bits, each output bit of every input bit (two multiply-xorshift rounds)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _digest(images: Tensor, salt: int) -> Tensor:
    """32 bits of each image, [N]: the sum of a hash of (place, value) over its bytes."""
    flat = images.flatten(1).long()
    place = torch.arange(flat.shape[1], device=flat.device) * 256 + salt
    return _hash(_hash((flat + place) & _MASK).sum(1) & _MASK)


class Noise:
    """Streams of random numbers for a batch of images, one row an image."""

    def __init__(self, images: Tensor, salt: Sequence[int]) -> None:
        """``images`` uint8 [N, C, H, W]; ``salt`` tells seeds, kinds and severities apart."""
        self.keys = [_digest(images, 0), _digest(images, 0x5BD1E995)]
        for number in salt:
            # Python integers of any size: the low and the next 32 bits.
            for word in (number & _MASK, (number >> 32) & _MASK):
                self.keys = [_hash((k + word + _GOLDEN) & _MASK) for k in self.keys]

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """[N, *shape] in (0, 1), float64, of 32 bits each. Another stream is independent."""
        first, second = (_hash((k ^ ((stream * _GOLDEN) & _MASK)) & _MASK) for k in self.keys)
        place = torch.arange(prod(shape), device=first.device)
        bits = _hash((_hash(place ^ first[:, None]) + second[:, None]) & _MASK)
        return ((bits.double() + 0.5) / 2**32).reshape(-1, *shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """[N, *shape], standard normal, float64: Φ⁻¹(u)."""
        normal: Tensor = torch.special.ndtri(self.uniform(stream, *shape))
        return normal

    def integers(self, stream: int, low: int, high: int, *shape: int) -> Tensor:
        """[N, *shape], each of low … high − 1 alike, int64."""
        drawn = (self.uniform(stream, *shape) * (high - low)).long()
        return low + drawn.clamp_max(high - low - 1)
