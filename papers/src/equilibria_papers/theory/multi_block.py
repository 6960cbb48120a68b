"""Lemma 3 (OptEq): a deep OptEq is a one-layer OptEq of L blocks with a permutation.

    z̃ = α W̃ᵀσ(W̃Pz̃ + Ũx + b̃) + (1 − α)Pz̃          (Eq 7, with P inside too)

z̃ = (z_1, …, z_{L−1}, z_0) holds what each layer makes; P hands every block its predecessor. The
paper prints σ(W̃z̃ + …), without P, and W̃ with an identity block that does not fit R^{mL}; the
equilibrium of a deep OptEq does not solve that equation (``step_as_printed`` shows by how much).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from equilibria.problems import DenseOperator

from .blocks import Block, Deep, as_blocks, check_assumption


class MultiBlock:
    """The multi-block form of a deep OptEq at one input (Lemma 3). z̃ is [B, L, *state].

    Args:
        blocks: f_1, …, f_L in the order in which the deep OptEq applies them.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = as_blocks(blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def permute(self, z: Tensor) -> Tensor:
        """Pz̃ = (z_0, z_1, …, z_{L−1}): each block sees its predecessor, the first sees the last."""
        return torch.roll(self._checked(z), 1, dims=1)

    def deep_step(self, z: Tensor) -> Tensor:
        """T(z) = f_L ∘ … ∘ f_1(z) on one state [B, *state]: the deep OptEq itself (Eq 5)."""
        for block in self.blocks:
            z = block(z)
        return z

    def expand(self, z: Tensor) -> Tensor:
        """z̃ = (f_1(z), f_2(f_1(z)), …, z) from one state z [B, *state].

        The last entry is z itself, not T(z): z̃ solves Eq 7 exactly when z = T(z).
        """
        found = []
        inner = z
        for block in self.blocks[:-1]:
            inner = block(inner)
            found.append(inner)
        return torch.stack([*found, z], dim=1)

    def collapse(self, z: Tensor) -> Tensor:
        """z_0, the deep OptEq's own state, from z̃."""
        return self._checked(z)[:, -1]

    def step(self, z: Tensor) -> Tensor:
        """α W̃ᵀσ(W̃Pz̃ + Ũx + b̃) + (1 − α)Pz̃."""
        before = self.permute(z)
        after = [block(v) for block, v in zip(self.blocks, before.unbind(1), strict=True)]
        return torch.stack(after, dim=1)

    def step_as_printed(self, z: Tensor) -> Tensor:
        """α W̃ᵀσ(W̃z̃ + Ũx + b̃) + (1 − α)Pz̃: Eq 7 as printed, without P inside."""
        pairs = zip(self.blocks, self.permute(z).unbind(1), z.unbind(1), strict=True)
        after = [b.alpha * b.proximal(own) + (1.0 - b.alpha) * left for b, left, own in pairs]
        return torch.stack(after, dim=1)

    def residual(self, z: Tensor, *, as_printed: bool = False) -> Tensor:
        """‖z̃ − step(z̃)‖, [B]; zero exactly at the multi-block forms of deep equilibria.

        ``as_printed`` measures the paper's Eq 7 instead.
        """
        after = self.step_as_printed(z) if as_printed else self.step(z)
        norm: Tensor = torch.linalg.vector_norm((z - after).flatten(1), dim=1)
        return norm

    def permutation(self) -> Tensor:
        """P as a matrix [mL, mL] on the flattened z̃, m the size of one state."""
        size = self.blocks[0].start()[0].numel()
        like = self.blocks[0].c
        shift = torch.roll(torch.eye(len(self)).to(like), 1, dims=0)
        return torch.kron(shift, torch.eye(size).to(like))

    def weight(self) -> Tensor:
        """W̃ = blockdiag(W_1, …, W_L) as a matrix [Σn_l, mL]; dense blocks only."""
        found = []
        for number, block in enumerate(self.blocks, 1):
            if not isinstance(block.W, DenseOperator):
                raise TypeError(
                    f"MultiBlock.weight writes W̃ as a matrix, and block {number} has a "
                    f"{type(block.W).__name__}; use step(z̃), which needs no matrix."
                )
            found.append(block.W.weight)
        matrix: Tensor = torch.block_diag(*found)
        return matrix

    def bias(self) -> Tensor:
        """Ũx + b̃ = (c_1, …, c_L), flattened, [B, Σn_l]."""
        return torch.cat([block.c.flatten(1) for block in self.blocks], dim=1)

    def _checked(self, z: Tensor) -> Tensor:
        one = self.blocks[0].start().shape
        expected = (one[0], len(self), *one[1:])
        if tuple(z.shape) != expected:
            raise ValueError(
                f"z̃ has the shape [B, L, *state] = {expected}, got {tuple(z.shape)}; "
                "expand(z) makes it from one state [B, *state]."
            )
        return z


def multi_block(layer: Deep, x: Tensor | None = None) -> MultiBlock:
    """The multi-block form of ``layer`` at the input x (Lemma 3), or of given blocks."""
    return MultiBlock(as_blocks(layer, x))


# Theorem 2 (OptEq): what the equilibrium of a deep OptEq solves.
#
#     0 ∈ ∂Φ(z̃) + (I − P)z̃,   Φ(z̃) = Σ_l α_l M_{φ_l}^{1−α_l}(z_l)          (Eq 8)
#
# with prox_{φ_l} = W_lᵀσ(W_l· + U_l x + b_l) and the permutation P of Lemma 3.


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


# Corollary 1 (OptEq): a deep OptEq of two layers minimizes one convex function.
#
#     min over z_1, z_0 of  α M_{φ_1}^{1−α}(z_1) + α M_{φ_2}^{1−α}(z_0) + ½‖z_1 − z_0‖²
#
# z_0 is the deep OptEq's state and z_1 = f_1(z_0). Each layer may have an α of its own.


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
