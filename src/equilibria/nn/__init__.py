"""Layers: parameters that make a problem from x, a solver for it, and an adjoint."""

from . import constraints
from .constraints import NormBounded, OperatorNorm, WeightNormalized, constrain
from .geq import GEQ, KerDEQ
from .kernel_twins import PolynomialEq, SigmoidEq
from .layer import EquilibriumLayer
from .opteq import OptEq

__all__ = [
    "GEQ",
    "EquilibriumLayer",
    "KerDEQ",
    "NormBounded",
    "OperatorNorm",
    "OptEq",
    "PolynomialEq",
    "SigmoidEq",
    "WeightNormalized",
    "constrain",
    "constraints",
]
