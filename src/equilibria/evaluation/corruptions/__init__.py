"""The 19 corruptions of Hendrycks and Dietterich (2019) at five severities, on any device."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import distortions, weather
from .filters import ImageNoise
from .severities import CONSTANTS, SEVERITIES

__all__ = ["CORRUPTIONS", "SEVERITIES", "check_kinds", "check_severities", "corrupt"]

_KINDS: dict[str, Callable[[Tensor, Any, ImageNoise], Tensor]] = {
    "gaussian_noise": distortions.gaussian_noise,
    "shot_noise": distortions.shot_noise,
    "impulse_noise": distortions.impulse_noise,
    "defocus_blur": distortions.defocus_blur,
    "glass_blur": distortions.glass_blur,
    "motion_blur": distortions.motion_blur,
    "zoom_blur": distortions.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": distortions.brightness,
    "contrast": distortions.contrast,
    "elastic_transform": distortions.elastic_transform,
    "pixelate": distortions.pixelate,
    "jpeg_compression": distortions.jpeg_compression,
    "speckle_noise": distortions.speckle_noise,
    "gaussian_blur": distortions.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": distortions.saturate,
}

CORRUPTIONS: tuple[str, ...] = tuple(_KINDS)
"""The fifteen of the benchmark, in its order, and the four that are kept for validation."""

_CHUNK = 1 << 23
"""Values worked on at a time: some steps hold a dozen float64 copies of them."""
_SMALLEST, _LARGEST = 4, 64
"""Of the shorter side: on larger images the constants would change next to nothing."""


def check_kinds(kinds: Any) -> tuple[str, ...]:
    """All 19 for None; else the given names, each known."""
    if kinds is None:
        return CORRUPTIONS
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not names:
        raise ValueError("kinds is empty: name at least one corruption, or None for all 19.")
    for name in names:
        if name not in _KINDS:
            close = difflib.get_close_matches(str(name), CORRUPTIONS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"no corruption is called {name!r}.{hint} Known: {list(CORRUPTIONS)}.")
    return names


def check_severities(severities: Any) -> tuple[int, ...]:
    """The given severities, each of 1 … 5."""
    given = (severities,) if isinstance(severities, int) else tuple(severities)
    for severity in given:
        if isinstance(severity, bool) or severity not in SEVERITIES:
            raise ValueError(f"severity {severity!r} is out of range: expected 1, 2, 3, 4 or 5.")
    if not given:
        raise ValueError("severities is empty: give at least one of 1, 2, 3, 4, 5.")
    return given


@torch.no_grad()
def corrupt(images: Tensor, kind: str, severity: int, *, seed: int = 0) -> Tensor:
    """Corrupt uint8 images [N, C, H, W], C 1 or 3; the same shape, dtype and device come back.

    What happens to an image depends on its pixels, ``kind``, ``severity`` and ``seed`` alone: not
    on the rest of the batch, and not on the device (up to one level of 255 by rounding).

    Args:
        images: uint8, the shorter side of 4 to 64 pixels: the constants are those of CIFAR-10-C.
        kind: one of ``CORRUPTIONS``.
        severity: 1 (weak) to 5.
        seed: another seed draws other noise.
    """
    _check_images(images)
    (name,), (strength,) = check_kinds(kind), check_severities(severity)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: expected an integer.")
    chosen = CONSTANTS[name][strength - 1]
    salt = (seed, CORRUPTIONS.index(name), strength)
    out = torch.empty_like(images)
    count = max(1, _CHUNK // max(1, images[:1].numel()))
    for start in range(0, images.shape[0], count):
        part = images[start : start + count]
        made = _KINDS[name](part.float() / 255, chosen, ImageNoise(part, salt))
        out[start : start + count] = (made.clamp(0.0, 1.0) * 255).round().to(torch.uint8)
    return out


def _check_images(images: Any) -> None:
    if not isinstance(images, Tensor):
        raise TypeError(f"corrupt takes a uint8 tensor [N, C, H, W], got {type(images).__name__}.")
    if images.dtype != torch.uint8:
        raise TypeError(
            f"corrupt takes uint8 images of 0 … 255, got {images.dtype}: corrupt before "
            "normalizing, (x * 255).round().to(torch.uint8) for values of 0 … 1."
        )
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            "corrupt takes images [N, C, H, W] with C 1 (gray) or 3 (RGB), got shape "
            f"{tuple(images.shape)}."
        )
    if not _SMALLEST <= min(images.shape[-2:]) <= _LARGEST:
        raise ValueError(
            f"corrupt takes images of at least {_SMALLEST} pixels a side, the shorter one of at "
            f"most {_LARGEST}, got {tuple(images.shape[-2:])}; load them with a smaller image_size."
        )
