"""Digital: brightness, contrast, saturate, elastic, pixelate, JPEG. x is [N, C, H, W] in 0 … 1."""

from __future__ import annotations

from io import BytesIO

import torch
from torch import Tensor

from equilibria.evaluation.extras import pillow_image

from .filters import bilinear, box_resize, gaussian
from .randomness import Noise

__all__ = [
    "brightness",
    "contrast",
    "elastic_transform",
    "jpeg_compression",
    "pixelate",
    "saturate",
]


def brightness(x: Tensor, amount: float, noise: Noise) -> Tensor:
    """Add to the value V = max(R, G, B) of HSV, hue and saturation kept: x·V′/V."""
    value = x.amax(1, keepdim=True)
    lifted = (value + amount).clamp_max(1.0)
    return torch.where(value > 0, x * lifted / value.clamp_min(1e-12), lifted)


def saturate(x: Tensor, constants: tuple[float, float], noise: Noise) -> Tensor:
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


def contrast(x: Tensor, factor: float, noise: Noise) -> Tensor:
    """(x − m)·c + m, m the mean of the channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (x - mean) * factor + mean


def elastic_transform(x: Tensor, constants: tuple[float, float, float], noise: Noise) -> Tensor:
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


def _affine_places(height: int, width: int, shift: float, noise: Noise) -> tuple[Tensor, Tensor]:
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
    inverse, _ = torch.linalg.inv_ex(edges)
    back = (here[1:] - here[:1]).mT @ inverse
    y = torch.arange(height, device=device, dtype=torch.float64)[:, None].expand(height, width)
    x = torch.arange(width, device=device, dtype=torch.float64).expand(height, width)
    points = torch.stack([x, y]).flatten(1)
    found = back @ (points - there[:, 0, :, None]) + here[0][:, None]
    # Three points all but on a line (no draw made them yet) would lead to infinity.
    found = found.nan_to_num(0.0).clamp(-1e6, 1e6).unflatten(2, (height, width))
    return found[:, 1], found[:, 0]


def pixelate(x: Tensor, share: float, noise: Noise) -> Tensor:
    """Resize to ``share`` of the side and back, with the box filter."""
    height, width = x.shape[-2:]
    small = box_resize(x * 255, max(1, int(height * share)), max(1, int(width * share))).round()
    return box_resize(small, height, width) / 255


def jpeg_compression(x: Tensor, quality: int, noise: Noise) -> Tensor:
    """Encode as JPEG and decode, by Pillow, on the CPU."""
    Image = pillow_image()
    levels = (x * 255).round().to(torch.uint8).cpu()
    made = torch.empty_like(levels)
    mode = "L" if x.shape[1] == 1 else "RGB"
    height, width = x.shape[-2:]
    for number, level in enumerate(levels):
        pixels = level.permute(1, 2, 0).contiguous().numpy()
        stream = BytesIO()
        Image.frombytes(mode, (width, height), pixels.tobytes()).save(
            stream, "JPEG", quality=quality
        )
        with Image.open(stream) as decoded:
            data = bytearray(decoded.tobytes())
        read = torch.frombuffer(data, dtype=torch.uint8).reshape(height, width, x.shape[1])
        made[number] = read.permute(2, 0, 1)
    return made.to(x.device, x.dtype) / 255
