"""A hidden problem: what an equilibrium layer solves.

    ``G(z; x) = sum f(z) + |z|^2/2 + q(z; x) [+ R(z)]``,   ``T_tau(z) = prox_{tau f}(z - tau g(z))``

with ``g`` the gradient of the smooth part. ``z* = T_tau(z*)`` iff ``0 in dG(z*)``, for every
``tau > 0``; ``T_1(z) = prox_f(-grad q(z))`` is the layer.

Two ways to add a regularizer (Xie et al. 2021, section 5.1), which are two problems:

- ``regularize="gradient"`` minimizes ``G + R`` (Theorem 4). L1 joins the prior (``WithL1``).
- ``regularize="prox"`` minimizes ``G + env R``, the Moreau envelope
  ``env R(z) = min_u R(u) + |u - z|^2/2`` with the gradient ``z - prox_R(z)``: the paper's
  ``T(prox_R(z))``.

A regularizer that couples the batch enters ``objective`` as ``R/B`` in every sample, so that the
sum over the batch is the function whose gradient ``step`` uses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from equilibria.engine.tree import sample_norm
from equilibria.problems.kernels import Coupling, Curvature, per_sample_sum
from equilibria.problems.norms import replaced, twin_in_double
from equilibria.problems.objective import as_smooth
from equilibria.problems.priors import (
    Free,
    NonNegative,
    Prior,
    WithL1,
    at_least_float32,
    check_step,
)
from equilibria.problems.regularizers import L1, Regularizer


def per_sample(tau: float | Tensor, z: Tensor) -> float | Tensor:
    """A number, or one step per sample ``[B]`` shaped to broadcast over ``z``."""
    tau = check_step(tau)
    if isinstance(tau, Tensor) and tau.ndim == 1 and z.ndim > 1:
        if tau.shape[0] not in (1, z.shape[0]):
            raise ValueError(
                f"tau got shape {tuple(tau.shape)} for a batch of {z.shape[0]}, takes one number "
                "per sample"
            )
        return tau.reshape(-1, *[1] * (z.ndim - 1))
    return tau


class HiddenProblem(ABC):
    """What solvers, certificates and layers may ask of a problem. ``z`` is ``[B, *state]``."""

    @abstractmethod
    def objective(self, z: Tensor) -> Tensor:
        """``G(z)``: ``[B]``, float32 or better; ``+inf`` outside the domain of the prior."""

    @abstractmethod
    def gradient(self, z: Tensor) -> Tensor:
        """The gradient of the smooth part of ``G``, the shape of ``z``."""

    @abstractmethod
    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        """``T_tau(z)``, whose fixed points have ``0 in dG(z)``; ``tau`` is a number or ``[B]``."""

    @abstractmethod
    def minimal_subgradient(self, z: Tensor) -> Tensor:
        """An element of ``dG(z)``, 0 iff ``z`` is stationary; ``inf`` where the prior is."""

    @abstractmethod
    def curvature(self) -> Curvature:
        """``m`` and ``L``: bounds on the Hessian of the smooth part, valid for every ``z``."""

    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors ``[B, ...]`` through which the problem depends on the sample."""

    @abstractmethod
    def with_inputs(self, *inputs: Tensor) -> HiddenProblem:
        """The same problem on other tensors in place of ``inputs()``."""

    @abstractmethod
    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """A state to start a solver from; ``shape`` ``[B, *state]`` where the input has less."""

    def unit_step(self) -> float | Tensor:
        """The ``tau`` of the map ``T_tau`` by which a solve is judged: 1, or ``1/L`` ``[B]``."""
        return 1.0

    def in_double(self) -> Self:
        """The same problem on the same numbers (weights, c and γ), detached and in float64."""
        return twin_in_double(self)

    @property
    def couples_batch(self) -> bool:
        """Whether a sample's part of ``G`` depends on other samples of the batch."""
        return False

    def into_domain(self, z: Tensor) -> Tensor:
        """``z`` moved to the nearest point where ``G`` is finite."""
        return z

    def stationarity(self, z: Tensor) -> Tensor:
        """``dist(0, dG(z))`` per sample: ``[B]``, float32 or better."""
        return sample_norm([self.minimal_subgradient(z)])

    def moreau(self, alpha: float) -> MoreauProblem:
        """The skip connection ``alpha T + (1 - alpha) I`` (Xie et al. 2021, Table 1, row 2)."""
        return MoreauProblem(self, alpha)

    def affine(self, matrix: float | Tensor, shift: Tensor | None = None) -> HiddenProblem:
        """The change of variable ``z = A y + shift`` (Xie et al. 2021, Table 1, row 3)."""
        return AffineProblem(self, matrix, shift)


