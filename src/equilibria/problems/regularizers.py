"""Feature regularizers ``R`` (Xie et al. 2021, Table 2 and section 7.2).

Each carries its weight, so ``R`` here is the paper's ``gamma R_z``. Gradients are those of the
formulas: the last column of the paper's Table 2 has a wrong sign for feature incay, and lacks
``gamma``, a 2 and a sign for decorrelation.

A regularizer of one sample answers ``[B]``. Decorrelation and HSIC compare features *across the
batch*: they answer one scalar for the batch, an answer then depends on the others by design, and
``couples_batch`` says so.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equilibria.engine.options import check_number
from equilibria.engine.tree import per_sample, sample_norm
from equilibria.problems.kernels import Curvature
from equilibria.problems.norms import UNIT
from equilibria.problems.priors import SoftThreshold, at_least_float32, check_step, per_sample_sum

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
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} has no closed prox; use its gradient form (SquaredNorm and L1 have one)"
        )

    @abstractmethod
    def curvature(self) -> Curvature:
        """Bounds on the spectrum of the Hessian of ``R``, for every ``z``; infinite if none."""

    def rounding_error(self, z: Tensor, form: str) -> Tensor | float | None:
        """How far float64 moves what ``R`` adds to a problem's force, entrywise; None: not known.

        ``form`` "gradient": the gradient of the smooth ``R``; "prox": ``z - prox_R(z)``.
        """
        return None

    def step_rounding(self, z: Tensor, moved: Tensor) -> Tensor | None:
        """The norm ``[B]`` of what float64 moves ``moved = z - dR(z)`` or ``prox_R(z)`` by."""
        return None


@dataclass(frozen=True)
class _Weighted(Regularizer):
    """A regularizer with a weight that is not negative."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "weight", low=0.0)

    def step_rounding(self, z: Tensor, moved: Tensor) -> Tensor | None:
        if not self.has_prox:
            return None
        # A product or quotient and a sum, or a difference of two: each term at most this.
        return 8 * UNIT * sample_norm([z.abs() + moved.abs() + self.weight * (1.0 + z.abs())])


@dataclass(frozen=True)
class SquaredNorm(_Weighted):
    """``R(z) = weight |z|^2 / 2``; gradient ``weight z``; prox ``z / (1 + tau weight)``."""

    convex: ClassVar[bool] = True
    has_prox: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        return 0.5 * self.weight * per_sample_sum(wide * wide)

    def grad(self, z: Tensor) -> Tensor:
        return self.weight * z

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return (z / (1.0 + check_step(tau) * self.weight)).to(z.dtype)

    def curvature(self) -> Curvature:
        return Curvature(self.weight, self.weight, True, "weight of the squared norm, exact")

    def rounding_error(self, z: Tensor, form: str) -> Tensor | float | None:
        return (8 if form == "prox" else 2 * self.weight) * UNIT * z.abs()


@dataclass(frozen=True)
class L1(_Weighted):
    """``R(z) = weight |z|_1``; subgradient ``weight sign(z)``; prox the soft threshold."""

    convex: ClassVar[bool] = True
    smooth: ClassVar[bool] = False
    has_prox: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        return self.weight * per_sample_sum(at_least_float32(z).abs())

    def grad(self, z: Tensor) -> Tensor:
        """The subgradient of least norm: ``weight sign(z)``, 0 at 0."""
        return self.weight * z.sign()

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return SoftThreshold(self.weight).prox(z, tau)

    def curvature(self) -> Curvature:
        return Curvature(0.0, math.inf, True, "convex, not differentiable at 0")

    def rounding_error(self, z: Tensor, form: str) -> Tensor | float | None:
        """In gradient form L1 is part of the prior."""
        return 8 * UNIT * z.abs() if form == "prox" else 0.0


