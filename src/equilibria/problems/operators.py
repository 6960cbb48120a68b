"""Linear maps z → Wz with their adjoints, ⟨Wz, y⟩ = ⟨z, Wᵀy⟩: matrices, convolutions, callables.

An operator holds tensors and no module state: gradients flow to whatever its weight came from.
The batch is dimension 0 and is never mixed. ``in_shape`` and ``out_shape`` leave the batch out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from equilibria.engine.transforms import autocasts, may_keep, may_reuse, transforms_active, version
from equilibria.ops.winograd import can_use_winograd, transformed_weight, winograd
from equilibria.problems.norms import (
    NormBound,
    convolution_norm_upper,
    dense_norm,
    estimated_norm,
    exact,
)


def _batched(shape: Sequence[int]) -> str:
    """[B, 3, 4] for (3, 4)."""
    return f"[B, {', '.join(map(str, shape))}]"


def check_dtype(like: Tensor, z: Tensor) -> None:
    """Raise unless torch multiplies the two."""
    if z.dtype != like.dtype and not autocasts(z):
        raise TypeError(
            f"weights or inputs of {like.dtype} meet a state of {z.dtype}: use z.to({like.dtype}) "
            "for a state or a warm start z0, or torch.autocast."
        )


class LinearOperator(ABC):
    """W with its adjoint Wᵀ. [B, *in_shape] → [B, *out_shape]."""

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """Wz. [B, *in_shape] → [B, *out_shape]."""

    @abstractmethod
    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        """Wᵀy. [B, *out_shape] → [B, *in_shape].

        Several input sizes may give one output size (strides); then ``in_shape`` says which.
        """

    @abstractmethod
    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of Wz for a z of ``in_shape``; ValueError where W does not take it."""

    @abstractmethod
    def check_output(self, out_shape: Sequence[int]) -> None:
        """Raise ValueError where no Wz has ``out_shape``."""

    @abstractmethod
    def cast(self, dtype: torch.dtype) -> LinearOperator:
        """The same map with detached weights in ``dtype``; a module operator returns itself."""

    @abstractmethod
    def norm_upper(self) -> float:
        """Rigorous upper bound on ‖W‖₂ for every input size (inf where none is known)."""

    def norm_upper_on(self, out_shape: Sequence[int]) -> float:
        """The same for the z whose Wz has ``out_shape``: closer and faster where maps are small."""
        return self.norm_upper()

    def norm_lower(self) -> float:
        """Rigorous lower bound on ‖Wz‖/‖z‖, the least singular value; 0 where none is known."""
        return 0.0

    def input_shape(self, out_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a z whose Wz has ``out_shape``; with a stride the multiple of it."""
        self.check_output(out_shape)
        if self.in_shape is None:
            raise TypeError(f"{type(self).__name__} does not say its input's shape.")
        return self.in_shape

    def in_double(self) -> LinearOperator:
        """The same map on the same numbers, detached and in float64."""
        return self.cast(torch.float64)

    def magnitude(self) -> tuple[LinearOperator, int] | None:
        """|W|, and the number of terms in an entry of Wz or of Wᵀy, whichever is larger.

        With it a kernel bounds the rounding of its products (``norms.py``). None: not known.
        """
        return None

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        """The input shape, where the operator takes only one."""
        return None

    weight: Tensor
    """The weights, some of them, or an empty tensor of their dtype and device."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weight.device

    def norm(self, in_shape: Sequence[int] | None = None) -> NormBound:
        """‖W‖₂ on maps of ``in_shape``: Lanczos's method from below, rigorous bound from above."""
        shape = self.in_shape if in_shape is None else tuple(in_shape)
        if shape is None:
            raise ValueError(f"{type(self).__name__}.norm needs in_shape, e.g. (channels, H, W).")
        upper = self.norm_upper_on(self.output_shape(shape))
        w = self.cast(torch.float64)
        gram = lambda v: w.adjoint(w(v), shape)  # noqa: E731
        return estimated_norm(gram, shape, upper, dtype=w.dtype, device=w.device)


class _OfOneShape(LinearOperator):
    """An operator that takes states of one shape alone; ``name`` is for its errors."""

    def __init__(self, name: str, in_shape: Sequence[int], out_shape: Sequence[int]) -> None:
        self._name, self._in_shape, self._out_shape = name, tuple(in_shape), tuple(out_shape)

    @property
    def in_shape(self) -> tuple[int, ...]:
        return self._in_shape

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(in_shape) != self._in_shape:
            takes = _batched(self._in_shape)
            raise ValueError(f"{self._name} takes states {takes}, got {_batched(in_shape)}.")
        return self._out_shape

    def check_output(self, out_shape: Sequence[int]) -> None:
        if tuple(out_shape) != self._out_shape:
            gives, given = _batched(self._out_shape), _batched(out_shape)
            raise ValueError(f"{self._name} gives {gives}, which does not fit {given}.")


class DenseOperator(_OfOneShape):
    """Wz = z·weightᵀ. weight [out, in]; z [B, in] → [B, out]."""

    def __init__(self, weight: Tensor) -> None:
        if weight.ndim != 2:
            raise ValueError(f"DenseOperator takes a weight [out, in], got {tuple(weight.shape)}.")
        super().__init__(f"W {tuple(weight.shape)}", weight.shape[1:], weight.shape[:1])
        self.weight = weight

    def __call__(self, z: Tensor) -> Tensor:
        check_dtype(self.weight, z)
        return F.linear(z, self.weight)

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        check_dtype(self.weight, y)
        return y @ self.weight

    def cast(self, dtype: torch.dtype) -> DenseOperator:
        return DenseOperator(self.weight.detach().to(dtype))

    def magnitude(self) -> tuple[LinearOperator, int]:
        return DenseOperator(self.weight.abs()), max(self.weight.shape)

    def norm_upper(self) -> float:
        return dense_norm(self.weight).upper

    def norm_lower(self) -> float:
        """By a float64 SVD, less its backward error."""
        if self.weight.shape[0] < self.weight.shape[1]:
            return 0.0
        sigma = torch.linalg.svdvals(exact(self.weight))
        slack = 16 * torch.finfo(torch.float64).eps * sum(self.weight.shape) * float(sigma[0])
        return max(0.0, float(sigma[-1]) - slack)

    def norm(self, in_shape: Sequence[int] | None = None) -> NormBound:
        """‖W‖₂ by a float64 SVD."""
        if in_shape is not None:
            self.output_shape(in_shape)
        return dense_norm(self.weight)


class IdentityOperator(LinearOperator):
    """Wz = z, for states of every shape; ``like`` has its dtype and device."""

    def __init__(self, like: Tensor) -> None:
        self.weight = like.new_ones(())

    def __call__(self, z: Tensor) -> Tensor:
        return z

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return y

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(in_shape)

    def input_shape(self, out_shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(out_shape)

    def check_output(self, out_shape: Sequence[int]) -> None:
        pass

    def cast(self, dtype: torch.dtype) -> IdentityOperator:
        return IdentityOperator(self.weight.detach().to(dtype))

    def magnitude(self) -> tuple[LinearOperator, int]:
        return self, 1

    def norm_upper(self) -> float:
        return 1.0

    def norm_lower(self) -> float:
        return 1.0


IDENTITY = IdentityOperator(torch.empty(0))


class DifferenceOperator(LinearOperator):
    """Differences to the next entry along each of ``dims``, 0 at the end: [B, *s] → [B, k, *s].

    ``dims`` count from the end: (−2, −1) is the gradient of images. ‖D‖² ≤ 4k.
    """

    def __init__(self, dims: Sequence[int] = (-2, -1)) -> None:
        if not dims or any(dim >= 0 for dim in dims):
            raise ValueError(f"DifferenceOperator(dims={dims!r}): expected negative dimensions.")
        self.dims = tuple(dims)
        self.weight = torch.ones(())

    def __call__(self, z: Tensor) -> Tensor:
        return torch.stack([z.roll(-1, d).sub(z) * self._inside(z, d) for d in self.dims], 1)

    @staticmethod
    def _inside(z: Tensor, dim: int) -> Tensor:
        n = z.shape[dim]
        return (torch.arange(n, device=z.device) < n - 1).view(-1, *[1] * (-1 - dim)).to(z.dtype)

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        held = [
            part * self._inside(part, d) for part, d in zip(y.unbind(1), self.dims, strict=True)
        ]
        moved = [part.roll(1, d) - part for part, d in zip(held, self.dims, strict=True)]
        return torch.stack(moved).sum(0)

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        if len(in_shape) < -min(self.dims):
            raise ValueError(f"Differences along {self.dims} do not fit {_batched(in_shape)}.")
        return (len(self.dims), *in_shape)

    def check_output(self, out_shape: Sequence[int]) -> None:
        self.output_shape(out_shape[1:])

    def input_shape(self, out_shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(out_shape[1:])

    def cast(self, dtype: torch.dtype) -> DifferenceOperator:
        return self

    def norm_upper(self) -> float:
        return 2.0 * math.sqrt(len(self.dims)) * (1.0 + 1e-15)


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
    """Whether z is known to be all zeros; on a CPU alone, where looking does not wait."""
    if z.device.type != "cpu" or z.ndim != 4 or z.requires_grad or z.numel() == 0:
        return False
    if torch.compiler.is_compiling() or transforms_active():
        return False
    if not (z.is_contiguous() or z.is_contiguous(memory_format=torch.channels_last)):
        return False
    apart = max(1, z.numel() // _SAMPLES)  # a few entries settle it for almost every other z
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
        self, weight: Tensor, stride: Pair = 1, padding: Pair | str = "same", groups: int = 1
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
        self._laid: dict[Any, tuple[Tensor, ...]] = {}

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
        check_dtype(self.weight, z)
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
        check_dtype(self.weight, y)
        in_shape = self.input_shape(y.shape[1:]) if in_shape is None else in_shape
        if tuple(y.shape[1:]) != self.output_shape(in_shape):
            raise ValueError(
                f"No input of shape {tuple(in_shape)} gives an output of {tuple(y.shape[1:])} "
                f"(kernel {tuple(self.weight.shape[2:])}, stride {self.stride}, padding "
                f"{self.padding}); pass the right in_shape to adjoint."
            )
        if self._winograd_serves(y):
            there, back = self._transformed()
            return winograd(y, self.weight, back, there, adjoint=True)
        extra = [left for _, left in self._strides(in_shape[1:])]
        return F.conv_transpose2d(
            y, self.weight, None, self.stride, self.padding, extra, self.groups
        )

    def _winograd_serves(self, x: Tensor) -> bool:
        if self.stride != (1, 1) or self.padding != (1, 1) or self.groups != 1:
            return False
        return can_use_winograd(x, self.weight)

    def _transformed(self) -> tuple[Tensor, Tensor]:
        """The transformed weights of W and of Wᵀ, made once for all steps of a solve."""
        now = version(self.weight)
        if self._fast is None or self._fast[0] != now:
            there = transformed_weight(self.weight, adjoint=False)
            back = transformed_weight(self.weight, adjoint=True)
            self._fast = now, there, back
        return self._fast[1], self._fast[2]

    def laid_out(self, layout: torch.memory_format) -> tuple[Tensor, ...]:
        """W and its flipped kernel, that of Wᵀ at stride 1, lying so, without a graph."""
        held, key = self.weight.detach(), (layout, version(self.weight))
        found = self._laid.get(key) if may_reuse() else None
        if found is not None:
            return found
        flipped = held.flip(2, 3).transpose(0, 1)
        both = tuple(t.contiguous(memory_format=layout) for t in (held, flipped))
        if may_keep(held) and not held.is_inference():  # whose changes are not counted
            self._laid = {k: v for k, v in self._laid.items() if k[1] == key[1]} | {key: both}
        return both

    def _strides(self, in_size: Sequence[int]) -> list[tuple[int, int]]:
        """How many strides fit into the padded map beside the kernel, and what is left, an axis."""
        kernel = self.weight.shape[2:]
        axes = zip(in_size, self.padding, kernel, self.stride, strict=True)
        return [((n + 2 * p - k) // s, (n + 2 * p - k) % s) for n, p, k, s in axes]

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        if len(in_shape) != 3 or in_shape[0] != self.in_channels:
            raise ValueError(
                f"The convolution W {tuple(self.weight.shape)} (groups={self.groups}) takes states "
                f"[B, {self.in_channels}, H, W], got {_batched(in_shape)}."
            )
        size = [strides + 1 for strides, _ in self._strides(in_shape[1:])]
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
                f"W], which does not fit {_batched(out_shape)}."
            )

    def input_shape(self, out_shape: Sequence[int]) -> tuple[int, ...]:
        self.check_output(out_shape)
        pixels = [s * n for s, n in zip(self.stride, out_shape[1:], strict=True)]
        found = (self.in_channels, *pixels)
        if self.output_shape(found) != tuple(out_shape):
            raise ValueError(
                f"No input of {found[1:]} pixels gives W an output of {tuple(out_shape)}; give the "
                "shape of the input (in_shape of adjoint, the start z0 of a solve)."
            )
        return found

    def cast(self, dtype: torch.dtype) -> ConvOperator:
        weight = self.weight.detach().to(dtype)
        return ConvOperator(weight, self.stride, self.padding, self.groups)

    def magnitude(self) -> tuple[LinearOperator, int]:
        out, per_group, kh, kw = self.weight.shape
        positive = ConvOperator(self.weight.abs(), self.stride, self.padding, self.groups)
        return positive, max(per_group, out // self.groups) * kh * kw

    def norm_upper(self) -> float:
        """sup_θ ‖K̂(θ)‖₂ of the polyphase symbol, at most 1% above it."""
        return convolution_norm_upper(self.weight, stride=self.stride, groups=self.groups)

    def norm_upper_on(self, out_shape: Sequence[int]) -> float:
        return convolution_norm_upper(
            self.weight,
            stride=self.stride,
            groups=self.groups,
            padding=self.padding,
            out_size=tuple(out_shape[1:]),
        )


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
        self.weight = pointwise

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

    def input_shape(self, out_shape: Sequence[int]) -> tuple[int, ...]:
        return self.depthwise.input_shape(self.pointwise.input_shape(out_shape))

    def cast(self, dtype: torch.dtype) -> SeparableConvOperator:
        depthwise = self.depthwise.weight.detach().to(dtype)
        return SeparableConvOperator(depthwise, self.pointwise.weight.detach().to(dtype))

    def magnitude(self) -> tuple[LinearOperator, int]:
        d, p = self.depthwise.weight.abs(), self.pointwise.weight.abs()
        # Two sums one after the other: γ_a + γ_b + γ_a γ_b ≤ γ_{a+b}.
        return SeparableConvOperator(d, p), d.shape[2] * d.shape[3] + max(p.shape[:2])

    def norm_upper(self) -> float:
        """From the symbol of the composed kernel, not the product of the two norms."""
        return ConvOperator(self.cast(torch.float64).kernel).norm_upper()

    def norm_upper_on(self, out_shape: Sequence[int]) -> float:
        return ConvOperator(self.cast(torch.float64).kernel).norm_upper_on(out_shape)


_DENSE_LIMIT = 2048  # largest small side of a module that is made into a matrix for its norm

_DOT_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


class ModuleOperator(_OfOneShape):
    """Any linear map given by two callables, checked by ⟨Wz, y⟩ = ⟨z, Wᵀy⟩ at construction.

    The test also catches a bias, a nonlinearity and a mixing of the batch. It runs in float64 if
    both callables take it (modules with their parameters in float64), else in ``dtype``.

    Args:
        forward: [B, *in_shape] → [B, *out_shape].
        adjoint: [B, *out_shape] → [B, *in_shape].
        in_shape: shape of one input.
        norm_bound: a known upper bound on ‖W‖₂. Without one, and where the smaller side is above
            2048, the upper bound of the norm is inf: no certificate can be given.
        dtype: dtype of the callables' weights. None: that of a module's parameters, else float32.
        device: likewise; None: the parameters' device, else the CPU.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        in_shape: Sequence[int],
        *,
        norm_bound: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if norm_bound is not None and not (math.isfinite(norm_bound) and norm_bound >= 0):
            raise ValueError(f"norm_bound={norm_bound!r}: expected a finite number ≥ 0 or None.")
        modules = [part for part in (forward, adjoint) if isinstance(part, nn.Module)]
        owned = [p for module in modules for p in module.parameters()]
        self._forward, self._adjoint = forward, adjoint
        self._in_shape = tuple(in_shape)
        like = owned[0] if owned else torch.empty(0, dtype=torch.float32, device="cpu")
        self.weight = torch.empty(0, dtype=dtype or like.dtype, device=device or like.device)
        self.norm_bound = norm_bound
        super().__init__("The module W", in_shape, self._dot_test())

    @torch.no_grad()
    def _dot_test(self) -> tuple[int, ...]:
        double = _in_double(self._forward), _in_double(self._adjoint)
        try:
            return self._dot_test_in(*double, torch.float64)
        except (RuntimeError, TypeError):
            return self._dot_test_in(self._forward, self._adjoint, self.dtype)

    def _dot_test_in(
        self,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> tuple[int, ...]:
        source = torch.Generator().manual_seed(0)

        def draw(shape: Sequence[int]) -> Tensor:
            t = torch.randn((3, *shape), generator=source, dtype=torch.float64)
            return t.to(self.device, dtype)

        z = draw(self._in_shape)
        wz = forward(z)
        # y = Wz sees a wrong adjoint at full size, a random y sees the parts that Wz is blind to.
        for y in (wz, draw(wz.shape[1:])):
            wty = adjoint(y.to(dtype))
            if wz.shape[:1] != z.shape[:1] or wty.shape != z.shape:
                raise ValueError(
                    f"forward takes {tuple(z.shape)} to {tuple(wz.shape)} and adjoint takes that "
                    f"to {tuple(wty.shape)}: the adjoint must come back to the input's shape."
                )
            allowed = max(_DOT_TOLERANCE[t.dtype] for t in (z, wz, wty))
            a, b, p, q = (t.flatten(1).double() for t in (wz, y, z, wty))
            left, right = (a * b).sum(1), (p * q).sum(1)
            scale = a.norm(dim=1) * b.norm(dim=1) + p.norm(dim=1) * q.norm(dim=1)
            gaps = (left - right).abs() / scale.clamp_min(1e-300)
            if not bool((gaps <= allowed).all()):
                worst = int(gaps.nan_to_num(math.inf).argmax())
                raise ValueError(
                    "adjoint is not the adjoint of forward (or forward is not linear): ⟨Wz, y⟩ = "
                    f"{float(left[worst]):.6g} but ⟨z, Wᵀy⟩ = {float(right[worst]):.6g}, "
                    f"relative gap {float(gaps[worst]):.2e}, allowed {allowed:.0e} in {dtype}."
                )
        return tuple(wz.shape[1:])

    def __call__(self, z: Tensor) -> Tensor:
        return self._forward(z)

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return self._adjoint(y)

    def cast(self, dtype: torch.dtype) -> ModuleOperator:
        return self

    def in_double(self) -> ModuleOperator:
        """W evaluated with its module's parameters in float64, with the norm bound it has now."""
        if self.dtype == torch.float64:
            return self
        upper = self.norm_upper()
        try:
            return ModuleOperator(
                _in_double(self._forward),
                _in_double(self._adjoint),
                self._in_shape,
                norm_bound=upper if math.isfinite(upper) else None,
                dtype=torch.float64,
                device=self.device,
            )
        except (RuntimeError, TypeError) as error:
            raise TypeError(
                "certify evaluates in float64, and the callables of this ModuleOperator do not "
                f"take it ({error}). Give nn.Modules, or callables that follow the dtype of their "
                "input."
            ) from error

    @torch.no_grad()
    def norm_upper(self) -> float:
        """The given bound, or that of the matrix with the rounding of its entries, or inf."""
        if self.norm_bound is not None:
            return float(self.norm_bound)
        n_in, n_out = math.prod(self._in_shape), math.prod(self._out_shape)
        if min(n_in, n_out) > _DENSE_LIMIT:
            return math.inf
        shape, apply = self._in_shape, self._forward
        if n_out < n_in:
            shape, apply = self._out_shape, self._adjoint
        eye = torch.eye(min(n_in, n_out), dtype=self.dtype, device=self.device)
        columns = [apply(part.reshape(-1, *shape)).flatten(1) for part in torch.split(eye, 64)]
        matrix = exact(torch.cat(columns))
        return dense_norm(matrix).upper + 4 * torch.finfo(self.dtype).eps * float(matrix.norm())


def _in_double(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A module evaluated with its parameters in float64; any other callable unchanged."""
    if not isinstance(function, nn.Module):
        return function
    state = {
        name: t.detach().double() if t.is_floating_point() else t
        for name, t in [*function.named_parameters(), *function.named_buffers()]
    }

    def doubled(z: Tensor) -> Tensor:
        # As functional_call, which leaves its tensors in a module that is used in two places.
        with _reparametrize_module(function, state, tie_weights=True, stack_weights=True):
            return function(z)  # type: ignore[no-any-return]

    return doubled


class TransposedOperator(LinearOperator):
    """Wᵀ as an operator: y → Wᵀy, with the adjoint z → Wz. [B, *out] → [B, *in].

    A strided convolution loses the size of its input; Wᵀ then gives stride × the size it gets.
    """

    def __init__(self, base: LinearOperator) -> None:
        self.base, self.weight = base, base.weight

    def __call__(self, z: Tensor) -> Tensor:
        return self.base.adjoint(z, self.output_shape(z.shape[1:]))

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return self.base(y)

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        return self.base.input_shape(in_shape)

    def check_output(self, out_shape: Sequence[int]) -> None:
        self.base.output_shape(out_shape)

    def cast(self, dtype: torch.dtype) -> TransposedOperator:
        return TransposedOperator(self.base.cast(dtype))

    def in_double(self) -> TransposedOperator:
        return TransposedOperator(self.base.in_double())

    def magnitude(self) -> tuple[LinearOperator, int] | None:
        base = self.base.magnitude()
        return None if base is None else (TransposedOperator(base[0]), base[1])

    def norm_upper(self) -> float:
        return self.base.norm_upper()

    def norm(self, in_shape: Sequence[int] | None = None) -> NormBound:
        """‖Wᵀ‖₂ = ‖W‖₂."""
        return self.base.norm(None if in_shape is None else self.output_shape(in_shape))

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        shape = self.base.in_shape
        return None if shape is None else self.base.output_shape(shape)


Weights = LinearOperator | Tensor | nn.Module


def as_operator(w: Weights) -> LinearOperator:
    """An operator from a matrix, a kernel, or a linear or convolution layer without a bias.

    Takes a 2-d tensor [out, in], a 4-d tensor [out, in, k, k] ("same" padding, stride 1),
    nn.Linear or nn.Conv2d without bias (parametrized weights keep their gradient), or an operator.
    """
    if isinstance(w, LinearOperator):
        return w
    if isinstance(w, Tensor):
        if not w.is_floating_point():
            raise TypeError(f"W must hold floating-point numbers, got {w.dtype}.")
        if w.ndim == 2:
            return DenseOperator(w)
        if w.ndim == 4:
            return ConvOperator(w)
        raise ValueError(
            "W as a tensor is a matrix [out, in] or a kernel [out, in, k, k], got "
            f"{tuple(w.shape)}."
        )
    if isinstance(w, nn.Linear):
        _check_no_bias(w)
        return DenseOperator(w.weight)
    if isinstance(w, nn.Conv2d):
        _check_no_bias(w)
        if w.padding_mode != "zeros" or tuple(w.dilation) != (1, 1):
            raise ValueError(
                f"{w}: only zero padding and dilation 1 have a built-in adjoint, got padding_mode="
                f"{w.padding_mode!r}, dilation={w.dilation}; use ModuleOperator(forward, adjoint)."
            )
        padding: Any = 0 if w.padding == "valid" else w.padding
        stride: Any = w.stride
        return ConvOperator(w.weight, stride, padding, w.groups)
    raise TypeError(
        f"W must be a matrix, a kernel, nn.Linear, nn.Conv2d or a LinearOperator, got "
        f"{type(w).__name__}; wrap other linear maps in ModuleOperator(forward, adjoint, in_shape)."
    )


def _check_no_bias(layer: nn.Linear | nn.Conv2d) -> None:
    if layer.bias is not None:
        raise ValueError(f"{layer} has a bias: W must be linear. Use bias=False; b goes into c.")
