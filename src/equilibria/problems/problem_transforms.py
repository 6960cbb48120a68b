"""Transforms that keep the solutions of a problem (003, Table 1): skip, change of variable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equilibria.problems.kernels import Curvature
from equilibria.problems.priors import at_least_float32
from equilibria.problems.problem import HiddenProblem

__all__ = ["AffineProblem", "MoreauProblem"]


@dataclass(frozen=True, eq=False)
class MoreauProblem(HiddenProblem):
    """``z -> alpha T(z) + (1 - alpha) z``: a skip connection, ``0 < alpha <= 1``.

    What stays true. The fixed points are those of ``T``, for every ``T``; a Lipschitz constant
    ``k`` of ``T`` becomes ``alpha k + 1 - alpha``. Paper 003 (Table 1) calls this the prox of
    ``alpha M_phi^{1-alpha}``, which holds where ``T = prox_phi``, as for its layer
    ``W' sigma(W z + c)``. The map ``T = prox_f(-grad q)`` of a general problem is not a prox, so
    here ``objective``, ``gradient``, ``stationarity`` and ``curvature`` are those of ``G`` itself,
    whose minimizers the envelope ``alpha M_G^{1-alpha}`` shares.
    """

    problem: HiddenProblem
    alpha: float

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ValueError(f"moreau: alpha got {self.alpha!r}, takes 0 < alpha <= 1")

    @property
    def couples_batch(self) -> bool:
        return self.problem.couples_batch

    def inputs(self) -> tuple[Tensor, ...]:
        return self.problem.inputs()

    def with_inputs(self, *inputs: Tensor) -> MoreauProblem:
        return dataclasses.replace(self, problem=self.problem.with_inputs(*inputs))

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        return self.problem.default_start(shape)

    def objective(self, z: Tensor) -> Tensor:
        return self.problem.objective(z)

    def gradient(self, z: Tensor) -> Tensor:
        return self.problem.gradient(z)

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self.alpha * self.problem.step(z, tau) + (1.0 - self.alpha) * z

    def snap(self, z: Tensor, tau: float) -> Tensor:
        return self.problem.snap(z, tau)

    def minimal_subgradient(self, z: Tensor) -> Tensor:
        return self.problem.minimal_subgradient(z)

    def curvature(self) -> Curvature:
        return self.problem.curvature()


@dataclass(frozen=True, eq=False)
class AffineProblem(HiddenProblem):
    """``G(A y + shift)`` in the variable ``y``, with the layer ``A^{-1}(T(A y + shift) - shift)``.

    ``matrix`` is a number (scaling) or an invertible ``[n, n]`` matrix on the flattened state;
    ``shift`` broadcasts to ``z``. What stays true. Fixed points correspond, ``z* = A y* + shift``,
    for every invertible ``A``. The step is a proximal-gradient step of ``G(A .)`` only when ``A``
    is orthogonal (``orthogonal``); otherwise it is the step of ``G`` in other coordinates, and
    descends in the metric of ``A``. ``minimal_subgradient`` is ``A' s`` with ``s`` the least
    subgradient of ``G``: its norm is the exact distance when ``A`` is a multiple of an orthogonal
    matrix and an upper bound otherwise, zero exactly at stationary points in both cases.

    ``A y + shift`` is rounded, and a rounded 0 is no longer at the kink of a ReLU or inside its
    domain. So ``objective`` forgives a state outside the domain by rounding alone, and
    ``minimal_subgradient`` looks at the state after a proximal step of sqrt(eps) (``snap``).
    """

    problem: HiddenProblem
    matrix: float | Tensor
    shift: Tensor | None = None
    _spread: tuple[float, float] = field(init=False, repr=False)  # extreme singular values

    def __post_init__(self) -> None:
        if isinstance(self.matrix, Tensor):
            if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
                got = tuple(self.matrix.shape)
                raise ValueError(f"affine: matrix got shape {got}, takes a square matrix [n, n]")
            values = torch.linalg.svdvals(self.matrix.detach().double())
            spread = float(values[-1]), float(values[0])
        else:
            spread = abs(float(self.matrix)), abs(float(self.matrix))
        if not (math.isfinite(spread[1]) and spread[0] > 1e-12 * spread[1]):
            raise ValueError(
                f"affine: matrix got singular values from {spread[0]:.3g} to {spread[1]:.3g}, "
                "takes an invertible matrix or a nonzero number"
            )
        object.__setattr__(self, "_spread", spread)

    @property
    def couples_batch(self) -> bool:
        return self.problem.couples_batch

    def inputs(self) -> tuple[Tensor, ...]:
        return self.problem.inputs()

    def with_inputs(self, *inputs: Tensor) -> AffineProblem:
        other = object.__new__(type(self))  # the singular values of the matrix stay as they are
        other.__dict__.update(self.__dict__)
        other.__dict__["problem"] = self.problem.with_inputs(*inputs)
        return other

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        return self.from_state(self.problem.default_start(shape))

    @property
    def orthogonal(self) -> bool:
        """Whether the layer stays a proximal-gradient step of ``G(A .)`` (to 1e-6)."""
        return abs(self._spread[0] - 1.0) < 1e-6 and abs(self._spread[1] - 1.0) < 1e-6

    def _apply(self, y: Tensor, *, transpose: bool = False) -> Tensor:
        if not isinstance(self.matrix, Tensor):
            return float(self.matrix) * y
        matrix = self.matrix.to(y.dtype)
        moved = y.flatten(1) @ (matrix if transpose else matrix.mT)
        return moved.reshape(y.shape)

    def to_state(self, y: Tensor) -> Tensor:
        """``z = A y + shift``."""
        z = self._apply(y)
        return z if self.shift is None else z + self.shift

    def from_state(self, z: Tensor) -> Tensor:
        """``y = A^{-1}(z - shift)``."""
        if self.shift is not None:
            z = z - self.shift
        if not isinstance(self.matrix, Tensor):
            return z / float(self.matrix)
        wide = at_least_float32(z)  # no factorization in half precision
        solved: Tensor = torch.linalg.solve(self.matrix.to(wide.dtype), wide.flatten(1).mT)
        return solved.mT.reshape(z.shape).to(z.dtype)

    def objective(self, z: Tensor) -> Tensor:
        state = self.to_state(z)
        value = self.problem.objective(state)
        eps = torch.finfo(state.dtype).eps
        near = self.problem.snap(state, eps)
        moved = (near - state).abs().flatten(1).amax(1)
        size = state.abs().flatten(1).amax(1) + self._spread[1] * z.abs().flatten(1).sum(1)
        excused = value.isinf() & (moved <= 64.0 * eps * (1.0 + size))
        return torch.where(excused, self.problem.objective(near), value)

    def gradient(self, z: Tensor) -> Tensor:
        return self._apply(self.problem.gradient(self.to_state(z)), transpose=True)

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self.from_state(self.problem.step(self.to_state(z), tau))

    def snap(self, z: Tensor, tau: float) -> Tensor:
        return self.from_state(self.problem.snap(self.to_state(z), tau))

    def minimal_subgradient(self, z: Tensor) -> Tensor:
        state = self.to_state(z)
        state = self.problem.snap(state, math.sqrt(torch.finfo(state.dtype).eps))
        least = self.problem.minimal_subgradient(state)
        pulled = self._apply(torch.where(least.isinf(), 0.0, least), transpose=True)
        outside = self.objective(z).isinf().reshape(-1, *[1] * (z.ndim - 1))
        return torch.where(outside, math.inf, pulled)

    def curvature(self) -> Curvature:
        base = self.problem.curvature()
        size = self.matrix.shape[0] if isinstance(self.matrix, Tensor) else 1
        slack = 1e-14 * size * self._spread[1]  # more than the error of an SVD in float64
        low, high = max(self._spread[0] - slack, 0.0) ** 2, (self._spread[1] + slack) ** 2
        # m A'A is at least m sigma_min^2 for m >= 0 and m sigma_max^2 below; the reverse for L.
        lower = torch.as_tensor(base.lower, dtype=torch.float64)
        upper = torch.as_tensor(base.upper, dtype=torch.float64)
        lower = torch.where(lower >= 0, lower * low, lower * high)
        upper = torch.where(upper >= 0, upper * high, upper * low)
        note = f"{base.note}; in the variable y, singular values of A by SVD in float64"
        ends = [float(t) if t.ndim == 0 else t for t in (lower, upper)]
        return Curvature(ends[0], ends[1], base.rigorous, note)
