"""Hidden problems: priors, couplings, regularizers, γ policies, and what is made of them."""

from .activated import Activated
from .certificate import Certificate, certify
from .custom_prior import CustomPrior, NonMonotoneActivation, NotNonexpansive
from .error_bounds import tight_curvature
from .feature_map import (
    gaussian_feature_map,
    truncated_gaussian_coupling,
    truncation_error_bound,
)
from .gamma import (
    FixedGamma,
    GammaPolicy,
    LearnedGamma,
    MeanPatchEnergy,
    MinPatchEnergy,
    as_gamma,
)
from .gaussian import GAUSSIAN_CONCAVITY, Gaussian
from .guarantee import Guarantee, Guaranteed
from .hsic import HSIC
from .kernels import (
    Coupling,
    Curvature,
    DegenerateKernelWarning,
    Linear,
    Polynomial,
    Sigmoidal,
)
from .lipschitz import GAUSSIAN_BEND, gaussian_sensitivity, global_lipschitz, local_lipschitz
from .map_certificate import CompositeCertificate, MapCertificate
from .norms import NormBound, dense_norm, metric_root
from .operators import (
    ConvOperator,
    DenseOperator,
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
    NonNegative,
    Prior,
    ShiftedNonNegative,
    SoftThreshold,
    WithL1,
)
from .priors_smooth import Logistic, Softplus, Tanh
from .problem import HiddenProblem, Problem
from .problem_transforms import AffineProblem, MoreauProblem
from .regularizers import L1, Decorrelation, FeatureIncay, Regularizer, SquaredNorm
from .solving import minimize

__all__ = [
    "GAUSSIAN_BEND",
    "GAUSSIAN_CONCAVITY",
    "HSIC",
    "L1",
    "Activated",
    "AffineProblem",
    "Box",
    "Certificate",
    "CompositeCertificate",
    "ConvOperator",
    "Coupling",
    "Curvature",
    "CustomPrior",
    "Decorrelation",
    "DegenerateKernelWarning",
    "DenseOperator",
    "FeatureIncay",
    "FixedGamma",
    "Free",
    "GammaPolicy",
    "Gaussian",
    "Guarantee",
    "Guaranteed",
    "HiddenProblem",
    "LeakyNonNegative",
    "LearnedGamma",
    "Linear",
    "LinearOperator",
    "Logistic",
    "MapCertificate",
    "MeanPatchEnergy",
    "MinPatchEnergy",
    "ModuleOperator",
    "MoreauProblem",
    "NonMonotoneActivation",
    "NonNegative",
    "NormBound",
    "NotNonexpansive",
    "Patches",
    "Polynomial",
    "Prior",
    "Problem",
    "Regularizer",
    "SeparableConvOperator",
    "ShiftedNonNegative",
    "Sigmoidal",
    "SoftThreshold",
    "Softplus",
    "SquaredNorm",
    "Tanh",
    "WithL1",
    "as_gamma",
    "as_operator",
    "certify",
    "dense_norm",
    "gaussian_feature_map",
    "gaussian_sensitivity",
    "global_lipschitz",
    "local_lipschitz",
    "metric_root",
    "minimize",
    "tight_curvature",
    "truncated_gaussian_coupling",
    "truncation_error_bound",
]
