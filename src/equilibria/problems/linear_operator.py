"""Linear maps z → Wz with their adjoints, ⟨Wz, y⟩ = ⟨z, Wᵀy⟩.

An operator holds tensors and no module state: gradients flow to whatever its weight came from.
The batch is dimension 0 and is never mixed. ``in_shape`` and ``out_shape`` leave the batch out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from equilibria.problems.norms import (
    NormBound,
    dense_norm,
    power_norm,
)

__all__ = ["DenseOperator", "LinearOperator"]


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

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        """The input shape, where the operator takes only one."""
        return None

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    def norm(self, in_shape: Sequence[int] | None = None) -> NormBound:
        """‖W‖₂ on maps of ``in_shape``: power iteration from below, rigorous bound from above."""
        shape = self.in_shape if in_shape is None else tuple(in_shape)
        if shape is None:
            raise ValueError(f"{type(self).__name__}.norm needs in_shape, e.g. (channels, H, W).")
        self.output_shape(shape)
        upper = self.norm_upper()
        w = self.cast(torch.float64)
        gram = lambda v: w.adjoint(w(v), shape)  # noqa: E731
        estimate = power_norm(gram, shape, dtype=w.dtype, device=w.device)
        return NormBound(min(estimate, upper), upper)


class DenseOperator(LinearOperator):
    """Wz = z·weightᵀ. weight [out, in]; z [B, in] → [B, out]."""

    def __init__(self, weight: Tensor) -> None:
        if weight.ndim != 2:
            raise ValueError(f"DenseOperator takes a weight [out, in], got {tuple(weight.shape)}.")
        self.weight = weight

    def __call__(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight)

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return y @ self.weight

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        if tuple(in_shape) != (self.weight.shape[1],):
            raise ValueError(
                f"W {tuple(self.weight.shape)} takes states [B, {self.weight.shape[1]}], "
                f"got [B, {', '.join(map(str, in_shape))}]."
            )
        return (self.weight.shape[0],)

    def check_output(self, out_shape: Sequence[int]) -> None:
        if tuple(out_shape) != (self.weight.shape[0],):
            raise ValueError(
                f"W {tuple(self.weight.shape)} gives [B, {self.weight.shape[0]}], "
                f"which does not fit [B, {', '.join(map(str, out_shape))}]."
            )

    def cast(self, dtype: torch.dtype) -> DenseOperator:
        return DenseOperator(self.weight.detach().to(dtype))

    def norm_upper(self) -> float:
        return dense_norm(self.weight).upper

    def norm(self, in_shape: Sequence[int] | None = None) -> NormBound:
        """‖W‖₂ by a float64 SVD."""
        if in_shape is not None:
            self.output_shape(in_shape)
        return dense_norm(self.weight)

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        return (self.weight.shape[1],)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device
