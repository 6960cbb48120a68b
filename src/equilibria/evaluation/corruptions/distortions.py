"""Noise, blur and digital corruptions. x is [N, C, H, W] in 0 … 1, float32, C 1 or 3."""

from __future__ import annotations

import math
from io import BytesIO

import torch
from torch import Tensor

from equilibria.data.decoding import decode_image
from equilibria.engine.optional import needs

from .filters import (
    ImageNoise,
    bilinear,
    box_resize,
    correlate,
    gaussian,
    gaussian_matrix,
    pixels_at,
    zoom,
)


def gaussian_noise(x: Tensor, deviation: float, noise: ImageNoise) -> Tensor:
    """x + σn."""
    return x + deviation * noise.normal(0, *x.shape[1:]).to(x.dtype)


def speckle_noise(x: Tensor, deviation: float, noise: ImageNoise) -> Tensor:
    """x + σxn."""
    return x + deviation * x * noise.normal(0, *x.shape[1:]).to(x.dtype)


def shot_noise(x: Tensor, photons: float, noise: ImageNoise) -> Tensor:
    """Poisson(x·photons)/photons, by inversion of the distribution function."""
    rows = torch.arange(256, dtype=torch.float64, device=x.device)[:, None]
    # Past the mean by 12 standard deviations and some, no 32-bit uniform number leads.
    terms = int(photons + 12 * photons**0.5 + 32)
    count, mean = torch.arange(terms, device=x.device).double(), rows / 255 * photons
    log_p = torch.xlogy(count, mean) - mean - torch.lgamma(count + 1)
    table = log_p.exp().cumsum(1).clamp_max(1.0)  # P(count ≤ k) of each pixel value, [256, terms]
    # Row v of the table holds numbers of 0 … 1: with v added, all rows are one sorted list.
    value = (x * 255).round().double()
    sought = noise.uniform(0, *x.shape[1:]) + value
    found = torch.searchsorted((table + rows).flatten(), sought) - value.long() * terms
    return (found.double() / photons).to(x.dtype)


def impulse_noise(x: Tensor, share: float, noise: ImageNoise) -> Tensor:
    """Each value becomes 0 or 1, half and half, with probability ``share``: salt and pepper."""
    hit = noise.uniform(0, *x.shape[1:]) <= share
    salt = (noise.uniform(1, *x.shape[1:]) <= 0.5).to(x.dtype)
    return torch.where(hit, salt, x)


def gaussian_blur(x: Tensor, sigma: float, noise: ImageNoise) -> Tensor:
    """Convolution with a Gaussian; pixels beyond the border repeat the nearest."""
    return gaussian(x, sigma)


def defocus_blur(x: Tensor, constants: tuple[float, float], noise: ImageNoise) -> Tensor:
    """Correlation with a disk of a radius < 2, smoothed by a small Gaussian: out of focus."""
    radius, smoothing = constants
    place = torch.arange(-3, 4, dtype=torch.float64)
    inside = (place[:, None] ** 2 + place**2 <= radius**2).double()
    smooth = gaussian_matrix(len(place), smoothing, 1, "nearest")
    return correlate(x, smooth @ (inside / inside.sum()) @ smooth.mT)


def glass_blur(x: Tensor, constants: tuple[float, int], noise: ImageNoise) -> Tensor:
    """Blur, let each pixel take the value of a near one, blur again: frosted glass."""
    sigma, passes = constants
    # Cut to whole levels as the published code does; the small addition is for rounding.
    moved = (gaussian(x, sigma) * 255 + 1e-3).clamp(0, 255).floor() / 255
    for number in range(passes):
        moved = take_neighbors(moved, noise.integers(number, -1, 1, 2, *x.shape[-2:]))
    return gaussian(moved, sigma)


def take_neighbors(x: Tensor, offsets: Tensor) -> Tensor:
    """One pass over the pixels, last row first, each copying the pixel at its offset.

    ``offsets`` [N, 2, H, W] holds (dy, dx), each −1 or 0. The pass is sequential: where the source
    came earlier, its new value is copied, so sources form chains. The chains are followed in
    parallel by pointer doubling. (The published code means to swap the two pixels; its assignment
    of numpy views copies one onto the other, and the published images have that.)
    """
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device)[:, None]
    columns = torch.arange(width, device=x.device)
    visited = (rows > 1) & (columns > 1)
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
    return pixels_at(x, source.gather(1, link).view(-1, height, width))


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
    total = torch.zeros_like(x)
    for tap in range(2 * radius + 1):
        i = (rows + down[:, tap, None, None]).clamp(0, height - 1)
        j = (columns + right[:, tap, None, None]).clamp(0, width - 1)
        total += weights[tap] * pixels_at(x, i * width + j)
    return total


