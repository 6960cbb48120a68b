"""Wᵀ as an operator of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.problems.norms import NormBound
from equilibria.problems.operators import ConvOperator, LinearOperator, SeparableConvOperator

__all__ = ["TransposedOperator"]


class TransposedOperator(LinearOperator):
    """Wᵀ as an operator: y → Wᵀy, with the adjoint z → Wz. [B, *out] → [B, *in].

    A strided convolution loses the size of its input; Wᵀ then gives stride × the size it gets.
    """

    def __init__(self, base: LinearOperator) -> None:
        if not isinstance(base, LinearOperator):
            raise TypeError(
                f"TransposedOperator takes a LinearOperator, got {type(base).__name__}; use "
                "as_operator(W)."
            )
        self.base = base

    def __call__(self, z: Tensor) -> Tensor:
        return self.base.adjoint(z, self.output_shape(z.shape[1:]))

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return self.base(y)

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        self.base.check_output(in_shape)
        if self.base.in_shape is not None:
            return self.base.in_shape
        if isinstance(self.base, SeparableConvOperator):
            return (self.base.depthwise.in_channels, *in_shape[1:])
        if not isinstance(self.base, ConvOperator):
            raise TypeError(
                f"TransposedOperator: {type(self.base).__name__} does not say its input's shape."
            )
        pixels = [s * n for s, n in zip(self.base.stride, in_shape[1:], strict=True)]
        found = (self.base.in_channels, *pixels)
        if self.base.output_shape(found) != tuple(in_shape):
            raise ValueError(
                f"No input of {tuple(pixels)} pixels gives W an output of {tuple(in_shape)}."
            )
        return found

    def check_output(self, out_shape: Sequence[int]) -> None:
        self.base.output_shape(out_shape)

    def cast(self, dtype: torch.dtype) -> TransposedOperator:
        return TransposedOperator(self.base.cast(dtype))

    def norm_upper(self) -> float:
        return self.base.norm_upper()

    def norm(self, in_shape: Sequence[int] | None = None) -> NormBound:
        """‖Wᵀ‖₂ = ‖W‖₂."""
        return self.base.norm(None if in_shape is None else self.output_shape(in_shape))

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        shape = self.base.in_shape
        return None if shape is None else self.base.output_shape(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device
