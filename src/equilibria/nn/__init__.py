"""Layers: parameters that make a problem from x, a solver for it, and an adjoint."""

from . import constraints
from .branch_solution import BranchSolution
from .constraints import NormBounded, OperatorNorm, WeightNormalized, constrain
from .deep_opteq import DeepOptEq, training_way
from .deep_opteq_blocks import BoundBlock, OptEqBlock
from .deq import DEQ, RepeatedBlock
from .geq import GEQ, KerDEQ
from .kernel_twins import PolynomialEq, SigmoidEq
from .layer import EquilibriumLayer
from .map_layer import MapLayer
from .mdeq import MDEQ
from .mdeq_heads import MDEQClassifier, MDEQSegmenter, MDEQStem
from .monotone import MonotoneDEQ
from .monotone_adjoint import TransposedSplitting
from .multi_branch import MultiBranch
from .observing import Observed, equilibrium_layers, observe
from .opteq import OptEq
from .penalties import Penalties, collect_penalties
from .residual_block import ResidualBlock

__all__ = [
    "DEQ",
    "GEQ",
    "MDEQ",
    "BoundBlock",
    "BranchSolution",
    "DeepOptEq",
    "EquilibriumLayer",
    "KerDEQ",
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
    "collect_penalties",
    "constrain",
    "constraints",
    "equilibrium_layers",
    "observe",
    "training_way",
]
