"""Cheap checks of what a user's own part claims: bounds on a Hessian, and that a prox is one.

A sample can refute a claim and never prove it. Parts of the library are not checked: what they
state is proven, and tested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.engine.tree import per_sample
from equilibria.problems.kernels import Coupling, SumCoupling, inner
from equilibria.problems.objective import ritz_ends
from equilibria.problems.priors import Prior
from equilibria.problems.problem import Problem

_PAIRS = 6
_SLACK = 1e-7  # relative: what rounding and an inner solve may do


def _ours(part: object) -> bool:
    return type(part).__module__.partition(".")[0] == "equilibria"


def _cloud(z: Tensor, count: int) -> list[Tensor]:
    """z, and states around it, at distances from a tenth to ten times its size."""
    source = torch.Generator().manual_seed(0)
    size = per_sample(z.flatten(1).norm(dim=1).clamp_min(1.0), z)
    found = [z]
    for k in range(count - 1):
        noise = torch.randn(z.shape, generator=source, dtype=z.dtype).to(z.device)
        found.append(z + size * noise * 10.0 ** (k % 3 - 1) / z[0].numel() ** 0.5)
    return found


def refuted(problem: Problem, z: Tensor) -> list[str]:
    """Which claims of the problem's own parts samples around z contradict, in words."""
    found = refuted_bounds(problem.coupling, z)
    wrong = refuted_prox(problem.effective_prior, z - problem.gradient(z))
    return [text for text in (found, wrong) if text is not None]


def refuted_bounds(q: Coupling, z: Tensor) -> str | None:
    """Which of m and L a Ritz value of the Hessian around z lies outside of, or None."""
    parts = [part for part, _ in q.parts] if isinstance(q, SumCoupling) else [q]
    bounds = q.curvature()
    if bounds.basis == "estimated" or (bounds.rigorous and all(_ours(part) for part in parts)):
        return None
    low, high = (
        torch.as_tensor(t, dtype=z.dtype, device=z.device) for t in (bounds.lower, bounds.upper)
    )
    if _mixes(q, z):
        return "smooth makes the samples of a batch depend on each other"
    for point in _cloud(z, 4):
        least, most = ritz_ends(q, point)
        slack = _SLACK * torch.maximum(least.abs(), most.abs())
        if bool((least < low - slack).any()):
            value = float((least - low).min() + low.min())
            convex = " (convexity is claimed)" if bool((low >= 0).all()) else ""
            claimed = f"m = {float(low.min()):.4g}{convex}"
            return f"the Hessian has curvature {value:.4g}, below {claimed}"
        if bool((most > high + slack).any()):
            value = float((most - high).max() + high.max())
            return f"the Hessian has curvature {value:.4g}, above L = {float(high.max()):.4g}"
    return None


def _mixes(q: Coupling, z: Tensor) -> bool:
    """Whether the gradient of a sample moves with another one; each pair differs in some bit."""
    moved, index = _cloud(z, 2)[1], torch.arange(len(z), device=z.device)
    here = q.grad(z)
    for bit in range((len(z) - 1).bit_length()):
        other = (index >> bit) % 2 == 1
        found = q.grad(torch.where(per_sample(other, z), moved, z))
        off = (found - here)[~other].abs()
        if bool((off > _SLACK * here[~other].abs().max()).any()):
            return True
    return False


def refuted_prox(prior: Prior, v: Tensor) -> str | None:
    """Why the prox of a prior is not that of its convex value, or None where samples agree.

    ``p = prox(u)`` means ``f(q) >= f(p) + <u - p, q - p>`` for all ``q``. Of two
    points it follows that the prox is firmly nonexpansive.
    """
    if _ours(prior) and _ours(getattr(prior, "prior", prior)):  # of WithL1
        return None
    points = _cloud(v, _PAIRS)
    images = [prior.prox(u) for u in points]
    name = type(prior).__name__
    for u, p in zip(points, images, strict=True):
        for w, q in zip(points, images, strict=True):
            moved, slack = q - p, _SLACK * (inner(u - w, u - w) + inner(u, u)) + 1e-12
            if bool((inner(moved, w - u) < inner(moved, moved) - slack).any()):
                return f"the prox of {name} is not firmly nonexpansive, so it is none"
            least, other = prior.sample_value(p), prior.sample_value(q)
            below = least + inner(u - p, moved) - other
            if bool((below > slack + _SLACK * (least.abs() + other.abs())).any()):
                return f"the prox of {name} is not that of its value: f is lower elsewhere"
    return None
