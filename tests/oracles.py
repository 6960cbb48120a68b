"""Priors beside their proxes from the formulas, in numpy, for float64 and longdouble alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import equilibria as eq

Array = np.ndarray[Any, Any]
Prox = Callable[[Array, Any], Array]


def _tanh_prox(v: Array, tau: Any) -> Array:
    """z + τ(artanh z − z) = v for τ ≤ 1, in u = artanh z by Newton, monotone from |v|."""
    size = np.abs(v)
    u = size.copy()
    for _ in range(9 if tau < 1 else 0):
        u -= (tau * u + (1 - tau) * np.tanh(u) - size) / (tau + (1 - tau) / np.cosh(u) ** 2)
    return np.asarray(np.sign(v) * np.tanh(u))


PROXES: dict[str, tuple[eq.Prior, Prox]] = {
    "relu": (eq.NonNegative(), lambda v, t: np.maximum(v, 0)),
    "box": (eq.Box(-0.3, 0.8), lambda v, t: np.clip(v, -0.3, 0.8)),
    "soft": (eq.SoftThreshold(0.2), lambda v, t: np.sign(v) * np.maximum(np.abs(v) - 0.2 * t, 0)),
    "shifted": (eq.ShiftedNonNegative(0.1), lambda v, t: np.maximum(v - 0.1 * t, 0)),
    "leaky": (
        eq.LeakyNonNegative(0.1),
        lambda v, t: np.where(v >= 0, v, v * 0.1 / (0.1 + t - 0.1 * t)),
    ),
    "identity": (eq.Free(), lambda v, t: v),
    "tanh": (eq.Tanh(), _tanh_prox),
    # With the step 1 alone.
    "logistic": (eq.Logistic(), lambda v, t: 1 / (1 + np.exp(-v))),
    "softplus": (eq.Softplus(), lambda v, t: np.logaddexp(0, v)),
}
