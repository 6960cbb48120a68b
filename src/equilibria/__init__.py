"""Equilibrium layers whose answer is the solution of a problem you can read, with a certificate."""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._version import __version__

if _TYPE_CHECKING:
    from . import nn
    from .adjoints import Implicit, OneStep, Phantom, Reversible, Unrolled
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
        ADMM,
        HSIC,
        L1,
        Ball,
        Box,
        ChambollePock,
        Composite,
        CustomPrior,
        Decorrelation,
        DouglasRachford,
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
        LeastSquares,
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
        Smooth,
        Softplus,
        SoftThreshold,
        SquaredNorm,
        Tanh,
        TotalVariation,
        TotalVariation2d,
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
    "ADMM",
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
    "ChambollePock",
    "Composite",
    "ConvergenceWarning",
    "CustomPrior",
    "Decorrelation",
    "DouglasRachford",
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
    "LeastSquares",
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
    "Reversible",
    "SequentialAveraging",
    "ShiftedNonNegative",
    "Sigmoidal",
    "Simplex",
    "Smooth",
    "SoftThreshold",
    "Softplus",
    "Solution",
    "SquaredNorm",
    "Stats",
    "Tanh",
    "TotalVariation",
    "TotalVariation2d",
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


def _load() -> None:
    """Import the core and bind its public names: on first use, as it brings torch with it."""
    globals()["nn"] = _import_module("equilibria.nn")  # imports the rest of the core
    for part in ("engine", "solvers", "adjoints", "entry", "problems", "certify"):
        found = vars(_sys.modules[f"equilibria.{part}"])
        shared = found.keys() & set(__all__) - {"certify"}
        globals().update({name: found[name] for name in shared})


class _Package(_ModuleType):
    """``eq.certify`` is a function, also after the package of that name was imported."""

    @property
    def certify(self) -> _Any:
        return _import_module("equilibria.certify").certify

    @certify.setter
    def certify(self, module: _Any) -> None:
        """The import system binds a package's name in its parent: not here."""


_sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> _Any:
    """The public names of the core, and the packages above it, which may need an extra."""
    if name in __all__:
        _load()
        return globals()[name]
    match name:
        case "adapters":
            return _import_module("equilibria.adapters")
        case "data":
            return _import_module("equilibria.data")
        case "evaluation":
            return _import_module("equilibria.evaluation")
        case "models":
            return _import_module("equilibria.models")
        case "serving":
            return _import_module("equilibria.serving")
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
    packages = ["adapters", "data", "evaluation", "models", "serving", "sklearn", "training"]
    return sorted([*__all__, *packages])
