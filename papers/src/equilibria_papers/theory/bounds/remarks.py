"""Remarks 1 and 3 of GEQ and Remark 1 of KerDEQ: when GEQ's bounds are below OptEq's."""

from __future__ import annotations

import math

from .report import AssumptionError, check_positive

__all__ = ["kerdeq_remark1", "remark1", "remark1_ratios", "remark3"]


def remark1_ratios(beta: float, mu: float, m: float) -> tuple[float, float]:
    """βμ(1 − m)/(1 − βm) and (2μβ + 1)(1 − m)/(1 − βm): where both are below 1, GEQ is tighter."""
    if not 0.0 <= m < 1.0:
        raise AssumptionError(f"Remark 1 needs 0 ≤ m < 1, got m = {m:.4g}.")
    scale = (1.0 - m) / (1.0 - beta * m)
    return beta * mu * scale, (2.0 * mu * beta + 1.0) * scale


def remark1(beta: float, mu: float, m: float) -> tuple[bool, str]:
    """GEQ Remark 1: β_max < 0.8 and μ, m > 0.9 make both terms of GEQ's bound the smaller ones."""
    premise = beta < 0.8 and mu > 0.9 and 0.9 < m < 1.0
    if not m < 1.0:
        return False, f"says nothing for m = {m:.4g} ≥ 1"
    first, second = remark1_ratios(beta, mu, m)
    word = "met" if premise else "not met"
    return premise, (
        f"premise β_max < 0.8, μ, m > 0.9 is {word}; the two ratios are {first:.3g}, {second:.3g}"
    )


def kerdeq_remark1(m: float = 0.9, mu: float | None = None) -> float:
    """The β below which both terms of KerDEQ's bound are below OptEq's; KerDEQ prints 0.83 at 0.9.

    βμ(1 − m) < 1 − βm and (2μβ + 1)(1 − m) ≤ 1 − βm give β < 1/(m + μ(1 − m)) and
    β ≤ m/(2μ(1 − m) + m). The paper takes m = μ = 0.9, which no W has: μ ≥ ‖W‖ = √m = 0.9487, the
    value taken if ``mu`` is None.
    """
    check_positive(m=m)
    if m >= 1.0:
        raise AssumptionError(f"KerDEQ's Remark 1 needs m < 1, got {m:.4g}.")
    size = math.sqrt(m) if mu is None else mu
    return min(1.0 / (m + size * (1.0 - m)), m / (2.0 * size * (1.0 - m) + m))


def remark3(log_d: float, gamma: float, smallest: float, *, printed: bool = False) -> float:
    """The distance ‖x₁ − x₂‖ from which κ̄_geq ≤ κ̄_opteq: 2√(log D/γ)/σ_min(U).

    The paper prints 2√(−log(1/D))/σ_min(U), which lacks 1/γ (and κ̄_geq on both sides); with γ < 1
    that is too short. inf where σ_min(U) = 0.
    """
    check_positive(gamma=gamma)
    if log_d < 0.0:
        raise ValueError(f"log_d={log_d!r}: D = e^… is at least 1, so its logarithm is 0 or more.")
    if smallest <= 0.0:
        return math.inf
    return 2.0 * math.sqrt(log_d if printed else log_d / gamma) / smallest
