"""How far the logits W_c z* + b_c move when every weight does: what a PAC-Bayes bound needs (ours).

All weights move by at most ω in operator norm (a convolution by ω for each tap). Second-order terms
are kept, ‖W̄‖ is what it becomes, and β moves as it must: G is strongly convex with the modulus
1 − 2e^{−3/2}μ̄², so ‖z̄ − z‖ ≤ ‖∇q̄(z) − ∇q(z)‖/m̄. GEQ's proof holds β constant (Eq 33), which is
false; this is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibria.problems.gaussian import GAUSSIAN_CONCAVITY, gaussian_sensitivity

__all__ = ["Sizes", "geq_change", "opteq_change"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Operator norms of the weights, the largest ‖x‖, and how a unit ω acts on each of them."""

    w: float
    u: float
    b: float
    head: float
    bound: float
    """B ≥ ‖x‖."""
    hidden: float = 1.0
    """‖W_h‖; 1 where there is none."""
    taps: int = 1
    """k² for convolutions of k × k: ‖ΔW‖ ≤ k²ω."""
    pixels: int = 1
    """‖Δb‖ ≤ √pixels·ω."""
    patches: int = 1
    has_hidden: bool = False
    has_bias: bool = True
    has_head_bias: bool = True


def _logits(s: Sizes, omega: float, moved: float, state: float) -> float:
    """‖(W_c + Δ)(z + Δz) + Δb_c − W_cz‖ ≤ (‖W_c‖ + ω)‖Δz‖ + ω‖z‖ + ω."""
    return (s.head + omega) * moved + omega * state + (omega if s.has_head_bias else 0.0)


def opteq_change(s: Sizes, omega: float, nu: float = 1.0) -> float:
    """The largest move of OptEq's logits; inf where ‖W̄‖²/ν ≥ 1."""
    dw, db = s.taps * omega, (math.sqrt(s.pixels) * omega if s.has_bias else 0.0)
    rest, rest_moved = 1.0 - s.w**2 / nu, 1.0 - (s.w + dw) ** 2 / nu
    if rest_moved <= 0.0:
        return math.inf
    state = (s.u * s.bound + s.b) / rest
    pushed = (2.0 * s.w * dw + dw**2) / nu * state + s.taps * omega * s.bound + db
    return _logits(s, omega, pushed / rest_moved, state)


def geq_change(s: Sizes, omega: float, gamma: float) -> float:
    """The largest move of GEQ's logits, γ fixed; inf where the moved layer may not be unique."""
    dw, db = s.taps * omega, (math.sqrt(s.pixels) * omega if s.has_bias else 0.0)
    dh = omega if s.has_hidden else 0.0
    mu, mu_moved = s.w * s.hidden, (s.w + dw) * (s.hidden + dh)
    modulus = 1.0 - GAUSSIAN_CONCAVITY * mu_moved**2
    if modulus <= 0.0:
        return math.inf
    features = s.u * s.bound + s.b
    cap = math.sqrt(s.patches / (2.0 * math.e * gamma))  # ‖e^{−γ‖h‖²}h‖ over all patches
    state = min(mu * cap, float(gaussian_sensitivity(mu)) * s.hidden * features)
    residual = features + s.w * state
    message = min(cap, s.hidden * residual)
    shifted = s.taps * omega * s.bound + db + dw * state  # ‖r̄ − r‖ at the same z
    inner = dh * residual + (s.hidden + dh) * shifted
    pushed = dw * s.hidden * message + (s.w + dw) * (dh * message + (s.hidden + dh) * inner)
    return _logits(s, omega, pushed / modulus, state)
