"""Envelope: a 1-Lipschitz layer from the hidden problem of any GEQ or OptEq."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equilibria.adjoints.graph import failed_codes, lend
from equilibria.certify import Enclosed
from equilibria.certify.certificate import distance
from equilibria.certify.network import tight_solver
from equilibria.engine.tree import per_sample, sample_norm
from equilibria.problems import Problem
from equilibria.problems.norms import SAFETY, sum_error

from .constraints import NormBounded, constrain
from .geq import GEQ
from .opteq import OptEq

_MARGIN = 1.03  # norms are held by estimates; with this margin the proven ones usually hold too


class Envelope(nn.Module):
    """y = x − (2/L)·Uᵀp(Ux + b), 1-Lipschitz for every weight (docs/facts.md, fact 7).

    p is the gradient of the optimal value φ(c) = min_z G(z; c) of the layer's hidden problem, moved
    so that 0 ⪯ ∂p/∂c ⪯ L, and U is held at ‖U‖ ≤ 1. So I − (2/L)UᵀPU has its eigenvalues
    in [−1, 1]. It is a residual layer; the branch is what the optimum is worth.

    - GEQ with a γ that does not depend on x: p = ∇φ(c) + κc, ∇φ(c) = unpatch(eᵢrᵢM) at z*,
      κ = b/(1 − b‖W‖²), b = 2e^{−3/2}, L = 1 + κ.
    - OptEq with ``form="hidden"``: p = ζ*(c), L = 1/(1 − ‖W‖²). With W = 0 this is the
      convex-potential layer x − 2Uᵀσ(Ux + b) (Meunier et al. 2022), so that training chooses how
      far to leave it: κ and L follow the estimate of ‖W‖, not its bound.

    x and y: [B, in_channels] or [B, in_channels, H, W], the input of the layer. The norms of the
    constraints are estimates with a margin of 3%; ``lipschitz(x)`` is proven, usually 1.

    Args:
        layer: a GEQ or OptEq with ``constraint=NormBounded(...)``. Its U is constrained too.
    """

    def __init__(self, layer: GEQ | OptEq) -> None:
        super().__init__()
        given: object = layer
        if not isinstance(given, (GEQ, OptEq)):
            raise TypeError(f"Envelope takes a GEQ or an OptEq, got {type(layer).__name__}.")
        if not isinstance(layer.constraint, NormBounded):
            raise ValueError(
                f"Envelope needs a bound on the norm of W, and the layer has constraint="
                f"{layer.constraint!r}: make it with constraint=NormBounded(bound=...)."
            )
        if isinstance(layer, OptEq) and (layer.form != "hidden" or layer.nu != 1.0):
            raise ValueError(
                f"Envelope(OptEq(form={layer.form!r}, nu={layer.nu:g})): expected form='hidden' "
                "and nu=1."
            )
        if isinstance(layer, GEQ) and layer.gamma.input_dependent:
            raise ValueError(
                f"Envelope(GEQ(gamma={layer.gamma!r})): γ depends on the input, for which nothing "
                "is proven. Give a number, FixedGamma or LearnedGamma."
            )
        bound = layer.constraint.bound
        limit = 1.0 if isinstance(layer, OptEq) else math.sqrt(math.exp(1.5) / 2.0)
        if not _MARGIN * bound < limit:
            raise ValueError(
                f"Envelope: the bound {bound:g} on the norm of W must be below "
                f"{limit / _MARGIN:.4f}: the equilibrium is unique below {limit:.4f}, and the norm "
                "may exceed its bound a little."
            )
        self.layer: GEQ | OptEq = layer
        self._sign = -1.0 if isinstance(layer, OptEq) else 1.0  # φ is concave there
        self.norm: Tensor | None
        self.register_buffer("norm", None)  # of a frozen copy; in its state too
        size, steps = layer.constraint.size, layer.constraint.steps
        constrain(layer.U, "weight", NormBounded(bound=1.0 / _MARGIN, size=size, steps=steps))

    def freeze(self) -> None:
        """Keep the estimate of ‖W‖ as it is, for a W that loses its constraint."""
        self.norm = self._norm().detach()

    def _norm(self) -> Tensor:
        """The estimate of ‖W‖, through which gradients pass."""
        if self.norm is not None:
            return self.norm
        held: Any = self.layer.W.parametrizations
        (bounded,) = held.weight
        found: Tensor = bounded.sigma(held.weight.original).clamp_max(bounded.bound)
        return found

    def _range(self, problem: Problem, norm: Tensor | None = None) -> tuple[Any, Any]:
        """Bounds on ±∇²φ, for this norm of W or proven."""
        found = problem.coupling.value_curvature(norm)
        return (-found.upper, -found.lower) if self._sign < 0 else (found.lower, found.upper)

    def _scale(self, problem: Problem) -> tuple[Any, Any]:
        """The shift κ and the top L of p = ±∇φ + κc, by the estimate of ‖W‖."""
        low, high = self._range(problem, _MARGIN * self._norm())
        return -low, high - low

    def _output(self, x: Tensor, problem: Problem, z: Tensor) -> Tensor:
        shift, top = self._scale(problem)
        field = self._sign * problem.coupling.value_gradient(z) + shift * problem.coupling.c
        branch = self.layer.input_operator().adjoint(field, x.shape[1:])
        out: Tensor = x - (2.0 / top).to(branch.dtype) * branch
        return out

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            kept: list[Any] = []
            z = self.layer(x, keep=kept)  # by its forward, so that its hooks see it
            problem, solution = kept
            # U and W are applied once more here: not to NaN, whose gradient 0·NaN they would get.
            failed = failed_codes(solution.result)
            if failed is None:
                return self._output(x, problem, z)
            healthy = problem.with_inputs(*(lend(t, failed) for t in problem.inputs()))
            found = self._output(lend(x, failed), healthy, lend(z, failed))
            return torch.where(per_sample(failed, x), torch.nan, found)

    def _constant(self, problem: Problem) -> tuple[float, float]:
        """Proven: the Lipschitz constant of the layer, and how far an error of z moves y."""
        shift, top = map(float, self._scale(problem))
        least, most = (float(bound) + shift for bound in self._range(problem))
        u = self.layer.input_operator().norm_upper_on(problem.coupling.c.shape[1:])
        step = 2.0 / top
        up = 1.0 + 1e-13
        found = max(1.0, 1.0 - step * u**2 * min(least, 0.0), step * u**2 * most - 1.0) * up
        return found, step * u * problem.coupling.value_slope() * up

    @torch.no_grad()
    def lipschitz(self, x: Tensor) -> float:
        """A proven Lipschitz constant for all inputs; x [B, ...] only says the shape."""
        return self._constant(self.layer.problem(x))[0]

    @torch.no_grad()
    def enclose(self, x: Tensor) -> Enclosed:
        """The output at x with what is proven of it, for ``certify.certify_network``."""
        z = self.layer.solve(x, solver=tight_solver(self.layer)).value
        problem = self.layer.problem(x)
        constant, slope = self._constant(problem)
        off = distance(self.layer, x, z).error
        y = self._output(x, problem, z)
        terms = self.layer.input_operator().magnitude()
        count = 64 if terms is None else 8 * terms[1] + 64
        size = sample_norm([x]) + sample_norm([y]) + sample_norm([problem.coupling.c])
        rounding = SAFETY * sum_error(count) * math.sqrt(x[0].numel()) * size
        return Enclosed(y, constant, slope * off + rounding)
