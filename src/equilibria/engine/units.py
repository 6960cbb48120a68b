"""Solve for w = z/unit where z is so small or large that products of it under- or overflow.

Units are powers of two, one a sample: no digit of the answer changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .maps import Map
from .tree import Leaves, flatten_state, scale_samples, strange, unflatten


def choose_units(residual: Tensor, scale: Tensor) -> Tensor:
    """2^k near the size of each sample's problem, [B]; 1 where that is ordinary, 0 or not finite.

    The end of the exponents is left out, where 2^k or 2^{−k} would not be a normal number.
    """
    size = torch.maximum(residual, scale)
    end = 1000 if size.dtype == torch.float64 else 100
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent.clamp(-end, end))
    return torch.where(strange(size) & (size > 0) & torch.isfinite(size), unit, 1.0)


def map_in_units(fn: Map, unit: Tensor) -> Map:
    """w ↦ T(unit·w)/unit."""

    def scaled(inner: Callable[..., Any]) -> Callable[..., Any]:
        def within(w: Any, up: Tensor, down: Tensor, *args: Any) -> Any:
            leaves, spec = flatten_state(w, "z")
            out = inner(unflatten(scale_samples(up, leaves), spec), *args)
            flat, spec = flatten_state(out, "T(z)")
            return unflatten(scale_samples(down, flat), spec)

        return within

    return fn.wrapped(scaled, (unit, 1.0 / unit, *fn.args))


def callback_in_units(
    callback: Callable[[int, Leaves, Tensor], None] | None, unit: Tensor
) -> Callable[[int, Leaves, Tensor], None] | None:
    """The callback, shown z and its residual where the engine iterates w."""
    if callback is None:
        return None
    return lambda step, w, norm: callback(step, scale_samples(unit, w), norm * unit)
