"""The 19 corruptions of Hendrycks and Dietterich (2019) at five severities, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.engine.options import hint

from . import distortions, weather
from .filters import ImageNoise

__all__ = ["CORRUPTIONS", "SEVERITIES", "check_kinds", "check_severities", "corrupt"]

SEVERITIES = (1, 2, 3, 4, 5)

# A kind is the function of that name in ``distortions`` or ``weather``. Its constants at severities
# 1 to 5 are those of CIFAR-10-C; lengths are in pixels unless a comment says "of the side".
# fmt: off
_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": (500, 250, 100, 75, 50),  # photons at full brightness
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values hit
    # radius, blur that smooths the disk's edge
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    # blur before and after, passes in which pixels move by one
    "glass_blur": ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)),
    "motion_blur": ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),  # radius, sigma
    "zoom_blur": tuple(  # factors
        tuple(1.0 + i * 0.01 for i in range(n)) for n in (7, 12, 16, 21, 26)),
    # mean, deviation, zoom, threshold, blur radius, blur sigma, share of the image kept
    "snow": ((0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95), (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9), (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8)),
    "frost": ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # image, frost
    "fog": ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),  # amount, decay
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added to the value of HSV
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor
    # of the side: displacement, its blur, affine shift of three points
    "elastic_transform": ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # of the side
    "jpeg_compression": (80, 65, 58, 50, 40),  # quality
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),  # standard deviation, times the value
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # sigma
    # mean, deviation, blur, threshold, strength (water) or blur (mud), 1 for mud
    "spatter": ((0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1.0, 0.69, 0.5, 0), (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1)),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),  # factor, added
}
# fmt: on
CORRUPTIONS: tuple[str, ...] = tuple(_CONSTANTS)
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
        if name not in CORRUPTIONS:
            near = hint(str(name), CORRUPTIONS)
            raise ValueError(f"no corruption is called {name!r}.{near} Known: {list(CORRUPTIONS)}.")
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
    made_by = getattr(weather, name, None) or getattr(distortions, name)
    chosen = _CONSTANTS[name][strength - 1]
    salt = (seed, CORRUPTIONS.index(name), strength)
    out = torch.empty_like(images)
    count = max(1, _CHUNK // max(1, images[:1].numel()))
    for start in range(0, images.shape[0], count):
        part = images[start : start + count]
        made = made_by(part.float() / 255, chosen, ImageNoise(part, salt))
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
