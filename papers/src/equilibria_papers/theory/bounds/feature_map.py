"""Proposition 1 of GEQ (Theorem 1 of KerDEQ): the Gaussian kernel as an infinitely wide linear one.

    q = −(λ/2γ)⟨Φ(c), Φ(Wz)⟩,  λ = e^{−γ‖c‖²}e^{−γ‖Wz‖²},  ⟨Φ_K(c), Φ_K(y)⟩ = Σ_{k<K}(2γ⟨c, y⟩)^k/k!

The paper's Eq 7 drops 1/2γ, prints λ with ‖Wz‖ in place of its square, and counts in^i features for
n^i. λ depends on z, so this is not a linear OptEq in the features: its gradient has a second term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from equilibria.problems import (
    Gaussian,
    metric_root,
    truncated_gaussian_coupling,
    truncation_error_bound,
)

from .report import Assumption, Report, Row, double, measure_layer, number

_TERMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_SMALL = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureMapReport(Report):
    """|q − q_K| at the equilibria, over its Lagrange bound, for K terms of the feature map."""

    TITLE: ClassVar[str] = "Proposition 1, the truncated feature map"

    terms: tuple[int, ...]
    error: tuple[float, ...]  # max |q − q_K| over the batch and its patches
    error_bound: tuple[float, ...]  # max of (λ/2γ)(|t|^K/K!)e^{max(t, 0)}, t = 2γ⟨c, Wz⟩
    printed_error: float  # max |q − q_printed|, Eq 7 with all terms: does not go to 0
    features: tuple[int | None, ...]
    """Σ_{k<K} n^k, the width of Φ_K; None where it has more than 18 digits."""
    gamma: tuple[float, float]

    def rows(self) -> list[Row]:
        made: list[Row] = []
        columns = zip(self.terms, self.error, self.error_bound, self.features, strict=True)
        for k, error, limit, width in columns:
            note = f"at most {limit:.3g} and rounding; {width or 'more than 1e18'}"
            made.append((f"|q − q_K|, K = {k}", error, f"{note} features"))
        made.append(("|q − q|, Eq 7 as printed", self.printed_error, "all terms"))
        return made

    def summary(self) -> list[tuple[str, str]]:
        small = [k for k, error in zip(self.terms, self.error, strict=True) if error < _SMALL]
        return [("Prop 1, terms for 1e-6", number(small[0] if small else None))]


@torch.no_grad()
def feature_map_report(
    layer: Any, x: Tensor, *, terms: tuple[int, ...] = _TERMS, name: str = ""
) -> FeatureMapReport:
    """How many terms of Φ the layer's kernel needs at the equilibria of x [B, ...]. GEQ only."""
    n = measure_layer(layer, x)
    if n.kind != "GEQ":
        raise TypeError("Proposition 1 is about GEQ: an OptEq has the linear kernel already.")
    if not terms or any(k < 1 for k in terms):
        raise ValueError(f"terms={terms!r}: expected one or more integers of at least 1.")
    q = double(layer).problem(x.detach().double()).coupling
    assert isinstance(q, Gaussian)
    split = (lambda r: r.flatten(1).unsqueeze(1)) if q.patches is None else q.patches.split
    root = None if q.metric is None else metric_root(q.metric)[0]

    def projected(r: Tensor) -> Tensor:
        """The patches of r [B, *out], a row each: [B·P, k]."""
        made = split(r).double().flatten(0, 1)
        return made if root is None else made @ root

    c, y = projected(q.c), projected(q.operator(n.z))
    gamma = q.gamma.double().repeat_interleave(len(c) // len(q.gamma))
    error, limit = [], []
    true = -torch.exp(-gamma * (c - y).square().sum(1)) / (2.0 * gamma)
    # γ differs by sample; scaling both vectors by √γ makes it 1 (and q scales with 1/γ).
    a, b = c * gamma.sqrt()[:, None], y * gamma.sqrt()[:, None]
    for k in terms:
        error.append(float((truncated_gaussian_coupling(a, b, 1.0, k) / gamma - true).abs().max()))
        limit.append(float((truncation_error_bound(a, b, 1.0, k) / gamma).max()))
    size = y.norm(dim=1)
    printed = -torch.exp(-gamma * (c.square().sum(1) + size) + 2.0 * gamma * (c * y).sum(1))
    counts = [sum(c.shape[1] ** power for power in range(k)) for k in terms]
    return FeatureMapReport(
        layer=name or "GEQ",
        assumptions=(
            *n.common(),
            Assumption("c = U(x + U⁻¹b)", True, "not needed: Φ is taken of c = Ux + b itself"),
        ),
        warnings=(
            "Eq 7 as printed lacks 1/2γ and a square in λ; λ depends on z, so the kernel is linear "
            "in the features only up to that factor",
        ),
        terms=tuple(terms),
        error=tuple(error),
        error_bound=tuple(limit),
        printed_error=float((printed - true).abs().max()),
        features=tuple(count if count < 10**18 else None for count in counts),
        gamma=n.gamma or (math.nan, math.nan),
    )
