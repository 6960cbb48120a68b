"""Random changes of a batch on its device, each sample by itself.

Ours and not kornia's: a batch depends on (seed, epoch, batch) alone, while kornia draws from
torch's global generator; every sample draws its own operations; and torch alone is needed.
"""

from __future__ import annotations

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard, overload

import torch
from torch import Tensor
from torch.nn import functional

from equilibria.engine.options import check_number, hint, options

from .sampling import host_seed
from .sources import IGNORE

Random = torch.Generator | None
Pair = tuple[Tensor, Tensor | None]


class Transform(ABC):
    """``transform(x, generator)`` for a batch x of floats from 0 to 1, [B, C, H, W].

    ``transform(x, y, generator)`` gives (x, y): masks [B, H, W] move with their images; labels [B]
    stay, unless the transform mixes samples. Every sample draws its own numbers, on the device of
    x, where ``generator`` must be too (None is torch's own); nothing waits for the device.
    """

    @abstractmethod
    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        """Change ``x`` and, if given, the targets ``y``."""

    @overload
    def __call__(self, x: Tensor, generator: Random = ..., /) -> Tensor: ...
    @overload
    def __call__(
        self, x: Tensor, y: Tensor, generator: Random = ..., /
    ) -> tuple[Tensor, Tensor]: ...
    def __call__(self, x: Tensor, *rest: Any) -> Any:
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} takes a batch of floats [B, C, H, W], got {x.dtype} "
                f"{tuple(x.shape)}."
            )
        if rest and isinstance(rest[0], Tensor):
            return self.apply(x, rest[0], rest[1] if len(rest) > 1 else None)
        return self.apply(x, None, rest[0] if rest else None)[0]


class Augmentation(Transform):
    """T_k ∘ … ∘ T_1: one transform after the other."""

    def __init__(self, parts: Sequence[Transform]) -> None:
        for part in parts:
            if not isinstance(part, Transform):
                raise TypeError(f"Augmentation takes transforms, got {type(part).__name__}.")
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"Augmentation([{', '.join(repr(part) for part in self.parts)}])"

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        for part in self.parts:
            x, y = part.apply(x, y, generator)
        return x, y


@options
class Crop(Transform):
    """Pad by ``padding`` on every side, then cut out the old size at a random place.

    x'[i, j] = x[i + a − padding, j + b − padding] with a, b uniform in 0 … 2·padding. Outside the
    image: its mirror image ("reflect", the edge not repeated), or zeros, where masks have IGNORE.
    """

    padding: int = 4
    mode: Literal["reflect", "zero"] = "reflect"

    def __post_init__(self) -> None:
        check_number(self, "padding", low=1, integer=True)
        if self.mode not in ("reflect", "zero"):
            raise ValueError(f"Crop(mode={self.mode!r}): expected 'reflect' or 'zero'.")

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        n, _, h, w = x.shape
        if self.mode == "reflect" and self.padding >= min(h, w):
            raise ValueError(
                f"Crop(padding={self.padding}) cannot mirror more than an image of {h} × {w} has; "
                "take less padding, or mode='zero'."
            )
        most = 2 * self.padding
        shift = torch.randint(0, most + 1, (2, n, 1), device=x.device, generator=generator)
        rows = (torch.arange(h, device=x.device) + shift[0] - self.padding).unsqueeze(2)
        columns = (torch.arange(w, device=x.device) + shift[1] - self.padding).unsqueeze(1)
        if self.mode == "zero":
            outside = (rows < 0) | (rows >= h) | (columns < 0) | (columns >= w)
            rows, columns = rows.clamp(0, h - 1), columns.clamp(0, w - 1)
        else:
            rows = (h - 1) - ((h - 1) - rows.abs()).abs()
            columns = (w - 1) - ((w - 1) - columns.abs()).abs()
        sample = torch.arange(n, device=x.device).view(-1, 1, 1)
        x = x[sample, :, rows, columns].permute(0, 3, 1, 2)
        y = y[sample, rows, columns] if _is_mask(y) else y
        if self.mode == "zero":
            x = x.masked_fill(outside.unsqueeze(1), 0.0)
            y = y.masked_fill(outside, IGNORE) if _is_mask(y) else y
        return x, y


