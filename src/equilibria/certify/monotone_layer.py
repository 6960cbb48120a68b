"""What is proven about a monotone layer and about a z that it returned.

Write M = I − W, T(z) = prox_f(Wz + c), p = T(z), r = z − p. From z − Mz + c − p ∈ ∂f(p) and
c − Mz* ∈ ∂f(z*), monotonicity of ∂f gives ⟨Me, e⟩ ≤ ⟨Wr, e⟩ for e = p − z*, and so m‖e‖² ≤ ⟨Wr, e⟩:
e lies in the ball of radius ‖Wr‖/2m around Wr/2m, and

    ‖z − z*‖ = ‖r + e‖ ≤ ‖r + Wr/2m‖ + ‖Wr‖/2m ≤ (1 + ‖W‖/m)·‖r‖.                    (a)

The same in z − z*: m‖z − z*‖² ≤ ⟨q, z − z*⟩ − ‖r‖² with q = (I + Mᵀ)r = 2r − Wᵀr, so

    ‖z − z*‖ ≤ ‖q‖/2m + √(‖q‖²/4m² − ‖r‖²/m) ≤ ((1 + L)/m)·‖r‖.                      (b)

The smaller is taken. For two inputs m‖Δz‖² ≤ ⟨Δc, Δz⟩, so x ↦ z* has the Lipschitz constant ‖U‖/m
(Pabbaraju, Winston and Kolter). Everything is computed in float64 from the W and c that the layer
made in its own dtype, with bounds on the rounding.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.engine.tree import sample_norm
from equilibria.problems.monotone_operator import MonotoneInclusion, MonotoneOperator, States
from equilibria.problems.norms import FUNCTION, SAFETY, UNIT, exact
from equilibria.problems.priors import Prior
from equilibria.solvers.forward_backward import ForwardBackward, forward_backward_factor
from equilibria.solvers.peaceman_rachford import PeacemanRachford, peaceman_rachford_factor

from .guarantee import SAMPLED, Guarantee, solved
from .map_certificate import MapCertificate
from .rounding import direct_convolutions

__all__ = ["certify_monotone"]

_UP = 1.0 + 1e-12


class MonotoneLayer(Protocol):
    """What is asked of the layer."""

    m: float
    prior: Prior
    solver: SolverOptions

    def solve(self, x: Tensor) -> Solution[Any]: ...
    def inject(self, x: Tensor) -> tuple[Tensor, ...]: ...
    def inclusion(self, x: Tensor) -> MonotoneInclusion: ...
    def input_norm_upper(self) -> float: ...


@torch.no_grad()
def certify_monotone(layer: MonotoneLayer, x: Tensor, z: Any = None) -> MapCertificate:
    """The certificate of ``layer`` at x, for z or for the layer's own answer."""
    z, solver = solved(lambda: layer.solve(x), z)
    (c,) = layer.inject(x)
    own = layer.inclusion(x)
    inclusion = MonotoneInclusion(own.operator.double(), layer.prior, own.tiers)
    parts = tuple(exact(part) for part in own.parts(z))
    with direct_convolutions(x):
        return _certify(layer, inclusion, parts, exact(c), solver)


