"""Fixed-point solvers, one file each."""

from .anderson import Anderson
from .best import BestIterate
from .broyden import Broyden
from .picard import Picard

__all__ = ["Anderson", "BestIterate", "Broyden", "Picard"]
