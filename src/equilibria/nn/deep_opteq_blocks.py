"""One block of a deep OptEq: f(z) = αWᵀσ(Wz + c) + (1 − α)z, c = Ux + b (Xie et al. 2021, Eq 6).

W and U are matrices, k × k convolutions, or depthwise-separable ones (``SeparableConv``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibria.problems import (
    ConvOperator,
    DenseOperator,
    LinearOperator,
    Prior,
    SeparableConvOperator,
)

from .constraints import Constraint, NormBounded, OperatorNorm, constrain
from .inputs import lowered

__all__ = ["BoundBlock", "OptEqBlock", "SeparableConv"]


# Power iterations where a full convolution takes one: together they still cost less, and the
# singular values of a separable kernel lie close, so that a single one follows them too slowly.
_SEPARABLE_STEPS = 4


class _SeparableNorm(OperatorNorm):
    """σ of the composed map z ↦ P(D ∗ z), from both weights in one matrix [out + k², C]."""

    def __init__(self, spec: NormBounded, kernel_size: int) -> None:
        super().__init__(spec.bound, size=spec.size, steps=_SEPARABLE_STEPS * spec.steps)
        self.kernel_size = kernel_size

    def operator(self, weight: Tensor) -> SeparableConvOperator:
        k = self.kernel_size
        pointwise, depthwise = weight[: -k * k], weight[-k * k :]
        return SeparableConvOperator(depthwise.mT.reshape(-1, 1, k, k), pointwise[:, :, None, None])

    def _input_shape(self, weight: Tensor) -> tuple[int, ...]:
        return (weight.shape[1], self.size, self.size)

    def excess(self, weight: Tensor) -> Tensor:
        """max(1, σ/bound); in training mode after a power iteration."""
        if self.training:
            self._iterate(weight)
        return (self.sigma(weight) / self.bound).clamp_min(1.0)


class SeparableConv(nn.Module):
    """Wz = P(D ∗ z) + b: a depthwise k × k convolution, then a pointwise one, as one linear map.

    ``NormBounded(bound=β)`` bounds the composed map: P is divided by max(1, ‖P∘D‖/β), which is
    sharper than bounding ‖P‖ and ‖D‖ apart, whose product is only an upper bound.
    ``WeightNormalized`` acts on each of the two. Whoever writes to the weights by hand calls
    ``settle()`` afterwards; an optimizer's steps are followed by power iteration.

    z [B, inputs, H, W] → [B, outputs, H, W]; k odd.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel_size: int,
        *,
        bias: bool = False,
        constraint: Constraint = None,
    ) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            inputs, inputs, kernel_size, padding=kernel_size // 2, groups=inputs, bias=False
        )
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=bias)
        self.norm: _SeparableNorm | None = None
        if isinstance(constraint, NormBounded):
            self.norm = _SeparableNorm(constraint, kernel_size)
            self.settle()
        else:
            constrain(self.depthwise, "weight", constraint)
            constrain(self.pointwise, "weight", constraint)

    @property
    def bias(self) -> Tensor | None:
        return self.pointwise.bias

    def _packed(self) -> Tensor:
        return torch.cat([self.pointwise.weight.flatten(1), self.depthwise.weight.flatten(1).mT])

    @torch.no_grad()
    def settle(self) -> None:
        """Converge the power iteration on the present weights."""
        if self.norm is not None:
            self.norm.right_inverse(self._packed())

    def operator(self) -> SeparableConvOperator:
        """The linear part, its constraint evaluated once."""
        depthwise, pointwise = self.depthwise.weight, self.pointwise.weight
        if self.norm is not None:
            pointwise = (pointwise / self.norm.excess(self._packed())).to(pointwise.dtype)
        return SeparableConvOperator(lowered(depthwise), lowered(pointwise))

    def forward(self, z: Tensor) -> Tensor:
        out = self.operator()(z)
        return out if self.bias is None else out + self.bias.to(out.dtype).view(-1, 1, 1)


@dataclass(frozen=True, eq=False)
class BoundBlock:
    """A block with its weights evaluated: what a solve repeats. z, f(z) [B, channels, ...]."""

    operator: LinearOperator
    alpha: float | Tensor
    prior: Prior

    def image(self, z: Tensor, c: Tensor) -> Tensor:
        """Wᵀσ(Wz + c), the proximal operator of this block's φ where L_σ‖W‖² ≤ 1 (Theorem 1)."""
        hidden = self.prior.activation(self.operator(z) + c)
        return self.operator.adjoint(hidden, z.shape[1:])

    def __call__(self, z: Tensor, c: Tensor) -> Tensor:
        image = self.image(z, c)
        if isinstance(self.alpha, float) and self.alpha == 1.0:
            return image
        weight = self.alpha if isinstance(self.alpha, float) else self.alpha.to(z.dtype)
        return torch.lerp(z, image.to(z.dtype), weight)


class OptEqBlock(nn.Module):
    """The weights of one block: W [mid ← channels] under its constraint, U [mid ← in] with b."""

    def __init__(
        self,
        channels: int,
        mid: int,
        in_channels: int,
        *,
        kernel_size: int | None,
        separable: bool,
        constraint: Constraint,
        bias: bool,
    ) -> None:
        super().__init__()
        self.W: nn.Module
        self.U: nn.Module
        k = kernel_size
        if k is None:
            self.W = constrain(nn.Linear(channels, mid, bias=False), "weight", constraint)
            self.U = nn.Linear(in_channels, mid, bias=bias)
        elif separable:
            self.W = SeparableConv(channels, mid, k, constraint=constraint)
            self.U = SeparableConv(in_channels, mid, k, bias=bias)
        else:
            free = nn.Conv2d(channels, mid, k, padding=k // 2, bias=False)
            self.W = constrain(free, "weight", constraint)
            self.U = nn.Conv2d(in_channels, mid, k, padding=k // 2, bias=bias)

    def operator(self) -> LinearOperator:
        """W, its constraint evaluated once; under autocast already in the lower precision."""
        return _operator(self.W)

    def input_operator(self) -> LinearOperator:
        """U without its bias."""
        return _operator(self.U)


def _operator(module: nn.Module) -> LinearOperator:
    if isinstance(module, SeparableConv):
        return module.operator()
    weight = lowered(module.weight)
    return DenseOperator(weight) if weight.ndim == 2 else ConvOperator(weight)
