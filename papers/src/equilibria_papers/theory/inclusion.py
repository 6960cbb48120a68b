"""Theorem 2 (paper 003): what the equilibrium of a deep OptEq solves.

    0 ∈ ∂Φ(z̃) + (I − P)z̃,   Φ(z̃) = Σ_l α_l M_{φ_l}^{1−α_l}(z_l)          (Eq 8)

with prox_{φ_l} = W_lᵀσ(W_l· + U_l x + b_l) and the permutation P of Lemma 3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .blocks import Deep, as_blocks, check_assumption
from .multi_block import MultiBlock

__all__ = ["inclusion_residual"]


@torch.no_grad()
def inclusion_residual(
    layer: Deep,
    x: Tensor | None,
    z: Tensor,
    *,
    form: Literal["subgradient", "proximal"] = "subgradient",
    check: bool = True,
) -> Tensor:
    """dist(0, ∂Φ(z̃) + (I − P)z̃) of Theorem 2, [B], in float64.

    α M_φ^{1−α} is differentiable for α < 1, and with v_l the solution of f_l(v_l) = z_l its
    gradient is v_l − z_l. So the inclusion has the residual v_l − (Pz̃)_l in each block, no matter
    how z̃ was found.

    Args:
        layer: a deep OptEq, or its blocks (then x is None).
        x: the layer's input.
        z: one state [B, *state], which is expanded to z̃ by Lemma 3, or z̃ [B, L, *state] itself.
        form: "subgradient" as above, for α < 1; "proximal" for every α: ‖z̃ − prox_Φ(Pz̃)‖, which
            is zero at the same z̃.
        check: raise where Assumption 2 (L_σ‖W_l‖² ≤ 1) is not met; without it Φ is not convex.
    """
    blocks = as_blocks(layer, x)
    if check:
        check_assumption(blocks, "Theorem 2")
    if form not in ("subgradient", "proximal"):
        raise ValueError(f"form={form!r}: expected 'subgradient' or 'proximal'.")
    multi = MultiBlock(blocks)
    z = z.detach().double()
    stacked = multi.expand(z) if z.ndim == blocks[0].start().ndim else z
    if form == "proximal":
        return multi.residual(stacked)
    full = [number for number, block in enumerate(blocks, 1) if block.alpha == 1.0]
    if full:
        raise ValueError(
            f"inclusion_residual(form='subgradient') needs α < 1, and block(s) {full} have α = 1, "
            "where ∂Φ may be empty beside the equilibrium; use form='proximal'."
        )
    gaps = [
        block.inverse(own) - before
        for block, own, before in zip(
            blocks, stacked.unbind(1), multi.permute(stacked).unbind(1), strict=True
        )
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(gaps, 1).flatten(1), dim=1)
    return norm
