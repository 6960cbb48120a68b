"""Random ingredients of the trials: numbers, weights of a given norm, activations and slopes.

Nothing here is shared with the code under test: activations and their integrals are written anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Random:
    """What a trial draws, from one generator; tensors are float64."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.share())

    def log_uniform(self, low: float, high: float) -> float:
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def integer(self, low: int, high: int) -> int:
        """Low to high, both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, items: Sequence[T]) -> T:
        return items[self.integer(0, len(items) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def share(self, *shape: int) -> Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def weights(self, rows: int, columns: int, size: float) -> Tensor:
        """[rows, columns] with spectral norm ``size``: dense, of rank one, orthogonal, sparse."""
        kind = self.integer(0, 5)
        found = self.normal(rows, columns)
        if kind == 0:
            found = self.normal(rows, 1) @ self.normal(1, columns)
        elif kind == 1:
            u, _, v = torch.linalg.svd(found, full_matrices=False)
            found = u @ v
        elif kind == 2:
            found = found * (torch.rand(rows, columns, generator=self.generator) < 0.5)
        elif kind == 3:
            found = found.abs()
        largest = spectral(found)
        return self.weights(rows, columns, size) if largest < 1e-9 else found * (size / largest)


def identity(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logistic(t: Tensor, top: float) -> float:
    """A free number as one between 0 and ``top``, for searches."""
    return top / (1.0 + math.exp(-float(t.clamp(-30, 30))))


def exponential(t: Tensor, low: float, high: float) -> float:
    """A free number as a positive one between e^low and e^high, for searches."""
    return math.exp(float(t.clamp(low, high)))


def norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t))


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


@dataclass(frozen=True)
class Activation:
    """σ, its slope (one element of Clarke's where it jumps), ∫₀σ, and L_σ = sup σ′."""

    name: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    integral: Callable[[Tensor], Tensor]
    expansion: float = 1.0
    smooth: bool = False


def _relu(t: Tensor) -> Tensor:
    return t.clamp_min(0.0)


def _step(t: Tensor) -> Tensor:
    return (t > 0).double()


def _leak(t: Tensor) -> Tensor:
    return 0.1 + 0.9 * _step(t)


def _log_cosh(t: Tensor) -> Tensor:
    size = t.abs()
    return size + torch.log1p(torch.exp(-2.0 * size)) - math.log(2.0)


def _soft(t: Tensor) -> Tensor:
    return t.sign() * (t.abs() - 0.3).clamp_min(0.0)


_ALL = (
    Activation("identity", lambda t: t, torch.ones_like, lambda t: 0.5 * t * t, smooth=True),
    Activation("relu", _relu, _step, lambda t: 0.5 * _relu(t) ** 2),
    Activation(
        "clipped relu",
        lambda t: t.clamp(0.0, 1.0),
        lambda t: ((t > 0) & (t < 1)).double(),
        lambda t: 0.5 * t.clamp(0.0, 1.0) ** 2 + (t - 1.0).clamp_min(0.0),
    ),
    Activation(
        "soft threshold", _soft, lambda t: (t.abs() > 0.3).double(), lambda t: 0.5 * _soft(t) ** 2
    ),
    Activation("leaky relu", lambda t: t * _leak(t), _leak, lambda t: 0.5 * t * t * _leak(t)),
    Activation("tanh", torch.tanh, lambda t: 1.0 - torch.tanh(t) ** 2, _log_cosh, smooth=True),
    Activation(
        "sigmoid",
        torch.sigmoid,
        lambda t: torch.sigmoid(t) * torch.sigmoid(-t),
        lambda t: torch.logaddexp(t, torch.zeros_like(t)) - math.log(2.0),
        expansion=0.25,
        smooth=True,
    ),
)
ACTIVATIONS = {each.name: each for each in _ALL}
