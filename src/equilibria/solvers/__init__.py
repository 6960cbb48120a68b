"""Fixed-point solvers, one file each."""

from .anderson import Anderson
from .auto import Auto
from .best import BestIterate
from .broyden import Broyden
from .picard import Picard
from .proximal_gradient import ProximalGradient
from .sequential_averaging import SequentialAveraging

__all__ = [
    "Anderson",
    "Auto",
    "BestIterate",
    "Broyden",
    "Picard",
    "ProximalGradient",
    "SequentialAveraging",
]