def motion_blur(x: Tensor, constants: tuple[int, float], noise: ImageNoise) -> Tensor:
    """Smear along an angle between −45 and 45 degrees."""
    radius, sigma = constants
    return motion(x, radius, sigma, 90.0 * noise.uniform(0) - 45.0)


def zoom_blur(x: Tensor, factors: tuple[float, ...], noise: ImageNoise) -> Tensor:
    """The mean of the image and its zooms: a camera that moves towards the scene."""
    total = x.clone()
    for factor in factors:
        total += zoom(x, factor)
    return total / (len(factors) + 1)


def brightness(x: Tensor, amount: float, noise: ImageNoise) -> Tensor:
    """Add to the value V = max(R, G, B) of HSV, hue and saturation kept: x·V′/V."""
    value = x.amax(1, keepdim=True)
    lifted = (value + amount).clamp_max(1.0)
    return torch.where(value > 0, x * lifted / value.clamp_min(1e-12), lifted)


def saturate(x: Tensor, constants: tuple[float, float], noise: ImageNoise) -> Tensor:
    """S ← aS + b in HSV, hue and value kept: V − (V − x)·S′/S. A gray image stays as it is."""
    if x.shape[1] == 1:
        return x
    factor, added = constants
    value = x.amax(1, keepdim=True)
    drop = value - x
    depth = drop.amax(1, keepdim=True)  # V·S
    old = depth / value.clamp_min(1e-12)
    new = (factor * old + added).clamp(0.0, 1.0)
    colored = value - drop * new / old.clamp_min(1e-12)
    # A gray pixel has the hue 0, which is red: what HSV says, and the published images show.
    red = torch.cat([value, value * (1 - new), value * (1 - new)], 1)
    return torch.where(depth > 0, colored, red)


def contrast(x: Tensor, factor: float, noise: ImageNoise) -> Tensor:
    """(x − m)·c + m, m the mean of the channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def elastic_transform(
    x: Tensor, constants: tuple[float, float, float], noise: ImageNoise
) -> Tensor:
    """Move three points at random and the image with them (affine), then each pixel a little."""
    height, width = x.shape[-2:]
    side = min(height, width)
    amount, blur, shift = (side * c for c in constants)
    rows, columns = _affine_places(height, width, shift, noise)
    moved = bilinear(x, rows, columns, "mirror")
    if amount == 0.0:
        return moved
    sway = 2.0 * noise.uniform(1, 2, height, width) - 1.0
    sway = amount * gaussian(sway, blur, truncate=3.0, border="reflect")
    rows = torch.arange(height, device=x.device)[:, None] + sway[:, 0]
    columns = torch.arange(width, device=x.device) + sway[:, 1]
    return bilinear(moved, rows, columns, "reflect")


def _affine_places(
    height: int, width: int, shift: float, noise: ImageNoise
) -> tuple[Tensor, Tensor]:
    """Where each pixel reads: the affine map that takes the moved points back, [N, H, W] twice."""
    reach = min(height, width) // 3
    row, column = height // 2, width // 2
    corners = [
        (column + reach, row + reach),
        (column + reach, row - reach),
        (column - reach, row - reach),
    ]
    device = noise.keys[0].device
    here = torch.tensor(corners, dtype=torch.float64, device=device)
    there = here + shift * (2.0 * noise.uniform(0, 3, 2) - 1.0)
    # back · (there_i − there_0) = here_i − here_0 for i = 1, 2
    edges = (there[:, 1:] - there[:, :1]).mT
    # A point moves too little to come near the line through the others. inv_ex does not wait.
    back = (here[1:] - here[:1]).mT @ torch.linalg.inv_ex(edges).inverse
    y = torch.arange(height, device=device, dtype=torch.float64)[:, None].expand(height, width)
    x = torch.arange(width, device=device, dtype=torch.float64).expand(height, width)
    points = torch.stack([x, y]).flatten(1)
    found = back @ (points - there[:, 0, :, None]) + here[0][:, None]
    columns, rows = found.unflatten(2, (height, width)).unbind(1)
    return rows, columns


def pixelate(x: Tensor, share: float, noise: ImageNoise) -> Tensor:
    """Resize to ``share`` of the side and back, with the box filter."""
    height, width = x.shape[-2:]
    small = box_resize(x * 255, int(height * share), int(width * share)).round()
    return box_resize(small, height, width) / 255


def jpeg_compression(x: Tensor, quality: int, noise: ImageNoise) -> Tensor:
    """Encode as JPEG and decode, by Pillow, on the CPU."""
    with needs("pillow", "JPEG compression"):
        from PIL import Image
    made = []
    for level in (x * 255).round().to(torch.uint8).cpu():
        stream = BytesIO()
        pixels = level.permute(1, 2, 0).squeeze(2).contiguous().numpy()
        Image.fromarray(pixels).save(stream, "JPEG", quality=quality)
        made.append(decode_image(stream.getvalue(), len(level), None))
    return torch.stack(made).to(x.device, x.dtype) / 255
