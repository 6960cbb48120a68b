"""The Hilbert-Schmidt independence criterion as a feature regularizer (paper 003, section 7.2.1).

    ``R(Z) = weight sum_{i<j} HSIC(Z_i, Z_j)``,
    ``HSIC(X, Y) = tr(K_X H K_Y H) / (B-1)^2``,  ``H = I - 11'/B``

the biased estimator with Gaussian kernels ``exp(-|x-y|^2 / (2 bandwidth^2))``. With centered
``A_i = H K_i H`` the double sum over pairs is one pass over features,

    ``sum_{i<j} <A_i, A_j> = (|sum_i A_i|^2 - sum_i |A_i|^2) / 2``.

Random Fourier features replace ``K_i`` by ``F_i F_i'``, ``F_i = [cos, sin](Z_i w)/sqrt(D)``: with
``C_i = H F_i`` stacked into ``C`` the same sum is ``(|C'C|^2 - sum_i |C_i'C_i|^2) / 2``, and no
kernel matrix per feature is formed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equilibria.problems.kernels import Curvature
from equilibria.problems.priors import at_least_float32, check_number
from equilibria.problems.regularizers import (
    Features,
    Regularizer,
    check_features,
    feature_rows,
    from_feature_rows,
)

__all__ = ["HSIC"]


@functools.lru_cache(maxsize=64)
def _drawn(length: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, count, generator=generator, dtype=torch.float64)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _frequencies(length: int, count: int, seed: int) -> Tensor:
    """Standard normal frequencies ``[length, count]``, float64, the same for the same seed.

    A constant to torch.compile, which traces neither a generator nor a cache.
    """
    return _drawn(length, count, seed)


def _center(features: Tensor) -> Tensor:
    """``H F`` for ``F`` of shape ``[m, B, D]``."""
    return features - features.mean(1, keepdim=True)


def _gram_norm(c: Tensor) -> Tensor:
    """``|C C'|_F^2`` summed over the leading dimension, formed on the smaller side of ``C``."""
    gram = c @ c.mT if c.shape[-2] <= c.shape[-1] else c.mT @ c
    return (gram * gram).sum()


def _gram_times(c: Tensor) -> Tensor:
    """``C C' C``, formed on the smaller side of ``C``."""
    return (c @ c.mT) @ c if c.shape[-2] <= c.shape[-1] else c @ (c.mT @ c)


@dataclass(frozen=True)
class HSIC(Regularizer):
    """``R(Z) = weight sum_{i<j} HSIC(Z_i, Z_j)``, a scalar for the batch; small = independent.

    ``features="all"``: every entry of the state is a variable; ``"channels"``: each channel map is
    one, vector valued. ``random_features=D`` uses ``D`` random frequencies (``2 D`` features)
    from ``seed``, unbiased for the kernel with error of order ``1/sqrt(D)``; the default is
    exact, at ``m B^2`` memory. Not convex. A batch of one has no dependence to measure: 0.
    """

    weight: float = 1.0
    _: KW_ONLY
    bandwidth: float = 1.0
    random_features: int | None = None
    seed: int = 0
    features: Features = "all"
    convex: ClassVar[bool] = False
    couples_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)
        check_number(self, "bandwidth", self.bandwidth)
        if self.bandwidth <= 0:
            raise ValueError(f"HSIC: bandwidth got {self.bandwidth!r}, takes a positive number")
        if self.random_features is not None and self.random_features < 1:
            raise ValueError(
                f"HSIC: random_features got {self.random_features!r}, takes None or an integer >= 1"
            )
        check_features(self, self.features)

    def _scale(self, batch: int) -> float:
        return self.weight / max(batch - 1, 1) ** 2

    def _kernels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``K_i`` and ``A_i = H K_i H``, each ``[m, B, B]``, from rows ``[m, B, k]``."""
        rows = rows / self.bandwidth
        rows = rows - rows.mean(1, keepdim=True)  # differences stay; less cancellation below
        if rows.shape[2] == 1:
            gap = rows - rows.mT
            square = gap * gap
        else:
            norm = (rows * rows).sum(2, keepdim=True)
            square = (norm + norm.mT - 2.0 * rows @ rows.mT).clamp(min=0.0)
        kernel = torch.exp(-0.5 * square)
        centered = kernel - kernel.mean(1, keepdim=True)
        return kernel, centered - centered.mean(2, keepdim=True)

    def _fourier(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """``cos`` and ``sin`` features ``[m, B, D]`` and the frequencies ``[k, D]``."""
        w = _frequencies(rows.shape[2], count, self.seed).to(rows) / self.bandwidth
        angle = rows @ w
        size = 1.0 / math.sqrt(count)
        return size * torch.cos(angle), size * torch.sin(angle), w

    def value(self, z: Tensor) -> Tensor:
        rows = feature_rows(at_least_float32(z), self.features)
        batch = rows.shape[1]
        if self.random_features is None:
            _, centered = self._kernels(rows)
            total = centered.sum(0)
            own = (centered * centered).sum()
            return 0.5 * self._scale(batch) * ((total * total).sum() - own)
        cos, sin, _ = self._fourier(rows, self.random_features)
        stacked = _center(torch.cat([cos, sin], 2))
        wide = stacked.movedim(1, 0).reshape(batch, -1)
        return 0.5 * self._scale(batch) * (_gram_norm(wide) - _gram_norm(stacked))

    def grad(self, z: Tensor) -> Tensor:
        """With ``M_i = (sum_j A_j - A_i)/(B-1)^2`` and ``V = M_i * K_i`` entrywise,

        ``dR/dx_b = -(2 weight / bandwidth^2) sum_c V_bc (x_b - x_c)``; with Fourier features
        ``dR/dF_i = 2 weight M_i F_i`` is pulled back through cos and sin.
        """
        rows = feature_rows(at_least_float32(z), self.features)
        count, batch, _ = rows.shape
        scale = 2.0 * self._scale(batch)
        if self.random_features is None:
            kernel, centered = self._kernels(rows)
            pull = (centered.sum(0) - centered) * kernel
            moved = pull.sum(2, keepdim=True) * rows - pull @ rows
            return from_feature_rows((-scale / self.bandwidth**2) * moved, z)
        cos, sin, w = self._fourier(rows, self.random_features)
        stacked = _center(torch.cat([cos, sin], 2))
        wide = stacked.movedim(1, 0).reshape(batch, -1)
        total = _gram_times(wide).reshape(batch, count, -1).movedim(1, 0)
        outer = scale * (total - _gram_times(stacked))
        by_cos, by_sin = outer.chunk(2, 2)
        return from_feature_rows((by_sin * cos - by_cos * sin) @ w.mT, z)

    def curvature(self) -> Curvature:
        return Curvature(-math.inf, math.inf, True, "HSIC: no bound is derived")
