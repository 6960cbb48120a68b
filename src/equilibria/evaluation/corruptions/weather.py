"""Snow, fog, frost and spatter. x is [N, C, H, W] in 0 … 1, float32, C 1 or 3."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from equilibria.data.augmentation import gray

from .distortions import motion
from .filters import ImageNoise, correlate, gaussian, zoom


def snow(x: Tensor, constants: tuple[float, ...], noise: ImageNoise) -> Tensor:
    """Whiten the scene, add flakes smeared by their fall, and the flakes turned by 180°."""
    mean, deviation, factor, threshold, radius, sigma, kept = constants
    flakes = mean + deviation * noise.normal(0, 1, *x.shape[-2:])
    flakes = zoom(flakes, factor).clamp_max(1.0)
    flakes = torch.where(flakes < threshold, 0.0, flakes).to(x.dtype)
    angle = 90.0 * noise.uniform(1) - 135.0
    flakes = motion(flakes, int(radius), sigma, angle)
    white = torch.maximum(x, 1.5 * gray(x) + 0.5)
    return kept * x + (1 - kept) * white + flakes + flakes.flip(-2, -1)


def fog(x: Tensor, constants: tuple[float, float], noise: ImageNoise) -> Tensor:
    """(x + a·p)·max x/(max x + a), p a plasma fractal of 0 … 1."""
    amount, decay = constants
    height, width = x.shape[-2:]
    size = 1 << (max(height, width) - 1).bit_length()
    cloud = plasma(size, decay, noise)[:, None, :height, :width].to(x.dtype)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + amount * cloud) * brightest / (brightest + amount)


def plasma(size: int, decay: float, noise: ImageNoise) -> Tensor:
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


def frost(x: Tensor, constants: tuple[float, float], noise: ImageNoise) -> Tensor:
    """a·x + b·frost, with a texture made for each image (see ``frost_texture``)."""
    image, ice = constants
    texture = frost_texture(x.shape[-2], x.shape[-1], noise).to(x.dtype)
    return image * x + ice * (texture if x.shape[1] == 3 else gray(texture))


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


def frost_texture(height: int, width: int, noise: ImageNoise) -> Tensor:
    """Frost on a window, [N, 3, height, width] in 0 … 1, float64.

    The published corruption crops five photographs, which we may not ship. Here each image gets a
    texture of its own, with the mean color and the spread of one of the five: crystals that grow
    from random seeds, their needles along a direction of their own, under a slow shade.
    """
    device = noise.keys[0].device
    side = float(max(height, width))
    rows = (torch.arange(height, device=device, dtype=torch.float64) / side)[:, None]
    columns = torch.arange(width, device=device, dtype=torch.float64) / side
    key, along, across = _crystals(rows, columns, noise)
    # Lines along each crystal, and branches that leave them at 60°, as ice grows.
    branch = 0.5 * along + 0.866 * across.abs()
    needles = _line_noise(key, 28.0 * across) + _line_noise(key + 0.37, 44.0 * branch)
    grain = noise.normal(101, height, width)
    shade = gaussian(noise.normal(102, height, width), side / 6)
    parts = [(needles, 1.0), (grain, 0.45), (shade, 0.6)]
    relief = torch.stack([weight * _standard(part) for part, weight in parts]).sum(0)
    relief = _standard(relief)

    table = torch.tensor(_PHOTOGRAPHS, dtype=torch.float64, device=device) / 255
    chosen = table[noise.integers(103, 0, len(_PHOTOGRAPHS))]
    color, spread = chosen[:, :3, None, None], chosen[:, 3, None, None, None]
    return (color + spread * relief[:, None]).clamp(0.0, 1.0)


def _crystals(rows: Tensor, columns: Tensor, noise: ImageNoise) -> tuple[Tensor, Tensor, Tensor]:
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


def _standard(field: Tensor) -> Tensor:
    """Mean 0, deviation 1 for each image."""
    centered = field - field.mean((1, 2), keepdim=True)
    deviation = centered.square().mean((1, 2), keepdim=True).sqrt()
    return centered / deviation.clamp_min(1e-12)


_WATER, _MUD = (175.0, 238.0, 238.0), (63.0, 42.0, 20.0)
_FARTHEST = 20
_SOBEL = [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]
_EMBOSS = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
_MEAN = torch.full((3, 3), 1.0 / 9.0, dtype=torch.float64)


def spatter(x: Tensor, constants: tuple[float, ...], noise: ImageNoise) -> Tensor:
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
    return color if x.shape[1] == 3 else gray(color)


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


def _shifted(x: Tensor, down: int, right: int, outside: float = 0.0) -> Tensor:
    """x [N, H, W] read at (i + down, j + right)."""
    height, width = x.shape[-2:]
    reach = max(abs(down), abs(right))
    padded = F.pad(x, (reach, reach, reach, reach), value=outside)
    top, left = reach + down, reach + right
    return padded[:, top : top + height, left : left + width]


def canny(level: Tensor, low: float, high: float) -> Tensor:
    """Edges of [N, H, W] levels of 0 … 255, as bool: Canny's, in the form that OpenCV gives it.

    Sobel gradients with the border repeated, |∂x| + |∂y|, thinning along four directions, and weak
    edges kept where a chain of them touches a strong one.
    """
    wide = F.pad(level[:, None], (1, 1, 1, 1), mode="replicate")
    sobel = torch.tensor(_SOBEL, dtype=level.dtype, device=level.device)
    dx, dy = F.conv2d(wide, torch.stack([sobel, sobel.T])[:, None]).unbind(1)
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
    shifts = range(-farthest, farthest + 1)
    here = torch.where(mask, 0.0, math.inf).double()
    column = torch.full_like(here, math.inf)
    for d in shifts:
        column = column.minimum(_shifted(here, d, 0, math.inf) + abs(d))
    squared, column = torch.full_like(here, float(farthest) ** 2), column.square()
    for d in shifts:
        squared = squared.minimum(_shifted(column, 0, d, math.inf) + d**2)
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
