"""‖z − z*‖ from above: a posteriori bounds for the minimizer of G, rounding included.

G = f + g with a convex f and m ⪯ ∇²g ⪯ L. For every τ > 0 the point z⁺ = T_τ(z) has the subgradient
u = (z − z⁺)/τ − (∇g(z) − ∇g(z⁺)) ∈ ∂G(z⁺), ‖u‖ ≤ max(|1/τ − m|, |L − 1/τ|)·‖z − z⁺‖. So

    m > 0:   ‖z − z*‖ ≤ (1 + max(|1/τ − m|, |L − 1/τ|)/m)·‖z − T_τ(z)‖       (docs/facts.md, fact 4)
    m > 0:   ‖z − z*‖ ≤ dist(0, ∂G(z))/m

by strong convexity; the smallest is taken. Whatever m, if ∇²g(y) ⪰ m₀ > 0 at a point y and ∇²g is
K-Lipschitz, G is strongly convex with modulus m₀ − Kr on the ball of radius r around y. Its
minimizer ẑ over that ball satisfies ‖ẑ − y‖ ≤ s/(m₀ − Kr) for s = dist(0, ∂G(y)) (the normal of the
ball only helps), which is inside the ball if r(m₀ − Kr) > s. So if m₀² > 4Ks there is exactly one
equilibrium within r = 2s/(m₀ + √(m₀² − 4Ks)) of y, and it is a strict local minimizer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria.problems.kernels import Curvature
from equilibria.problems.norms import UNIT
from equilibria.problems.problem import HiddenProblem, Problem

from .rounding import norm, residual_rounding, subgradient_rounding

_UP = 1.0 + 32 * UNIT  # the last few operations of a bound, each rounded once


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    """The smaller bound; NaN is no bound."""
    a, b = (torch.where(t.isnan(), math.inf, t) for t in (a, b))
    return torch.minimum(a, b)


def _pool(t: Tensor, together: bool) -> Tensor:
    """Norms [B]; where samples are coupled, the norm over the batch for each of them."""
    return norm(t.unsqueeze(0)).expand_as(t) if together else t


def tight_curvature(problem: HiddenProblem, z: Tensor | None = None) -> Curvature:
    """m ⪯ ∇²g ⪯ L everywhere, or at z, by the closest bounds that the coupling has."""
    if isinstance(problem, Problem):
        return problem.tight_curvature(z)
    if z is None:
        return problem.curvature()
    return Curvature(-math.inf, math.inf, True, "no local bound is known")


def local_modulus(problem: HiddenProblem, z: Tensor) -> Tensor:
    """m₀ [B] with ∇²g(z) ⪰ m₀ at this z; −inf where nothing is known."""
    found = tight_curvature(problem, z)
    if not found.rigorous:
        return z.new_full((z.shape[0],), -math.inf)
    lower = found.ends(z)[0].expand(z.shape[0])
    lower = lower - 16 * UNIT * (1.0 + lower.abs())
    return torch.where(lower.isnan(), -math.inf, lower)


def _radius(m: Tensor, s: Tensor, bend: Tensor) -> Tensor:
    """2s/(m + √(m² − 4Ks)) where m > 0 and m² > 4Ks, else inf."""
    left = m * m * (1.0 - 16 * UNIT) - 4.0 * bend * s * (1.0 + 16 * UNIT)
    found = 2.0 * s / (m + left.clamp_min(0.0).sqrt()) * _UP
    return torch.where((m > 0) & (left > 0) & found.isfinite(), found, math.inf)


def error_bound(
    problem: HiddenProblem,
    z: Tensor,
    image: Tensor,
    gap: Tensor,
    off: Tensor,
    m: Tensor,
    upper: Tensor,
) -> Tensor:
    """‖z − z*‖ for the only equilibrium z*, or the only one that close; inf: none proven. [B].

    ``image`` is the computed T(z), ``off`` [B] a bound on its error, ``gap`` [B] ≥ ‖z − T(z)‖,
    m and L [B] hold everywhere. Where samples are coupled, the bound is that of all together.
    """
    together = problem.couples_batch
    factor = torch.maximum((1.0 - m).abs(), (upper - 1.0).abs())
    everywhere, near = (1.0 + factor / m) * _pool(gap, together), torch.full_like(gap, math.inf)
    bend = None
    if isinstance(problem, Problem):
        bend = None if together else problem.coupling.hessian_lipschitz()
        bend = None if bend is None else torch.as_tensor(bend, dtype=gap.dtype, device=gap.device)
        if bend is not None:  # around T(z), for every prior
            around = _radius(local_modulus(problem, image) - bend * off, factor * gap, bend)
            near = (gap + around) * _UP
        steepest = _subgradient(problem, z)
        if steepest is not None:
            everywhere = _smaller(everywhere, _pool(steepest, together) / m)
            everywhere = _smaller(everywhere, _best_step(problem, z, m, upper))
            if bend is not None:  # around z itself
                near = _smaller(near, _radius(local_modulus(problem, z), steepest, bend))
    return _smaller(torch.where(m > 0, everywhere * _UP, math.inf), near)


def _subgradient(problem: Problem, z: Tensor) -> Tensor | None:
    """dist(0, ∂G(z)) from above, [B]; None where its rounding is not derived."""
    if not problem.effective_prior.piecewise_linear:
        return None
    least = problem.minimal_subgradient(z)
    off = subgradient_rounding(problem, z, least)
    return None if off is None else norm(least) + off


def _best_step(problem: Problem, z: Tensor, m: Tensor, upper: Tensor) -> Tensor:
    """The bound by T_τ with τ = 2/(m + L), which has the factor (L − m)/(L + m); [B]."""
    tau = 2.0 / (m + upper)
    tau = torch.where((m > 0) & tau.isfinite() & (tau > 0), tau, 1.0)
    image = problem.step(z, tau)
    off = residual_rounding(problem, z, image, tau)[0]
    factor = torch.maximum((1.0 / tau - m).abs(), (upper - 1.0 / tau).abs())
    return (1.0 + factor / m) * _pool(norm(z - image) + off, problem.couples_batch)
