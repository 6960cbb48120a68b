"""RandAugment (Cubuk et al. 2020): n random operations a sample, all of one magnitude."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equilibria.engine.options import check_number, options

from .color import autocontrast, brightness, contrast, saturation
from .counting import host_seed
from .extras import kornia_enhance
from .geometry import warp
from .transform import Transform

__all__ = ["OPERATIONS", "RandAugment", "affine", "change_color"]

_STEPS = 30.0
_GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
_COLOR = (
    "brightness",
    "contrast",
    "saturation",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
OPERATIONS = ("identity", *_GEOMETRIC, *_COLOR)
"""The fourteen operations of the paper, table 6."""


@options
class RandAugment(Transform):
    """``n`` operations, drawn for every sample by itself, of ``magnitude`` 0 … 30 (needs kornia).

    At magnitude m: rotate by ±m degrees, shear by ±0.01 m, translate by ±0.015 m of the side,
    blend brightness, contrast, saturation and sharpness by 1 ± 0.03 m, keep 8 − 4m/30 bits, invert
    what is above 1 − m/30. What moves in from outside is black; in masks it is IGNORE.
    """

    n: int = 2
    magnitude: float = 9.0

    def __post_init__(self) -> None:
        check_number(self, "n", low=1, high=16, integer=True)
        check_number(self, "magnitude", low=0, high=_STEPS)

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the operations on the host, so that their groups are known without waiting."""
        kornia_enhance()  # a missing package is told before anything is drawn
        host = torch.Generator().manual_seed(host_seed(generator))
        chosen = torch.randint(0, len(OPERATIONS), (self.n, len(x)), generator=host)
        signs = 2.0 * torch.randint(0, 2, (self.n, len(x)), generator=host) - 1.0
        for row, sign in zip(chosen, signs, strict=True):
            x, y = self._layer(x, y, row, sign)
        return x, y

    def _layer(
        self, x: Tensor, y: Tensor | None, chosen: Tensor, sign: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        moving = (chosen >= 1) & (chosen <= len(_GEOMETRIC))
        if bool(moving.any()):
            kinds = [OPERATIONS[k] for k in chosen[moving].tolist()]
            theta = affine(kinds, self.magnitude * sign[moving], x.shape[2], x.shape[3])
            index = _sent(moving.nonzero().flatten(), x.device)
            part = None if y is None else y[index]
            moved, part = warp(x[index], part, _sent(theta, x.device), border=False)
            x = x.index_copy(0, index, moved)
            if y is not None and part is not None:
                y = y.index_copy(0, index, part)
        for k, name in enumerate(OPERATIONS):
            where = chosen == k
            if name in _COLOR and bool(where.any()):
                index = _sent(where.nonzero().flatten(), x.device)
                levels = _sent(self.magnitude * sign[where], x.device)
                x = x.index_copy(0, index, change_color(x[index], name, levels).to(x.dtype))
        return x, y


def affine(kinds: list[str], level: Tensor, height: int, width: int) -> Tensor:
    """θ [B, 2, 3] of the geometric operations, with signed magnitudes ``level`` [B], for ``warp``.

    In pixels from the middle, the output at p is the input at A p + t; θ is that in [−1, 1]².
    """
    theta = torch.zeros(len(kinds), 2, 3)
    for row, kind, m in zip(theta, kinds, level.tolist(), strict=True):
        (a, b), (c, d), t = (1.0, 0.0), (0.0, 1.0), [0.0, 0.0]
        match kind:
            case "rotate":
                cosine, sine = math.cos(math.radians(m)), math.sin(math.radians(m))
                (a, b), (c, d) = (cosine, -sine), (sine, cosine)
            case "shear_x":
                b = 0.01 * m
            case "shear_y":
                c = 0.01 * m
            case "translate_x":
                t[0] = 0.015 * m * width
            case "translate_y":
                t[1] = 0.015 * m * height
        row[0] = torch.tensor([a, b * height / width, 2 * t[0] / width])
        row[1] = torch.tensor([c * width / height, d, 2 * t[1] / height])
    return theta


def change_color(x: Tensor, name: str, level: Tensor) -> Tensor:
    """One operation on the colors of x [B, C, H, W], with signed magnitudes ``level`` [B]."""
    enhance = kornia_enhance()
    factor = 1 + 0.03 * level
    blends: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "brightness": brightness,
        "contrast": contrast,
        "saturation": saturation,
        "sharpness": enhance.sharpness,
    }
    if name in blends:
        return blends[name](x, factor.to(x.dtype))
    match name:
        case "posterize":
            bits = 8 - torch.round(4 * level.abs() / _STEPS).to(torch.int64)
            made: Tensor = enhance.posterize(x, bits)
        case "solarize":
            made = enhance.solarize(x, (1 - level.abs() / _STEPS).to(x.dtype))
        case "autocontrast":
            made = autocontrast(x)
        case "equalize":
            made = enhance.equalize(x.clamp(0, 1))
        case _:
            raise ValueError(f"{name!r} is not one of {', '.join(_COLOR)}.")
    return made


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: pinned memory is copied while the host goes on."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
