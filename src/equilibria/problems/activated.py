"""The coupling of OptEq's Eq 3: an activation between W and Wᵀ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equilibria.problems.kernels import Curvature, ImageCoupling, per_sample_sum, unproven
from equilibria.problems.norms import FUNCTION, UNIT, sum_error
from equilibria.problems.operators import LinearOperator
from equilibria.problems.priors import Prior, at_least_float32


class Activated(ImageCoupling):
    """q(z) = −(1/ν) 1ᵀσ̃(Wz + c), −∇q = (1/ν) Wᵀσ(Wz + c), σ̃′ = σ (OptEq Eq 3, Theorem 1).

    With no prior (``Free``) the layer map is Eq 3 itself, and G(z) = ½‖z‖² − (1/ν)1ᵀσ̃(Wz + c) has,
    by Toland's duality, the minimizer and the minimum of Theorem 1's φ, which is closed only for an
    invertible W. From the prior of σ, with a = σ(v), σ̃(v) = (f + ½|·|²)*(v) = va − f(a) − ½a².

    Args:
        W: z [B, *state] → Wz, shaped like c.
        c: Ux + b, [B, *out].
        prior: f with σ = prox_f.
        nu: ν > 0; Theorem 1 asks ν ≥ L_σ‖W‖².
    """

    def __init__(self, W: LinearOperator | Tensor, c: Tensor, prior: Prior, nu: float = 1.0):
        super().__init__(W, c)
        if not isinstance(prior, Prior):
            raise TypeError(f"Activated(prior={prior!r}): expected a prior such as NonNegative().")
        if not 0.0 < nu < float("inf"):
            raise ValueError(f"Activated(nu={nu!r}): expected a positive finite number.")
        self.prior = prior
        self.nu = float(nu)

    def default_start(self, shape: Sequence[int] | None = None) -> Tensor:
        """z₀ = 0. ``shape`` [B, *state] is needed for strided convolutions."""
        if shape is None:
            shape = (self.c.shape[0], *self.operator.input_shape(self.c.shape[1:]))
        start = self.c.new_zeros(tuple(shape))
        self.check_state(start)
        return start

    def _before(self, z: Tensor) -> Tensor:
        """Wz + c."""
        self.check_state(z)
        return self.operator(z) + self.c

    def hidden(self, z: Tensor) -> Tensor:
        """ζ = σ(Wz + c). [B, *state] → [B, *out]."""
        return self.prior.activation(self._before(z))

    def value(self, z: Tensor) -> Tensor:
        v = at_least_float32(self._before(z))
        a = self.prior.activation(v)
        return -per_sample_sum(v * a - self.prior.value(a) - 0.5 * a * a) / self.nu

    def grad(self, z: Tensor) -> Tensor:
        pulled = self.operator.adjoint(self.hidden(z), z.shape[1:])
        return -pulled if self.nu == 1.0 else pulled * (-1.0 / self.nu)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        before = self._before(z)
        keep = torch.is_grad_enabled() and before.requires_grad
        with torch.enable_grad():
            before = before if keep else before.detach().requires_grad_()
            a = self.prior.activation(before)
            (slope,) = torch.autograd.grad(a, before, torch.ones_like(a), create_graph=keep)
        pulled = self.operator.adjoint(slope * self.operator(v), z.shape[1:])
        return pulled * (-1.0 / self.nu)

    def rounding_error(self, z: Tensor) -> Tensor | None:
        """∇q = −(1/ν)Wᵀσ(v), v = Wz + c, line by line."""
        magnitude = self.operator.magnitude()
        if magnitude is None:
            return None
        size, terms = magnitude
        v = self.operator(z) + self.c
        a = self.prior.activation(v)
        off = sum_error(terms) * size(z.abs()) + 2 * UNIT * v.abs()
        off = off + FUNCTION * (v.abs() + a.abs()) + sum_error(terms + 2) * a.abs()
        return size.adjoint(off, z.shape[1:]) / self.nu

    def lipschitz(
        self, modulus: float, rest: Tensor, reach: float, *, in_x: bool
    ) -> tuple[float | None, str]:
        """m‖Δz‖² ≤ (1/ν)⟨WΔz, Δσ⟩ with σ moved by c alone: L_σ‖W‖/(νm)."""
        missing = unproven(modulus, reach)
        if missing is not None:
            return None, missing
        found = self._steepness() / modulus * (1.0 + 1e-14)
        return found * reach, "every input: L_σ‖W‖/(νm)·‖U‖"

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        m = modulus.expand_as(error)
        found = torch.where(m > 0, self._steepness() / m * (1.0 + 1e-14), math.inf)
        return found, "as for every input: σ′ jumps at kinks"

    def _steepness(self) -> float:
        """L_σ‖W‖/ν."""
        return self.prior.expansion * self.norm_upper() / self.nu

    def curvature(self) -> Curvature:
        """−(L_σ/ν)‖W‖² ≤ ∇²q ≤ 0."""
        lower = -self.prior.expansion * self.norm_upper() ** 2 / self.nu
        note = "every z: ∇²q = −(1/ν)Wᵀ diag(σ′)W, 0 ≤ σ′ ≤ L_σ"
        # The L_σ of a sampled activation is a measurement.
        return Curvature(lower, 0.0, not self.prior.sampled, note)

    def local_curvature(self, z: Tensor) -> Curvature:
        """The global bounds: σ′ jumps at kinks, where a bound at one point says nothing."""
        self.check_state(z)
        return self.curvature()