@dataclass(frozen=True)
class FeatureIncay(_Weighted):
    """``R(z) = 2 weight / (|z|^2 + 2 eps)`` per sample: features are pushed outward.

    With ``s = |z|^2 + 2 eps`` the gradient is ``-4 weight z / s^2`` and the Hessian
    ``-4 weight I/s^2 + 16 weight z z'/s^3``, whose spectrum is in
    ``[-weight/eps^2, weight/(4 eps^2)]``, both ends attained (``z = 0``; ``|z|^2 = 2 eps``).
    Not convex. (Section 7.2.2 of the paper prints another function; this is Table 2's and 5's.)
    """

    eps: float = 1.0
    convex: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "eps", low=0.0, low_open=True)

    def value(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        return 2.0 * self.weight / (per_sample_sum(wide * wide) + 2.0 * self.eps)

    def grad(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        size = per_sample_sum(wide * wide) + 2.0 * self.eps
        factor = (-4.0 * self.weight / size) / size
        return (per_sample(factor, z) * wide).to(z.dtype)

    def curvature(self) -> Curvature:
        bend = self.weight / self.eps**2
        return Curvature(-bend, 0.25 * bend, True, "feature incay, attained at 0 and 2 eps")

    def rounding_error(self, z: Tensor, form: str) -> Tensor | float | None:
        return (z[0].numel() + 16) * UNIT * self.grad(z).abs() if form == "gradient" else None

    def step_rounding(self, z: Tensor, moved: Tensor) -> Tensor | None:
        size = z.abs() + moved.abs() + self.grad(z).abs()
        return (z[0].numel() + 64) * UNIT * sample_norm([size])


def feature_rows(z: Tensor, features: Features) -> Tensor:
    """``[B, *state]`` to ``[m, B, k]``: every entry is a feature (k = 1), or each channel is."""
    if z.ndim < 2:
        raise ValueError(f"a state of shape [B, *state] is needed, got {tuple(z.shape)}")
    batch = z.shape[0]
    rows = z.reshape(batch, -1, 1) if features == "all" else z.reshape(batch, z.shape[1], -1)
    return rows.movedim(1, 0)


def from_feature_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``feature_rows``, in the shape and type of ``like``."""
    return rows.movedim(0, 1).reshape(like.shape).to(like.dtype)


class _OverBatch(_Weighted):
    """A regularizer that compares the features of different samples."""

    features: Features
    convex: ClassVar[bool] = False
    couples_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features not in ("all", "channels"):
            got = f"{type(self).__name__}: features got {self.features!r}"
            raise ValueError(f"{got}, takes 'all' or 'channels'")


@dataclass(frozen=True)
class Decorrelation(_OverBatch):
    """``R(Z) = weight/2 |D Z Z' D - I|_F^2`` (Xie et al. 2021, Eq 13), a scalar for the batch.

    ``Z`` is ``m x B``: row ``i`` is feature ``i`` over the batch, ``D = diag(1/|z_i|)``. So
    ``R = weight/2 sum_{i != j} cos^2(z_i, z_j)``, and with unit rows ``n_i``

        ``dR/dz_i = 2 weight (I - n_i n_i') sum_{j != i} n_j (n_j' n_i) / |z_i|``.

    A row of zeros (a dead feature) has no direction: it contributes 0 and gets gradient 0. Not
    convex. ``features="channels"`` makes rows of channels, each of length ``B H W``.
    """

    features: Features = "all"

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
        if unit.shape[0] <= unit.shape[1]:
            gram = unit @ unit.mT
            gram = gram - torch.diag_embed(gram.diagonal())
            return 0.5 * self.weight * (gram * gram).sum()
        gram = unit.mT @ unit  # the smaller side
        return 0.5 * self.weight * ((gram * gram).sum() - alive.to(unit.dtype).sum())

    def grad(self, z: Tensor) -> Tensor:
        unit, inverse, _ = self._unit_rows(z)
        rows_first = unit.shape[0] <= unit.shape[1]  # products on the smaller side
        pulled = (unit @ unit.mT) @ unit if rows_first else unit @ (unit.mT @ unit)
        # The projection removes the term j = i as well.
        across = pulled - (pulled * unit).sum(1, keepdim=True) * unit
        rows = 2.0 * self.weight * inverse * across
        return from_feature_rows(rows.reshape(rows.shape[0], z.shape[0], -1), z)

    def curvature(self) -> Curvature:
        note = "decorrelation: the Hessian is unbounded near a zero row"
        return Curvature(-math.inf, math.inf, True, note)


@dataclass(frozen=True)
class HSIC(_OverBatch):
    """``R(Z) = weight sum_{i<j} HSIC(Z_i, Z_j)``, a scalar for the batch; small = independent.

    ``HSIC(X, Y) = tr(K_X H K_Y H) / (B-1)^2``, ``H = I - 11'/B``: the biased estimator with
    Gaussian kernels ``exp(-|x-y|^2 / (2 bandwidth^2))``. With centered ``A_i = H K_i H`` the sum
    over pairs is ``(|sum_i A_i|^2 - sum_i |A_i|^2) / 2``, at ``m B^2`` memory.

    ``features="all"``: every entry of the state is a variable; ``"channels"``: each channel map is
    one, vector valued. Not convex. A batch of one has no dependence to measure: 0.
    """

    _: KW_ONLY
    bandwidth: float = 1.0
    features: Features = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "bandwidth", low=0.0, low_open=True)

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

    def value(self, z: Tensor) -> Tensor:
        rows = feature_rows(at_least_float32(z), self.features)
        _, centered = self._kernels(rows)
        total = centered.sum(0)
        own = (centered * centered).sum()
        return 0.5 * self._scale(rows.shape[1]) * ((total * total).sum() - own)

    def grad(self, z: Tensor) -> Tensor:
        """With ``M_i = (sum_j A_j - A_i)/(B-1)^2`` and ``V = M_i * K_i`` entrywise,

        ``dR/dx_b = -(2 weight / bandwidth^2) sum_c V_bc (x_b - x_c)``.
        """
        rows = feature_rows(at_least_float32(z), self.features)
        scale = 2.0 * self._scale(rows.shape[1])
        kernel, centered = self._kernels(rows)
        pull = (centered.sum(0) - centered) * kernel
        moved = pull.sum(2, keepdim=True) * rows - pull @ rows
        return from_feature_rows((-scale / self.bandwidth**2) * moved, z)

    def curvature(self) -> Curvature:
        return Curvature(-math.inf, math.inf, True, "HSIC: no bound is derived")
