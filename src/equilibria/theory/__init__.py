"""What the papers prove, as code to call on your own model.

Paper 003 (OptEq): ``multi_block`` (Lemma 3), ``inclusion_residual`` (Theorem 2),
``two_layer_objective`` (Corollary 1), ``wide_limit`` (Theorem 3), ``to_hidden_units`` (Lemma 1) and
``to_deep_opteq`` (Lemma 2). Each states its assumptions and checks them.
"""

from .blocks import Block, as_blocks, deep_equilibrium
from .converters import UnitNetwork, to_deep_opteq, to_hidden_units
from .feed_forward import prior_of
from .inclusion import inclusion_residual
from .multi_block import MultiBlock, multi_block
from .two_layer import moreau_envelope, two_layer_objective
from .wide_limit import (
    WideLimitStudy,
    approach_wide_limit,
    to_wide_opteq,
    wide_limit,
    wide_objective,
)

__all__ = [
    "Block",
    "MultiBlock",
    "UnitNetwork",
    "WideLimitStudy",
    "approach_wide_limit",
    "as_blocks",
    "deep_equilibrium",
    "inclusion_residual",
    "moreau_envelope",
    "multi_block",
    "prior_of",
    "to_deep_opteq",
    "to_hidden_units",
    "to_wide_opteq",
    "two_layer_objective",
    "wide_limit",
    "wide_objective",
]
