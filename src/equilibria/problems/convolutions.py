"""Convolutions with their adjoints: zero padding, strides, groups, depthwise-separable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.engine.transforms import functorch_active, transforms_active
from equilibria.ops.winograd import can_use_winograd, transformed_weight, winograd
from equilibria.problems.linear_operator import LinearOperator
from equilibria.problems.norms import (
    convolution_norm_upper,
    exact,
)

__all__ = ["ConvOperator", "SeparableConvOperator"]

Pair = int | tuple[int, int]


def _pair(value: Pair, name: str, low: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(isinstance(p, bool) or not isinstance(p, int) for p in pair):
        raise TypeError(f"{name}={value!r}: expected an integer or a pair of integers.")
    if min(pair) < low:
        raise ValueError(f"{name}={value!r} is out of range: expected at least {low}.")
    return pair[0], pair[1]


_SAMPLES = 64


def _is_zero(z: Tensor) -> bool:
    """Whether z is known to be all zeros; on a CPU alone, where looking does not wait.

    A few entries settle it for almost every other z.
    """
    if z.device.type != "cpu" or z.ndim != 4 or z.requires_grad or z.numel() == 0:
        return False
    if torch.compiler.is_compiling() or functorch_active() or transforms_active():
        return False
    if not (z.is_contiguous() or z.is_contiguous(memory_format=torch.channels_last)):
        return False
    apart = max(1, z.numel() // _SAMPLES)
    some = z.as_strided((z.numel() // apart,), (apart,))
    return not any(some.tolist()) and not bool(z.any())


class ConvOperator(LinearOperator):
    """Zero-padded 2-d convolution. weight [out, in/groups, kh, kw]; z [B, in, H, W].

    ``padding="same"`` (the default) pads k//2 on each side and needs odd kernels; an explicit
    integer or pair takes any kernel. The adjoint is the transposed convolution; with a stride and
    no ``in_shape`` it takes the input size to be stride × output size. On a CPU, channels-last maps
    in float32 go by Winograd's form where it is faster (``ops/winograd.py``).
    """

    def __init__(
        self,
        weight: Tensor,
        stride: Pair = 1,
        padding: Pair | str = "same",
        groups: int = 1,
    ) -> None:
        if weight.ndim != 4:
            raise ValueError(
                f"A convolution takes a weight [out, in/groups, k, k], got {tuple(weight.shape)}."
            )
        kh, kw = weight.shape[2:]
        if isinstance(padding, str):
            if padding != "same":
                raise ValueError(f"padding={padding!r}: expected 'same', an integer or a pair.")
            if kh % 2 == 0 or kw % 2 == 0:
                raise ValueError(
                    f"padding='same' needs an odd kernel, got {kh}×{kw}; give padding as a number."
                )
            padding = (kh // 2, kw // 2)
        _pair(groups, "groups", 1)
        if weight.shape[0] % groups:
            raise ValueError(f"groups={groups} does not divide the {weight.shape[0]} outputs of W.")
        self.weight = weight
        self.stride = _pair(stride, "stride", 1)
        self.padding = _pair(padding, "padding", 0)
        self.groups = groups
        self._fast: tuple[int, Tensor, Tensor] | None = None  # of which version of the weight

    @property
    def in_channels(self) -> int:
        return self.weight.shape[1] * self.groups

    @property
    def out_channels(self) -> int:
        return self.weight.shape[0]

    @property
    def kernel(self) -> Tensor:
        """The kernel written without groups, [out, in, kh, kw]."""
        if self.groups == 1:
            return self.weight
        blocks = self.weight.reshape(self.groups, -1, *self.weight.shape[1:])
        eye = torch.eye(self.groups, dtype=blocks.dtype, device=blocks.device)
        full = torch.einsum("gh,goiab->gohiab", eye, blocks)
        return full.flatten(2, 3).flatten(0, 1)

    def __call__(self, z: Tensor) -> Tensor:
        # The first step of most solves; where a graph is recorded it must reach W.
        if not (torch.is_grad_enabled() and self.weight.requires_grad) and _is_zero(z):
            zeros = z.new_zeros(z.shape[0], *self.output_shape(z.shape[1:]))
            last = z.stride(1) == 1 and z.shape[1] > 1
            return zeros.to(memory_format=torch.channels_last) if last else zeros
        if self._winograd_serves(z):
            there, back = self._transformed()
            return winograd(z, self.weight, there, back, adjoint=False)
        return F.conv2d(z, self.weight, None, self.stride, self.padding, 1, self.groups)

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        extra = self._output_padding(y.shape[-2:], in_shape)
        if self._winograd_serves(y):
            there, back = self._transformed()
            return winograd(y, self.weight, back, there, adjoint=True)
        return F.conv_transpose2d(
            y, self.weight, None, self.stride, self.padding, extra, self.groups
        )

    def _winograd_serves(self, x: Tensor) -> bool:
        if self.stride != (1, 1) or self.padding != (1, 1) or self.groups != 1:
            return False
        return can_use_winograd(x, self.weight)

    def _transformed(self) -> tuple[Tensor, Tensor]:
        """The transformed weights of W and of Wᵀ, made once for all steps of a solve."""
        version = self.weight._version
        if self._fast is None or self._fast[0] != version:
            there = transformed_weight(self.weight, adjoint=False)
            back = transformed_weight(self.weight, adjoint=True)
            self._fast = version, there, back
        return self._fast[1], self._fast[2]

    def _output_padding(
        self, out_size: Sequence[int], in_shape: Sequence[int] | None
    ) -> tuple[int, int]:
        """What the transposed convolution must add to come back to the input's size."""
        if in_shape is None:
            in_size = [s * n for s, n in zip(self.stride, out_size, strict=True)]
            in_shape = (self.in_channels, *in_size)
        if tuple(out_size) != self.output_shape(in_shape)[1:]:
            raise ValueError(
                f"No input of shape {tuple(in_shape)} gives an output of {tuple(out_size)} pixels "
                f"(kernel {tuple(self.weight.shape[2:])}, stride {self.stride}, padding "
                f"{self.padding}); pass the right in_shape to adjoint."
            )
        rest = [
            (n + 2 * p - k) % s
            for n, p, k, s in zip(
                in_shape[1:], self.padding, self.weight.shape[2:], self.stride, strict=True
            )
        ]
        return rest[0], rest[1]

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        if len(in_shape) != 3 or in_shape[0] != self.in_channels:
            raise ValueError(
                f"The convolution W {tuple(self.weight.shape)} (groups={self.groups}) takes states "
                f"[B, {self.in_channels}, H, W], got [B, {', '.join(map(str, in_shape))}]."
            )
        size = [
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(
                in_shape[1:], self.padding, self.weight.shape[2:], self.stride, strict=True
            )
        ]
        if min(size) < 1:
            raise ValueError(
                f"A map of {tuple(in_shape[1:])} pixels is smaller than the kernel "
                f"{tuple(self.weight.shape[2:])} with padding {self.padding}."
            )
        return (self.out_channels, *size)

    def check_output(self, out_shape: Sequence[int]) -> None:
        if len(out_shape) != 3 or out_shape[0] != self.out_channels:
            raise ValueError(
                f"The convolution W {tuple(self.weight.shape)} gives [B, {self.out_channels}, H, "
                f"W], which does not fit [B, {', '.join(map(str, out_shape))}]."
            )

    def cast(self, dtype: torch.dtype) -> ConvOperator:
        weight = self.weight.detach().to(dtype)
        return ConvOperator(weight, self.stride, self.padding, self.groups)

    def norm_upper(self) -> float:
        """sup_θ ‖K̂(θ)‖₂ of the polyphase symbol, at most 1% above it."""
        return convolution_norm_upper(self.weight, stride=self.stride, groups=self.groups)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


