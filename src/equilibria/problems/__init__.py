"""Hidden problems: priors, couplings, regularizers, γ policies, operators, and how to solve them.

Each states its own bounds (curvature, rounding, Lipschitz constants); what is proven with them is
in ``certify``. How a problem is solved is in ``solvers``; ``minimize`` brings the two together.
"""

from .custom_prior import CustomPrior, NonMonotoneActivation, NotNonexpansive
from .gamma import (
    FixedGamma,
    GammaPolicy,
    LearnedGamma,
    MeanPatchEnergy,
    MinPatchEnergy,
    as_gamma,
)
from .gaussian import (
    GAUSSIAN_BEND,
    GAUSSIAN_CONCAVITY,
    Gaussian,
    gaussian_sensitivity,
    truncated_gaussian_coupling,
    truncation_error_bound,
)
from .joint_priors import (
    Ball,
    Entropy,
    GroupSoftThreshold,
    HalfSpace,
    Isotonic,
    JointPrior,
    NuclearNorm,
    Simplex,
    TotalVariation,
)
from .kernels import (
    Activated,
    Coupling,
    Curvature,
    DegenerateKernelWarning,
    Linear,
    Polynomial,
    Sigmoidal,
)
from .multistart import Equilibria, multistart
from .norms import NormBound, dense_norm, metric_root
from .objective import LeastSquares, Smooth
from .operators import (
    ConvOperator,
    DenseOperator,
    DifferenceOperator,
    IdentityOperator,
    LinearOperator,
    ModuleOperator,
    SeparableConvOperator,
    as_operator,
)
from .patches import Patches
from .priors import (
    Box,
    Free,
    LeakyNonNegative,
    Logistic,
    NonNegative,
    Prior,
    ShiftedNonNegative,
    Softplus,
    SoftThreshold,
    Tanh,
    WithL1,
)
from .problem import HiddenProblem, Problem
from .regularizers import HSIC, L1, Decorrelation, FeatureIncay, Regularizer, SquaredNorm
from .solving import BoundsWarning, minimize
from .splitting import ADMM, ChambollePock, Composite, DouglasRachford
from .total_variation import TotalVariation2d

# fmt: off
__all__ = [
    "ADMM", "GAUSSIAN_BEND", "GAUSSIAN_CONCAVITY", "HSIC", "L1", "Activated", "Ball",
    "BoundsWarning", "Box", "ChambollePock", "Composite", "ConvOperator", "Coupling", "Curvature",
    "CustomPrior", "Decorrelation", "DegenerateKernelWarning", "DenseOperator",
    "DifferenceOperator", "DouglasRachford", "Entropy", "Equilibria", "FeatureIncay", "FixedGamma",
    "Free", "GammaPolicy", "Gaussian", "GroupSoftThreshold", "HalfSpace", "HiddenProblem",
    "IdentityOperator", "Isotonic", "JointPrior", "LeakyNonNegative", "LearnedGamma",
    "LeastSquares", "Linear", "LinearOperator", "Logistic", "MeanPatchEnergy", "MinPatchEnergy",
    "ModuleOperator", "NonMonotoneActivation", "NonNegative", "NormBound", "NotNonexpansive",
    "NuclearNorm", "Patches", "Polynomial", "Prior", "Problem", "Regularizer",
    "SeparableConvOperator", "ShiftedNonNegative", "Sigmoidal", "Simplex", "Smooth",
    "SoftThreshold", "Softplus", "SquaredNorm", "Tanh", "TotalVariation", "TotalVariation2d",
    "WithL1", "as_gamma", "as_operator", "dense_norm", "gaussian_sensitivity", "metric_root",
    "minimize", "multistart", "truncated_gaussian_coupling", "truncation_error_bound",
]
# fmt: on

_MOVED = ("Certificate", "CompositeCertificate", "Guarantee", "Guaranteed", "MapCertificate")


def __getattr__(name: str) -> object:
    if name in (*_MOVED, "certify"):
        moved = f"use `from equilibria.certify import {name}`."
        raise ImportError(f"equilibria.problems.{name} has moved: {moved}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
