"""The engine: the driver of solves, typed results, norms over trees, Krylov solvers."""

from .adjoint import Adjoint
from .krylov import CG, GMRES, LinearSolver
from .result import ConvergenceWarning, NotConvergedError, Result, Solution, Stats
from .solver import Point, Solver, SolverOptions
from .spectral import jacobian_penalty, spectral_radius

__all__ = [
    "CG",
    "GMRES",
    "Adjoint",
    "ConvergenceWarning",
    "LinearSolver",
    "NotConvergedError",
    "Point",
    "Result",
    "Solution",
    "Solver",
    "SolverOptions",
    "Stats",
    "jacobian_penalty",
    "spectral_radius",
]
