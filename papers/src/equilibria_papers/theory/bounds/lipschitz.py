"""Proposition 3 and Remark 2 of GEQ: how far z* moves when x does, beside our own constants.

    Eq 11   L_geq = κμ²/(1 − κμ²),  κ = β_max + √γBμ        (printed; with b = 0 it is proven)
    Eq 12   L_opteq = μ/(1 − μ²)
    ours    κ = β_max + 0.1972·√γ·max‖h‖ in place of κ      (with or without a bias)
    ours    Λ(μ)·‖x → c̃‖, for every input, sharp            (docs/facts.md, fact 5; γ fixed)

κ is a Lipschitz constant of the message te^{−γt²}: φ(t) = te^{−t²} has |φ′(ξ)| ≤ e^{−ξ²} + Cξ with
C = max 2e^{−s}(s − 1)/√s = 0.1972. At an equilibrium ‖r‖ ≤ ‖Ux + b‖: without a bias that is Bμ, and
Eq 11 follows (with patches ‖hᵢ‖ ≤ 2Bμ and 2C < 1 do). With a bias it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equilibria.certify import global_lipschitz, local_lipschitz, tight_curvature
from equilibria.problems import GAUSSIAN_CONCAVITY, MeanPatchEnergy, Problem, gaussian_sensitivity

from .report import (
    Assumption,
    AssumptionError,
    LayerNumbers,
    Provable,
    Report,
    Row,
    check_positive,
    double,
    measure_layer,
    measured_around,
    measured_pairs,
    number,
    refusing,
)

_PEAK = (3.0 + math.sqrt(17.0)) / 4.0
BEND = 2.0 * math.exp(-_PEAK) * (_PEAK - 1.0) / math.sqrt(_PEAK) * (1.0 + 1e-14)
"""C = max_s 2e^{−s}(s − 1)/√s = 0.19718, at s = (3 + √17)/4."""


def _check_mu(mu: float) -> None:
    check_positive(mu=mu)
    if mu >= 1.0:
        raise AssumptionError(f"Proposition 3 needs μ = max(‖W‖, ‖U‖) < 1, and μ = {mu:.4g} here.")


def eq11(mu: float, beta_max: float, gamma: float, bound: float) -> float:
    """L_geq = (β_maxμ² + √γBμ³)/(1 − β_maxμ² − √γBμ³) (GEQ Eq 11).

    Refuses μ ≥ 1 and a denominator that is not positive: the proof divides by it.
    """
    check_positive(gamma=gamma)
    _check_mu(mu)
    part = beta_max * mu**2 + math.sqrt(gamma) * bound * mu**3
    if part >= 1.0:
        raise AssumptionError(
            f"Eq 11 needs β_maxμ² + √γBμ³ < 1, and it is {part:.4g} here: take a smaller γ, or "
            "inputs of smaller norm."
        )
    return part / (1.0 - part)


def eq12(mu: float) -> float:
    """L_opteq = μ/(1 − μ²) (GEQ Eq 12); refuses μ ≥ 1."""
    _check_mu(mu)
    return mu / (1.0 - mu**2)


def ours_at_the_data(mu: float, reach_in: float, beta_max: float, gamma: float, h: float) -> float:
    """κμ‖x → c̃‖/(1 − κμ²), κ = min(1, β_max + 0.1972√γ max‖h‖): between inputs like the given ones.

    It needs no μ < 1 of U and allows a bias; it refuses κμ² ≥ 1.
    """
    kappa = min(1.0, beta_max + BEND * math.sqrt(gamma) * h)
    if kappa * mu**2 >= 1.0:
        raise AssumptionError(f"κμ² = {kappa * mu**2:.4g} is not below 1; Λ(μ) needs less.")
    return kappa * mu * reach_in / (1.0 - kappa * mu**2)


def remark2(beta_max: float, bound: float, gamma: float, bias: bool) -> tuple[bool, str]:
    """Whether Remark 2's premise β_max < 0.8, B < 1, √γ < 0.2 is met, and what it is worth.

    Without a bias (Eq 6, one patch) it never is: γ‖Ux − Wz‖² ≤ γ‖Ux‖² < 0.04, so
    β_max > e^{−0.04} = 0.961.
    """
    met = beta_max < 0.8 and bound < 1.0 and math.sqrt(gamma) < 0.2
    if met:
        return True, "the premise is met, so L_geq < L_opteq; but with a bias Eq 11 may not hold"
    why = "" if bias else "; without a bias it cannot be, as β_max > e^−0.04 = 0.961"
    return False, f"premise β_max < 0.8, B < 1, √γ < 0.2 is not met{why}"


@dataclass(frozen=True, eq=False, kw_only=True)
class LipschitzReport(Report):
    """Constants L with ‖z*(x₁) − z*(x₂)‖ ≤ L‖x₁ − x₂‖, and what was measured."""

    TITLE: ClassVar[str] = "Proposition 3, Lipschitz constant of x → z*"

    printed: float | None  # Eq 11 or Eq 12 with the papers' one μ and B; None where refused
    at_data: float | None
    """Ours, between inputs whose weights and residuals are like those given (GEQ)."""
    ours: float | None  # Ours, for every input, or None where none exists
    ours_note: str
    local: float | None  # Ours around the worst of the given inputs, γ held fixed
    fixed: float | None  # Λ(μ)·‖x → c̃‖ (γ fixed), sharp (GEQ)
    mean_rule: float | None  # 2.833·(μ/m)·‖x → c̃‖ for the mean rule's scale 0.2 (GEQ)
    pairs: float  # Measured: the largest ratio over pairs of the batch
    around: float  # Measured: the largest ratio near an input
    mu: float
    w_norm: float
    u_norm: float
    bias_norm: float
    bound: float
    beta_max: float | None
    gamma: tuple[float, float] | None
    reach: float | None
    remark2: str = ""

    @property
    def measured(self) -> float:
        """The largest ratio that was seen."""
        return max(self.pairs, self.around)

    def rows(self) -> list[Row]:
        equation = "Eq 12" if self.gamma is None else "Eq 11"
        made: list[Row] = [(f"{equation} as printed", self.printed, "between inputs like these")]
        if self.gamma is not None:
            made += [
                ("ours, at the data", self.at_data, "κ from the largest residual; bias allowed"),
                ("ours, Λ(μ)‖x → c̃‖", self.fixed, "every input, if γ is fixed; sharp"),
                ("ours, 2.833(μ/m)", self.mean_rule, "every input, γ by the mean rule"),
            ]
        made += [
            ("ours, this layer", self.ours, self.ours_note),
            ("ours, local", self.local, "around the worst input, γ held"),
            ("measured, pairs", self.pairs, ""),
            ("measured, around", self.around, ""),
            ("μ = max(‖W‖, ‖U‖)", self.mu, f"‖W‖ {self.w_norm:.4g}, ‖U‖ {self.u_norm:.4g}"),
            ("‖b‖", self.bias_norm, ""),
            ("B", self.bound, "largest norm of inputs and outputs"),
        ]
        if self.gamma is not None:
            span = f"{self.gamma[0]:.4g} … {self.gamma[1]:.4g}"
            made += [("β_max", self.beta_max, ""), ("γ", span, ""), ("Remark 2", "", self.remark2)]
        return made

    def summary(self) -> list[tuple[str, str]]:
        return [
            ("Prop 3, Lipschitz ≤, Eq 11/12", number(self.printed)),
            ("Prop 3, Lipschitz ≤, ours", number(self.ours)),
            ("Prop 3, Lipschitz ≤, ours, local", number(self.local)),
            ("Prop 3, Lipschitz, measured", number(self.measured)),
        ]


def lipschitz_report(
    layer: Provable, x: Tensor, *, name: str = "", generator: torch.Generator | None = None
) -> LipschitzReport:
    """Proposition 3 on ``layer`` and the batch x [B, ...], our constants and measurements beside.

    Args:
        layer: a GEQ or OptEq.
        x: the layer's own input.
        name: what to call the layer; its class if not given.
        generator: seeds the search, by power iteration, for the worst direction at each input.
    """
    n = measure_layer(layer, x)
    refused: dict[str, str] = {}
    at_data = fixed = mean_rule = None
    remark = ""
    if n.beta_max is None or n.gamma is None or n.reach is None:
        printed = refusing(refused, "Eq 12", eq12, n.mu)
    else:
        gamma = n.gamma[1]
        printed = refusing(refused, "Eq 11", eq11, n.mu, n.beta_max, gamma, n.bound)
        own = (n.w_norm, n.u_norm, n.beta_max, gamma, n.reach)
        at_data = refusing(refused, "ours at the data", ours_at_the_data, *own)
        if not n.gamma_fixed:
            # Its proof holds γ fixed between the two inputs.
            at_data, refused["ours at the data"] = None, "γ changes with the input"
        fixed = float(gaussian_sensitivity(n.w_norm)) * n.u_norm
        m = 1.0 - GAUSSIAN_CONCAVITY * n.w_norm**2
        factor = MeanPatchEnergy(0.2).lipschitz_factor
        assert factor is not None
        mean_rule = factor * n.w_norm / m * n.u_norm if m > 0 else None
        remark = remark2(n.beta_max, n.bound, gamma, n.bias_norm > 0)[1]
    ours, note, local = _certified(layer, x, n)
    return LipschitzReport(
        layer=name or n.kind,
        assumptions=tuple(_assumptions(n)),
        warnings=tuple(_warnings(n)),
        refused=refused,
        printed=printed,
        at_data=at_data,
        ours=ours,
        ours_note=note,
        local=local,
        fixed=fixed,
        mean_rule=mean_rule,
        pairs=measured_pairs(x, n.z),
        around=float(measured_around(layer, x, generator=generator).max()),
        remark2=remark,
        **n.taken("mu", "w_norm", "u_norm", "bias_norm", "bound", "beta_max", "gamma", "reach"),
    )


@torch.no_grad()
def _certified(
    layer: Provable, x: Tensor, n: LayerNumbers
) -> tuple[float | None, str, float | None]:
    """Our constant for every input, why, and the largest local one."""
    exact = double(layer)
    problem: Problem = exact.problem(x.detach().double())
    modulus = tight_curvature(problem).lower
    found, note = global_lipschitz(problem, modulus, n.u_norm)
    # z is solved to 1e-12, far below what the local curvature can feel.
    error = torch.full((len(n.z),), 1e-9, dtype=n.z.dtype, device=n.z.device)
    local, _ = local_lipschitz(problem, n.z, error, modulus, n.u_norm)
    return found, note, None if local is None else float(local.max())


def _assumptions(n: LayerNumbers) -> list[Assumption]:
    made = [
        *n.common(),
        Assumption("‖W‖, ‖U‖ < 1", n.mu < 1.0, f"proven bounds {n.w_norm:.4g} and {n.u_norm:.4g}"),
    ]
    if n.kind == "GEQ":
        bias = Assumption(
            "no bias (the proof's layer)", n.bias_norm == 0.0, f"‖b‖ = {n.bias_norm:.4g}"
        )
        made += [bias, Assumption("γ fixed", n.gamma_fixed, "the layer's γ policy")]
    made.append(Assumption("B and β_max over all of D", None, f"from the {len(n.z)} inputs given"))
    return made


def _warnings(n: LayerNumbers) -> list[str]:
    made = []
    if n.kind == "GEQ" and n.bias_norm > 0.0:
        made.append(
            "Eq 11 is false with a bias: μ = 0.5, γ = 1, b = 1.29306 gives 0.12557 against 0.07859"
        )
    if n.kind == "GEQ" and not n.gamma_fixed:
        made.append("Eq 11 holds γ fixed; this layer's γ changes with the input, and so does z*")
    return made
