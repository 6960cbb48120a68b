"""Images as a network was trained on them: channels, size and normalization.

x = (pixels − mean)/std,    pixels from 0 to 1, one mean and one std for each channel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.optional import needs
from equilibria.engine.options import shown
from equilibria.engine.result import warn_user

LARGEST_SIDE = 4096
"""Pixels of a side that a network may be laid out for, or ask images to be resized to."""
_FLAT = 0.05
_FAR = 2.0
_TAKES = (
    "expected a uint8 tensor (0 to 255), a floating tensor of pixels from 0 to 1, a PIL image, or "
    "a list of them"
)


class InputWarning(UserWarning):
    """Images that are far from those that a network was trained on."""


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before a network sees it."""

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    whole: bool = False
    """The shorter side is resized and nothing cut off (segmentation), else the middle square."""

    @classmethod
    def of(
        cls, channels: int, image_size: int, whole: bool, extra: Mapping[str, Any]
    ) -> Preprocessing:
        """As ``extra`` of a file says; without a mean and a std pixels stay from 0 to 1."""
        mean = _numbers("mean", extra.get("mean") or [0.0] * channels, channels)
        std = _numbers("std", extra.get("std") or [1.0] * channels, channels)
        if min(std) <= 0:
            raise _wrong("std", list(std), "expected positive numbers")
        size = trained_side(extra.get("image_size") or image_size, whole)
        return cls(channels, size, mean, std, whole)

    @property
    def normalizes(self) -> bool:
        """Whether it changes the values of pixels."""
        return any(self.mean) or any(s != 1.0 for s in self.std)

    @property
    def largest(self) -> float:
        """The largest size of a normalized pixel."""
        pairs = zip(self.mean, self.std, strict=True)
        return max(max(abs(m), abs(1.0 - m)) / s for m, s in pairs)

    def __call__(
        self, images: Any, names: Sequence[str] | None = None, device: torch.device | None = None
    ) -> Tensor:
        """One image or several, see ``Network.preprocess``; float32 [B, C, H, W]."""
        batch = isinstance(images, Tensor) and images.ndim == 4
        given = list(images) if batch or isinstance(images, (list, tuple)) else [images]
        if not given:
            raise ValueError(f"there is no image: {_TAKES}.")
        names = [f"image {i}" for i in range(len(given))] if names is None else names
        if len(names) != len(given):
            raise ValueError(f"names: there are {len(names)} for {len(given)} images.")
        doubts: dict[str, list[str]] = {}
        made: list[Tensor] = []
        for image, name in zip(given, names, strict=True):
            pixels = self._resized(self._pixels(image, name)).to(device)
            x = pixels / 255.0 if pixels.dtype == torch.uint8 else pixels.float()
            mean, std = (x.new_tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
            made.append((x - mean) / std)
            doubt = self._doubt(x, made[-1])
            if doubt:
                doubts.setdefault(doubt, []).append(name)
        shapes = {tuple(x.shape) for x in made}
        if len(shapes) > 1:
            sizes = ", ".join(f"{h} × {w}" for _, h, w in sorted(shapes)[:3])
            raise ValueError(
                f"whole images of different shapes ({sizes} pixels) do not fit one batch: give "
                "them one at a time."
            )
        for doubt, whose in doubts.items():
            others = "" if len(whose) == 1 else f" and {len(whose) - 1} more"
            warn_user(f"{whose[0]}{others}: {doubt}", InputWarning)
        return torch.stack(made)

    def _pixels(self, image: Any, name: str) -> Tensor:
        """[C, H, W], uint8 or floating."""
        pillow: Any = sys.modules.get("PIL.Image")  # not imported: then nothing is an image of it
        if pillow is not None and isinstance(image, pillow.Image):
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"{name}: a PIL image of mode {image.mode} has no fixed range; convert it to "
                    "8 bits, or give its pixels from 0 to 1 as a tensor."
                )
            if self.channels not in (1, 3):
                raise ValueError(
                    f"{name}: the network takes {self.channels} channels, a PIL image has 1 or 3; "
                    "give a tensor."
                )
            image = image.convert("L" if self.channels == 1 else "RGB")
            values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            return values.view(image.height, image.width, -1).permute(2, 0, 1)
        if not isinstance(image, Tensor):
            hint = ""
            if type(image).__module__.split(".")[0] == "numpy":
                hint = " Use torch.from_numpy(image), of shape [C, H, W]."
            raise TypeError(f"{name}: got {type(image).__name__}; {_TAKES}.{hint}")
        if image.dtype != torch.uint8 and not image.is_floating_point():
            raise TypeError(
                f"{name}: got a tensor of {image.dtype}; {_TAKES}. Use images.to(torch.uint8) for "
                "values from 0 to 255."
            )
        made: Tensor = image.detach()[None] if image.ndim == 2 else image.detach()
        if made.ndim != 3 or made.shape[0] != self.channels or made.numel() == 0:
            last = made.ndim == 3 and made.shape[-1] == self.channels
            hint = " Channels come first: use .permute(2, 0, 1)." if last else ""
            if made.ndim == 3 and (made.shape[0], self.channels) == (1, 3):
                hint = " Use .expand(3, -1, -1) for a gray image."
            raise ValueError(
                f"{name}: got shape {list(made.shape)}, expected [{self.channels}, height, "
                f"width].{hint}"
            )
        if made.is_floating_point() and not bool(torch.isfinite(made).all()):
            raise ValueError(f"{name}: it holds NaN or infinity; expected pixels from 0 to 1.")
        return made

    def _resized(self, x: Tensor) -> Tensor:
        """x [C, H, W]: the middle square at size × size, or the whole at its shorter side.

        By Pillow, channel after channel, as images are resized for training: uint8 in whole
        numbers, floating point in float32.
        """
        height, width = x.shape[1:]
        side = min(height, width)
        box = (0, 0, width, height)
        target = (self.size, self.size)
        if self.whole:
            target = (round(width * self.size / side), round(height * self.size / side))
        else:
            left, top = (width - side) // 2, (height - side) // 2
            box = (left, top, left + side, top + side)
        if target == (width, height):
            return x
        if max(target) > 4 * LARGEST_SIDE:
            raise ValueError(
                f"an image of {height} × {width} pixels would be resized to {target[1]} × "
                f"{target[0]}; the limit is {4 * LARGEST_SIDE} for a side."
            )
        with needs("pillow", "Resizing images"):
            import PIL.Image as pillow
        kind = torch.uint8 if x.dtype == torch.uint8 else torch.float32
        made = []
        for channel in x.to("cpu", kind).contiguous():
            image = pillow.fromarray(channel.numpy())
            image = image.resize(target, pillow.Resampling.BILINEAR, box=box)
            made.append(torch.frombuffer(bytearray(image.tobytes()), dtype=kind))
        return torch.stack(made).view(-1, target[1], target[0])

    def _doubt(self, pixels: Tensor, x: Tensor) -> str:
        """What makes an image [C, H, W] unlike those of training; empty: nothing.

        Pixels should be from 0 to 1. Normalized, x has mean 0 and standard deviation 1 over all
        pixels of the training images.
        """
        low, high = float(pixels.min()), float(pixels.max())
        if low < -0.01 or high > 1.01:
            found = f"values from {low:.3g} to {high:.3g} where pixels from 0 to 1 are expected"
            if low < 0 and max(-low, high) < 20:
                return f"{found}; if it is normalized already, call model(x) without preprocess"
            return f"{found}; divide by 255, or give uint8"
        if not self.normalizes or x[0].numel() == 1:
            return ""
        contrast, mean = float(x.flatten(1).std(1).max()), float(x.mean())
        if contrast < _FLAT:
            return (
                "almost no contrast, unlike the images that the network was trained on: do not "
                "rely on its label (pixels are 0 to 255 in uint8, 0 to 1 in floating point)"
            )
        if abs(mean) > _FAR:
            kind = "brighter" if mean > 0 else "darker"
            return (
                f"much {kind} than the images that the network was trained on (mean pixel "
                f"{mean:+.1f} standard deviations): are its colors inverted?"
            )
        return ""


def _wrong(key: str, given: Any, wanted: str) -> ValueError:
    return ValueError(f"the weights store {key}={shown(given)}: {wanted}.")


def _numbers(key: str, given: Any, channels: int) -> tuple[float, ...]:
    listed = isinstance(given, (list, tuple)) and len(given) == channels
    if not listed or not all(
        isinstance(v, (int, float)) and abs(v) < 1e6 and math.isfinite(v) for v in given
    ):
        raise _wrong(key, given, f"expected {channels} finite number(s), one for each channel")
    return tuple(float(v) for v in given)


def trained_side(given: Any, whole: bool) -> int:
    """The side of the square images that the network was trained on, or their shorter one."""
    sides = list(given) if isinstance(given, (list, tuple)) else [given]
    whole_numbers = all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sides)
    if not whole_numbers or len(sides) not in (1, 2) or (len(set(sides)) > 1 and not whole):
        raise _wrong("image_size", given, "expected the side of a square")
    if max(sides) > LARGEST_SIDE:
        raise _wrong("image_size", given, f"the limit is {LARGEST_SIDE} pixels for a side")
    return int(min(sides))
