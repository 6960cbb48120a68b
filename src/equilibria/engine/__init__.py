"""The engine: the driver of solves, typed results, norms over trees, Krylov solvers."""

from .adjoint import Adjoint
from .dense import solve_each
from .files import SaveError, json_text, json_value, write_bytes, write_json, write_text
from .krylov import CG, GMRES, LinearSolver
from .options import OptionError, check_number, options
from .result import ConvergenceWarning, NotConvergedError, Result, Solution, Stats
from .solver import Bounds, Choice, Point, Solver, SolverOptions
from .spectral import jacobian_penalty, spectral_radius
from .tree import Leaves, sample_norm, without_graph

__all__ = [
    "CG",
    "GMRES",
    "Adjoint",
    "Bounds",
    "Choice",
    "ConvergenceWarning",
    "Leaves",
    "LinearSolver",
    "NotConvergedError",
    "OptionError",
    "Point",
    "Result",
    "SaveError",
    "Solution",
    "Solver",
    "SolverOptions",
    "Stats",
    "check_number",
    "jacobian_penalty",
    "json_text",
    "json_value",
    "options",
    "sample_norm",
    "solve_each",
    "spectral_radius",
    "without_graph",
    "write_bytes",
    "write_json",
    "write_text",
]
