"""Equilibrium layers whose answer is the solution of a problem you can read, with a certificate."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from . import nn
from ._version import __version__
from .adjoints import Implicit, OneStep, Phantom, Unrolled
from .certify import Certificate, certify
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
from .entry import fixed_point, linear_solve, root
from .problems import (
    HSIC,
    L1,
    Ball,
    Box,
    CustomPrior,
    Decorrelation,
    Entropy,
    Equilibria,
    FeatureIncay,
    FixedGamma,
    Free,
    Gaussian,
    GroupSoftThreshold,
    HalfSpace,
    Isotonic,
    LeakyNonNegative,
    LearnedGamma,
    Linear,
    Logistic,
    MeanPatchEnergy,
    MinPatchEnergy,
    NonNegative,
    NuclearNorm,
    Patches,
    Polynomial,
    Problem,
    ShiftedNonNegative,
    Sigmoidal,
    Simplex,
    Softplus,
    SoftThreshold,
    SquaredNorm,
    Tanh,
    TotalVariation,
    minimize,
    multistart,
)
from .solvers import (
    Anderson,
    Auto,
    BestIterate,
    Broyden,
    ForwardBackward,
    NewtonKrylov,
    PeacemanRachford,
    Picard,
    ProximalGradient,
    SequentialAveraging,
)

__all__ = [
    "CG",
    "GMRES",
    "HSIC",
    "L1",
    "Anderson",
    "Auto",
    "Ball",
    "BestIterate",
    "Box",
    "Broyden",
    "Certificate",
    "ConvergenceWarning",
    "CustomPrior",
    "Decorrelation",
    "Entropy",
    "Equilibria",
    "FeatureIncay",
    "FixedGamma",
    "ForwardBackward",
    "Free",
    "Gaussian",
    "GroupSoftThreshold",
    "HalfSpace",
    "Implicit",
    "Isotonic",
    "LeakyNonNegative",
    "LearnedGamma",
    "Linear",
    "Logistic",
    "MeanPatchEnergy",
    "MinPatchEnergy",
    "NewtonKrylov",
    "NonNegative",
    "NotConvergedError",
    "NuclearNorm",
    "OneStep",
    "Patches",
    "PeacemanRachford",
    "Phantom",
    "Picard",
    "Polynomial",
    "Problem",
    "ProximalGradient",
    "Result",
    "SequentialAveraging",
    "ShiftedNonNegative",
    "Sigmoidal",
    "Simplex",
    "SoftThreshold",
    "Softplus",
    "Solution",
    "SquaredNorm",
    "Stats",
    "Tanh",
    "TotalVariation",
    "Unrolled",
    "__version__",
    "certify",
    "fixed_point",
    "jacobian_penalty",
    "linear_solve",
    "minimize",
    "multistart",
    "nn",
    "root",
    "spectral_radius",
]


def __getattr__(name: str) -> _ModuleType:
    """The packages above the core, imported on first access: they may need an extra."""
    match name:
        case "data":
            return _import_module("equilibria.data")
        case "evaluation":
            return _import_module("equilibria.evaluation")
        case "models":
            return _import_module("equilibria.models")
        case "sklearn":
            return _import_module("equilibria.sklearn")
        case "training":
            return _import_module("equilibria.training")
        case "experiments" | "theory":
            place = "tables" if name == "experiments" else name
            raise AttributeError(
                f"equilibria.{name} is now equilibria_papers.{place}: pip install equilibria-papers"
            )
    raise AttributeError(f"module 'equilibria' has no attribute {name!r}")


def __dir__() -> list[str]:
    packages = ["data", "evaluation", "models", "sklearn", "training"]
    return sorted([*__all__, *packages])
