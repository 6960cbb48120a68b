"""The right sides of Proposition 4 (GEQ) and Theorem 3 (KerDEQ): bounds on the output similarity κ.

    J(θ) = sin θ + (π − θ)cos θ,  K₀ = E[U²]‖x₁‖‖x₂‖J(θ)/2π      Lemma 3: one ReLU neuron of Ux
    Eq 15   κ_opteq ≤ K₀/(1 − μ²)²
    Eq 14   κ_geq ≤ μ²De^{−γσ_min(U)²‖x₁−x₂‖²/4}K₀/(1 − β_maxμ²)²,  D = e^{γB‖W‖²}
    Eq 48   the same without the 1/4
    KerDEQ Eq 10   the same with e^{−γ‖U‖₂‖x₁−x₂‖²} and D = e^{γ‖W‖B}

Lemma 3 is about one neuron, so κ is divided by the width. All of these fail for some W: the proofs
take zᵀWᵀWz′ ≤ ‖W‖²zᵀz′ entry by entry, which is false.
"""

from __future__ import annotations

import math

from .report import AssumptionError, check_positive

__all__ = ["arc_cosine", "eq14", "eq15", "eq48", "kerdeq_eq10", "log_d_derived"]


def arc_cosine(theta: float) -> float:
    """J(θ) = sin θ + (π − θ)cos θ for 0 ≤ θ ≤ π: from π down to 0."""
    if not 0.0 <= theta <= math.pi:
        raise ValueError(f"theta={theta!r}: expected an angle from 0 to π.")
    left = math.pi - theta  # J = sin φ − φ cos φ of φ = π − θ, which falls like φ³/3
    if left < 1e-3:
        return left**3 / 3.0 * (1.0 - left**2 / 10.0)
    return math.sin(left) - left * math.cos(left)


def _one_neuron(variance: float, sizes: float, theta: float) -> float:
    """K₀ with ``sizes`` = ‖x₁‖‖x₂‖."""
    check_positive(variance=variance)
    return variance * sizes * arc_cosine(theta) / (2.0 * math.pi)


def _contracting(mu: float) -> None:
    if not 0.0 <= mu < 1.0:
        raise AssumptionError(f"Proposition 4 needs ‖W‖ ≤ μ < 1, and μ = {mu:.4g} here.")


def eq15(variance: float, sizes: float, theta: float, mu: float) -> float:
    """κ̄_opteq = K₀/(1 − μ²)² (Eq 15, Eq 49, KerDEQ Eq 11)."""
    _contracting(mu)
    return _one_neuron(variance, sizes, theta) / (1.0 - mu**2) ** 2


def _gaussian(one: float, mu: float, beta_max: float, exponent: float) -> float:
    _contracting(mu)
    return mu**2 * math.exp(min(exponent, 700.0)) * one / (1.0 - beta_max * mu**2) ** 2


def eq14(
    variance: float,
    sizes: float,
    theta: float,
    mu: float,
    *,
    gamma: float,
    beta_max: float,
    bound: float,
    smallest: float,
    distance: float,
    quarter: float = 0.25,
) -> float:
    """κ̄_geq of Eq 14, D = e^{γBμ²}; ``quarter=1`` is the appendix' Eq 48."""
    exponent = gamma * (bound * mu**2 - quarter * (smallest * distance) ** 2)
    return _gaussian(_one_neuron(variance, sizes, theta), mu, beta_max, exponent)


def eq48(variance: float, sizes: float, theta: float, mu: float, **numbers: float) -> float:
    """κ̄_geq as the appendix restates it: γ in place of γ/4."""
    return eq14(variance, sizes, theta, mu, quarter=1.0, **numbers)


def kerdeq_eq10(
    variance: float,
    sizes: float,
    theta: float,
    mu: float,
    *,
    gamma: float,
    beta_max: float,
    bound: float,
    largest: float,
    distance: float,
) -> float:
    """κ̄_kerdeq of KerDEQ Eq 10: D = e^{γμB}, decay e^{−γ‖U‖₂‖x₁−x₂‖²}, both as printed."""
    exponent = gamma * (bound * mu - largest * distance**2)
    return _gaussian(_one_neuron(variance, sizes, theta), mu, beta_max, exponent)


def log_d_derived(gamma: float, mu: float, bound: float) -> float:
    """log D = γ‖W‖²B², what Eq 58 gives: ‖W(z₁ − z₂)‖² ≤ 2‖W‖²B² for z₁, z₂ ≥ 0."""
    return gamma * mu**2 * bound**2