@options
class Flip(Transform):
    """Mirror left and right with probability ``p``."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_number(self, "p", low=0, high=1)

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        chosen = torch.rand(len(x), 1, 1, device=x.device, generator=generator) < self.p
        if _is_mask(y):
            y = torch.where(chosen, y.flip(-1), y)
        return torch.where(chosen.unsqueeze(3), x.flip(-1), x), y


@options
class Cutout(Transform):
    """Fill a square of ``size`` pixels with its middle anywhere (DeVries and Taylor 2017).

    ``fill`` is a value from 0 to 1; None is the mean color of each image. Masks stay: the class of
    a hidden pixel is still to be predicted.
    """

    size: int = 8
    fill: float | None = None

    def __post_init__(self) -> None:
        check_number(self, "size", low=1, integer=True)
        check_number(self, "fill", low=0, high=1, optional=True)

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        inside = []
        for length in x.shape[2:]:  # rows, then columns
            middle = torch.randint(0, length, (len(x), 1), device=x.device, generator=generator)
            first, i = middle - self.size // 2, torch.arange(length, device=x.device)
            inside.append((i >= first) & (i < first + self.size))
        hidden = (inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1)
        if self.fill is not None:
            return x.masked_fill(hidden, self.fill), y
        return torch.where(hidden, x.mean(dim=(2, 3), keepdim=True), x), y


@options
class ResizedCrop(Transform):
    """Cut out a random part and resize it to the whole: of ``scale`` of the area, ``ratio`` w : h.

    Area, log(w/h) and place are uniform; a part larger than the image is cut down to it.
    """

    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, high in (("scale", 1.0), ("ratio", math.inf)):
            value = getattr(self, name)
            if not (len(value) == 2 and 0 < value[0] <= value[1] <= high):
                raise ValueError(
                    f"ResizedCrop({name}={value!r}): expected (low, high), positive"
                    f"{' and at most 1' if high == 1 else ''}."
                )

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        n, _, h, w = x.shape
        area, shape, u, v = torch.rand(4, n, device=x.device, generator=generator)
        low, high = (math.log(r) for r in self.ratio)
        area = self.scale[0] + (self.scale[1] - self.scale[0]) * area
        # w : h in pixels; of the unit square it is the ratio times h/w of the image.
        root = torch.exp(0.5 * (low + (high - low) * shape)) * math.sqrt(h / w)
        width = (area.sqrt() * root).clamp(max=1.0)
        height = (area.sqrt() / root).clamp(max=1.0)
        zero = torch.zeros_like(width)
        across = torch.stack([width, zero, (2 * u - 1) * (1 - width)], dim=1)
        down = torch.stack([zero, height, (2 * v - 1) * (1 - height)], dim=1)
        return warp(x, y, torch.stack([across, down], dim=1), border=True)


@options
class ColorJitter(Transform):
    """Brightness, contrast and saturation by factors uniform in [1 − s, 1 + s]."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_number(self, name, low=0, high=1)

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        draws = 2 * torch.rand(3, len(x), device=x.device, generator=generator) - 1
        kinds = ("brightness", "contrast", "saturation")[: 3 if x.shape[1] == 3 else 2]
        for name, draw in zip(kinds, draws, strict=False):
            x = change_color(x, name, 1 + getattr(self, name) * draw)
        return x, y


@options
class _Mix(Transform):
    num_classes: int
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "num_classes", low=2, integer=True)
        check_number(self, "alpha", low=0, low_open=True)

    def soft(self, y: Tensor | None) -> Tensor:
        """Labels as float [B, num_classes]."""
        name = type(self).__name__
        if y is None:
            raise ValueError(f"{name} mixes labels too: call it with (x, y, generator).")
        if y.ndim == 2 and y.is_floating_point():
            return y
        if y.ndim != 1:
            raise ValueError(f"{name} is for labels [B], not for masks of shape {tuple(y.shape)}.")
        return functional.one_hot(y, self.num_classes).float()


