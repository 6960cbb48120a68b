"""How far z* moves when the input does: Lipschitz constants of c → z*, global and at one input.

Gaussian coupling, γ fixed (docs/facts.md, fact 5). Two inputs, monotone ∂f, and the mean Hessian
block B with −bI ⪯ B ⪯ βI give  a‖Δz‖² ≤ ⟨AΔz, B(Δc̃ − AΔz)⟩,  where a = 1 plus the modulus of the
regularizer. Since B² ⪯ (β − b)B + bβI,

    ‖Δz‖/‖Δc̃‖ ≤ Λ = sup_{ρ ≤ μ, Y} ρ√((β − b)Y + bβ)/(a + ρ²Y),

which has three branches in closed form. Globally b = 2e^{−3/2} and β = 1, and it is attained; at
one z they are those of its patches. A γ that changes with the input changes the map too, detached
or not: its policy has a factor F, Λ = Fμ/m, or none.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import torch
from torch import Tensor

from equilibria.engine.tree import sample_norm
from equilibria.problems.activated import Activated
from equilibria.problems.gaussian import GAUSSIAN_CONCAVITY, Gaussian
from equilibria.problems.kernels import SIGMOID_CURVATURE, Coupling, Linear, Polynomial, Sigmoidal
from equilibria.problems.norms import metric_root
from equilibria.problems.problem import HiddenProblem, Problem

__all__ = [
    "GAUSSIAN_BEND",
    "features_norm",
    "gaussian_sensitivity",
    "global_lipschitz",
    "hessian_lipschitz",
    "local_lipschitz",
]

Variable = Literal["x", "c"]

_EDGE = (3.0 - math.sqrt(6.0)) / 2.0
GAUSSIAN_BEND = (6.0 - 4.0 * _EDGE) * math.sqrt(_EDGE) * math.exp(-_EDGE) * (1.0 + 1e-14)
"""max |(4a³ − 6a)e^{−a²}| = 1.9518: ‖∇³(−e^{−γ‖h‖²}/2γ)‖ ≤ 1.9518·√γ for every h.

