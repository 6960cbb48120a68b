"""Layers: parameters that make a problem from x, a solver for it, and an adjoint."""

from . import constraints
from .constraints import NormBounded, OperatorNorm, WeightNormalized, constrain
from .deep_opteq import BoundBlock, DeepOptEq, OptEqBlock, training_way
from .deq import DEQ, RepeatedBlock, ResidualBlock
from .envelope import Envelope
from .geq import GEQ, KerDEQ
from .kernel_twins import PolynomialEq, SigmoidEq
from .layer import EquilibriumLayer, LayerOptions, MapLayer
from .mdeq import MDEQ, MDEQClassifier, MDEQSegmenter, MDEQStem
from .monotone import MonotoneDEQ, TransposedSplitting
from .multi_branch import BranchSolution, MultiBranch
from .observing import Observed, Penalties, collect_penalties, equilibrium_layers, observe
from .opteq import OptEq
from .steps import calibrate_steps, frozen_copy, set_steps

__all__ = [
    "DEQ",
    "GEQ",
    "MDEQ",
    "BoundBlock",
    "BranchSolution",
    "DeepOptEq",
    "Envelope",
    "EquilibriumLayer",
    "KerDEQ",
    "LayerOptions",
    "MDEQClassifier",
    "MDEQSegmenter",
    "MDEQStem",
    "MapLayer",
    "MonotoneDEQ",
    "MultiBranch",
    "NormBounded",
    "Observed",
    "OperatorNorm",
    "OptEq",
    "OptEqBlock",
    "Penalties",
    "PolynomialEq",
    "RepeatedBlock",
    "ResidualBlock",
    "SigmoidEq",
    "TransposedSplitting",
    "WeightNormalized",
    "calibrate_steps",
    "collect_penalties",
    "constrain",
    "constraints",
    "equilibrium_layers",
    "frozen_copy",
    "observe",
    "set_steps",
    "training_way",
]


def __dir__() -> list[str]:
    return sorted(__all__)
