"""GEQ's Proposition 2 and Remark 1: the margin bound, its lemmas, and the steps of its proof."""

from __future__ import annotations

from .claim import Claim, Variant
from .geq_margin_trials import (
    eq29,
    eq29_worst,
    eq30,
    eq30_aligned,
    eq33_input,
    eq33_known,
    eq33_weights,
    eq33_weights_worst,
    eq35,
    eq35_search,
    frobenius,
    lemma1,
    lemma2,
    prop2,
    remark1,
    remark1_corner,
)

__all__ = ["CLAIMS", "margin_variants"]


def margin_variants() -> tuple[Variant, ...]:
    """The readings of the GEQ half of Proposition 2."""
    return (
        Variant(name="as printed", random=lambda g: prop2(g, gaussian=True)),
        Variant(
            name="ours: β moves",
            random=lambda g: eq35(g, ours=True),
            needs="γ fixed, strong convexity of G in place of a constant β, σ from a cover",
            cost=4,
        ),
    )


_PROOF = "the constants of its own proof: 4√(·/(M − 1)), B + 1, the factors 2 of Eq 31 and 37"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="geq.lemma1",
        paper="GEQ",
        where="Lemma 1, Eq 26",
        statement=r"For $z = \sigma(Wz + Ux + b)$ with $\|W\|, \|\bar W\| \le m < 1$ the output "
        r"moves by at most $\|\Delta W\|\|Ux + b\|/(1-m)^2 + (\|\Delta Ux\| + \|\Delta b\|)"
        r"/(1-m)$.",
        variants=(Variant(name="as printed", random=lemma1, cost=4),),
    ),
    Claim(
        id="geq.lemma2",
        paper="GEQ",
        where="Lemma 2, Eq 27",
        statement=r"$L_0(f_w) \le \hat L_\eta(f_w) + 4\sqrt{(KL(w+u\|P) + \ln(6M/\delta))/(M-1)}$ "
        r"if the outputs move by less than $\eta/4$ with probability $1/2$.",
        variants=(Variant(name="as printed", random=lemma2, cost=2),),
        note="Tried on linear classifiers of two Gaussian classes, error on fresh samples.",
    ),
    Claim(
        id="geq.eq29",
        paper="GEQ",
        where="Eq 29 (proof of Proposition 2)",
        statement=r"$\|\Delta(W^\top W)\|_2 \le 2\omega\mu$ for $\|\Delta W\| \le \omega$.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: eq29(g, second=False),
                adversarial=eq29_worst,
            ),
            Variant(
                name="with ω²",
                random=lambda g: eq29(g, second=True),
                needs="2ωμ + ω² on the right",
            ),
        ),
        note="The second-order term is dropped; so is that ‖W̄‖ may be larger than ‖W‖.",
    ),
    Claim(
        id="geq.eq30",
        paper="GEQ",
        where="Eq 30–31 (proof of Proposition 2, OptEq)",
        statement=r"A move of all weights by $\omega$ moves OptEq's logits by at most "
        r"$\frac{2\mu^2\omega(B+1)}{(1-m)^2} + \frac{2\mu\omega(B+1)}{1-m} + \omega$.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: eq30(g, power=2),
                adversarial=lambda g: eq30_aligned(g, power=2),
                cost=4,
            ),
            Variant(
                name="Eq 31, first order",
                random=lambda g: eq30(g, power=3),
                tolerance=1e-2,
                needs="2μ³ as in Eq 31, ω → 0",
                cost=4,
            ),
            Variant(
                name="ours: all orders",
                random=lambda g: eq30(g, power=3, ours=True),
                adversarial=lambda g: eq30_aligned(g, power=3, ours=True),
                needs="‖W̄‖ as it becomes, and the terms in ω²",
                cost=4,
            ),
        ),
    ),
    Claim(
        id="geq.eq33",
        paper="GEQ",
        where="Eq 33 (proof of Proposition 2, GEQ)",
        statement=r"With $\beta$ held constant, a move of $Ux + b$ moves $z^*$ by at most "
        r"$\beta_{\max}\|W\|/(1 - \beta_{\max}m)$ times as much.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: eq33_input(g, ours=False),
                adversarial=eq33_known,
            ),
            Variant(
                name="ours: β moves",
                random=lambda g: eq33_input(g, ours=True),
                needs="Λ(μ) in place of β_maxμ/(1 − β_maxm)",
            ),
        ),
        note="β moves with the weights: the slope of te^{−t²} is e^{−s}(1 − 2s), not e^{−s}. At "
        "s = 1.5, w = 0.9 that is 2.566 times the right side, and about 2s − 1 times for large s. "
        "The GEQ half of Proposition 2 rests on this step.",
    ),
    Claim(
        id="geq.eq33.weights",
        paper="GEQ",
        where="Eq 33, a move of W (proof of Proposition 2, GEQ)",
        statement=r"A move of $W$ alone moves $z^*$ by at most $\beta_{\max}\mu\|\Delta W_s\|\|Ux\|"
        r"/(1-\beta_{\max}m)^2 + \beta_{\max}\|\Delta WUx\|/(1-\beta_{\max}m)$.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: eq33_weights(g, ours=False),
                adversarial=lambda g: eq33_weights_worst(g, ours=False),
            ),
            Variant(
                name="ours: β moves",
                random=lambda g: eq33_weights(g, ours=True),
                adversarial=lambda g: eq33_weights_worst(g, ours=True),
                needs="ω(‖e^{−γ‖r‖²}r‖ + ‖W̄‖‖z‖)/(1 − 2e^{−3/2}‖W̄‖²) on the right",
            ),
        ),
    ),
    Claim(
        id="geq.eq35",
        paper="GEQ",
        where="Eq 35 (proof of Proposition 2, GEQ)",
        statement=r"A move of all weights by $\omega$ moves GEQ's logits by at most "
        r"$\frac{2\beta_{\max}\mu^3\omega(B+1)}{(1-\beta_{\max}m)^2} + \frac{(2\mu\beta_{\max}+1)"
        r"\mu\omega(B+1)}{1-\beta_{\max}m} + \omega$.",
        variants=(
            Variant(
                name="as printed",
                random=lambda g: eq35(g, ours=False),
                adversarial=lambda g: eq35_search(g, ours=False),
                cost=4,
            ),
            Variant(
                name="ours: β moves",
                random=lambda g: eq35(g, ours=True),
                adversarial=lambda g: eq35_search(g, ours=True),
                needs="strong convexity of G in place of a constant β",
                cost=4,
            ),
        ),
    ),
    Claim(
        id="geq.prop2",
        paper="GEQ",
        where="Proposition 2, Eq 10 (OptEq)",
        statement=r"The printed excess $\sqrt{16h\ln(24h)K^2\mathcal B_W/(\eta^2M) + "
        r"\ln(M\sqrt M/\delta)/M}$ is at least what Lemma 2 and Eq 31 give.",
        variants=(
            Variant(name="as printed", random=lambda g: prop2(g, gaussian=False)),
            Variant(
                name="ours: all orders",
                random=lambda g: eq30(g, power=3, ours=True),
                needs=f"{_PROOF}; ‖W‖_F² for ‖WᵀW‖_F²; σ from a cover",
                cost=4,
            ),
        ),
        note="Lemma 2's factor 4 (16 under the root), B + 1 and factors 2 are lost on the way. The "
        "bound itself may still be true: it exceeds 1 on every layer we met.",
    ),
    Claim(
        id="geq.prop2.geq",
        paper="GEQ",
        where="Proposition 2 (GEQ)",
        statement="The printed excess of GEQ is at least what Lemma 2 and Eq 37 give.",
        variants=margin_variants(),
        note="Heuristic besides: its proof holds β constant, and Eq 33 is false. Of what it ends "
        "with, Eq 35, no violation was found: its other terms are slack enough.",
    ),
    Claim(
        id="geq.prop2.size",
        paper="GEQ",
        where=r"Proposition 2, 𝓑_W",
        statement=r"$\mathcal B_W$ with $\|W^\top W\|_F^2$ bounds the squared size of the weights "
        r"that the proof moves: $\|W\|_F^2 \le \|W^\top W\|_F^2$.",
        variants=(Variant(name="as printed", random=frobenius),),
        note="The proof moves W (Eq 29), so KL(w + u‖P) has ‖W‖_F², which is larger for ‖W‖ < 1.",
    ),
    Claim(
        id="geq.remark1",
        paper="GEQ",
        where="Remark 1",
        statement=r"If $\beta_{\max} < 0.8$ and $\mu, m > 0.9$ then $\frac{\beta_{\max}\mu}"
        r"{1-\beta_{\max}m} < \frac{1}{1-m}$ and $\frac{2\mu\beta_{\max}+1}{1-\beta_{\max}m} \le "
        r"\frac{1}{1-m}$.",
        variants=(Variant(name="as printed", random=remark1, adversarial=remark1_corner),),
    ),
)
