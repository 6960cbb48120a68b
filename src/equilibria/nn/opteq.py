"""OptEq (Xie et al. 2021): z = Wᵀσ(Wz + Ux + b), and its other form ζ = σ(WWᵀζ + Ux + b)."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack

from torch import Tensor

from equilibria.engine.options import check_number
from equilibria.problems import Free, HiddenProblem, Linear, Problem
from equilibria.problems.kernels import Activated
from equilibria.problems.operators import TransposedOperator

from .inputs import lowered
from .layer import LayerOptions, WeightedLayer, weight_operator


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
        channels, mid: channels of z; of ζ, Ux and Wz.
        form: which of the two is solved and returned.
        nu: ν of Theorem 1, which asks ν ≥ L_σ‖W‖² (``nu_needed()``).
        options: see ``LayerOptions``.
    """

    shown = (*WeightedLayer.shown, "form", "nu")

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
        self.form, self.nu = form, nu
        check_number(self, "nu", low=0.0, low_open=True)

    @property
    def state_channels(self) -> int:
        return self.channels if self.form == "state" else self.mid

    def problem(self, x: Tensor) -> Problem:
        """The problem of this form. In training mode this moves W's power iteration."""
        c = self.features(x)
        if self.form == "state":
            return Problem(Free(), Activated(self.operator(), c, self.prior, self.nu))
        weight = lowered(self.W.weight)
        if self.nu != 1.0:
            weight = weight * (1.0 / math.sqrt(self.nu))
        return Problem(self.prior, Linear(TransposedOperator(weight_operator(weight)), c))

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
