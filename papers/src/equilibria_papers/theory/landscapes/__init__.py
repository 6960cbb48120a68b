"""Loss landscapes around trained weights (the NTK thesis, §4.2; Li et al. 2018).

``measure_landscape`` measures Φ(a, b) = L(θ* + a d₁ + b d₂) on a grid, ``random_directions`` gives
the directions, ``repeated`` the weight-tied twin repeat-K, ``Surface`` is what comes back and is
saved, and the figures draw it.
"""

from .measuring import (
    Direction,
    Grid,
    cross_entropy,
    measure_landscape,
    random_directions,
    repeated,
    squared_error,
)
from .surface import LandscapeFileError, Surface, contour_figure

__all__ = [
    "Direction",
    "Grid",
    "LandscapeFileError",
    "Surface",
    "contour_figure",
    "cross_entropy",
    "measure_landscape",
    "random_directions",
    "repeated",
    "squared_error",
]
