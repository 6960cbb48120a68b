"""Certificates of sums f + g + Σ hᵢ(Kᵢz), which have no single prox: by the duality gap.

With m that of f + g, r the least element of ∂f(z) + ∇g(z) + Kᵀy and the gap of (z, y),

    m‖z − z*‖² ≤ ‖r‖‖z − z*‖ + gap   and   G(z) − G(z*) ≤ gap + ‖r‖²/(2m),

for every y. The y is found by a splitting, in float64.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.engine.result import ConvergenceWarning
from equilibria.problems.kernels import Curvature
from equilibria.problems.norms import SAFETY, UNIT, exact, sum_error
from equilibria.problems.splitting import Composite, duality_gap, split

from .claims import refuted_bounds, refuted_prox
from .guarantee import Guarantee, Proven, Rows, spread, where_known
from .rounding import norm


@dataclass(frozen=True, eq=False, kw_only=True)
class GapCertificate(Proven):
    """What is proven for a batch of minimizers of a sum; [B] tensors are float64.

    ``residual`` is ‖r‖, the distance of 0 from ∂f(z) + ∇g(z) + Kᵀy.
    """

    modulus: float | Tensor
    """m ≤ ∇²g, rounded down."""
    objective: Tensor
    """G(z), [B]."""
    gap: Tensor
    """Σ hᵢ(Kᵢz) + hᵢ*(yᵢ) − ⟨yᵢ, Kᵢz⟩ ≥ 0, [B]; inf where an hᵢ(Kᵢz) is."""
    value_bound: Tensor
    """G(z) − G(z*) is at most this, [B]; inf where nothing is proven."""

    def first_rows(self) -> Rows:
        return [
            ("modulus m", spread(self.modulus)),
            ("objective", spread(self.objective)),
            ("duality gap", spread(self.gap)),
        ]

    def last_rows(self, of: str = "x") -> Rows:
        return [("G(z) − G(z*) ≤", spread(self.value_bound))]


def _rounding(problem: Composite, z: Tensor, y: list[Tensor], bounds: Curvature) -> Tensor:
    """An estimate, [B], of what rounding does to r: as many roundings as terms of its parts."""
    terms = 64 + sum(t[0].numel() for t in (z, *y))
    parts = [problem.gradient(torch.zeros_like(z)), problem.gradient(z), problem.pull(y, z)]
    high = bounds.ends(z)[1]
    reach = torch.where(high.isfinite(), high, 0.0) * norm(z)
    return SAFETY * sum_error(terms) * (sum((norm(part) for part in parts), reach))


def certify_sum(given: Composite, state: Tensor, solver: str) -> GapCertificate:
    """Judge z as the minimizer of a sum."""
    problem, z = given.in_double(), exact(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        y = split(problem, z)[1]
    residual, gap = duality_gap(problem, z, y)
    bounds = problem.curvature()
    off = _rounding(problem, z, y, bounds)
    rest = residual + off
    m = bounds.ends(z)[0].expand(z.shape[0])
    m = m - 16 * UNIT * m.abs()
    notes = ["rounding is an estimate: none is derived for a sum"]
    if bounds.basis:
        notes.append(f"m and L are {bounds.basis}: the certificate is as good as they are")
    pairs = [(problem.prior, z), *((h, K(z)) for h, K in problem.terms)]
    found = [refuted_prox(h, at) for h, at in pairs]
    found += [] if problem.smooth is None else [refuted_bounds(problem.smooth, z)]
    wrong = [f"REFUTED: {text}" for text in found if text is not None]
    notes += wrong
    inner_solve = [h for h, at in pairs if bool((torch.as_tensor(h.prox_error(at)) > 0).any())]
    notes += [f"the prox of {type(h).__name__} is an inner solve: no gap" for h in inner_solve]
    if not bool((m > 0).all()):
        notes.append("f + g is not known to be strongly convex: a gap bounds no distance")
    if bool(gap.isinf().any()):
        notes.append("a term h(Kz) is infinite at z (a constraint that z meets up to rounding)")
    believed = bounds.basis != "estimated" and not wrong
    holds = (m > 0) & (rest + gap).isfinite() & (believed and not inner_solve)
    safe = torch.where(holds, m, 1.0)
    error = (rest + (rest * rest + 4.0 * safe * gap).sqrt()) / (2.0 * safe)
    value = gap + rest * rest / (2.0 * safe)
    unique = (m > 0) & z.flatten(1).isfinite().all(1) & believed
    return GapCertificate(
        kinds=where_known(unique, Guarantee.strong_convexity),
        residual=residual,
        error_bound=torch.where(holds, error * (1 + 64 * UNIT), math.inf),
        rounding=off,
        lipschitz=None,
        lipschitz_note="no constant is derived for a sum",
        solver=solver,
        rigorous=False,
        notes=tuple(notes),
        modulus=bounds.lower,
        objective=problem.objective(z),
        gap=gap,
        value_bound=torch.where(holds, value * (1 + 64 * UNIT), math.inf),
    )
