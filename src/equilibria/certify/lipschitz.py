"""How far z* moves when the input does: Lipschitz constants of x → z*, for all inputs and at one.

The constant of a coupling is its own (``Coupling.lipschitz``); it is in c̃, the features that the
coupling sees, and ‖x → c̃‖ or ‖c → c̃‖ leads to x or c (docs/facts.md, fact 5).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from equilibria.problems.problem import HiddenProblem, Problem

__all__ = ["Variable", "global_lipschitz", "local_lipschitz"]

Variable = Literal["x", "c"]


def _own_modulus(problem: Problem) -> Tensor:
    """a: the modulus of everything in G but the prior and the coupling (1 without regularizer)."""
    if problem.regularizer is None:
        return torch.ones((), dtype=torch.float64)
    whole = torch.as_tensor(problem.curvature().lower, dtype=torch.float64)
    part = torch.as_tensor(problem.coupling.curvature().lower, dtype=torch.float64)
    return (whole - part) * (1.0 - 1e-14)


def global_lipschitz(
    problem: HiddenProblem, modulus: float | Tensor, input_norm: float | None
) -> tuple[float | None, str]:
    """A Lipschitz constant of x → z* that holds for all inputs, or None, and why.

    ``input_norm`` bounds x → c̃ (x → c for the linear coupling); None: the constant is in c.
    """
    if not isinstance(problem, Problem):
        return None, f"no constant is derived for {type(problem).__name__}"
    if problem.couples_batch:
        return None, "the regularizer couples the samples of a batch"
    q = problem.coupling
    m = float(torch.as_tensor(modulus, dtype=torch.float64).min())
    reach = q.features_norm() if input_norm is None else input_norm
    return q.lipschitz(m, _own_modulus(problem), reach, in_x=input_norm is not None)


def local_lipschitz(
    problem: HiddenProblem, z: Tensor, error: Tensor, modulus: float | Tensor, input_norm: float
) -> tuple[Tensor | None, str]:
    """limsup ‖z*(x′) − z*(x)‖/‖x′ − x‖ as x′ → x, bounded, with γ held fixed; [B], inf where none.

    From the curvature at z, widened to all points within ``error`` of it, so that it holds at the
    equilibrium and not only at z.
    """
    if not isinstance(problem, Problem):
        return None, f"nothing is derived for {type(problem).__name__}"
    if problem.couples_batch:
        return None, "the regularizer couples the samples of a batch"
    m, here = (
        torch.as_tensor(t, dtype=z.dtype, device=z.device)
        for t in (modulus, problem.local_curvature(z).lower)
    )
    rest = _own_modulus(problem)
    found, note = problem.coupling.local_lipschitz(z, error, m, here, rest)
    return None if found is None else found * input_norm, note
