"""The claims of paper 003 (OptEq): one layer, deep, regularized features, training."""

from __future__ import annotations

from . import (
    opteq_deep,
    opteq_features,
    opteq_layer,
    opteq_networks,
    opteq_table1,
    opteq_training,
)
from .claim import Claim

CLAIMS: tuple[Claim, ...] = (
    *opteq_layer.CLAIMS,
    *opteq_table1.CLAIMS,
    *opteq_networks.CLAIMS,
    *opteq_deep.CLAIMS,
    *opteq_features.CLAIMS,
    *opteq_training.CLAIMS,
)
