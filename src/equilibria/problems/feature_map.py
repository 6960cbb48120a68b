"""exp(−γ‖c − y‖²) = λ⟨Φ(c), Φ(y)⟩, λ = e^{−γ‖c‖²}e^{−γ‖y‖²}: the features of GEQ's Prop 1.

Φ(x) stacks √((2γ)^k/k!)·x^{⊗k} for k = 0, 1, …, so ⟨Φ(c), Φ(y)⟩ = Σ_k (2γ⟨c, y⟩)^k/k!. With K
terms the Gaussian coupling becomes q_K = −(λ/2γ)⟨Φ_K(c), Φ_K(y)⟩, y = Wz. (The paper's Eq 7 drops
1/2γ, and λ lacks a square there.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _exponents(c: Tensor, y: Tensor, gamma: float, terms: int) -> tuple[Tensor, Tensor]:
    """2γ⟨c, y⟩ and log λ = −γ(‖c‖² + ‖y‖²), [B] each, of checked arguments."""
    if not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(f"gamma={gamma!r} is out of range: γ must be a positive finite number.")
    if isinstance(terms, bool) or int(terms) != terms or terms < 1:
        raise ValueError(f"terms={terms!r}: expected an integer of at least 1.")
    if c.ndim != 2 or c.shape != y.shape:
        raise ValueError(
            f"Expected vectors [B, n], all of one shape; got {tuple(c.shape)}, {tuple(y.shape)}."
        )
    return 2.0 * gamma * (c * y).sum(-1), -gamma * (c.square().sum(-1) + y.square().sum(-1))


def truncated_gaussian_coupling(c: Tensor, y: Tensor, gamma: float, terms: int) -> Tensor:
    """q_K = −(λ/2γ) Σ_{k<K} (2γ⟨c, y⟩)^k/k! → −(1/2γ)exp(−γ‖c − y‖²) as K grows (GEQ Prop 1).

    c and y = Wz [B, n] → [B]. The sum starts from λ, so every term is at most 1; with
    γ(‖c‖² + ‖y‖²) beyond the logarithm of the smallest number (745 in float64) it is 0.
    """
    exponent, log_scale = _exponents(c, y, gamma, terms)
    total = term = torch.exp(log_scale)
    for k in range(1, terms):
        term = term * exponent / k
        total = total + term
    return -total / (2.0 * gamma)


def truncation_error_bound(c: Tensor, y: Tensor, gamma: float, terms: int) -> Tensor:
    """|q − q_K| ≤ (λ/2γ)·(|t|^K/K!)·e^{max(t, 0)}, t = 2γ⟨c, y⟩ (Lagrange's remainder). [B]."""
    t, log_scale = _exponents(c, y, gamma, terms)
    power = torch.special.xlogy(torch.full_like(t, float(terms)), t.abs())
    log_bound = log_scale + power - math.lgamma(terms + 1) + t.clamp_min(0.0)
    return torch.exp(log_bound) / (2.0 * gamma)
