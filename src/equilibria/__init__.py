"""Equilibrium layers whose answer is the solution of a problem you can read, with a certificate."""

from ._version import __version__
from .adjoints import Implicit, OneStep, Phantom, Unrolled
from .engine import (
    CG,
    GMRES,
    ConvergenceWarning,
    NotConvergedError,
    Result,
    Solution,
    Stats,
    jacobian_penalty,
    spectral_radius,
)
from .entry import fixed_point, linear_solve
from .solvers import Anderson, BestIterate, Broyden, Picard

__all__ = [
    "CG",
    "GMRES",
    "Anderson",
    "BestIterate",
    "Broyden",
    "ConvergenceWarning",
    "Implicit",
    "NotConvergedError",
    "OneStep",
    "Phantom",
    "Picard",
    "Result",
    "Solution",
    "Stats",
    "Unrolled",
    "__version__",
    "fixed_point",
    "jacobian_penalty",
    "linear_solve",
    "spectral_radius",
]
