"""Layers: parameters that make a problem from x, a solver for it, and an adjoint."""

from . import constraints
from .constraints import NormBounded, OperatorNorm, WeightNormalized, constrain
from .deep_opteq import DeepOptEq, training_way
from .geq import GEQ, KerDEQ
from .kernel_twins import PolynomialEq, SigmoidEq
from .layer import EquilibriumLayer
from .map_layer import MapLayer
from .observing import Observed, equilibrium_layers, observe
from .opteq import OptEq

__all__ = [
    "GEQ",
    "DeepOptEq",
    "EquilibriumLayer",
    "KerDEQ",
    "MapLayer",
    "NormBounded",
    "Observed",
    "OperatorNorm",
    "OptEq",
    "PolynomialEq",
    "SigmoidEq",
    "WeightNormalized",
    "constrain",
    "constraints",
    "equilibrium_layers",
    "observe",
    "training_way",
]