@options
class Mixup(_Mix):
    """λ x_i + (1 − λ) x_j and the same of the labels, λ ~ Beta(α, α) (Zhang et al. 2018, eq. 1).

    One λ a batch, partners by a random permutation. Labels [B] become soft, float [B, num_classes].
    """

    alpha: float = 0.2

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        soft = self.soft(y)
        share = random.Random(host_seed(generator)).betavariate(self.alpha, self.alpha)
        other = torch.randperm(len(x), device=x.device, generator=generator)
        return torch.lerp(x[other], x, share), torch.lerp(soft[other], soft, share)


@options
class CutMix(_Mix):
    """A rectangle of x_i comes from x_j; labels by area (Yun et al. 2019, eq. 1 and 2).

    The rectangle has 1 − λ of the area, λ ~ Beta(α, α), its middle anywhere, and labels count the
    pixels inside the image. One rectangle a batch, partners by a random permutation.
    """

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        soft = self.soft(y)
        draw = random.Random(host_seed(generator))
        h, w = x.shape[2], x.shape[3]
        side = math.sqrt(1 - draw.betavariate(self.alpha, self.alpha))
        middle = (draw.randrange(h), draw.randrange(w))
        half = (int(side * h) // 2, int(side * w) // 2)
        top, left = (max(m - r, 0) for m, r in zip(middle, half, strict=True))
        bottom, right = min(middle[0] + half[0], h), min(middle[1] + half[1], w)
        other = torch.randperm(len(x), device=x.device, generator=generator)
        mixed = x.clone()
        mixed[:, :, top:bottom, left:right] = x[other, :, top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (h * w)
        return mixed, torch.lerp(soft[other], soft, share)


_STEPS = 30.0
_MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
_BLENDS = ("brightness", "contrast", "saturation", "sharpness")
_COLORS = (*_BLENDS, "posterize", "solarize", "autocontrast", "equalize")
OPERATIONS = ("identity", *_MOVES, *_COLORS)
"""The fourteen operations of Cubuk et al. (2020), table 6."""


@options
class RandAugment(Transform):
    """``n`` operations, drawn for every sample by itself, of ``magnitude`` 0 … 30.

    At magnitude m (Cubuk et al. 2020): rotate by ±m degrees, shear by ±0.01 m, translate by
    ±0.015 m of the side, blend brightness, contrast, saturation and sharpness by 1 ± 0.03 m, keep
    8 − 4m/30 bits, invert what is above 1 − m/30, stretch or equalize the histogram. What moves in
    from outside is black; in masks it is IGNORE.
    """

    n: int = 2
    magnitude: float = 9.0

    def __post_init__(self) -> None:
        check_number(self, "n", low=1, high=16, integer=True)
        check_number(self, "magnitude", low=0, high=_STEPS)

    def apply(self, x: Tensor, y: Tensor | None, generator: Random) -> Pair:
        # Drawn on the host, so that the groups are known without waiting for the device.
        host = torch.Generator().manual_seed(host_seed(generator))
        chosen = torch.randint(0, len(OPERATIONS), (self.n, len(x)), generator=host)
        signs = 2.0 * torch.randint(0, 2, (self.n, len(x)), generator=host) - 1.0
        for row, sign in zip(chosen, signs, strict=True):
            x, y = self._layer(x, y, row, self.magnitude * sign)
        return x, y

    def _layer(self, x: Tensor, y: Tensor | None, chosen: Tensor, level: Tensor) -> Pair:
        counts = torch.bincount(chosen, minlength=len(OPERATIONS)).tolist()
        still, moving, colors = counts[0], sum(counts[1 : 1 + len(_MOVES)]), counts[-len(_COLORS) :]
        order = chosen.argsort(stable=True)  # samples of one operation beside each other
        index = _sent(order, x.device)
        parts = list(x[index].split([still, moving, *colors]))
        levels = _sent(level[order], x.device).split([still, moving, *colors])
        if moving:
            which = order[still : still + moving]
            theta = affine(chosen[which], level[which], x.shape[2], x.shape[3])
            there = index[still : still + moving]
            masks = None if y is None else y[there]
            parts[1], masks = warp(parts[1], masks, _sent(theta, x.device), border=False)
            if y is not None and masks is not None:
                y = y.index_copy(0, there, masks)
        for place, name in enumerate(_COLORS, 2):
            if len(parts[place]):
                m = levels[place]
                m = 1 + 0.03 * m if name in _BLENDS else m.abs() / _STEPS
                parts[place] = change_color(parts[place], name, m.to(x.dtype))
        return x.index_copy(0, index, torch.cat(parts)), y


def affine(chosen: Tensor, level: Tensor, height: int, width: int) -> Tensor:
    """θ [B, 2, 3] for ``warp`` of the operations number ``chosen`` [B], magnitudes ``level`` [B].

    In pixels from the middle, the output at p is the input at A p + t; θ is that in [−1, 1]².
    """
    m = level.double()

    def only(name: str, values: Tensor) -> Tensor:
        return torch.where(chosen == OPERATIONS.index(name), values, 0.0)

    angle = only("rotate", torch.deg2rad(m))
    a, sine = angle.cos(), angle.sin()
    b, c = only("shear_x", 0.01 * m) - sine, only("shear_y", 0.01 * m) + sine
    s, t = only("translate_x", 0.03 * m), only("translate_y", 0.03 * m)
    rows = [a, b * height / width, s, c * width / height, a, t]
    return torch.stack(rows, 1).view(-1, 2, 3).float()


def warp(x: Tensor, y: Tensor | None, theta: Tensor, *, border: bool) -> Pair:
    """x'(p) = x(θ [p; 1]) with p in [−1, 1]², θ [B, 2, 3]; bilinear, and nearest for masks.

    Outside: the edge's value with ``border``, else zeros, and IGNORE in masks.
    """
    size = [len(x), 1, x.shape[2], x.shape[3]]
    grid = functional.affine_grid(theta.to(x.dtype), size, align_corners=False)
    mode = "border" if border else "zeros"
    moved = functional.grid_sample(x, grid, padding_mode=mode, align_corners=False)
    if _is_mask(y):
        # One more than the class, so that zero is the outside; exact in float32.
        classes = (y + 1).unsqueeze(1).float()
        found = functional.grid_sample(
            classes, grid.float(), mode="nearest", padding_mode=mode, align_corners=False
        )
        found = found.squeeze(1).round().long() - 1
        y = torch.where(found < 0, IGNORE, found)
    return moved, y


def change_color(x: Tensor, name: str, level: Tensor) -> Tensor:
    """One operation on the colors of x [B, C, H, W], from 0 to 1, with ``level`` a [B].

    Brightness, contrast, saturation and sharpness are the blend d + a·(x − d), where d is black,
    the mean gray, the gray image or the smoothed image. Posterize keeps 8 − 4a bits, solarize
    inverts what is not below 1 − a; autocontrast and equalize ignore a. As in Pillow.
    """
    a = level.view(-1, 1, 1, 1)
    match name:
        case "brightness":
            return (x * a).clamp_(0, 1)
        case "contrast" | "saturation" | "sharpness":
            if name == "sharpness":
                d = _smooth(x)
            else:
                d = gray(x) if name == "saturation" else gray(x).mean(dim=(1, 2, 3), keepdim=True)
            return (x - d).mul_(a).add_(d).clamp_(0, 1)
        case "posterize":
            step = (2 ** torch.round(4 * a).long()).to(x.dtype)
            kept = ((x * 255).floor() / step).floor() * step / 255
            return torch.where(step == 1, x, kept)
        case "solarize":
            return torch.where(x < 1 - a, x, 1.0 - x)
        case "autocontrast":
            low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
            flat = high <= low
            return torch.where(flat, x, (x - low) / torch.where(flat, 1.0, high - low))
        case "equalize":
            return _equalize(x.clamp(0, 1))
    raise ValueError(f"{name!r} is not one of {', '.join(_COLORS)}.")


def gray(x: Tensor) -> Tensor:
    """0.299 R + 0.587 G + 0.114 B (ITU-R 601), [B, 1, H, W]; one channel stays as it is."""
    if x.shape[1] != 3:
        return x.mean(dim=1, keepdim=True)
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def _smooth(x: Tensor) -> Tensor:
    """The mean over 3 × 3 pixels, the middle counted five times; the border stays."""
    if min(x.shape[2:]) < 3:
        return x
    kernel = x.new_ones(x.shape[1], 1, 3, 3)
    kernel[:, :, 1, 1].fill_(5)  # waits for no device, unlike a tensor made on the host
    inner = functional.conv2d(x, kernel / 13, groups=x.shape[1]).clamp(0, 1)
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = inner
    return smooth


def _equalize(x: Tensor) -> Tensor:
    """Every channel through its own cumulative histogram of 256 levels."""
    levels = 255 * x.flatten(0, 1).flatten(1)
    index = levels.long()
    counts = index.new_zeros(len(index), 256).scatter_add_(1, index, torch.ones_like(index))
    # Pillow leaves the pixels of the highest level out of the step.
    last = counts.gather(1, index.amax(1, keepdim=True))
    step = torch.div(counts.sum(1, keepdim=True) - last, 255, rounding_mode="floor")
    before = counts.cumsum(1) - counts
    table = torch.div(before + step // 2, step.clamp(min=1), rounding_mode="floor")
    made = table.clamp(0, 255).to(x.dtype).gather(1, index)
    return (torch.where(step == 0, levels, made) / 255).view_as(x)


def _is_mask(y: Tensor | None) -> TypeGuard[Tensor]:
    return y is not None and y.ndim == 3


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: pinned memory is copied while the host goes on."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


_KINDS: dict[str, type[Transform]] = {
    "crop": Crop, "flip": Flip, "cutout": Cutout, "resized_crop": ResizedCrop,
    "color_jitter": ColorJitter, "rand_augment": RandAugment, "mixup": Mixup, "cutmix": CutMix,
}  # fmt: skip


def build_augmentation(
    parts: Sequence[str | Mapping[str, Any] | Transform], *, num_classes: int | None = None
) -> Augmentation | None:
    """``["crop", "flip", {"cutout": {"size": 8}}]`` as an Augmentation; None for an empty list.

    ``num_classes`` is given to the parts that mix labels. ``RandAugment`` is ``rand_augment``, too.
    """
    made = [part if isinstance(part, Transform) else _built(part, num_classes) for part in parts]
    return Augmentation(made) if made else None


def _built(part: Any, num_classes: int | None) -> Transform:
    if isinstance(part, str):
        name, chosen = part, {}
    elif isinstance(part, Mapping) and len(part) == 1:
        ((name, given),) = part.items()
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(f"augmentation {name}: options are a mapping, got {given!r}.")
        chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in (given or {}).items()}
    else:
        raise TypeError(f"an augmentation is a name or {{name: options}}, got {part!r}.")
    key = re.sub("[-_]", "", str(name)).lower()
    kind = next((kind for k, kind in _KINDS.items() if k.replace("_", "") == key), None)
    if kind is None:
        near = hint(str(name).lower(), _KINDS)
        raise ValueError(f"there is no augmentation {name!r}.{near} Known: {', '.join(_KINDS)}.")
    if kind in (Mixup, CutMix) and num_classes is not None:
        chosen.setdefault("num_classes", num_classes)
    return kind(**chosen)
