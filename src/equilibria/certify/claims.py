"""Cheap checks of what a user's own part claims: bounds on a Hessian, and that a prox is one.

A sample can refute a claim and never prove it. Parts of the library are not checked: what they
state is proven, and tested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.engine.tree import per_sample, sample_norm
from equilibria.problems.kernels import Activated, Coupling, inner, parts_of
from equilibria.problems.objective import ritz_ends
from equilibria.problems.operators import ModuleOperator, TransposedOperator
from equilibria.problems.priors import Prior
from equilibria.problems.problem import Problem
from equilibria.problems.regularizers import Regularizer

NOT_BY_U = "c is not Ux + b: a hook or a subclass makes it in another way"
_PAIRS = 6
_SLACK = 1e-7  # relative: what rounding and an inner solve may do


def _ours(part: object) -> bool:
    """Whether it is the library's, and its operator too, without a norm that was given."""
    operator = getattr(part, "operator", None)
    while isinstance(operator, TransposedOperator):
        operator = operator.base
    given = isinstance(operator, ModuleOperator) and operator.norm_bound is not None
    kinds = [type(t) for t in (part, operator) if t is not None]
    return not given and all(k.__module__.partition(".")[0] == "equilibria" for k in kinds)


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
    q, prior, regularizer = problem.coupling, problem.effective_prior, problem.regularizer
    found = [refuted_bounds(q, z)]
    if not prior_is_ours(prior):
        found.append(refuted_prox(prior, z - problem.gradient(z)))
    for part, K in parts_of(q):
        if isinstance(part, Activated) and not prior_is_ours(part.prior):
            found.append(refuted_prox(part.prior, part.operator(K(z)) + part.c))
    if regularizer is not None:
        found.append(refuted_regularizer(regularizer, problem.regularize, z))
    return [text for text in found if text is not None]


def refuted_regularizer(regularizer: Regularizer, form: str, z: Tensor) -> str | None:
    """Whether what R adds to the gradient has a slope outside of the bounds around z."""
    if _ours(regularizer) or regularizer.couples_batch:
        return None
    bounds = regularizer.curvature().envelope() if form == "prox" else regularizer.curvature()
    points = _cloud(z, _PAIRS)
    forces = [u - regularizer.prox(u) if form == "prox" else regularizer.grad(u) for u in points]
    for i, (u, g) in enumerate(zip(points, forces, strict=True)):
        for w, h in zip(points[:i], forces[:i], strict=True):
            slope = inner(g - h, u - w) / inner(u - w, u - w)
            slack = _SLACK * (1.0 + slope.abs())
            if bool(((slope < bounds.lower - slack) | (slope > bounds.upper + slack)).any()):
                name = type(regularizer).__name__
                return f"the bounds of {name} on its Hessian do not hold for its {form}"
    return None


def refuted_bounds(q: Coupling, z: Tensor) -> str | None:
    """Which of m and L a Ritz value of the Hessian around z lies outside of, or None."""
    ours = all(_ours(part) and _ours(K) for part, K in parts_of(q))
    bounds = q.curvature()
    if bounds.basis == "estimated" or (bounds.rigorous and ours):
        return None
    low, high = bounds.ends(z)
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


def stretched(c: Tensor, start: Tensor, image: Tensor) -> bool:
    """Whether c is further than Ux, the image, from ``start`` [1, ...], which it is at the input 0:
    ‖U‖ does not bound x ↦ c then."""
    moved, reach, size = (sample_norm([t.double()]) for t in (c - start, image, c))
    slack = torch.finfo(image.dtype).eps ** 0.5 * (moved + reach + size)
    return bool((moved > reach + slack).any())


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


def prior_is_ours(prior: Prior) -> bool:
    return _ours(prior) and _ours(getattr(prior, "prior", prior))  # of WithL1


def refuted_prox(prior: Prior, v: Tensor) -> str | None:
    """Why the prox of a prior is not that of its convex value, or None where samples agree.

    ``p = prox_tau(u)`` means ``f(q) >= f(p) + <u - p, q - p>/tau`` for all ``q``. Of two
    points it follows that the prox is firmly nonexpansive.
    """
    if prior_is_ours(prior):
        return None
    points, name = _cloud(v, _PAIRS), type(prior).__name__
    for tau in (1.0, 0.25, 4.0) if prior.piecewise_linear else (1.0,):  # what bounds are made of
        images = [prior.prox(u, tau) for u in points]
        for u, p in zip(points, images, strict=True):
            for w, q in zip(points, images, strict=True):
                moved, slack = q - p, _SLACK * (inner(u - w, u - w) + inner(u, u)) + 1e-12
                if bool((inner(moved, w - u) < inner(moved, moved) - slack).any()):
                    return f"the prox of {name} is not firmly nonexpansive, so it is none"
                steep = prior.expansion * (1.0 + _SLACK) * (w - u).abs() + _SLACK * u.abs() + 1e-12
                if tau == 1.0 and prior.separable and bool((moved.abs() > steep).any()):
                    return f"the activation of {name} is steeper than its expansion"
                least, other = prior.sample_value(p), prior.sample_value(q)
                below = least + inner(u - p, moved) / tau - other
                if bool((below > 4 * slack + _SLACK * (least.abs() + other.abs())).any()):
                    return f"the prox of {name} is not that of its value: f is lower elsewhere"
    return None
