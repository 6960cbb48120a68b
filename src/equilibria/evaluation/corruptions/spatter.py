"""Spatter: drops of water or mud on the lens. x is [N, C, H, W] in 0 … 1, float32, C 1 or 3."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .filters import border_index, correlate, gaussian
from .randomness import Noise
from .weather import luminance

__all__ = ["canny", "distance_to", "equalize", "spatter"]

_WATER, _MUD = (175.0, 238.0, 238.0), (63.0, 42.0, 20.0)
_FARTHEST = 20
_EMBOSS = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
_MEAN = torch.full((3, 3), 1.0 / 9.0, dtype=torch.float64)


def spatter(x: Tensor, constants: tuple[float, ...], noise: Noise) -> Tensor:
    """Blurred noise above a threshold is wet: brightened by water, or covered by mud."""
    mean, deviation, blur, threshold, strength, mud = constants
    liquid = gaussian(mean + deviation * noise.normal(0, *x.shape[-2:]), blur)
    liquid = torch.where(liquid < threshold, 0.0, liquid)
    if mud:
        cover = gaussian((liquid > threshold).double(), strength)
        cover = torch.where(cover < 0.8, 0.0, cover)[:, None].to(x.dtype)
        return x * (1 - cover) + cover * _color(_MUD, x)
    wet = strength * _water(liquid)[:, None].to(x.dtype)
    return x + wet * _color(_WATER, x)


def _color(rgb: tuple[float, float, float], x: Tensor) -> Tensor:
    color = torch.tensor(rgb, dtype=x.dtype, device=x.device).reshape(1, 3, 1, 1) / 255
    return color if x.shape[1] == 3 else luminance(color)


def _water(liquid: Tensor) -> Tensor:
    """[N, H, W] in 0 … 1: how much light each drop adds, embossed by the distance to its edge.

    The chain of the published code: edges (Canny), distance to them, its histogram made even, a
    relief filter. The distance here is Euclidean and exact, where OpenCV's is near to it.
    """
    level = (liquid.clamp(0.0, 1.0) * 255).floor()
    distance = distance_to(canny(level, 50.0, 150.0), _FARTHEST)
    smooth = correlate(distance[:, None], _MEAN).squeeze(1)
    even = equalize((smooth + 1e-6).floor())
    relief = correlate(even[:, None], _EMBOSS).round().clamp(0, 255)
    relief = correlate(relief, _MEAN).squeeze(1).round()
    wet = level * relief
    return wet / wet.amax((1, 2), keepdim=True).clamp_min(1.0)


def _shifted(x: Tensor, down: int, right: int) -> Tensor:
    """x [N, H, W] read at (i + down, j + right), zero outside."""
    height, width = x.shape[-2:]
    reach = max(abs(down), abs(right))
    padded = F.pad(x, (reach, reach, reach, reach))
    top, left = reach + down, reach + right
    return padded[:, top : top + height, left : left + width]


def canny(level: Tensor, low: float, high: float) -> Tensor:
    """Edges of [N, H, W] levels of 0 … 255, as bool: Canny's, in the form that OpenCV gives it.

    Sobel gradients with the border repeated, |∂x| + |∂y|, thinning along four directions, and weak
    edges kept where a chain of them touches a strong one.
    """
    size = level.shape[-2:]
    rows, columns = (border_index(torch.arange(-1, n + 1), n, "nearest") for n in size)
    wide = level.index_select(-2, rows.to(level.device)).index_select(-1, columns.to(level.device))
    smooth_down = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]
    dx = smooth_down[..., 2:] - smooth_down[..., :-2]
    smooth_right = wide[..., :-2] + 2 * wide[..., 1:-1] + wide[..., 2:]
    dy = smooth_right[:, 2:] - smooth_right[:, :-2]
    strength = dx.abs() + dy.abs()

    tangent = math.tan(math.pi / 8)
    flat, steep = dy.abs() < tangent * dx.abs(), dy.abs() > (2.0 + tangent) * dx.abs()
    same = dx * dy >= 0

    def peak(before: tuple[int, int], after: tuple[int, int], strict: bool) -> Tensor:
        following = _shifted(strength, *after)
        over = strength > following if strict else strength >= following
        return over & (strength > _shifted(strength, *before))

    thin = torch.where(same, peak((-1, -1), (1, 1), True), peak((-1, 1), (1, -1), True))
    thin = torch.where(steep, peak((-1, 0), (1, 0), False), thin)
    thin = torch.where(flat, peak((0, -1), (0, 1), False), thin)
    weak = thin & (strength > low)
    found = weak & (strength > high)
    while True:
        grown = F.max_pool2d(found.float()[:, None], 3, 1, 1).squeeze(1).bool() & weak
        if torch.equal(grown, found):
            return found
        found = grown


def distance_to(mask: Tensor, farthest: int) -> Tensor:
    """Euclidean distance [N, H, W] of each pixel to the nearest true one, at most ``farthest``."""
    limit = float(farthest)
    column = torch.full(mask.shape, math.inf, dtype=torch.float64, device=mask.device)
    for d in range(-farthest, farthest + 1):
        column = torch.where(_shifted(mask.float(), d, 0) > 0, column.clamp_max(abs(d)), column)
    squared = torch.full_like(column, limit**2)
    near = torch.where(column.isinf(), 0.0, 1.0 / (column + 1.0))  # zero outside means far
    for d in range(-farthest, farthest + 1):
        there = _shifted(near, 0, d)
        inverse = torch.where(there > 0, 1.0 / there.clamp_min(1e-12) - 1.0, math.inf)
        squared = torch.minimum(squared, inverse**2 + d**2)
    return squared.sqrt()


def equalize(level: Tensor) -> Tensor:
    """Even the histogram of each [H, W] of whole levels 0 … 255; one level alone stays."""
    flat = level.flatten(1).long()
    counts = torch.zeros(flat.shape[0], 256, dtype=torch.long, device=flat.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    total = counts.cumsum(1)
    first = counts.gather(1, flat.amin(1, keepdim=True))
    rest = (flat.shape[1] - first).clamp_min(1)
    table = ((total - first).double() * (255.0 / rest)).round().clamp(0, 255)
    even = table.gather(1, flat).reshape(level.shape).to(level.dtype)
    alone = (first == flat.shape[1])[..., None]
    return torch.where(alone, level, even)
