"""The constants of the 19 corruptions at severities 1 to 5 (Hendrycks & Dietterich, 2019).

As published with CIFAR-10-C, for images of 32 pixels. Lengths are in pixels unless the comment says
"of the side".
"""

from __future__ import annotations

from typing import Any

SEVERITIES = (1, 2, 3, 4, 5)

# fmt: off
CONSTANTS: dict[str, tuple[Any, ...]] = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": (500, 250, 100, 75, 50),  # photons at full brightness
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values hit
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),  # standard deviation, times the value
    # radius, blur that smooths the disk's edge
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)),
    # blur before and after, reach of a move, passes
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)),  # radius, sigma
    "zoom_blur": tuple(  # factors
        tuple(1.0 + i * 0.01 for i in range(n)) for n in (7, 12, 16, 21, 26)),
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
# fmt: on