def _certify(
    layer: MonotoneLayer, inclusion: MonotoneInclusion, z: States, c: Tensor, solver: str
) -> MapCertificate:
    operator = inclusion.operator
    upper, norm = operator.norm_uppers()
    # ⟨(I − W)z, z⟩ ≥ (1 − ‖W‖)‖z‖² too.
    m = max(operator.modulus_lower(), (1.0 - norm) * (1.0 - 4 * UNIT))
    factor = layer.prior.expansion * norm
    argument = inclusion.parts(inclusion.argument(inclusion.state(z), c))
    image = tuple(layer.prior.activation(v) for v in argument)
    gap = tuple(a - b for a, b in zip(z, image, strict=True))
    residual = sample_norm(gap)
    off = _rounding(layer, operator, z, argument, image, gap)
    finite = (residual + off).isfinite()
    error = torch.where(finite, _error_bound(operator, gap, residual, off, m, norm), math.inf)
    proven, lipschitz = Guarantee.none, None
    note = "I − W is not certified monotone in this precision"
    notes = []
    if m > 0:
        proven = Guarantee.contraction if factor < 1 else Guarantee.strong_monotonicity
        lipschitz = layer.input_norm_upper() / m * _UP
        note = "‖U‖/m (Pabbaraju, Winston and Kolter)"
    else:
        error = torch.full_like(error, math.inf)
        notes.append(
            f"the rounding of W exceeds the modulus m = {layer.m:g}: take a wider dtype or a "
            "larger m"
        )
    kinds = tuple(proven if known else Guarantee.none for known in finite.tolist())
    derived, sampled = layer.prior.shift is not None, layer.prior.sampled
    if not derived:
        notes.append("rounding is an estimate: none is derived for this prior")
    if sampled:
        notes.append(SAMPLED)
    return MapCertificate(
        kinds=kinds,
        residual=residual,
        error_bound=error,
        rounding=off,
        contraction=factor,
        modulus=m,
        lipschitz=lipschitz,
        lipschitz_note=note,
        solver=solver,
        rigorous=derived and not sampled,
        numbers=_numbers(layer, operator, m, upper, norm),
        notes=tuple(notes),
    )


def _rounding(
    layer: MonotoneLayer,
    operator: MonotoneOperator,
    z: States,
    argument: States,
    image: States,
    gap: States,
) -> Tensor:
    """δ [B] with |fl‖z − T(z)‖ − ‖z − T(z)‖| ≤ δ; prox is nonexpansive and passes errors on."""
    shift = layer.prior.shift or 0.0
    rows = []
    for product, v, a, r in zip(operator.rounding(z), argument, image, gap, strict=True):
        rows.append(
            product + 4 * UNIT * v.abs() + FUNCTION * (v.abs() + a.abs() + shift) + UNIT * r.abs()
        )
    entries = sum(part[0].numel() for part in z)
    return SAFETY * (sample_norm(tuple(rows)) + (entries + 4) * UNIT * sample_norm(gap))


def _error_bound(
    operator: MonotoneOperator, r: States, size: Tensor, off: Tensor, m: float, norm: float
) -> Tensor:
    """The smaller of (a) and (b), with r known up to ``off`` and products up to their rounding."""
    w, back = operator(r), operator.adjoint(r)
    slack = norm * off + SAFETY * sample_norm(operator.rounding(r))
    moved = tuple(p + q / (2.0 * m) for p, q in zip(r, w, strict=True))
    wide = sample_norm(w) + slack
    first = sample_norm(moved) + off + slack / (2.0 * m) + wide / (2.0 * m)
    slack_back = norm * off + SAFETY * sample_norm(operator.rounding(r, transposed=True))
    reflected = tuple(2.0 * p - t for p, t in zip(r, back, strict=True))
    q = sample_norm(reflected) + 2.0 * off + slack_back
    inner = (q / (2.0 * m)) ** 2 - (size - off).clamp_min(0.0) ** 2 / m
    second = q / (2.0 * m) + inner.clamp_min(0.0).sqrt()
    return torch.minimum(first, second) * _UP


def _numbers(
    layer: MonotoneLayer, operator: MonotoneOperator, m: float, upper: float, norm: float
) -> dict[str, str]:
    numbers = {"‖I − W‖": f"at most {upper:.4g}", "‖W‖": f"at most {norm:.4g}"}
    if m <= 0:
        return numbers
    given = layer.solver.alpha if isinstance(layer.solver, ForwardBackward) else None
    alpha = m / upper**2 if given is None else given
    rate = forward_backward_factor(m, upper, alpha) * _UP
    end = 2.0 * m / upper**2
    numbers["forward-backward"] = f"factor {rate:.6g} at α = {alpha:.4g} (2m/L² = {end:.4g})"
    given = layer.solver.alpha if isinstance(layer.solver, PeacemanRachford) else None
    alpha = 1.0 / float(operator.scale()) if given is None else given
    rate = peaceman_rachford_factor(m, upper, alpha) * _UP
    numbers["Peaceman–Rachford"] = f"factor {rate:.6g} at α = {alpha:.4g}"
    return numbers
