"""The right sides of Proposition 2 (GEQ) and Theorem 2 (KerDEQ), printed and as proven.

With T = 16h ln(24h)K²/η² and 𝓑 = ‖WᵀW‖_F² + ‖U‖_F² + ‖b‖² + ‖W_c‖_F² + ‖b_c‖²,

    printed   √(T𝓑/M + ln(M√M/δ)/M)
    derived   4√((T𝓑 + ln(6M√M/δ))/(M − 1))                    Lemma 2, after Eq 31 and 37

and K = bracket/(1 − βm)²; OptEq has β = 1 (and one μ less on two terms). What the printed form
loses: Lemma 2's factor 4, B + 1 for B, the factors 2 of Eq 31 and 37.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .report import AssumptionError, check_positive

__all__ = ["PacBayes", "bracket_geq", "bracket_opteq", "covered_scale", "excess"]


@dataclass(frozen=True, kw_only=True)
class PacBayes:
    """M samples, probability 1 − δ, margin η, width h, and the squared size 𝓑 of the weights."""

    samples: int
    delta: float
    margin: float
    width: int
    size: float

    def __post_init__(self) -> None:
        check_positive(margin=self.margin, delta=self.delta, size=self.size)
        if self.delta >= 1.0:
            raise ValueError(f"delta={self.delta!r}: expected a probability in (0, 1).")
        if self.samples < 2:
            raise ValueError(f"samples={self.samples!r}: expected at least 2 training samples.")

    def printed(self, k: float) -> float:
        """√(16h ln(24h)K²𝓑/(η²M) + ln(M√M/δ)/M)."""
        t = 16.0 * self.width * math.log(24.0 * self.width) * (k / self.margin) ** 2
        count = self.samples
        return math.sqrt((t * self.size + math.log(count**1.5 / self.delta)) / count)

    def derived(self, k: float) -> float:
        """4√((16h ln(24h)K²𝓑/η² + ln(6M√M/δ))/(M − 1))."""
        t = 16.0 * self.width * math.log(24.0 * self.width) * (k / self.margin) ** 2
        count = self.samples
        rest = math.log(6.0 * count**1.5 / self.delta)
        return 4.0 * math.sqrt((t * self.size + rest) / (count - 1))


def _contracting(m: float) -> None:
    if not m < 1.0:
        raise AssumptionError(
            f"Proposition 2 needs m = ‖WᵀW‖₂ < 1, and it is {m:.4g} here: the bound divides by "
            "(1 − m)⁴."
        )


def bracket_opteq(mu: float, m: float, bound: float, *, derived: bool) -> float:
    """K of OptEq: μ³B/(1 − m)² + μB/(1 − m) + 1, or with 2 and B + 1 as Eq 31 has it."""
    _contracting(m)
    two, reach = (2.0, bound + 1.0) if derived else (1.0, bound)
    return two * mu**3 * reach / (1.0 - m) ** 2 + two * mu * reach / (1.0 - m) + 1.0


def bracket_geq(mu: float, m: float, beta: float, bound: float, *, derived: bool) -> float:
    """K of GEQ: βμ⁴B/(1 − βm)² + (2μβ + 1)μB/(1 − βm) + 1, or as Eq 37 has it."""
    _contracting(m)
    two, reach = (2.0, bound + 1.0) if derived else (1.0, bound)
    rest = 1.0 - beta * m
    middle = (2.0 * mu * beta + 1.0) * mu * reach / rest
    return two * beta * mu**4 * reach / rest**2 + two * middle + 1.0


def covered_scale(
    change: Callable[[float], float], margin: float, per_scale: float
) -> tuple[float, int]:
    """The largest σ = 2^{−j/4} with change(σ·per_scale) ≤ η/4, and j.

    A prior may not look at the trained weights, so σ comes from a list fixed before: its entry j
    pays with δ/((j + 1)(j + 2)) instead of δ.
    """
    for j in range(800):
        scale = 2.0 ** (-j / 4)
        if change(scale * per_scale) <= margin / 4.0:
            return scale, j
    raise AssumptionError(
        f"no perturbation of the weights, however small, keeps the outputs within η/4 = "
        f"{margin / 4:.3g}: is the equilibrium unique at these weights?"
    )


def excess(squares: float, scale: float, entry: int, samples: int, delta: float) -> float:
    """4√((‖w‖²/2σ² + ln(6M/δ_j))/(M − 1)), δ_j = δ/((j + 1)(j + 2)) (Lemma 2 with the cover)."""
    spent = delta / ((entry + 1) * (entry + 2))
    kl = squares / (2.0 * scale**2)
    return 4.0 * math.sqrt((kl + math.log(6.0 * samples / spent)) / (samples - 1))