@dataclass(frozen=True, eq=False)
class Problem(HiddenProblem):
    """``G(z) = sum f(z) + |z|^2/2 + q(z)``, plus ``R(z)`` or its Moreau envelope.

    Or, with ``smooth`` in place of ``coupling``, ``G(z) = f(z) + smooth(z, x, theta)`` and nothing
    added: any objective, by a function or by a ``Coupling`` (``LeastSquares``, a kernel, a sum).

    A problem is bound to its input, so it is made for a batch and thrown away.

    Args:
        prior: ``f``.
        coupling: ``q``, in the form of a layer.
        regularizer: ``R``.
        regularize: Whether ``R`` is added, or its Moreau envelope.
        smooth: A function that returns one number per sample, ``[B]``, or a ``Coupling``.
        x: The per-sample arguments of that function: a tensor ``[B, ...]`` or a tuple of them.
        theta: Its shared arguments: a tensor, a module, a tuple or dict of them.
        bounds: ``(m, L)`` with ``m <= Hessian <= L`` for every ``z``; None: estimated.
        state: The shape of ``z`` without the batch; None: that of ``x``.
        ridge: The weight of ``|z|^2/2``: 1 with ``coupling``, 0 with ``smooth``.
    """

    prior: Prior
    coupling: Coupling = None  # type: ignore[assignment]  # made of ``smooth``, if not given
    regularizer: Regularizer | None = None
    regularize: Literal["gradient", "prox"] = "gradient"
    _: KW_ONLY
    smooth: InitVar[Callable[..., Tensor] | Coupling | None] = None
    x: InitVar[Tensor | tuple[Tensor, ...] | None] = None
    theta: InitVar[Any] = None
    bounds: InitVar[tuple[float | Tensor, float | Tensor] | None] = None
    state: InitVar[Sequence[int] | None] = None
    ridge: float = 1.0
    _prior: Prior = field(init=False, repr=False)  # with the non-smooth regularizer, if any
    _smooth: Regularizer | None = field(init=False, repr=False)  # what is left of it

    def __post_init__(
        self,
        smooth: Callable[..., Tensor] | Coupling | None,
        x: Tensor | tuple[Tensor, ...] | None,
        theta: Any,
        bounds: tuple[float | Tensor, float | Tensor] | None,
        state: Sequence[int] | None,
    ) -> None:
        if (smooth is None) == (self.coupling is None):
            given = "neither" if smooth is None else "both"
            raise TypeError(f"Problem: takes one of coupling and smooth, got {given}")
        if self.ridge not in (0.0, 1.0):
            raise ValueError(f"Problem: ridge got {self.ridge!r}, takes 1.0 (a layer) or 0.0")
        if smooth is not None:
            object.__setattr__(self, "ridge", 0.0)
            object.__setattr__(self, "coupling", as_smooth(smooth, x, theta, bounds, state))
        elif any(part is not None for part in (x, theta, bounds, state)):
            raise TypeError("Problem: x, theta, bounds and state go with smooth, not with coupling")
        kinds = {"prior": Prior, "coupling": Coupling, "regularizer": Regularizer | None}
        for name, kind in kinds.items():
            part = getattr(self, name)
            if not isinstance(part, kind):
                takes = f"a {name.capitalize()}"
                raise TypeError(f"Problem: {name} got a {type(part).__name__}, takes {takes}")
        if self.regularize not in ("gradient", "prox"):
            raise ValueError(
                f"Problem: regularize got {self.regularize!r}, takes 'gradient' or 'prox'"
            )
        prior, rest = self.prior, self.regularizer
        if rest is not None and self.regularize == "prox" and not rest.has_prox:
            raise ValueError(
                f"Problem: regularize='prox' needs a regularizer with a closed prox (SquaredNorm, "
                f"L1), got {type(rest).__name__}; use regularize='gradient'"
            )
        if self.regularize == "gradient" and isinstance(rest, L1):
            prior, rest = WithL1(prior, rest.weight), None
        elif self.regularize == "gradient" and rest is not None and not rest.smooth:
            raise ValueError(
                f"Problem: regularize='gradient' takes a smooth regularizer or L1, got "
                f"{type(rest).__name__}; use regularize='prox'"
            )
        object.__setattr__(self, "_prior", prior)
        object.__setattr__(self, "_smooth", rest)

    @property
    def effective_prior(self) -> Prior:
        """The prior whose prox ``step`` takes: ``f``, or ``f + w|.|`` with an L1 regularizer."""
        return self._prior

    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.coupling.inputs(), *self._prior.inputs())

    def with_inputs(self, *inputs: Tensor) -> Problem:
        own = len(inputs) - len(self._prior.inputs())
        coupling = self.coupling.with_inputs(*inputs[:own])
        if own == len(inputs):
            return replaced(self, coupling=coupling)
        # The weight of L1 is a number, so both priors have the same tensors.
        prior, effective = (f.with_inputs(*inputs[own:]) for f in (self.prior, self._prior))
        return replaced(self, coupling=coupling, prior=prior, _prior=effective)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        return self.coupling.default_start(shape)

    def into_domain(self, z: Tensor) -> Tensor:
        """The domain of ``f`` is convex and holds ``z*``: the answer is no farther from it."""
        if isinstance(self._prior, Free):
            return z
        if type(self._prior) is NonNegative and not torch.is_grad_enabled():
            return torch.relu(z)  # the same in one pass; its gradient at 0 is another
        return self._prior.into_domain(z)

    def _force(self, z: Tensor) -> Tensor:
        """The gradient of the smooth part without ``|z|^2/2``."""
        force = self.coupling.grad(z)
        if self._smooth is None:
            return force
        if self.regularize == "prox":
            return force + (z - self._smooth.prox(z))
        return force + self._smooth.grad(z)

    @property
    def couples_batch(self) -> bool:
        return self.regularizer is not None and self.regularizer.couples_batch

    def _penalty(self, regularizer: Regularizer, z: Tensor) -> Tensor:
        """``R`` or its envelope: ``[B]``, or ``R/B`` for all where it couples the batch."""
        if self.regularize == "prox":
            wide = at_least_float32(z)
            near = regularizer.prox(wide)
            return regularizer.value(near) + 0.5 * per_sample_sum((near - wide) ** 2)
        value = regularizer.value(z)
        return value / z.shape[0] if regularizer.couples_batch else value

    def objective(self, z: Tensor) -> Tensor:
        wide = at_least_float32(z)
        prior = self._prior.value(z)
        if self._prior.separable:
            prior = per_sample_sum(prior)
        total = prior + self.coupling.value(z)
        if self.ridge:
            total = total + 0.5 * per_sample_sum(wide * wide)
        return total if self._smooth is None else total + self._penalty(self._smooth, z)

    def gradient(self, z: Tensor) -> Tensor:
        return z + self._force(z) if self.ridge else self._force(z)

    def unit_step(self) -> float | Tensor:
        if self.ridge:
            return 1.0
        upper = self.curvature().upper
        if isinstance(upper, Tensor):
            return torch.where(upper.isfinite() & (upper > 0), 1.0 / upper, 1.0)
        return 1.0 / upper if 0.0 < upper < math.inf else 1.0

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        tau = per_sample(tau, z)
        pushed = self.coupling.descent(z) if self._smooth is None else -self._force(z)
        if not self.ridge:
            return self._prior.prox((z + tau * pushed).to(z.dtype), tau)
        if isinstance(tau, float) and tau == 1.0:
            return self._prior.prox(pushed)
        if isinstance(tau, float):
            moved = torch.add((1.0 - tau) * z, pushed, alpha=tau).to(z.dtype)
        else:
            moved = ((1.0 - tau) * z + tau * pushed).to(z.dtype)
        return self._prior.prox(moved, tau)

    def minimal_subgradient(self, z: Tensor) -> Tensor:
        """The element of least norm of ``dG(z)``."""
        return self._prior.least_subgradient(z, at_least_float32(self.gradient(z)))

    def curvature(self) -> Curvature:
        return self._with_rest(self.coupling.curvature())

    def tight_curvature(self, z: Tensor | None = None) -> Curvature:
        """The closest bounds there are, for every ``z`` or at this one; expensive."""
        if z is None:
            return self._with_rest(self.coupling.tight_curvature())
        return self._with_rest(self.coupling.tight_local_curvature(z))

    def local_curvature(self, z: Tensor) -> Curvature:
        """Bounds at this ``z`` (of the coupling; those of a regularizer stay global)."""
        return self._with_rest(self.coupling.local_curvature(z))

    def _with_rest(self, q: Curvature) -> Curvature:
        """Add the identity of ``|z|^2/2`` and the regularizer to the bounds of ``q``."""
        if self._smooth is None:
            return replace(q, lower=self.ridge + q.lower, upper=self.ridge + q.upper)
        r = self._smooth.curvature()
        if self.regularize == "prox":  # h/(1+h) is increasing: the envelope's Hessian
            ends = [1.0 if h == math.inf else h / (1.0 + h) for h in (r.lower, r.upper)]
            r = Curvature(ends[0], ends[1], r.rigorous, f"envelope of: {r.note}")
        note = f"{q.note}; {r.note}"
        lower, upper = self.ridge + q.lower + r.lower, self.ridge + q.upper + r.upper
        return Curvature(lower, upper, q.rigorous and r.rigorous, note, q.basis)


