"""What the parameters of an estimator may be; checked when it is fitted, as scikit-learn wants."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch

from .network import LAYERS

__all__ = ["DTYPES", "check_parameters", "torch_device"]

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def torch_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def check_parameters(estimator: Any) -> None:
    """Raise a ValueError that names the parameter, what it got and what it takes."""
    name = type(estimator).__name__
    if not callable(estimator.layer) and estimator.layer not in LAYERS:
        raise ValueError(
            f"{name}(layer={estimator.layer!r}): expected one of "
            f"{', '.join(map(repr, LAYERS))}, or a callable (in_features, hidden) -> nn.Module."
        )
    for key in ("hidden", "max_iter", "batch_size", "n_iter_no_change"):
        value = getattr(estimator, key)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name}({key}={value!r}): expected an integer of at least 1.")
    limits = {
        "bound": (0.0, 1.0 if estimator.layer in ("opteq", "deep_opteq") else math.inf, True),
        "lr": (0.0, math.inf, True),
        "weight_decay": (0.0, math.inf, False),
        "tol": (0.0, math.inf, False),
        "validation_fraction": (0.0, 1.0, True),
    }
    for key, (low, high, is_open) in limits.items():
        value = getattr(estimator, key)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (low < value if is_open else low <= value) or not value < high:
            ends = f"{'(' if is_open else '['}{low:g}, {high:g})"
            raise ValueError(f"{name}({key}={value!r}): expected a number in {ends}.")
    if estimator.schedule not in ("cosine", "constant"):
        raise ValueError(
            f"{name}(schedule={estimator.schedule!r}): expected 'cosine' or 'constant'."
        )
    if estimator.dtype not in DTYPES:
        raise ValueError(f"{name}(dtype={estimator.dtype!r}): expected 'float64' or 'float32'.")
    try:
        device = torch_device(estimator.device)
    except RuntimeError as error:
        raise ValueError(
            f"{name}(device={estimator.device!r}): expected 'cpu', 'cuda', 'cuda:0', …, or 'auto'."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{name}(device={estimator.device!r}): torch sees no GPU here; use 'auto' or 'cpu'."
        )
