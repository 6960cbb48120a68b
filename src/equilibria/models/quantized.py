"""Weights in eight bits: w ≈ q·s, q in −127 … 127, one scale s for each row.

    s = max|w| / 127,  q = round(w / s),  |w − q·s| ≤ s/2 = max|w| / 254

over a row, which is one index of the first dimension: an output channel. Parameters of two or more
dimensions are kept so. Buffers of two or more dimensions are kept in float16, and all that has
fewer (norms, biases, running means) in float32. The scales of the tensor ``name`` are the tensor
``name`` + ".scale." of the same file. No name of a state dict ends with a dot, so none is like it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = [
    "FIELD",
    "KIND",
    "QuantizationError",
    "check_finite",
    "dequantize",
    "layout",
    "quantize",
    "scale_name",
]

FIELD = "quantization"
"""The field of a file's metadata that says what is quantized, and how."""
_SUFFIX = ".scale."
KIND = {"version": 1, "scheme": "int8 rows", "suffix": _SUFFIX}
"""What the metadata of a file in eight bits says of how it was made."""
_LARGEST = 127


class QuantizationError(ValueError):
    """Weights that eight bits cannot hold, or a file whose eight bits contradict themselves."""


def scale_name(name: str) -> str:
    """The name under which the scales of the tensor ``name`` are stored."""
    return name + _SUFFIX


def layout(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtype in which each entry of the model's state dict is stored."""
    return {name: _stored_as(value) for name, value in model.state_dict(keep_vars=True).items()}


def _stored_as(value: Tensor) -> torch.dtype:
    if not value.is_floating_point():
        return value.dtype
    if value.ndim < 2:
        return torch.float32
    return torch.int8 if isinstance(value, nn.Parameter) else torch.float16


def check_finite(name: str, value: Tensor) -> None:
    """Raise where a floating tensor holds NaN or infinity; one of integers never does."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise QuantizationError(
            f"{name} holds NaN or infinity, and a file in eight bits (dtype=torch.int8) holds "
            "finite numbers alone; repair it, or save with dtype=None to keep it as it is"
        )


def quantize(name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """w [R, …] ↦ q = round(w/s) in int8 [R, …] and s = max|w|/127 in float32 [R].

    A row of zeros has s = 1 and q = 0. So has one whose scale would be below float32's smallest
    normal number, 1.2e-38: some devices take such a scale for 0.
    """
    # Exact to float32's rounding: a quotient in float32 misses ties by up to 8e-6 of a step.
    exact = weight.detach().cpu().double()
    check_finite(name, exact)
    scale = (exact.abs().flatten(1).amax(1) / _LARGEST).float()
    scale[scale < torch.finfo(torch.float32).tiny] = 1.0
    whole = torch.round(exact / _column(scale.double(), exact.ndim)).clamp_(-_LARGEST, _LARGEST)
    if not bool(torch.isfinite(whole.float() * _column(scale, exact.ndim)).all()):
        raise QuantizationError(
            f"dtype=torch.int8: {name} holds a weight of size {float(exact.abs().max()):.3g}, more "
            "than a scale in float32 can give back; save with dtype=None."
        )
    return whole.to(torch.int8).contiguous(), scale


def dequantize(name: str, whole: Tensor, scale: Tensor) -> Tensor:
    """q int8 [R, …], s float32 [R] ↦ q·s, computed in float32. Neither q nor s is believed."""
    usable = torch.isfinite(scale) & (scale > 0)
    if not bool(usable.all()):
        row = int((~usable).nonzero()[0, 0])
        raise QuantizationError(
            f"the scale of row {row} of {name} is {float(scale[row])}, expected a positive finite "
            "number; the file is damaged, fetch or save it again"
        )
    if bool((whole < -_LARGEST).any()):
        raise QuantizationError(
            f"{name} holds {int(whole.min())}, expected −{_LARGEST} to {_LARGEST}; the file is "
            "damaged, fetch or save it again"
        )
    made = whole.float() * _column(scale, whole.ndim)
    if not bool(torch.isfinite(made).all()):
        raise QuantizationError(
            f"{name} times its scales, up to {float(scale.max()):.3g}, exceeds float32; the file "
            "is damaged, fetch or save it again"
        )
    return made


def _column(scale: Tensor, ndim: int) -> Tensor:
    """[R] ↦ [R, 1, …] of ``ndim`` dimensions."""
    return scale.view(-1, *([1] * (ndim - 1)))
