"""Claims of paper 004, the NTK thesis: chapters 2 and 3 and its appendices."""

from __future__ import annotations

from . import thesis_background, thesis_bounds, thesis_calculus, thesis_training
from .claim import Claim

CLAIMS: tuple[Claim, ...] = (
    *thesis_background.CLAIMS,
    *thesis_calculus.CLAIMS,
    *thesis_bounds.CLAIMS,
    *thesis_training.CLAIMS,
)
