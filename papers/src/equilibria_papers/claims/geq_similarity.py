"""GEQ's Proposition 4 and Remark 3: the output similarity κ, with the steps of their proofs."""

from __future__ import annotations

from .claim import Claim, Variant
from .geq_similarity_trials import (
    entrywise,
    entrywise_worst,
    eq14,
    eq14_derived,
    eq14_family,
    eq15,
    eq15_family,
    eq15_identity,
    eq48,
    eq58,
    eq58_worst,
    free_of_angle,
    free_of_angle_geq,
    lemma3,
    remark3,
    remark3_known,
    variant,
)

__all__ = ["CLAIMS", "EQ15_READINGS", "FREE_OF_ANGLE"]

EQ15_READINGS = (
    Variant(
        name="as printed", random=variant(eq15, gaussian=False), adversarial=eq15_family, cost=10
    ),
    Variant(
        name="W = μI",
        random=eq15_identity,
        needs="W = μI, where it is an equality (tried as one)",
        cost=2,
        proof="z = σ(Ux)/(1 − μ²), then Lemma 3 for one neuron",
    ),
    Variant(
        name="ours: free of the angle",
        random=variant(free_of_angle, gaussian=False),
        needs="E[U²]‖x₁‖‖x₂‖/(1 − μ²)² on the right",
        cost=10,
        proof="Cauchy and Schwarz with ‖z‖ ≤ ‖Ux‖/(1 − μ²)",
    ),
)

FREE_OF_ANGLE = Variant(
    name="ours: free of the angle",
    random=variant(free_of_angle_geq, gaussian=True),
    adversarial=eq14_family(free_of_angle_geq),
    needs="min(Λ(μ)²E[U²]‖x₁‖‖x₂‖, μ²/(2eγn)) on the right",
    cost=10,
    proof="Cauchy and Schwarz with ‖z‖ ≤ Λ(μ)‖Ux‖ (fact 5) and ‖z‖ ≤ μ max √(s/γ)e^{−s}",
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="geq.lemma3",
        paper="GEQ",
        where="Lemma 3, Eq 50",
        statement=r"$E[\sigma(Ux_1)^\top\sigma(Ux_2)] = \frac{E[U_i^2]\|x_1\|\|x_2\|}{2\pi}"
        r"(\sin\theta_0 + (\pi - \theta_0)\cos\theta_0)$ for a layer $\sigma(Ux)$.",
        variants=(
            Variant(name="as printed", random=lambda g: lemma3(g, width=None)),
            Variant(name="per neuron", random=lambda g: lemma3(g, width=1), needs="one row of U"),
        ),
        note="True of one neuron; a layer of n has n times as much: divide κ by the width.",
    ),
    Claim(
        id="geq.eq51",
        paper="GEQ",
        where="Eq 51–53 (proof of Proposition 4)",
        statement=r"$\sigma(W^\top Wz_1)^\top z_2 \le \mu^2 z_1^\top z_2$ for $z_1, z_2 \ge 0$.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: entrywise(g, kind=None),
                adversarial=entrywise_worst,
            ),
            Variant(
                name="W = μI",
                random=lambda g: entrywise(g, kind="identity"),
                needs="WᵀW a multiple of I",
            ),
        ),
        note="‖W‖ bounds quadratic forms, not products of two different vectors.",
    ),
    Claim(
        id="geq.prop4.eq15",
        paper="GEQ",
        where="Proposition 4, Eq 15",
        statement=r"$\kappa_{opteq} \le \frac{E[U_i^2]\|x_1\|\|x_2\|(\sin\theta_0 + "
        r"(\pi-\theta_0)\cos\theta_0)}{2\pi(1-\mu^2)^2}$, per neuron.",
        variants=EQ15_READINGS,
        note="Rests on Eq 51, which is false. At opposite inputs the right side is 0 and κ is not.",
    ),
    Claim(
        id="geq.eq58",
        paper="GEQ",
        where="Eq 58 (proof of Proposition 4)",
        statement=r"$\beta_{x_1}\beta_{x_2} \le De^{-\frac\gamma4\sigma_{\min}(U)^2\|x_1-x_2\|^2}$ "
        r"with $D = e^{\gamma\|W\|^2B}$.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: eq58(g, squared=False),
                adversarial=eq58_worst,
                cost=4,
            ),
            Variant(
                name="with B²",
                random=lambda g: eq58(g, squared=True),
                needs="D = e^{γ‖W‖²B²}",
                cost=4,
            ),
        ),
    ),
    Claim(
        id="geq.prop4.eq14",
        paper="GEQ",
        where="Proposition 4, Eq 14",
        statement=r"$\kappa_{geq} \le \frac{\mu^2De^{-\frac\gamma4\sigma_{\min}(U)^2\|x_1-x_2\|^2}"
        r"E[U_i^2]\|x_1\|\|x_2\|(\sin\theta_0 + (\pi-\theta_0)\cos\theta_0)}"
        r"{2\pi(1-\beta_{\max}\mu^2)^2}$, per neuron.",
        variants=(
            Variant(
                name="as printed",
                random=variant(eq14, gaussian=True),
                adversarial=eq14_family(eq14),
                cost=10,
            ),
            Variant(
                name="W = μI, D with B²",
                random=variant(eq14_derived, gaussian=True, kind="identity"),
                needs="W = μI and D = e^{γ‖W‖²B²}",
                cost=10,
            ),
            FREE_OF_ANGLE,
        ),
        note="Read with the largest β_max and B and the smallest σ_min(U) of all draws, which "
        "favors it; they are random when U is. Fails near opposite inputs, for Eq 51's reason.",
    ),
    Claim(
        id="geq.prop4.eq48",
        paper="GEQ",
        where="Proposition 4 in the appendix, Eq 48",
        statement=r"The same with $e^{-\gamma\sigma_{\min}(U)^2\|x_1-x_2\|^2}$, without the $1/4$.",
        variants=(
            Variant(
                name="as printed",
                random=variant(eq48, gaussian=True),
                adversarial=eq14_family(eq48),
                cost=10,
            ),
        ),
        note="Its own proof ends with the 1/4 of Eq 14 (Eq 58–59).",
    ),
    Claim(
        id="geq.remark3",
        paper="GEQ",
        where="Remark 3",
        statement=r"If $\|x_1-x_2\| \ge 2\sqrt{-\log(1/D)}/\sigma_{\min}(U)$ then "
        r"$\bar\kappa_{geq} \le \bar\kappa_{opteq}$ (printed with $\bar\kappa_{geq}$ twice).",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: remark3(g, printed=True),
                adversarial=remark3_known,
            ),
            Variant(
                name="with 1/γ",
                random=lambda g: remark3(g, printed=False),
                needs="2√(log D/γ)/σ_min(U)",
            ),
        ),
    ),
)
