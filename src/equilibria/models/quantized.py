"""Weights in eight bits: w ≈ q·s, q in −127 … 127, one scale s for each row.

    s = max|w| / 127,  q = round(w / s),  |w − q·s| ≤ s/2 = max|w| / 254

over a row, which is one index of the first dimension: an output channel. Parameters of two or more
dimensions are kept so. Buffers of two or more dimensions are kept in float16, and all that has
fewer (norms, biases, running means) in float32. The scales of the tensor ``name`` are the tensor
``name`` + ".scale." of the same file. No name of a state dict ends with a dot, so none is like it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "FIELD",
    "QuantizationError",
    "check_finite",
    "check_note",
    "dequantize",
    "layout",
    "make_note",
    "quantize",
    "scale_name",
]

FIELD = "quantization"
"""The field of a file's metadata that says what is quantized, and how."""
_SUFFIX = ".scale."
_KIND = {"version": 1, "scheme": "int8 rows", "suffix": _SUFFIX}
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


def make_note(names: list[str]) -> dict[str, Any]:
    """What the metadata of a file says of its quantized tensors, in JSON's types."""
    return {**_KIND, "tensors": names}


def check_note(note: Mapping[str, Any] | None, found: Mapping[str, Mapping[str, Any]]) -> None:
    """The note against the dtypes and shapes in the file; None is a file without one."""
    named: set[str] = set()
    if note is not None:
        _check_kind(note)
        named.update(_names(note.get("tensors")))
        for name in sorted(named):
            _check_pair(name, found)
    for name, entry in found.items():
        if entry["dtype"] == "I8" and name not in named:
            raise QuantizationError(
                f"tensor {name!r} has dtype I8 and no scales: the field {FIELD!r} of its metadata "
                "does not name it, expected of every tensor in int8; write the file with "
                "models.save"
            )


def _check_kind(note: Mapping[str, Any]) -> None:
    for key, known in _KIND.items():
        given = note.get(key)
        if type(given) is not type(known) or given != known:
            raise QuantizationError(
                f"its quantization has {key}={given!r}, and this version reads {known!r}; use the "
                "version of the library that wrote the file, or write it with models.save"
            )


def _names(given: Any) -> list[str]:
    if not isinstance(given, list):
        raise QuantizationError(
            f"its quantization has tensors={given!r}, expected a list of names; write the file "
            "with models.save"
        )
    seen: set[str] = set()
    for name in given:
        if not isinstance(name, str):
            raise QuantizationError(
                f"its quantization names the tensor {name!r}, expected a text; write the file with "
                "models.save"
            )
        if name in seen:
            raise QuantizationError(
                f"its quantization names {name!r} twice, expected once; write the file with "
                "models.save"
            )
        seen.add(name)
    return given


def _check_pair(name: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """A named tensor is there, in int8, and its scales are, one in float32 for each row."""
    whole, scale = found.get(name), found.get(scale_name(name))
    cure = "; write the file with models.save"
    if whole is None:
        raise QuantizationError(
            f"its quantization names {name!r}, expected among its tensors and not there{cure}"
        )
    if whole["dtype"] != "I8" or len(whole["shape"]) < 2:
        raise QuantizationError(
            f"its quantization names {name!r}, which is {whole['dtype']} of shape "
            f"{whole['shape']}, expected I8 of two or more dimensions{cure}"
        )
    rows = (whole["shape"][0],)
    if scale is None:
        raise QuantizationError(
            f"the scales of {name!r} are missing, expected a tensor {scale_name(name)!r} in F32 "
            f"of shape {rows}{cure}"
        )
    if scale["dtype"] != "F32" or tuple(scale["shape"]) != rows:
        raise QuantizationError(
            f"the scales of {name!r} are {scale['dtype']} of shape {scale['shape']}, expected F32 "
            f"of shape {rows}{cure}"
        )
