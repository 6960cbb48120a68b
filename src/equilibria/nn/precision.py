"""Solving a map under autocast: which dtype the state has, and no cached casts of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equilibria.engine.precision import autocasts, uncached

__all__ = ["autocasts", "lowered", "solving_dtype", "uncached"]


def solving_dtype(like: Tensor) -> torch.dtype:
    """The dtype for the state of a map on ``like``: autocast's in place of float32.

    A map that rounds to bfloat16 inside has no fixed point to the tolerance of float32.
    """
    if like.dtype == torch.float32 and autocasts(like):
        return torch.get_autocast_dtype(like.device.type)
    return like.dtype


def lowered(weight: Any) -> Tensor:
    """The weight in autocast's precision, to be cast once a solve, not at each evaluation."""
    given: Tensor = weight  # an attribute of a module may be anything, for a type checker
    wanted = solving_dtype(given)
    return given if given.dtype == wanted else given.to(wanted)
