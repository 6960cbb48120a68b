"""What corruptions are made of: linear filters of images, and random numbers of an image.

Separable filters are matrices, B x Aᵀ: a matrix holds the border rule, any reach and any resizing
alike, and its product is exact to float64 on every device, where a convolution may run in TF32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Border = Literal["nearest", "reflect", "mirror"]
"""aaa|abc|ccc, cba|abc|cba, cb|abc|ba."""


def border_index(index: Tensor, size: int, border: Border) -> Tensor:
    """Where an index outside 0 … size − 1 reads, for any distance."""
    if border == "nearest":
        return index.clamp(0, size - 1)
    twice = int(border == "reflect")  # whether the outermost pixel is read twice
    wrapped = index.remainder(2 * (size - 1 + twice))
    return torch.minimum(wrapped, 2 * size - 2 + twice - wrapped)


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows · x · columnsᵀ for x [..., H, W], in float64, returned in the dtype of x."""
    rows, columns = rows.to(x.device, torch.float64), columns.to(x.device, torch.float64)
    return (rows @ x.double() @ columns.mT).to(x.dtype)


def gaussian_matrix(size: int, sigma: float, radius: int, border: Border) -> Tensor:
    """[size, size]: correlation with exp(−d²/2σ²), |d| ≤ radius, normalized."""
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    weights /= weights.sum()
    places = border_index(torch.arange(size)[:, None] + offsets, size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add(1, places, weights.expand(size, -1))


def gaussian(
    x: Tensor, sigma: float, *, truncate: float = 4.0, border: Border = "nearest"
) -> Tensor:
    """Gaussian blur of the last two dimensions; the kernel ends at truncate·σ."""
    radius = int(truncate * sigma + 0.5)
    rows, columns = (gaussian_matrix(n, sigma, radius, border) for n in x.shape[-2:])
    return separable(x, rows, columns)


def _middle(x: Tensor, height: int, width: int) -> Tensor:
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]


def zoom(x: Tensor, factor: float) -> Tensor:
    """Zoom into the middle of [N, C, H, W] by factor ≥ 1, linearly, the size kept."""
    cut = [math.ceil(n / factor) for n in x.shape[-2:]]
    stretched = [round(n * factor) for n in cut]
    middle = _middle(x.double(), *cut)
    large = F.interpolate(middle, stretched, mode="bilinear", align_corners=True)
    return _middle(large, *x.shape[-2:]).to(x.dtype)


def _box_matrix(size: int, target: int) -> Tensor:
    """[target, size]: the mean of the pixels whose centers lie under each target pixel."""
    scale = size / target
    reach = max(scale, 1.0)
    center = (torch.arange(target, dtype=torch.float64)[:, None] + 0.5) * scale
    offset = (torch.arange(size, dtype=torch.float64) + 0.5 - center) / reach
    inside = ((offset > -0.5) & (offset <= 0.5)).double()
    return inside / inside.sum(1, keepdim=True)


def box_resize(x: Tensor, height: int, width: int) -> Tensor:
    """Resize [..., H, W] with the box filter, as Pillow does it (``Image.Resampling.BOX``)."""
    return separable(x, _box_matrix(x.shape[-2], height), _box_matrix(x.shape[-1], width))


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """Correlation of every plane of [N, C, H, W] with an odd kernel [k, k], border ``mirror``."""
    wide = F.pad(x.double(), [kernel.shape[-1] // 2] * 4, mode="reflect")
    kernel = kernel.to(x.device, torch.float64)
    return F.conv2d(wide.flatten(0, 1)[:, None], kernel[None, None]).view_as(x).to(x.dtype)


def pixels_at(x: Tensor, places: Tensor) -> Tensor:
    """x [N, C, H, W] read at places [N, H', W'], each row·W + column."""
    found = x.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, x.shape[1], -1))
    return found.view(*x.shape[:2], *places.shape[1:])


def bilinear(x: Tensor, rows: Tensor, columns: Tensor, border: Border) -> Tensor:
    """x [N, C, H, W] read at (rows, columns) [N, H', W'], between pixels linearly."""
    height, width = x.shape[-2:]
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, None].to(x.dtype), (columns - left)[:, None].to(x.dtype)
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        i = border_index(top.long() + dy, height, border)
        j = border_index(left.long() + dx, width, border)
        weight = (down if dy else 1 - down) * (right if dx else 1 - right)
        total = total + weight * pixels_at(x, i * width + j)
    return total


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


class ImageNoise:
    """Streams of random numbers for a batch of images, a function of pixels, salt and place.

    u = h(h(place ⊕ k₁) + k₂)/2³²

    h an integer hash, (k₁, k₂) the image's keys. The noise of an image depends neither on the
    rest of the batch nor on its place in it, and is the same on every device. Products
    stay below 2⁶³: factors are below 2³¹, values below 2³².
    """

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
        place = torch.arange(math.prod(shape), device=first.device)
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