class SeparableConvOperator(LinearOperator):
    """Depthwise "same" convolution, then pointwise: Wz = P(D ∗ z).

    depthwise [C, 1, k, k] (k odd), pointwise [out, C, 1, 1]; z [B, C, H, W] → [B, out, H, W].
    """

    def __init__(self, depthwise: Tensor, pointwise: Tensor) -> None:
        if depthwise.ndim != 4 or depthwise.shape[1] != 1:
            raise ValueError(f"depthwise must be [C, 1, k, k], got {tuple(depthwise.shape)}.")
        channels = depthwise.shape[0]
        if pointwise.ndim != 4 or tuple(pointwise.shape[1:]) != (channels, 1, 1):
            raise ValueError(
                f"pointwise must be [out, {channels}, 1, 1] to follow depthwise "
                f"{tuple(depthwise.shape)}, got {tuple(pointwise.shape)}."
            )
        self.depthwise = ConvOperator(depthwise, groups=channels)
        self.pointwise = ConvOperator(pointwise)

    @property
    def kernel(self) -> Tensor:
        """The one kernel P[o, c]·D[c, a, b] that the two make together, [out, C, k, k]."""
        return self.pointwise.weight * self.depthwise.weight[:, 0]

    @property
    def stride(self) -> tuple[int, int]:
        return (1, 1)

    def __call__(self, z: Tensor) -> Tensor:
        return self.pointwise(self.depthwise(z))

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return self.depthwise.adjoint(self.pointwise.adjoint(y))

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        return self.pointwise.output_shape(self.depthwise.output_shape(in_shape))

    def check_output(self, out_shape: Sequence[int]) -> None:
        self.pointwise.check_output(out_shape)

    def cast(self, dtype: torch.dtype) -> SeparableConvOperator:
        depthwise = self.depthwise.weight.detach().to(dtype)
        return SeparableConvOperator(depthwise, self.pointwise.weight.detach().to(dtype))

    def norm_upper(self) -> float:
        """From the symbol of the composed kernel, not the product of the two norms."""
        kernel = exact(self.pointwise.weight) * exact(self.depthwise.weight)[:, 0]
        return convolution_norm_upper(kernel)

    @property
    def dtype(self) -> torch.dtype:
        return self.pointwise.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.pointwise.weight.device
