"""Fixed-point solvers, one file each."""

from .anderson import Anderson
from .auto import Auto
from .best import BestIterate
from .broyden import Broyden
from .forward_backward import ForwardBackward, SplittingSolver
from .peaceman_rachford import PeacemanRachford
from .picard import Picard
from .proximal_gradient import ProximalGradient
from .sequential_averaging import SequentialAveraging

__all__ = [
    "Anderson",
    "Auto",
    "BestIterate",
    "Broyden",
    "ForwardBackward",
    "PeacemanRachford",
    "Picard",
    "ProximalGradient",
    "SequentialAveraging",
    "SplittingSolver",
]
