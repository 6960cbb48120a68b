"""Corollary 1 (paper 003): a deep OptEq of two layers minimizes one convex function.

    min over z_1, z_0 of  α M_{φ_1}^{1−α}(z_1) + α M_{φ_2}^{1−α}(z_0) + ½‖z_1 − z_0‖²

z_0 is the deep OptEq's state and z_1 = f_1(z_0). Each layer may have an α of its own.
"""

from __future__ import annotations

from torch import Tensor

from .blocks import Block, Deep, as_blocks, check_assumption

__all__ = ["moreau_envelope", "two_layer_objective"]


def moreau_envelope(block: Block, z: Tensor) -> Tensor:
    """α M_φ^{1−α}(z) = α min_u φ(u) + ‖u − z‖²/(2(1 − α)), [B], for every W, invertible or not.

    The minimizer is u = ∇ψ(v) with f(v) = z, where φ(u) = ψ*(u) − ½‖u‖² = ⟨u, v⟩ − ψ(v) − ½‖u‖².
    Needs α < 1. The value is differentiable in z once, with the gradient v − z.
    """
    v = block.inverse(z)
    u = block.proximal(v).detach()
    phi = (u * v - 0.5 * u * u).flatten(1).sum(1) - block.psi(v)
    distance = (u - z.double()).square().flatten(1).sum(1)
    return block.alpha * (phi + distance / (2.0 * (1.0 - block.alpha)))


def two_layer_objective(
    layer: Deep,
    x: Tensor | None,
    z0: Tensor,
    z1: Tensor | None = None,
    *,
    check: bool = True,
) -> Tensor:
    """Corollary 1's objective at (z_1, z_0), [B], in float64; differentiable in both, once.

    Args:
        layer: a deep OptEq of two layers, or two blocks (then x is None).
        x: the layer's input.
        z0: the deep OptEq's state, [B, *state].
        z1: the state between the layers; None takes f_1(z_0).
        check: raise where Assumption 2 (L_σ‖W_l‖² ≤ 1) is not met; without it the objective is
            not convex.
    """
    blocks = as_blocks(layer, x)
    if len(blocks) != 2:
        raise ValueError(
            f"Corollary 1 is about L = 2 layers, got {len(blocks)}; for other L use "
            "inclusion_residual (Theorem 2) or wide_limit (Theorem 3)."
        )
    if check:
        check_assumption(blocks, "Corollary 1")
    z0 = z0.double()
    between = blocks[0](z0) if z1 is None else z1.double()
    if between.shape != z0.shape:
        raise ValueError(
            f"z1 and z0 are states of one shape, got {tuple(between.shape)} and {tuple(z0.shape)}."
        )
    total = moreau_envelope(blocks[0], between) + moreau_envelope(blocks[1], z0)
    return total + 0.5 * (between - z0).square().flatten(1).sum(1)
