"""The claims of GEQ (papers 000 and 002), in the order of the paper."""

from __future__ import annotations

from . import geq_lipschitz, geq_margin, geq_problems, geq_similarity
from .claim import Claim

CLAIMS: tuple[Claim, ...] = (
    *geq_problems.CLAIMS,
    *geq_margin.CLAIMS,
    *geq_lipschitz.CLAIMS,
    *geq_similarity.CLAIMS,
)
