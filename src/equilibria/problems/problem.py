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
from equilibria.problems.kernels import Coupling, Curvature
from equilibria.problems.objective import Smooth
from equilibria.problems.parts import Part, replaced
from equilibria.problems.priors import (
    Prior,
    WithL1,
    at_least_float32,
    per_sample_sum,
    step_of_samples,
)
from equilibria.problems.regularizers import L1, Regularizer


class HiddenProblem(Part, ABC):
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
    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """A state to start a solver from; ``shape`` ``[B, *state]`` where the input has less."""

    def unit_step(self) -> float | Tensor:
        """The ``tau`` of the map ``T_tau`` by which a solve is judged: 1, or ``1/L`` ``[B]``."""
        return 1.0

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
    effective_prior: Prior = field(init=False, repr=False)
    """The prior whose prox ``step`` takes: ``f``, or ``f + w|.|`` with an L1 regularizer."""
    _smooth: Regularizer | None = field(init=False, repr=False)  # what is left of it
    parameters = ("coupling", "prior")

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
        options = {"x": x, "theta": theta, "bounds": bounds, "state": state}
        own = [name for name, value in options.items() if value is not None]
        if own and (smooth is None or isinstance(smooth, Coupling)):
            raise TypeError(
                f"Problem: {own[0]} belongs to a smooth function: x, theta, bounds and state go "
                "with smooth=function, and a Coupling has its own"
            )
        if smooth is not None:
            made = smooth if isinstance(smooth, Coupling) else Smooth(smooth, **options)
            object.__setattr__(self, "ridge", 0.0)
            object.__setattr__(self, "coupling", made)
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
        object.__setattr__(self, "effective_prior", prior)
        object.__setattr__(self, "_smooth", rest)

    def with_inputs(self, *inputs: Tensor) -> Self:
        own = len(inputs) - len(self.prior.inputs())
        coupling = self.coupling.with_inputs(*inputs[:own])
        if own == len(inputs):
            return replaced(self, coupling=coupling)
        # The weight of L1 is a number, so both priors have the same tensors.
        both = (self.prior, self.effective_prior)
        prior, effective = (f.with_inputs(*inputs[own:]) for f in both)
        return replaced(self, coupling=coupling, prior=prior, effective_prior=effective)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        return self.coupling.default_start(shape)

    def into_domain(self, z: Tensor) -> Tensor:
        """The domain of ``f`` is convex and holds ``z*``: the answer is no farther from it."""
        return self.effective_prior.into_domain(z)

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
        total = self.effective_prior.sample_value(z) + self.coupling.value(z)
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
        tau = step_of_samples(tau, z)
        pushed = self.coupling.descent(z) if self._smooth is None else -self._force(z)
        if not self.ridge:
            return self.effective_prior.prox((z + tau * pushed).to(z.dtype), tau)
        if isinstance(tau, float) and tau == 1.0:
            return self.effective_prior.prox(pushed)
        if isinstance(tau, float):
            moved = torch.add((1.0 - tau) * z, pushed, alpha=tau).to(z.dtype)
        else:
            moved = ((1.0 - tau) * z + tau * pushed).to(z.dtype)
        return self.effective_prior.prox(moved, tau)

    def minimal_subgradient(self, z: Tensor) -> Tensor:
        """The element of least norm of ``dG(z)``."""
        return self.effective_prior.least_subgradient(z, at_least_float32(self.gradient(z)))

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
        if self.regularize == "prox":
            r = r.envelope()
        note = f"{q.note}; {r.note}"
        lower, upper = self.ridge + q.lower + r.lower, self.ridge + q.upper + r.upper
        return Curvature(lower, upper, q.rigorous and r.rigorous, note, q.basis)
