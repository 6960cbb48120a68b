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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from equilibria.engine.tree import sample_norm
from equilibria.problems.kernels import Coupling, Curvature, per_sample_sum
from equilibria.problems.norms import replaced, twin_in_double
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


@dataclass(frozen=True, eq=False)
class Problem(HiddenProblem):
    """``G(z) = sum f(z) + |z|^2/2 + q(z)``, plus ``R(z)`` or its Moreau envelope.

    ``coupling`` is bound to its input, so a problem is made for a batch and thrown away.
    """

    prior: Prior
    coupling: Coupling
    regularizer: Regularizer | None = None
    regularize: Literal["gradient", "prox"] = "gradient"
    _prior: Prior = field(init=False, repr=False)  # with the non-smooth regularizer, if any
    _smooth: Regularizer | None = field(init=False, repr=False)  # what is left of it

    def __post_init__(self) -> None:
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
        prior, smooth = self.prior, self.regularizer
        if smooth is not None and self.regularize == "prox" and not smooth.has_prox:
            raise ValueError(
                f"Problem: regularize='prox' needs a regularizer with a closed prox (SquaredNorm, "
                f"L1), got {type(smooth).__name__}; use regularize='gradient'"
            )
        if self.regularize == "gradient" and isinstance(smooth, L1):
            prior, smooth = WithL1(prior, smooth.weight), None
        elif self.regularize == "gradient" and smooth is not None and not smooth.smooth:
            raise ValueError(
                f"Problem: regularize='gradient' takes a smooth regularizer or L1, got "
                f"{type(smooth).__name__}; use regularize='prox'"
            )
        object.__setattr__(self, "_prior", prior)
        object.__setattr__(self, "_smooth", smooth)

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
        total = prior + 0.5 * per_sample_sum(wide * wide) + self.coupling.value(z)
        return total if self._smooth is None else total + self._penalty(self._smooth, z)

    def gradient(self, z: Tensor) -> Tensor:
        return z + self._force(z)

    def step(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        tau = per_sample(tau, z)
        pushed = self.coupling.descent(z) if self._smooth is None else -self._force(z)
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
            return Curvature(1.0 + q.lower, 1.0 + q.upper, q.rigorous, q.note)
        r = self._smooth.curvature()
        if self.regularize == "prox":  # h/(1+h) is increasing: the envelope's Hessian
            ends = [1.0 if h == math.inf else h / (1.0 + h) for h in (r.lower, r.upper)]
            r = Curvature(ends[0], ends[1], r.rigorous, f"envelope of: {r.note}")
        note = f"{q.note}; {r.note}"
        lower, upper = 1.0 + q.lower + r.lower, 1.0 + q.upper + r.upper
        return Curvature(lower, upper, q.rigorous and r.rigorous, note)
