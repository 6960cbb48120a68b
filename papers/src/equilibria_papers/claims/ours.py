"""Our own facts about the layers, under the same trials as the papers' claims."""

from __future__ import annotations

from . import ours_errors, ours_gaussian, ours_kernels, ours_lipschitz
from .claim import Claim

CLAIMS: tuple[Claim, ...] = (
    *ours_gaussian.CLAIMS,
    *ours_errors.CLAIMS,
    *ours_lipschitz.CLAIMS,
    *ours_kernels.CLAIMS,
)
