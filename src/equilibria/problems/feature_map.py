"""exp(−γ‖c − y‖²) = λ⟨Φ(c), Φ(y)⟩, λ = e^{−γ‖c‖²}e^{−γ‖y‖²}: the features of GEQ's Prop 1.

Φ(x) stacks √((2γ)^k/k!)·x^{⊗k} for k = 0, 1, …, so ⟨Φ(c), Φ(y)⟩ = Σ_k (2γ⟨c, y⟩)^k/k!. With K
terms the Gaussian coupling becomes q_K = −(λ/2γ)⟨Φ_K(c), Φ_K(y)⟩, y = Wz. (The paper's Eq 7 drops
1/2γ, and λ lacks a square there.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gaussian_feature_map", "truncated_gaussian_coupling", "truncation_error_bound"]

_MAX_FEATURES = 1_000_000


def _check(gamma: float, terms: int, *tensors: Tensor) -> None:
    if not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(f"gamma={gamma!r} is out of range: γ must be a positive finite number.")
    if isinstance(terms, bool) or int(terms) != terms or terms < 1:
        raise ValueError(f"terms={terms!r}: expected an integer of at least 1.")
    for t in tensors:
        if t.ndim != 2 or t.shape != tensors[0].shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise ValueError(f"Expected vectors [B, n], all of one shape; got {shapes}.")


def _log_scale(c: Tensor, y: Tensor, gamma: float) -> Tensor:
    """log λ = −γ(‖c‖² + ‖y‖²). [B]."""
    return -gamma * (c.square().sum(-1) + y.square().sum(-1))


def gaussian_feature_map(x: Tensor, gamma: float, terms: int) -> Tensor:
    """Φ_K(x) = (√((2γ)^k/k!)·x^{⊗k}), k < K. x [B, n] → [B, Σ_{k<K} n^k]. For small n and K."""
    _check(gamma, terms, x)
    n = x.shape[1]
    features = sum(n**k for k in range(terms))
    if features > _MAX_FEATURES:
        raise ValueError(
            f"The explicit map has Σ n^k = {features} features for n={n}, terms={terms}, above "
            f"{_MAX_FEATURES}; truncated_gaussian_coupling needs only inner products."
        )
    power = torch.ones_like(x[:, :1])
    blocks = [power]
    for k in range(1, terms):
        # √((2γ)^k/k!) grows factor by factor, so nothing overflows before the feature does.
        power = (power.unsqueeze(-1) * x.unsqueeze(1)).flatten(1) * math.sqrt(2.0 * gamma / k)
        blocks.append(power)
    return torch.cat(blocks, dim=1)


def truncated_gaussian_coupling(c: Tensor, y: Tensor, gamma: float, terms: int) -> Tensor:
    """q_K = −(λ/2γ) Σ_{k<K} (2γ⟨c, y⟩)^k/k! → −(1/2γ)exp(−γ‖c − y‖²) as K grows (GEQ Prop 1).

    c and y = Wz [B, n] → [B]. The sum starts from λ, so every term is at most 1; with
    γ(‖c‖² + ‖y‖²) beyond the logarithm of the smallest number (745 in float64) it is 0.
    """
    _check(gamma, terms, c, y)
    exponent = 2.0 * gamma * (c * y).sum(-1)
    term = torch.exp(_log_scale(c, y, gamma))
    total = term
    for k in range(1, terms):
        term = term * exponent / k
        total = total + term
    return -total / (2.0 * gamma)


def truncation_error_bound(c: Tensor, y: Tensor, gamma: float, terms: int) -> Tensor:
    """|q − q_K| ≤ (λ/2γ)·(|t|^K/K!)·e^{max(t, 0)}, t = 2γ⟨c, y⟩ (Lagrange's remainder). [B]."""
    _check(gamma, terms, c, y)
    t = 2.0 * gamma * (c * y).sum(-1)
    power = torch.special.xlogy(torch.full_like(t, float(terms)), t.abs())
    log_bound = _log_scale(c, y, gamma) + power - math.lgamma(terms + 1) + t.clamp_min(0.0)
    return torch.exp(log_bound) / (2.0 * gamma)
