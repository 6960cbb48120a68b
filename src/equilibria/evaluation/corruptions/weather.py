"""Weather: snow, fog and frost. x is [N, C, H, W] in 0 … 1, float32, C 1 or 3."""

from __future__ import annotations

import torch
from torch import Tensor

from .blur import motion
from .filters import zoom
from .frost_texture import frost_texture
from .randomness import Noise

__all__ = ["fog", "frost", "luminance", "plasma", "snow"]

_LUMINANCE = (0.299, 0.587, 0.114)


def luminance(x: Tensor) -> Tensor:
    """[N, 1, H, W]: 0.299 R + 0.587 G + 0.114 B; a gray image is its own."""
    if x.shape[1] == 1:
        return x
    weights = torch.tensor(_LUMINANCE, dtype=x.dtype, device=x.device)
    return (x * weights[:, None, None]).sum(1, keepdim=True)


def snow(x: Tensor, constants: tuple[float, ...], noise: Noise) -> Tensor:
    """Whiten the scene, add flakes smeared by their fall, and the flakes turned by 180°."""
    mean, deviation, factor, threshold, radius, sigma, kept = constants
    flakes = mean + deviation * noise.normal(0, 1, *x.shape[-2:])
    flakes = zoom(flakes, factor).clamp_max(1.0)
    flakes = torch.where(flakes < threshold, 0.0, flakes).to(x.dtype)
    angle = 90.0 * noise.uniform(1) - 135.0
    flakes = motion(flakes, int(radius), sigma, angle)
    white = torch.maximum(x, 1.5 * luminance(x) + 0.5)
    return kept * x + (1 - kept) * white + flakes + flakes.flip(-2, -1)


def fog(x: Tensor, constants: tuple[float, float], noise: Noise) -> Tensor:
    """(x + a·p)·max x/(max x + a), p a plasma fractal of 0 … 1."""
    amount, decay = constants
    height, width = x.shape[-2:]
    size = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(size, decay, noise)[:, None, :height, :width].to(x.dtype)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * cloud) * brightest / (brightest + amount)


def plasma(size: int, decay: float, noise: Noise) -> Tensor:
    """[N, size, size] in 0 … 1: diamond-square on a torus, ``size`` a power of two.

    Each new point is the mean of four plus a uniform number of ±w², w = 100 at first, then divided
    by ``decay`` a level.
    """
    count = noise.keys[0].shape[0]
    field = torch.zeros(count, size, size, dtype=torch.float64, device=noise.keys[0].device)
    step, wobble, stream = size, 100.0, 10

    def wobbled(total: Tensor) -> Tensor:
        nonlocal stream
        stream += 1
        spread = 2.0 * noise.uniform(stream, *total.shape[1:]) - 1.0
        return total / 4 + wobble**2 * spread

    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        field[:, half::step, half::step] = wobbled(pairs + pairs.roll(-1, 2))
        middles = field[:, half::step, half::step]
        above = middles + middles.roll(1, 1) + corners + corners.roll(-1, 2)
        field[:, ::step, half::step] = wobbled(above)
        beside = middles + middles.roll(1, 2) + corners + corners.roll(-1, 1)
        field[:, half::step, ::step] = wobbled(beside)
        step, wobble = half, wobble / decay
    field = field - field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True).clamp_min(torch.finfo(field.dtype).tiny)


def frost(x: Tensor, constants: tuple[float, float], noise: Noise) -> Tensor:
    """a·x + b·frost, with a texture made for each image (see ``frost_texture``)."""
    image, ice = constants
    texture = frost_texture(x.shape[-2], x.shape[-1], noise).to(x.dtype)
    return image * x + ice * (texture if x.shape[1] == 3 else luminance(texture))
