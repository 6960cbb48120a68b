"""The constants of the 19 corruptions at severities 1 to 5 (Hendrycks & Dietterich, 2019).

Three tables, as published with CIFAR-10-C (images of 32 pixels), Tiny-ImageNet-C (64) and
ImageNet-C (224). Lengths are in pixels unless the comment says "of the side".
"""

from __future__ import annotations

from typing import Any, Literal

Scale = Literal["cifar", "tiny", "imagenet"]
SEVERITIES = (1, 2, 3, 4, 5)

Five = tuple[Any, ...]


def _zooms(count: int, step: float) -> tuple[float, ...]:
    """1, 1 + step, …: as many as numpy's arange gave the authors, whose end rounding moves."""
    return tuple(1.0 + i * step for i in range(count))


# fmt: off
_CIFAR: dict[str, Five] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": (500, 250, 100, 75, 50),  # photons at full brightness
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values hit
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),  # standard deviation, times the value
    # radius, blur that smooths the disk's edge
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    # blur before and after, reach of a move, passes
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),  # radius, sigma
    "zoom_blur": tuple(_zooms(n, 0.01) for n in (7, 12, 16, 21, 26)),  # factors
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # sigma
    # mean, deviation, zoom, threshold, blur radius, blur sigma, share of the image kept
    "snow": ((0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95), (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9), (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8)),
    "frost": ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # image, frost
    "fog": ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)),  # amount, decay
    # mean, deviation, blur, threshold, strength (water) or blur (mud), 1 for mud
    "spatter": ((0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1.0, 0.69, 0.5, 0), (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added to the value of HSV
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # factor
    "saturate": ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),  # factor, added
    # of the side: displacement, its blur, affine shift of three points
    "elastic_transform": ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # of the side
    "jpeg_compression": (80, 65, 58, 50, 40),  # quality
}

_TINY: dict[str, Five] = {
    "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": (250, 100, 50, 30, 15),
    "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
    "speckle_noise": (0.15, 0.2, 0.25, 0.3, 0.35),
    "defocus_blur": ((0.5, 0.6), (1.0, 0.1), (1.5, 0.1), (2.5, 0.01), (3.0, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1.0), (10, 1.5), (10, 2.0), (10, 2.5), (12, 3.0)),
    "zoom_blur": _CIFAR["zoom_blur"],
    "gaussian_blur": (0.5, 0.75, 1.0, 1.25, 1.5),
    "snow": ((0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.8), (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.7), (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.6)),
    "frost": ((1.0, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
    "fog": ((0.4, 3.0), (0.7, 3.0), (1.0, 2.5), (1.5, 2.0), (2.0, 1.75)),
    "spatter": ((0.62, 0.1, 0.7, 0.7, 0.6, 0), (0.65, 0.1, 0.8, 0.7, 0.6, 0),
        (0.65, 0.3, 1.0, 0.69, 0.6, 0), (0.65, 0.1, 0.7, 0.68, 0.6, 1),
        (0.65, 0.1, 0.5, 0.67, 0.6, 1)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (30.0, 0.2)),
    "elastic_transform": ((0.0, 0.0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06),
        (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
    "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": (65, 58, 50, 40, 25),
}

# ImageNet-C gives the elastic lengths for 244 pixels and uses them at 224.
_STRETCH = 244 / 224

_IMAGENET: dict[str, Five] = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (60, 25, 12, 5, 3),
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),
    "defocus_blur": ((3.0, 0.1), (4.0, 0.5), (6.0, 0.5), (8.0, 0.5), (10.0, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3.0), (15, 5.0), (15, 8.0), (15, 12.0), (20, 15.0)),
    "zoom_blur": (_zooms(12, 0.01), _zooms(16, 0.01), _zooms(11, 0.02), _zooms(13, 0.02),
        _zooms(11, 0.03)),
    "gaussian_blur": (1.0, 2.0, 3.0, 4.0, 6.0),
    "snow": ((0.1, 0.3, 3.0, 0.5, 10, 4.0, 0.8), (0.2, 0.3, 2.0, 0.5, 12, 4.0, 0.7),
        (0.55, 0.3, 4.0, 0.9, 12, 8.0, 0.7), (0.55, 0.3, 4.5, 0.85, 12, 8.0, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12.0, 0.55)),
    "frost": ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4)),
    "spatter": ((0.65, 0.3, 4.0, 0.69, 0.6, 0), (0.65, 0.3, 3.0, 0.68, 0.6, 0),
        (0.65, 0.3, 2.0, 0.68, 0.5, 0), (0.65, 0.3, 1.0, 0.65, 1.5, 1),
        (0.67, 0.4, 1.0, 0.65, 1.5, 1)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "saturate": ((0.3, 0.0), (0.1, 0.0), (2.0, 0.0), (5.0, 0.1), (20.0, 0.2)),
    "elastic_transform": tuple(
        tuple(_STRETCH * length for length in lengths) for lengths in (
            (2.0, 0.7, 0.1), (2.0, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02),
            (0.12, 0.01, 0.02))),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": (25, 18, 15, 10, 7),
}

# fmt: on
TABLES: dict[Scale, dict[str, Five]] = {"cifar": _CIFAR, "tiny": _TINY, "imagenet": _IMAGENET}


def scale_for(height: int, width: int) -> Scale:
    """The table for images of this size: by the shorter side, the nearest published one."""
    side = min(height, width)
    return "cifar" if side <= 48 else "tiny" if side <= 120 else "imagenet"
