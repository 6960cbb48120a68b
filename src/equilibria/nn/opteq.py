"""OptEq (Xie et al. 2021): z = Wᵀσ(Wz + Ux + b), and its other form ζ = σ(WWᵀζ + Ux + b)."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from equilibria.engine.options import check_number
from equilibria.problems import (
    ConvOperator,
    DenseOperator,
    Free,
    HiddenProblem,
    Linear,
    LinearOperator,
    Problem,
)
from equilibria.problems.kernels import Activated, per_sample_sum
from equilibria.problems.operators import TransposedOperator
from equilibria.problems.priors import at_least_float32

from .weighted import LayerOptions, WeightedLayer

__all__ = ["OptEq"]


class OptEq(WeightedLayer):
    """z = (1/ν)Wᵀσ(Wz + Ux + b) (Eq 3, Theorem 1), or ζ = σ((1/ν)WWᵀζ + Ux + b): one layer.

    The two forms have the solutions z = (1/ν)Wᵀζ and ζ = σ(Wz + Ux + b) of each other
    (``to_state``, ``to_hidden``), and each minimizes a problem of its own:

    - ``form="hidden"``: G(ζ) = 1ᵀf(ζ) + ½‖ζ‖² − ⟨c, ζ⟩ − (1/2ν)‖Wᵀζ‖², the linear kernel, with its
      state in the space of Wz. This is the linear twin of a GEQ of equal size (MOptEq).
    - ``form="state"``: G(z) = ½‖z‖² − (1/ν)1ᵀσ̃(Wz + c), whose minimizer is that of Theorem 1's φ.

    With ‖W‖² < ν both are strongly convex and their layer maps contract with factor ‖W‖²/ν.

    Dense without ``kernel_size``: x [B, in_channels], z [B, channels], ζ [B, mid], W
    [mid, channels]. Convolutional with it: x [B, in_channels, H, W], z [B, channels, H, W],
    ζ [B, mid, H, W].

    Args:
        channels: channels of z.
        mid: channels of ζ, Ux and Wz.
        form: which of the two is solved and returned.
        nu: ν of Theorem 1, which asks ν ≥ L_σ‖W‖² (``nu_needed()``).
        options: see ``LayerOptions``.
    """

    def __init__(
        self,
        channels: int,
        mid: int,
        *,
        form: Literal["state", "hidden"] = "state",
        nu: float = 1.0,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(channels, mid, features=mid, **options)
        if form not in ("state", "hidden"):
            raise ValueError(f"OptEq(form={form!r}): expected 'state' or 'hidden'.")
        self.form = form
        self.nu = nu
        check_number(self, "nu", low=0.0, low_open=True)

    @property
    def state_channels(self) -> int:
        return self.channels if self.form == "state" else self.mid

    def problem(self, x: Tensor) -> Problem:
        """The problem of this form. In training mode this moves W's power iteration."""
        c = self.features(x)
        w = self.operator()
        if self.form == "state":
            return Problem(Free(), Activated(w, c, self.prior, self.nu))
        return Problem(self.prior, Linear(TransposedOperator(self._scaled(w)), c))

    def _scaled(self, w: LinearOperator) -> LinearOperator:
        """W/√ν."""
        if self.nu == 1.0:
            return w
        factor = 1.0 / math.sqrt(self.nu)
        if isinstance(w, ConvOperator):
            return ConvOperator(w.weight * factor)
        assert isinstance(w, DenseOperator)
        return DenseOperator(w.weight * factor)

    def to_hidden(self, z: Tensor, x: Tensor) -> Tensor:
        """ζ = σ(Wz + Ux + b) from z of the state form."""
        return Activated(self.operator(), self.features(x), self.prior).hidden(z)

    def to_state(self, zeta: Tensor) -> Tensor:
        """z = (1/ν)Wᵀζ from ζ of the hidden form."""
        z = TransposedOperator(self.operator())(zeta)
        return z if self.nu == 1.0 else z / self.nu

    def nominal_bounds(self, problem: HiddenProblem) -> tuple[Any, Any] | None:
        norm = self.nominal_norm()
        return None if norm is None else (1.0 - norm**2 / self.nu, 1.0)

    def nu_needed(self) -> float:
        """The least ν for which Theorem 1 is proven here: L_σ‖W‖², by the upper bound on ‖W‖."""
        return self.prior.expansion * self.operator().norm_upper() ** 2

    def objective_state(self, z: Tensor, x: Tensor, *, tolerance: float | None = None) -> Tensor:
        """φ(z) = ψ*(z) − ½‖z‖² of Theorem 1, in closed form for a square invertible W. [B].

        ψ = (1/ν)1ᵀσ̃(W· + c) and σ̃* = f + ½|·|², so with ζ = νW⁻ᵀz

            φ(z) = (1/ν)(1ᵀf(ζ) + ½‖ζ‖² − ⟨c, ζ⟩) − ½‖z‖²,

        Eq 4 for ReLU with σ̃*(0) = 0 (the paper prints ∞ there, where most equilibria sit). Entries
        of ζ outside the domain of f by less than ``tolerance``·max|ζ| count as on its edge: the
        solve with W rounds (None: 1e-9 in float64, 1e-4 in float32).
        """
        w = self.operator()
        if not isinstance(w, DenseOperator) or w.weight.shape[0] != w.weight.shape[1]:
            raise ValueError(
                "OptEq.objective_state is closed for a square matrix W only, and this layer has "
                f"channels={self.channels}, mid={self.mid}, kernel_size={self.kernel_size}; "
                "OptEq(form='state').problem(x).objective(z) has the same minimizer and minimum "
                "for every W."
            )
        c = at_least_float32(self.features(x))
        z = at_least_float32(z)
        weight = at_least_float32(w.weight)
        spread = torch.linalg.svdvals(weight.detach().double())
        if not bool(spread[-1] > 1e-10 * spread[0]):
            raise ValueError(
                "OptEq.objective_state needs an invertible W; its singular values go from "
                f"{float(spread[-1]):.2e} to {float(spread[0]):.2e}."
            )
        zeta = self.nu * torch.linalg.solve(weight.mT, z.mT).mT
        if tolerance is None:
            tolerance = 1e-9 if zeta.dtype == torch.float64 else 1e-4
        # prox_{τf} for a tiny τ is the projection to the domain of f.
        outside = torch.isinf(self.prior.value(zeta))
        edge = self.prior.prox(zeta, 1e-12)
        near = (edge - zeta).abs() <= tolerance * zeta.detach().abs().amax(1, keepdim=True)
        zeta = torch.where(outside & near, edge, zeta)
        inner = self.prior.value(zeta) + 0.5 * zeta * zeta - c * zeta
        return per_sample_sum(inner) / self.nu - 0.5 * per_sample_sum(z * z)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form!r}, nu={self.nu:g}"
