"""Uniform conditioning on a ball: λ_min(K(θ)) and λ_max(K(θ)) for ‖θ − θ_0‖ ≤ R, by samples.

What is found bounds the infimum from above and the supremum from below: points that were not looked
at may be worse. Along a run ``KernelMonitor`` looks at the points that training visits.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria_papers.theory.ntk.kernel import empirical_ntk
from equilibria_papers.theory.ntk.parameters import Filter, select_parameters
from equilibria_papers.theory.ntk.rows import evaluating, following
from equilibria_papers.theory.ntk.spectrum import spectrum

__all__ = ["BallConditioning", "conditioning_on_ball"]

_SETTLE = 8
"""Evaluations in which the vectors of norm bounds settle on the weights of a new point."""


@dataclass(frozen=True, eq=False)
class BallConditioning:
    """λ_min and λ_max of K at the center and at points of a ball."""

    distances: Tensor
    """‖θ − θ_0‖ of each point; the first is the center, 0. [P + 1]."""
    smallest: Tensor
    """λ_min at each, [P + 1]."""
    largest: Tensor
    """λ_max at each, [P + 1]."""

    @property
    def lambda_min(self) -> float:
        """The smallest λ_min that was seen."""
        return float(self.smallest.min())

    @property
    def lambda_max(self) -> float:
        """The largest λ_max that was seen."""
        return float(self.largest.max())


@torch.no_grad()
def conditioning_on_ball(
    model: nn.Module,
    x: Tensor,
    radius: float,
    *,
    points: int = 8,
    seed: int = 0,
    parameters: Filter = None,
    **options: Any,
) -> BallConditioning:
    """λ_min and λ_max of K at ``points`` random points θ_0 + r·v, ‖v‖ = 1, r = R/P, 2R/P, … R.

    Args:
        model: its parameters are θ_0; it is left as it is.
        x: samples, [N, …].
        radius: R > 0.
        points: P, random directions.
        seed: of the directions.
        parameters: which parameters move and are differentiated; as in ``empirical_ntk``.
        **options: of ``empirical_ntk``.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"radius={radius!r}: expected a positive number.")
    if points < 1:
        raise ValueError(f"points={points}: expected 1 or more.")
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    chosen = list(select_parameters(moved, parameters).values())
    start = [p.detach().clone() for p in chosen]
    distances, low, high = [], [], []
    for k in range(points + 1):
        if k:
            steps = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in start]
            size = math.sqrt(sum(float(s.square().sum()) for s in steps))
            for p, q, s in zip(chosen, start, steps, strict=True):
                p.copy_(q + (s * (radius * k / points / size)).to(q))
            with evaluating(moved), following(moved):
                for _ in range(_SETTLE):
                    moved(x[:1])
        found = spectrum(empirical_ntk(moved, x, parameters=parameters, **options))
        distances.append(radius * k / points)
        low.append(found.smallest)
        high.append(found.largest)
    return BallConditioning(*(torch.tensor(v, dtype=torch.float64) for v in (distances, low, high)))
