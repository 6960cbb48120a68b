"""Lemma 3 (paper 003): a deep OptEq is a one-layer OptEq of L blocks with a permutation.

    z̃ = α W̃ᵀσ(W̃Pz̃ + Ũx + b̃) + (1 − α)Pz̃          (Eq 7, with P inside too)

z̃ = (z_1, …, z_{L−1}, z_0) holds what each layer makes; P hands every block its predecessor. The
paper prints σ(W̃z̃ + …), without P, and W̃ with an identity block that does not fit R^{mL}; the
equilibrium of a deep OptEq does not solve that equation (``step_as_printed`` shows by how much).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.problems.operators import DenseOperator

from .blocks import Block, Deep, as_blocks

__all__ = ["MultiBlock", "multi_block"]


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
