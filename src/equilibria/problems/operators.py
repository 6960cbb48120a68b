"""Linear maps by whatever a user has: a matrix, a kernel, a layer, an operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equilibria.problems.convolutions import ConvOperator, SeparableConvOperator
from equilibria.problems.linear_operator import DenseOperator, LinearOperator
from equilibria.problems.module_operator import ModuleOperator

__all__ = [
    "ConvOperator",
    "DenseOperator",
    "LinearOperator",
    "ModuleOperator",
    "SeparableConvOperator",
    "as_operator",
]


def as_operator(w: LinearOperator | Tensor | nn.Module) -> LinearOperator:
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