@dataclass(frozen=True, eq=False)
class _Transformed(HiddenProblem):
    """Another view of a problem, on the same inputs."""

    problem: HiddenProblem

    @property
    def couples_batch(self) -> bool:
        return self.problem.couples_batch

    def inputs(self) -> tuple[Tensor, ...]:
        return self.problem.inputs()

    def with_inputs(self, *inputs: Tensor) -> Self:
        return replaced(self, problem=self.problem.with_inputs(*inputs))

    def unit_step(self) -> float | Tensor:
        return self.problem.unit_step()


@dataclass(frozen=True, eq=False)
class MoreauProblem(_Transformed):
    """``z -> alpha T(z) + (1 - alpha) z``: a skip connection, ``0 < alpha <= 1``.

    The fixed points are those of ``T``; a Lipschitz constant ``k`` of ``T`` becomes
    ``alpha k + 1 - alpha``. Xie et al. 2021 (Table 1) calls this the prox of
    ``alpha M_phi^{1-alpha}``, which holds where ``T = prox_phi``. The ``T`` of a general problem is
    not a prox, so ``objective``, ``gradient``, ``stationarity`` and ``curvature`` are those of
    ``G`` itself, whose minimizers the envelope ``alpha M_G^{1-alpha}`` shares.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ValueError(f"moreau: alpha got {self.alpha!r}, takes 0 < alpha <= 1")

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        return self.problem.default_start(shape)

    def objective(self, z: Tensor) -> Tensor:
        return self.problem.objective(z)

    def gradient(self, z: Tensor) -> Tensor:
        return self.problem.gradient(z)

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self.alpha * self.problem.step(z, tau) + (1.0 - self.alpha) * z

    def affine(self, matrix: float | Tensor, shift: Tensor | None = None) -> MoreauProblem:
        """The skip connection of the inner problem in the other variable, which is the same map."""
        return MoreauProblem(self.problem.affine(matrix, shift), self.alpha)

    def minimal_subgradient(self, z: Tensor) -> Tensor:
        return self.problem.minimal_subgradient(z)

    def curvature(self) -> Curvature:
        return self.problem.curvature()


@dataclass(frozen=True, eq=False)
class AffineProblem(_Transformed):
    """``G(A y + shift)`` in the variable ``y``, with the layer ``A^{-1}(T(A y + shift) - shift)``.

    ``matrix`` is a number (scaling) or an invertible ``[n, n]`` matrix on the flattened state;
    ``shift`` broadcasts to ``z``. Fixed points correspond, ``z* = A y* + shift``. The step is a
    proximal-gradient step of ``G(A .)`` only when ``A`` is orthogonal (``orthogonal``); otherwise
    it descends in the metric of ``A``. ``minimal_subgradient`` is ``A' s`` with ``s`` the least
    subgradient of ``G``: its norm is the exact distance when ``A`` is a multiple of an orthogonal
    matrix and an upper bound otherwise, zero exactly at stationary points in both cases.

    ``A y + shift`` is rounded, and a rounded 0 is no longer at the kink of a ReLU or inside its
    domain. So ``objective`` forgives a state outside the domain by rounding alone, and
    ``minimal_subgradient`` looks at the state after a proximal step of sqrt(eps).
    """

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
        near = self.problem.step(state, eps)
        moved = (near - state).abs().flatten(1).amax(1)
        size = state.abs().flatten(1).amax(1) + self._spread[1] * z.abs().flatten(1).sum(1)
        excused = value.isinf() & (moved <= 64.0 * eps * (1.0 + size))
        return torch.where(excused, self.problem.objective(near), value)

    def gradient(self, z: Tensor) -> Tensor:
        return self._apply(self.problem.gradient(self.to_state(z)), transpose=True)

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return self.from_state(self.problem.step(self.to_state(z), tau))

    def minimal_subgradient(self, z: Tensor) -> Tensor:
        state = self.to_state(z)
        state = self.problem.step(state, math.sqrt(torch.finfo(state.dtype).eps))
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
        return Curvature(ends[0], ends[1], base.rigorous, note, base.basis)
