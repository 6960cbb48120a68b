"""Feature regularizers ``R`` (OptEq, paper 003, Table 2 and section 7.2), without HSIC.

Each carries its weight, so ``R`` here is the paper's ``gamma R_z``. Gradients are those of the
formulas: the last column of the paper's Table 2 has a wrong sign for feature incay, and lacks
``gamma``, a 2 and a sign for decorrelation.

A regularizer of one sample answers ``[B]``. Decorrelation and HSIC compare features *across the
batch*: they answer one scalar for the batch, an answer then depends on batch mates by design, and
``couples_batch`` says so.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equilibria.problems.kernels import Curvature, per_sample_sum
from equilibria.problems.priors import SoftThreshold, at_least_float32, check_number, check_step

__all__ = ["L1", "Decorrelation", "FeatureIncay", "Regularizer", "SquaredNorm"]

Features = Literal["all", "channels"]


class Regularizer(ABC):
    """``R(z)`` for ``z`` of shape ``[B, *state]``.

    ``convex``: a minimizer of a problem with it is global; otherwise expect stationary points.
    ``smooth``: ``grad`` is a gradient everywhere (for L1 it is a subgradient).
    """

    convex: ClassVar[bool]
    smooth: ClassVar[bool] = True
    has_prox: ClassVar[bool] = False
    couples_batch: ClassVar[bool] = False

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """``R(z)``: ``[B]``, or a scalar where ``couples_batch``; float32 or better."""

    @abstractmethod
    def grad(self, z: Tensor) -> Tensor:
        """``dR/dz`` (of the sum over the batch), shape and type of ``z``, by formula."""

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        """``prox_{tau R}(z)`` where closed (see ``has_prox``); ``tau`` broadcasts to ``z``."""
        raise NotImplementedError(
            f"{type(self).__name__} has no closed prox; use its gradient form (SquaredNorm and L1 "
            "have one)"
        )

    @abstractmethod
    def curvature(self) -> Curvature:
        """Bounds on the spectrum of the Hessian of ``R``, for every ``z``; infinite if none."""


@dataclass(frozen=True)
class SquaredNorm(Regularizer):
    """``R(z) = weight |z|^2 / 2``; gradient ``weight z``; prox ``z / (1 + tau weight)``."""

    weight: float = 1.0
    convex: ClassVar[bool] = True
    has_prox: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        return 0.5 * self.weight * per_sample_sum(wide * wide)

    def grad(self, z: Tensor) -> Tensor:
        return self.weight * z

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return (z / (1.0 + check_step(tau) * self.weight)).to(z.dtype)

    def curvature(self) -> Curvature:
        return Curvature(self.weight, self.weight, True, "weight of the squared norm, exact")


@dataclass(frozen=True)
class L1(Regularizer):
    """``R(z) = weight |z|_1``; subgradient ``weight sign(z)``; prox the soft threshold."""

    weight: float = 1.0
    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = False
    has_prox: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)

    def value(self, z: Tensor) -> Tensor:
        return self.weight * per_sample_sum(at_least_float32(z).abs())

    def grad(self, z: Tensor) -> Tensor:
        """The subgradient of least norm: ``weight sign(z)``, 0 at 0."""
        return self.weight * z.sign()

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return SoftThreshold(self.weight).prox(z, tau)

    def curvature(self) -> Curvature:
        return Curvature(0.0, math.inf, True, "convex, not differentiable at 0")


@dataclass(frozen=True)
class FeatureIncay(Regularizer):
    """``R(z) = 2 weight / (|z|^2 + 2 eps)`` per sample: features are pushed outward.

    With ``s = |z|^2 + 2 eps`` the gradient is ``-4 weight z / s^2`` and the Hessian
    ``-4 weight I/s^2 + 16 weight z z'/s^3``, whose spectrum is in
    ``[-weight/eps^2, weight/(4 eps^2)]``, both ends attained (``z = 0``; ``|z|^2 = 2 eps``).
    Not convex. (Section 7.2.2 of the paper prints another function; this is Table 2's and 5's.)
    """

    weight: float = 1.0
    eps: float = 1.0
    convex: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)
        check_number(self, "eps", self.eps)
        if self.eps <= 0:
            raise ValueError(f"FeatureIncay: eps got {self.eps!r}, takes a positive number")

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        return 2.0 * self.weight / (per_sample_sum(wide * wide) + 2.0 * self.eps)

    def grad(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        size = per_sample_sum(wide * wide) + 2.0 * self.eps
        factor = (-4.0 * self.weight / size) / size
        return (factor.reshape(-1, *[1] * (z.ndim - 1)) * wide).to(z.dtype)

    def curvature(self) -> Curvature:
        bend = self.weight / self.eps**2
        return Curvature(-bend, 0.25 * bend, True, "feature incay, attained at 0 and 2 eps")


def feature_rows(z: Tensor, features: Features) -> Tensor:
    """``[B, *state]`` to ``[m, B, k]``: feature ``i`` of sample ``b`` is a vector of length k.

    ``"all"``: every entry of the state is a feature (``k = 1``, the paper's ``Z`` in R^{m x B});
    ``"channels"``: each channel map is one (``[B, C, H, W]`` gives ``m = C``, ``k = H W``).
    """
    if z.ndim < 2:
        raise ValueError(f"a state of shape [B, *state] is needed, got {tuple(z.shape)}")
    batch = z.shape[0]
    rows = z.reshape(batch, -1, 1) if features == "all" else z.reshape(batch, z.shape[1], -1)
    return rows.movedim(1, 0)


def from_feature_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``feature_rows``, in the shape and type of ``like``."""
    return rows.movedim(0, 1).reshape(like.shape).to(like.dtype)


def check_features(owner: object, features: str) -> None:
    if features not in ("all", "channels"):
        raise ValueError(
            f"{type(owner).__name__}: features got {features!r}, takes 'all' or 'channels'"
        )


@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """``R(Z) = weight/2 |D Z Z' D - I|_F^2`` (paper 003, Eq 13), a scalar for the batch.

    ``Z`` is ``m x B``: row ``i`` is feature ``i`` over the batch, ``D = diag(1/|z_i|)``. So
    ``R = weight/2 sum_{i != j} cos^2(z_i, z_j)``, and with unit rows ``n_i``

        ``dR/dz_i = 2 weight (I - n_i n_i') sum_{j != i} n_j (n_j' n_i) / |z_i|``.

    A row of zeros (a dead feature) has no direction: it contributes 0 and gets gradient 0.
    ``|N N' - I|^2`` is computed on the smaller side, ``m x m`` or ``B x B``. Not convex, and its
    Hessian is unbounded near a zero row. ``features="channels"`` makes rows of channels, each of
    length ``B H W``.
    """

    weight: float = 1.0
    features: Features = "all"
    convex: ClassVar[bool] = False
    couples_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "weight", self.weight, least=0.0)
        check_features(self, self.features)

    def _unit_rows(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit rows ``[m, n]``, ``1/norm`` and whether the row is alive, ``[m, 1]`` each."""
        rows = feature_rows(at_least_float32(z), self.features).flatten(1)
        peak = rows.detach().abs().amax(1, keepdim=True)
        alive = (peak > 0) & peak.isfinite()
        scaled = rows / torch.where(alive, peak, 1.0)  # no overflow or underflow in the squares
        square = torch.where(alive, (scaled * scaled).sum(1, keepdim=True), 1.0)
        inverse = torch.where(alive, square.rsqrt(), 0.0)
        return scaled * inverse, inverse / torch.where(alive, peak, 1.0), alive

    def value(self, z: Tensor) -> Tensor:
        unit, _, alive = self._unit_rows(z)
        count, length = unit.shape
        if count <= length:
            gram = unit @ unit.mT
            gram = gram - torch.diag_embed(gram.diagonal())
            return 0.5 * self.weight * (gram * gram).sum()
        gram = unit.mT @ unit
        return 0.5 * self.weight * ((gram * gram).sum() - alive.to(unit.dtype).sum())

    def grad(self, z: Tensor) -> Tensor:
        unit, inverse, _ = self._unit_rows(z)
        if unit.shape[0] <= unit.shape[1]:
            pulled = (unit @ unit.mT) @ unit
        else:
            pulled = unit @ (unit.mT @ unit)
        # The projection removes the term j = i as well.
        across = pulled - (pulled * unit).sum(1, keepdim=True) * unit
        rows = 2.0 * self.weight * inverse * across
        return from_feature_rows(rows.reshape(rows.shape[0], z.shape[0], -1), z)

    def curvature(self) -> Curvature:
        return Curvature(
            -math.inf, math.inf, True, "decorrelation: the Hessian is unbounded near a zero row"
        )
