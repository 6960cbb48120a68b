"""Equilibria of given inputs for many random U, and a bound on their norms for every U."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.nn import OptEq
from equilibria.problems import Coupling, Gaussian, Linear, Problem
from equilibria.problems.gaussian import gaussian_sensitivity

from .measuring import Provable, solved

__all__ = ["Draws", "norms_of", "state_bound"]


def norms_of(t: Tensor) -> Tensor:
    """‖·‖ of each sample. [B, ...] → [B]."""
    found: Tensor = torch.linalg.vector_norm(t.flatten(1), dim=1)
    return found


class Draws:
    """A layer (in float64, OptEq in the form of Eq 4) whose U is drawn anew; x [N, ...]."""

    def __init__(self, exact: Provable, x: Tensor, deviation: float) -> None:
        self.exact, self.x, self.deviation = exact, x, deviation
        self.prior = exact.prior
        self.coupling = exact.problem(x).coupling
        self.norms: list[tuple[float, float]] = []
        """(σ_min, σ_max) of each U drawn."""

    def mu(self) -> float:
        """A proven bound on ‖A‖ (GEQ) or ‖W‖/√ν (OptEq)."""
        if isinstance(self.coupling, Gaussian):
            return self.coupling.mu_upper(tight=True)
        assert isinstance(self.exact, OptEq)
        return self.exact.operator().norm_upper() / math.sqrt(self.exact.nu)

    def features(self, generator: torch.Generator | None) -> Tensor:
        """c = Ux for a fresh U, without a bias. [N, *mid]."""
        weight: Any = self.exact.U.weight
        drawn = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
        drawn = drawn.to(weight.device) * self.deviation
        if self.exact.convolutional:
            # The least singular value of a convolution is not at hand; 0 favors the papers.
            self.norms.append((0.0, float(torch.linalg.matrix_norm(drawn.flatten(1), 2))))
            return F.conv2d(self.x, drawn, padding=weight.shape[-1] // 2)
        values = torch.linalg.svdvals(drawn)
        least = float(values[-1]) if drawn.shape[0] >= drawn.shape[1] else 0.0
        self.norms.append((least, float(values[0])))
        return self.x @ drawn.mT

    def solve(self, c: Tensor) -> tuple[Problem, Tensor]:
        """The problem on the features c [N, *mid], and its equilibria [N, *state]."""
        q = self.coupling
        made: Coupling
        if isinstance(q, Gaussian):
            assert q.policy is not None  # a GEQ always has one
            made = Gaussian(q.operator, c, q.policy, patches=q.patches, metric=q.metric)
        else:
            made = Linear(q.operator, c)
        problem = Problem(self.prior, made)
        start = c.new_zeros(len(c), self.exact.state_channels, *c.shape[2:])
        return problem, solved(problem, start)


def state_bound(problem: Problem, mu: float, z: Tensor) -> Tensor:
    """s with ‖z*‖ ≤ s for every W of this μ (see ``similarity``); z gives the shape. [B]."""
    q = problem.coupling
    if not isinstance(q, Gaussian):
        size = norms_of(q.c)
        return size / (1.0 - mu**2) if mu < 1.0 else torch.full_like(size, math.inf)
    energies = q.energies(torch.zeros_like(z))
    features = energies.sum(1).sqrt()
    cap = (energies.shape[1] / (2.0 * math.e * q.gamma)).sqrt()
    if energies.shape[1] == 1:
        # Far inputs: ‖h‖ ≥ ‖c̃‖ − μ‖z‖, and te^{−γt²} falls beyond 1/√(2γ).
        least = features - mu**2 * cap
        falling = least > (2.0 * q.gamma).rsqrt()
        cap = torch.where(falling, least * torch.exp(-q.gamma * least.square()), cap)
    near = gaussian_sensitivity(mu).to(features.device) * features
    return torch.minimum(near, mu * cap)
