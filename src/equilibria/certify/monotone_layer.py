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
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.engine.result import Solution
from equilibria.engine.solver import SolverOptions
from equilibria.engine.tree import sample_norm
from equilibria.problems.monotone_operator import (
    DenseMonotone,
    MonotoneInclusion,
    MonotoneOperator,
    States,
)
from equilibria.problems.norms import FUNCTION, SAFETY, UNIT, dense_norm, exact, sum_error
from equilibria.problems.priors import Prior
from equilibria.solvers.forward_backward import ForwardBackward, forward_backward_factor
from equilibria.solvers.peaceman_rachford import PeacemanRachford, peaceman_rachford_factor

from .claims import NOT_BY_U, refuted_prox, stretched
from .guarantee import SAMPLED, Guarantee, solved, where_known
from .map_certificate import MapCertificate
from .rounding import direct_convolutions, product_rounding

_UP = 1.0 + 1e-12


class MonotoneLayer(Protocol):
    """What is asked of the layer."""

    m: float
    prior: Prior
    solver: SolverOptions
    U: nn.Module

    def solve(self, x: Tensor) -> Solution[Any]: ...
    def inject(self, x: Tensor) -> tuple[Tensor, ...]: ...
    def inclusion(self, x: Tensor) -> MonotoneInclusion: ...
    def input_norm_upper(self) -> float: ...


@torch.no_grad()
def certify_monotone(layer: MonotoneLayer, x: Tensor, z: Any = None) -> MapCertificate:
    """The certificate of ``layer`` at x, for z or for the layer's own answer."""
    z, solver = solved(lambda: layer.solve(x), z)
    (c,) = layer.inject(x)
    stretches = stretched(c, layer.inject(torch.zeros_like(x[:1]))[0], _linear(layer.U, x))
    reach = math.inf if stretches else layer.input_norm_upper()
    own = layer.inclusion(x)
    inclusion = MonotoneInclusion(own.operator.double(), layer.prior, own.tiers)
    parts = tuple(exact(part) for part in own.parts(z))
    with direct_convolutions(x):
        c_off = product_rounding(layer.U, x)
        return _certify(layer, inclusion, parts, exact(c), c_off, reach, solver)


def _linear(u: Any, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Ux without a bias, or with another weight in place of U."""
    weight = u.weight if weight is None else weight
    out: Tensor = (
        F.linear(x, weight) if isinstance(u, nn.Linear) else u._conv_forward(x, weight, None)
    )
    return out


def _certify(
    layer: MonotoneLayer,
    inclusion: MonotoneInclusion,
    z: States,
    c: Tensor,
    c_off: Tensor,
    reach: float,
    solver: str,
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
    notes, wrong = [], refuted_prox(layer.prior, argument[0])
    if wrong is not None:
        error = torch.full_like(error, math.inf)
        note = "the prior is not what it claims"
        notes.append(f"REFUTED: {wrong}")
    elif m > 0:
        proven = Guarantee.contraction if factor < 1 else Guarantee.strong_monotonicity
        lipschitz = reach / m * _UP if math.isfinite(reach) else None
        note = "‖U‖/m (Pabbaraju, Winston and Kolter)" if math.isfinite(reach) else NOT_BY_U
    else:
        error = torch.full_like(error, math.inf)
        notes.append(
            f"the rounding of W exceeds the modulus m = {layer.m:g}: take a wider dtype or a "
            "larger m"
        )
    derived, sampled = layer.prior.shift is not None, layer.prior.sampled
    if not derived:
        notes.append("rounding is an estimate: none is derived for this prior")
    if sampled:
        notes.append(SAMPLED)
    return MapCertificate(
        kinds=where_known(finite, proven),
        residual=residual,
        error_bound=error,
        rounding=off,
        contraction=factor,
        input_rounding=c_off / m if m > 0 else torch.full_like(error, math.inf),
        modulus=m,
        lipschitz=lipschitz,
        lipschitz_note=note,
        solver=solver,
        rigorous=derived and not sampled and wrong is None,
        numbers=_numbers(layer, operator, m, upper, norm),
        notes=tuple(notes),
    )


@torch.no_grad()
def entrywise(layer: Any, x: Tensor, entries: Tensor) -> tuple[float, Tensor | None]:
    """Bounds on ‖Δz*‖₂ and, where there is one, on each |Δz*|, for |Δx| ≤ entries [1, ...].

    ‖Δz*‖ ≤ ‖Δc‖/m with |Δc| ≤ |U|·entries; for a dense U also ‖Δc‖ ≤ ‖UP⁻¹‖‖P·entries‖ for every
    P = diag(p) > 0, of which p = ‖columns of U‖^α are tried. Entry by entry, σ is monotone and
    nonexpansive, so that Δz = D(WΔz + Δc) with D = diag(d), 0 ≤ d ≤ 1. I − W ⪰ mI gives
    1 − Wᵢᵢ ≥ m > 0, and as d/(1 − dWᵢᵢ) ≤ 1/(1 − Wᵢᵢ),

        (1 − Wᵢᵢ)|Δzᵢ| ≤ Σ_{j≠i} |Wᵢⱼ||Δzⱼ| + |Δcᵢ|,    that is   N|Δz| ≤ |Δc|.

    N has no positive entry beside its diagonal. If some t > 0 has Nt ≥ s > 0, N is an M-matrix and
    N⁻¹ ≥ 0, so that |Δz| ≤ t where |Δc| ≤ s. Such a t is sought by a linear solve and checked with
    its rounding; where there is none (rows of W that are large beside their diagonal), the second
    bound is None. Dense layers alone have it.
    """
    u, dense = layer.U, isinstance(layer.U, nn.Linear)
    weight = u.weight.abs()  # of a constrained U too, which makes its weight anew for every call
    c = _linear(u, entries, weight) * (1.0 + 1e-9)
    operator = layer.inclusion(x).operator.double()
    m = operator.modulus_lower()
    reach = [float(c.norm())]
    if dense:
        columns = weight.norm(dim=0)
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
            p = columns.clamp_min(1e-6 * float(columns.max()) + 1e-300) ** alpha
            reach.append(dense_norm(u.weight / p).upper * float((p * entries).norm()))
    size = min(reach) / m * (1.0 + 1e-9) if m > 0 else math.inf
    if not isinstance(operator, DenseMonotone):
        return size, None
    matrix = -operator.weight.abs()
    matrix.diagonal().copy_(1.0 - operator.weight.diagonal())
    need = c[0] + 1e-12 * c.amax() + 1e-300
    t = torch.linalg.solve_ex(matrix, need[:, None]).result * (1.0 + 1e-9)
    slack = 4 * sum_error(len(t) + 4) * (matrix.abs() @ t)
    proven = bool((t > 0).all() & (matrix @ t - slack >= need[:, None]).all())
    return size, t.mT if proven else None


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
