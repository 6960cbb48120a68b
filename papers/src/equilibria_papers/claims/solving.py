"""Equilibria by a solver of the audit's own: semismooth Newton with a line search, in float64.

F(z) = z − T(z) = 0 with a generalized Jacobian J of F. A step is halved until ‖F‖ falls; where
Newton stalls, averaged iterations move the start. Nothing of the library's solvers is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Unsolved", "bisect", "newton", "solve"]

Map = Callable[[Tensor], Tensor]


class Unsolved(RuntimeError):
    """No equilibrium was found to the accuracy that a trial needs."""


def newton(step: Map, slope: Map, start: Tensor, *, steps: int = 60) -> tuple[Tensor, float]:
    """z [n] with z = step(z), and the residual ‖z − step(z)‖; slope(z) is the Jacobian of step."""
    z = start
    gap = z - step(z)
    size = float(torch.linalg.vector_norm(gap))
    eye = torch.eye(len(z), dtype=z.dtype)
    for _ in range(steps):
        scale = 1.0 + float(torch.linalg.vector_norm(z))
        if size <= 4e-16 * scale:
            break
        solved, info = torch.linalg.solve_ex(eye - slope(z), gap)
        if int(info) != 0 or not bool(solved.isfinite().all()):
            break
        part, moved = 1.0, False
        while part > 1e-4:
            tried = z - part * solved
            new = tried - step(tried)
            new_size = float(torch.linalg.vector_norm(new))
            if new_size < size * (1.0 - 1e-4 * part):
                z, gap, size, moved = tried, new, new_size, True
                break
            part *= 0.5
        if not moved:
            break
    return z, size


def solve(
    step: Map, slope: Map, start: Tensor, *, accuracy: float = 1e-11, averaging: float = 0.5
) -> Tensor:
    """The equilibrium to ‖z − step(z)‖ ≤ accuracy·(1 + ‖z‖), or ``Unsolved``."""
    z = start
    for tries in range(5):
        found, size = newton(step, slope, z)
        if size <= accuracy * (1.0 + float(torch.linalg.vector_norm(found))):
            return found
        for _ in range(100 * 4**tries):
            z = (1.0 - averaging) * z + averaging * step(z)
    raise Unsolved(f"‖z − T(z)‖ = {size:.2e} after Newton from five starts")


def bisect(rising: Map, low: Tensor, high: Tensor, steps: int = 90) -> Tensor:
    """Entrywise zeros of a function that rises, between low and high."""
    for _ in range(steps):
        middle = 0.5 * (low + high)
        above = rising(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return 0.5 * (low + high)
