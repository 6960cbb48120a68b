"""Solvers, one file each: of fixed points, ``Auto``, which chooses one, and of roots."""

from .anderson import Anderson
from .auto import Auto, choose_solver
from .best import BestIterate
from .broyden import Broyden
from .forward_backward import ForwardBackward, SplittingSolver
from .newton_krylov import NewtonKrylov
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
    "NewtonKrylov",
    "PeacemanRachford",
    "Picard",
    "ProximalGradient",
    "SequentialAveraging",
    "SplittingSolver",
    "choose_solver",
]