A symmetric trilinear form attains its norm at u, u, u, and along u the function is −e^{−a²}/2 times
a factor of at most 1, whose third derivative is (4a³ − 6a)e^{−a²}, largest at a² = (3 − √6)/2.
"""


def gaussian_sensitivity(
    mu: float | Tensor,
    *,
    concavity: float | Tensor = GAUSSIAN_CONCAVITY,
    top: float | Tensor = 1.0,
    modulus: float | Tensor = 1.0,
) -> Tensor:
    """Λ(μ; b, β, a) = √(β/a)·Λ₁ with μ₁ = μ√(β/a), b₁ = b/β, and inf where bμ² ≥ a. [B] or scalar.

    Λ₁ = μ₁/(1 + μ₁²) for μ₁² ≤ (1 − b₁)/(1 + b₁); (1 − b₁)/(2√(1 − b₁ − b₁μ₁²)) up to
    μ₁² = (1 − b₁)/(b₁(1 + b₁)); b₁μ₁/(1 − b₁μ₁²) above. Rounded up.
    """
    given = (mu, concavity, top, modulus)
    device = next((t.device for t in given if isinstance(t, Tensor)), None)
    m, b, beta, a = torch.broadcast_tensors(
        *[torch.as_tensor(t, dtype=torch.float64, device=device) for t in given]
    )
    up = 1.0 + 1e-14
    scale = (beta.clamp_min(1e-300) / a).sqrt() * up
    ratio = b / beta.clamp_min(1e-300) * up
    t = (m * scale).square()
    low = m * scale / (1.0 + t)
    middle = (1.0 - ratio) / (2.0 * (1.0 - ratio - ratio * t).clamp_min(0.0).sqrt())
    high = ratio * m * scale / (1.0 - ratio * t)
    found = torch.where(t * (ratio * (1.0 + ratio)) <= 1.0 - ratio, middle, high)
    found = torch.where(t * (1.0 + ratio) <= 1.0 - ratio, low, found)
    return torch.where((ratio * t < 1.0) & (a > 0.0), found * scale * up, math.inf)


def _norm(t: Tensor) -> Tensor:
    """‖·‖ per sample, rounded up. [B]."""
    return sample_norm([t]) * (1.0 + 2e-16 * (t[0].numel() + 8))


def hessian_lipschitz(q: Coupling) -> Tensor | float | None:
    """K with ‖∇²q(z) − ∇²q(z′)‖ ≤ K‖z − z′‖ for all z, z′; [B], a number, or None (no constant).

    Gaussian: 1.9518·√γ μ³. Sigmoid: 2‖c‖³ (|tanh‴| ≤ 2). Polynomial: 0 for d = 2, 6‖c‖³ for d = 3.
    """
    if isinstance(q, Gaussian):
        mu = q.mu_upper(tight=True)
        return None if math.isinf(mu) else GAUSSIAN_BEND * mu**3 * q.gamma.sqrt() * (1.0 + 1e-14)
    if isinstance(q, Linear):
        return 0.0
    if isinstance(q, Sigmoidal):
        return 2.0 * _norm(q.c) ** 3
    if isinstance(q, Polynomial) and q.degree <= 3:
        return 0.0 if q.degree == 2 else 6.0 * _norm(q.c) ** 3
    return None


def _own_modulus(problem: Problem) -> Tensor:
    """a: the modulus of everything in G but the prior and the coupling (1 without regularizer)."""
    whole = torch.as_tensor(problem.curvature().lower, dtype=torch.float64)
    part = torch.as_tensor(problem.coupling.curvature().lower, dtype=torch.float64)
    if problem.regularizer is None:
        return torch.ones((), dtype=torch.float64)
    return (whole - part) * (1.0 - 1e-14)


def features_norm(q: Coupling) -> float:
    """‖c → c̃‖: ‖W_h‖ for the Gaussian, whose c̃ is (rows of c)W_h, else 1."""
    if isinstance(q, Gaussian) and q.metric is not None:
        return metric_root(q.metric)[1]
    return 1.0


def global_lipschitz(
    problem: HiddenProblem, modulus: float | Tensor, input_norm: float | None
) -> tuple[float | None, str]:
    """A Lipschitz constant of x → z* that holds for all inputs, or None, and why.

    ``input_norm`` bounds x → c̃ (x → c for the linear coupling); None: the constant is in c.
    """
    if not isinstance(problem, Problem):
        return None, f"no constant is derived for {type(problem).__name__}"
    if problem.couples_batch:
        return None, "the regularizer couples the samples of a batch"
    q = problem.coupling
    if isinstance(q, (Sigmoidal, Polynomial)):
        return None, "the modulus depends on the input; lipschitz_local holds at this one"
    if not isinstance(q, (Gaussian, Linear, Activated)):
        return None, f"no constant is derived for {type(q).__name__}"
    m = float(torch.as_tensor(modulus, dtype=torch.float64).min())
    if not m > 0.0:
        return None, "the equilibrium is not certified to be unique for every input"
    reach = features_norm(q) if input_norm is None else input_norm
    if not math.isfinite(reach):
        return None, "no bound on the norm of U is known"
    if isinstance(q, Linear):
        return reach / m * (1.0 + 1e-14), "every input: ‖U‖/m"
    if isinstance(q, Activated):
        found = _activated_constant(q, m) * reach
        return found, "every input: L_σ‖W‖/(νm)·‖U‖"
    policy, mu = q.policy, q.mu_upper(tight=True)
    if policy is None and input_norm is not None:
        return None, "γ came as a tensor, so it may depend on x; lipschitz_local holds γ fixed"
    if policy is None or not policy.input_dependent:
        sharp = float(gaussian_sensitivity(mu, modulus=_own_modulus(problem)))
        return reach * sharp, "every input, γ fixed: Λ(μ)·‖x → c̃‖, sharp"
    factor = policy.lipschitz_factor
    if factor is None:
        return None, f"none exists for {policy!r}: it grows with the number of patches"
    found = factor * mu / m * reach * (1.0 + 1e-14)
    return found, f"every input, γ by {policy!r}: {factor:.3f}·(μ/m)·‖x → c̃‖"


def local_lipschitz(
    problem: HiddenProblem, z: Tensor, error: Tensor, modulus: float | Tensor, input_norm: float
) -> tuple[Tensor | None, str]:
    """limsup ‖z*(x′) − z*(x)‖/‖x′ − x‖ as x′ → x, bounded, with γ held fixed; [B], inf where none.

    From the curvature at z, widened to all points within ``error`` of it, so that it holds at the
    equilibrium and not only at z.
    """
    if not isinstance(problem, Problem):
        return None, f"nothing is derived for {type(problem).__name__}"
    q = problem.coupling
    if problem.couples_batch:
        return None, "the regularizer couples the samples of a batch"
    if isinstance(q, Gaussian):
        return _gaussian_local(problem, q, z, error) * input_norm, (
            "at the equilibrium near this z, from its patch energies; γ held fixed"
        )
    if isinstance(q, Activated):
        m = torch.as_tensor(modulus, dtype=z.dtype, device=z.device).expand_as(error)
        found = torch.where(m > 0, _activated_constant(q, m) * input_norm, math.inf)
        return found, "as for every input: σ′ jumps at kinks"
    if isinstance(q, (Linear, Sigmoidal, Polynomial)):
        found = _linear_term_local(problem, z, error, modulus) * input_norm
        return found, "at the equilibrium near this z, from ∇²q there"
    return None, f"nothing is derived for {type(q).__name__}"


N = TypeVar("N", float, Tensor)


def _activated_constant(q: Activated, m: N) -> N:
    """m‖Δz‖² ≤ (1/ν)⟨WΔz, Δσ⟩ with σ moved by c alone: L_σ‖W‖/(νm)."""
    return q.prior.expansion * q.norm_upper() / q.nu / m * (1.0 + 1e-14)


def _gaussian_local(problem: Problem, q: Gaussian, z: Tensor, error: Tensor) -> Tensor:
    mu = q.mu_upper(tight=True)
    if math.isinf(mu):
        return torch.full_like(error, math.inf)
    if mu == 0.0:
        return torch.zeros_like(error)
    here = q.local_curvature(z, tight=True)
    moved = GAUSSIAN_BEND * mu * q.gamma.sqrt() * error * (1.0 + 1e-14)
    concavity = (moved - here.lower / mu**2).clamp_max(GAUSSIAN_CONCAVITY)
    top = (moved + here.upper / mu**2).clamp_max(1.0)
    found = gaussian_sensitivity(
        mu, concavity=concavity, top=top, modulus=_own_modulus(problem).to(error.device)
    )
    return torch.where(found.isnan(), math.inf, found)


def _linear_term_local(
    problem: Problem, z: Tensor, error: Tensor, modulus: float | Tensor
) -> Tensor:
    """(φ′ + |φ″|‖c‖‖z*‖)/m at t = ⟨c, z*⟩: the derivative of φ′(t)c in c, over the modulus."""
    q = problem.coupling
    local = torch.as_tensor(problem.local_curvature(z).lower, dtype=z.dtype, device=z.device)
    bend = hessian_lipschitz(q)
    known = torch.as_tensor(modulus, dtype=z.dtype, device=z.device)
    if bend is not None:
        slow = torch.as_tensor(bend, dtype=z.dtype, device=z.device)
        known = torch.maximum(known, local - torch.where(slow == 0.0, 0.0, slow * error))
    c = _norm(q.c)
    t = (q.c * z).flatten(1).sum(1)
    far = c * error + 1e-14 * c * _norm(z)  # |t* − t|
    if isinstance(q, Sigmoidal):
        h = t.tanh()
        slope = (1.0 - h * h + SIGMOID_CURVATURE * far).clamp_max(1.0)
        second = ((2.0 * h * (1.0 - h * h)).abs() + 2.0 * far).clamp_max(SIGMOID_CURVATURE)
    elif isinstance(q, Polynomial):
        base, d = (q.offset + t).abs() + far, q.degree
        slope, second = d * base ** (d - 1), d * (d - 1) * base ** (d - 2)
    else:
        slope, second = torch.ones_like(t), torch.zeros_like(t)
    push = torch.where(second > 0, second * c * (_norm(z) + error), 0.0)
    found = (slope + push) / known * (1.0 + 1e-13)
    return torch.where((known > 0) & ~found.isnan(), found, math.inf)
