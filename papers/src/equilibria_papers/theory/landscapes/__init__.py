"""Loss landscapes around trained weights (the NTK thesis, §4.2; Li et al. 2018).

``measure_landscape`` measures Φ(a, b) = L(θ* + a d₁ + b d₂) on a grid, ``random_directions`` gives
the directions, ``repeated`` the weight-tied twin repeat-K, ``Surface`` is what comes back and is
saved, and the figures draw it.
"""

from .contours import contour_figure, curve_figure, surface_figure
from .directions import Direction, random_directions
from .measuring import Grid, cross_entropy, measure_landscape, repeated, squared_error
from .surface import LandscapeFileError, Surface

__all__ = [
    "Direction",
    "Grid",
    "LandscapeFileError",
    "Surface",
    "contour_figure",
    "cross_entropy",
    "curve_figure",
    "measure_landscape",
    "random_directions",
    "repeated",
    "squared_error",
    "surface_figure",
]
