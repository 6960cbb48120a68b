"""How far floating point moves the residual of a certificate: |fl(T(z)) − T(z)|, bounded.

The error of ∇q and ∇R, entry by entry, is stated by the kernel and the regularizer (the model of
arithmetic is in ``problems/norms.py``). The prox of a convex function is nonexpansive, so it passes
the error on and adds its own, 4 units in the last place. Each bound is doubled at the end, which
covers terms of order u² and the rounding of the bounds themselves.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equilibria.engine.tree import sample_norm
from equilibria.problems.norms import FUNCTION, SAFETY, UNIT, sum_error
from equilibria.problems.priors import step_of_samples, step_tensor
from equilibria.problems.problem import HiddenProblem, Problem


def direct_convolutions(z: Tensor) -> AbstractContextManager[None]:
    """No cuDNN: it may take a transform for a convolution in float64, with other error bounds."""
    return torch.backends.cudnn.flags(enabled=False) if z.is_cuda else nullcontext()


def norm(t: Tensor) -> Tensor:
    """‖·‖ of each sample, [B]."""
    return sample_norm([t])


def product_rounding(module: nn.Module, x: Tensor) -> Tensor:
    """‖fl(Ux + b) − (Ux + b)‖ ≤ this, [B], in float64: of a linear layer, of a convolution, or of
    such modules one after the other."""
    size, terms = x.detach().abs(), 0
    for part in [module] if isinstance(module, nn.Linear | nn.Conv2d) else module.children():
        if not isinstance(part, nn.Linear | nn.Conv2d):
            return torch.full_like(norm(x), torch.inf)
        weight = part.weight.detach().abs()
        bias = None if part.bias is None else part.bias.detach().abs()
        if isinstance(part, nn.Linear):
            size = F.linear(size, weight, bias)
        else:
            size = part._conv_forward(size, weight, bias)
        terms += weight[0].numel() + 1
    return SAFETY * sum_error(terms) * norm(size)


def _force_error(problem: HiddenProblem, z: Tensor) -> Tensor | None:
    """A bound on the error of ∇q(z) + ∇R(z), entrywise; None where none is derived."""
    if not isinstance(problem, Problem):
        return None
    off = problem.coupling.rounding_error(z)
    if off is None or problem.regularizer is None:
        return off
    extra = problem.regularizer.rounding_error(z, problem.regularize)
    return None if extra is None else off + extra


def residual_rounding(
    problem: HiddenProblem, z: Tensor, image: Tensor, tau: float | Tensor = 1.0
) -> tuple[Tensor, bool]:
    """δ [B] with |fl‖z − T_τ(z)‖ − ‖z − T_τ(z)‖| ≤ δ, and whether it is derived (else a guess).

    ``image`` is the computed T_τ(z); everything in float64. With a τ other than 1 it is derived
    for piecewise linear proxes alone; at τ = 1 for every prior that states its ``shift``.
    """
    force_off, step = _force_error(problem, z), step_tensor(step_of_samples(tau, z), z)
    shift = problem.effective_prior.shift if isinstance(problem, Problem) else None
    if force_off is None or shift is None or not isinstance(problem, Problem):
        # n + 64 roundings of everything in sight.
        scale = norm(z) + norm(image) + norm(problem.gradient(z))
        delta = SAFETY * sum_error(z[0].numel() + 64) * scale
        if isinstance(problem, Problem):  # a prox by an inner solve
            argument = z - problem.gradient(z) * step
            delta = delta + problem.effective_prior.prox_error(argument, tau)
        return delta, False
    force = z.abs() + problem.gradient(z).abs()
    gap = (z - image).abs()
    argument = (1.0 - step).abs() * z.abs() + step * force
    off = step * force_off + 4 * UNIT * (argument + step * force)
    off = off + FUNCTION * (argument + image.abs() + step * shift)
    delta = SAFETY * (norm(off + UNIT * gap) + sum_error(z[0].numel() + 4) * norm(gap))
    exact = not isinstance(tau, Tensor) and tau == 1.0
    return delta, exact or problem.effective_prior.piecewise_linear


def subgradient_rounding(problem: Problem, z: Tensor, least: Tensor) -> Tensor | None:
    """δ [B] with |fl dist(0, ∂G(z)) − dist(0, ∂G(z))| ≤ δ, or None where none is derived.

    ``least`` is the computed element of least norm. For piecewise linear proxes: the ends of
    ∂f(z) are then constants or multiples of z, each off by at most 4 units in the last place.
    """
    prior = problem.effective_prior
    force_off = _force_error(problem, z)
    if force_off is None or not prior.piecewise_linear:
        return None
    force = z.abs() + problem.gradient(z).abs()
    ends = [torch.where(end.isfinite(), end, 0.0).abs() for end in prior.subdifferential(z)]
    off = force_off + FUNCTION * (force + z.abs() + torch.maximum(*ends) + least.abs())
    return SAFETY * (norm(off) + sum_error(z[0].numel() + 4) * norm(least))
