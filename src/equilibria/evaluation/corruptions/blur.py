"""Blur: gaussian, defocus, glass, motion and zoom. x is [N, C, H, W] in 0 … 1, float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .filters import correlate, gaussian, gaussian_matrix, zoom
from .randomness import Noise

__all__ = ["defocus_blur", "gaussian_blur", "glass_blur", "motion", "motion_blur", "zoom_blur"]


def gaussian_blur(x: Tensor, sigma: float, noise: Noise) -> Tensor:
    """Convolution with a Gaussian; pixels beyond the border repeat the nearest."""
    return gaussian(x, sigma)


def disk(radius: float, smoothing: float) -> Tensor:
    """[k, k], of sum 1: the pixels within ``radius``, their edge smoothed by a small Gaussian."""
    reach, edge = (8, 1) if radius <= 8 else (int(radius), 2)
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (place[:, None] ** 2 + place**2 <= radius**2).double()
    smooth = gaussian_matrix(2 * reach + 1, smoothing, edge, "mirror")
    return smooth @ (inside / inside.sum()) @ smooth.mT


def defocus_blur(x: Tensor, constants: tuple[float, float], noise: Noise) -> Tensor:
    """Correlation with a disk: a lens out of focus."""
    kernel = disk(*constants)
    used = kernel.abs().sum(0).nonzero()[:, 0]  # the border of zeros only costs time
    first, last = int(used[0]), int(used[-1]) + 1
    return correlate(x, kernel[first:last, first:last])


def glass_blur(x: Tensor, constants: tuple[float, int, int], noise: Noise) -> Tensor:
    """Blur, let each pixel take the value of a near one, blur again: frosted glass."""
    sigma, reach, passes = constants
    # Cut to whole levels as the published code does; the small addition is for rounding.
    moved = (gaussian(x, sigma) * 255 + 1e-3).clamp(0, 255).floor() / 255
    for number in range(passes):
        offsets = noise.integers(number, -reach, reach, 2, *x.shape[-2:])
        moved = take_neighbors(moved, offsets, reach)
    return gaussian(moved, sigma)


def take_neighbors(x: Tensor, offsets: Tensor, reach: int) -> Tensor:
    """One pass over the pixels, last row first, each copying the pixel at its offset.

    ``offsets`` [N, 2, H, W] holds (dy, dx) in −reach … reach − 1. The pass is sequential: where
    the source came earlier, its new value is copied, so sources form chains. The chains are
    followed in parallel by pointer doubling. (The published code means to swap the two pixels;
    its assignment of numpy views copies one onto the other, and the published images have that.)
    """
    height, width = x.shape[-2:]
    if min(height, width) < 2 * reach + 1:
        return x
    rows = torch.arange(height, device=x.device)[:, None].expand(height, width)
    columns = torch.arange(width, device=x.device)[None].expand(height, width)
    # The pass goes over rows height − reach … reach + 1 and columns alike.
    visited = (rows > reach) & (rows <= height - reach) & (columns > reach)
    visited = visited & (columns <= width - reach)
    here = rows * width + columns
    source = torch.where(visited, here + offsets[:, 0] * width + offsets[:, 1], here)
    source = source.flatten(1)
    # A later place in memory is earlier in the pass. A link leads on to the source's own source;
    # places that end a chain link to themselves.
    place = here.flatten()
    earlier = (source > place) & visited.flatten()[source]
    link = torch.where(earlier, source, place)
    for _ in range(math.ceil(math.log2(height * width))):
        link = link.gather(1, link)
    origin = source.gather(1, link)
    flat = x.flatten(2)
    taken = flat.gather(2, origin[:, None].expand(-1, x.shape[1], -1))
    return taken.reshape(x.shape)


def motion(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Smear each image of [N, C, H, W] along its own angle [N], in degrees.

    A half Gaussian of 2·radius + 1 taps along the line, each read at the nearest pixel, the border
    repeated: the rule of ImageMagick's motion blur, which the published images were made with.
    """
    height, width = x.shape[-2:]
    taps = torch.arange(2 * radius + 1, device=x.device, dtype=torch.float64)
    weights = torch.exp(-(taps**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).to(x.dtype)
    turned = torch.deg2rad(angle.double())[:, None]
    down = torch.ceil(taps * torch.sin(turned) - 0.5).long()
    right = torch.ceil(taps * torch.cos(turned) - 0.5).long()
    rows = torch.arange(height, device=x.device)[:, None]
    columns = torch.arange(width, device=x.device)
    flat, total = x.flatten(2), torch.zeros_like(x)
    for tap in range(2 * radius + 1):
        i = (rows + down[:, tap, None, None]).clamp(0, height - 1)
        j = (columns + right[:, tap, None, None]).clamp(0, width - 1)
        places = (i * width + j).flatten(1)[:, None].expand(-1, x.shape[1], -1)
        total += weights[tap] * flat.gather(2, places).unflatten(2, (height, width))
    return total


def motion_blur(x: Tensor, constants: tuple[int, float], noise: Noise) -> Tensor:
    """Smear along an angle between −45 and 45 degrees."""
    radius, sigma = constants
    return motion(x, radius, sigma, 90.0 * noise.uniform(0) - 45.0)


def zoom_blur(x: Tensor, factors: tuple[float, ...], noise: Noise) -> Tensor:
    """The mean of the image and its zooms: a camera that moves towards the scene."""
    total = x.clone()
    for factor in factors:
        total += zoom(x, factor)
    return total / (len(factors) + 1)
