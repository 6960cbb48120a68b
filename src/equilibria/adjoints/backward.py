"""The linear system of the backward pass, u = g + Jᵀu, by any solver; and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.iterate import iterate
from equilibria.engine.krylov import LinearSolver, MatVec
from equilibria.engine.maps import Map
from equilibria.engine.result import BackwardStats, Iterated, Result, warn_user
from equilibria.engine.solver import Solver
from equilibria.engine.tree import Leaves, add, repeat_samples, sample_norm, subtract


def refuse_batches(grads: Sequence[Tensor]) -> None:
    """Raise where vmap, of either kind, gives a recorded solve many gradients at once."""
    if any("Batched" in str(torch._C._dispatch_keys(g)) for g in grads):
        raise RuntimeError(
            "the backward pass of a solve was given a batch of gradients (is_grads_batched=True, "
            "vectorize=True or torch.vmap) and takes one: call torch.autograd.grad for each, or "
            "torch.func.jacrev or torch.func.vjp of a function in which the solve is."
        )


def solve_adjoint(
    solver: LinearSolver | Solver, transpose: MatVec, g: Leaves, *, coupled: bool, group: int
) -> Iterated:
    """Solve u = g + Jᵀu; a fixed-point solver starts from g, a Krylov space is spanned by it.

    ``relative`` is ‖u − g − Jᵀu‖/‖g‖ of the u that is returned, of each sample, or of the batch
    where J couples samples: said by ``coupled``, or found out.
    """
    if isinstance(solver, LinearSolver):

        def identity_minus(v: Leaves) -> Leaves:
            return subtract(v, transpose(v))

        return solver.solve(identity_minus, g, coupled=coupled, group=group)

    def affine(u: Any) -> Any:
        return tuple(add(g, transpose(list(u))))

    spec = pytree.tree_structure(tuple(g))
    done = iterate(Map(affine, (), spec, g, coupled=coupled, group=group), g, solver)
    residual, norm = done.residual, sample_norm(g)
    if solver.fixed_steps:
        # The last step was taken after the last evaluation.
        residual = sample_norm(subtract(affine(done.value), done.value))
    if done.coupled:
        norm = _together(norm, group)
        residual = _together(residual, group) if solver.fixed_steps else residual
    relative = residual / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return replace(done, residual=residual, relative=relative)


def _together(norm: Tensor, size: int) -> Tensor:
    """The norm over each group of coupled samples, for every sample of it."""
    return repeat_samples(sample_norm([norm.unflatten(0, (-1, size))]), size)


def note_backward(stats: BackwardStats, outcome: Iterated) -> None:
    """Count, and warn once a solve (of the layer's call, not of each sample)."""
    stats.solves += 1
    stats.steps, stats.residual = outcome.steps, outcome.relative
    # Of a fixed number of steps, or a tolerance of 0, an exact gradient is no miss.
    exact = outcome.relative <= 2 * torch.finfo(outcome.relative.dtype).eps
    missed = int(((outcome.result != int(Result.converged)) & ~exact).sum())
    stats.unconverged += missed
    if missed:
        warn_user(
            f"the backward solve missed its tolerance for {missed} of {len(outcome.result)} "
            f"samples (relative residual up to {float(outcome.relative.max()):.1e} after "
            f"{int(outcome.steps.max())} steps): gradients are off by about that much. Raise "
            "max_steps (GMRES: restart too) in Implicit(solver=...), or bound the norm of the map."
        )


@dataclass
class Backward:
    """How the linear systems of a derivative are solved."""

    solver: LinearSolver | Solver
    stats: BackwardStats
    group: int
    """How many samples may depend on each other: the batch, without what vmap stacks on it."""
    coupled: bool
    """Whether they are known to."""

    def outcome(self, transpose: MatVec, g: Leaves) -> Iterated:
        """The solve of u = g + Jᵀu, counted."""
        found = solve_adjoint(self.solver, transpose, g, coupled=self.coupled, group=self.group)
        note_backward(self.stats, found)
        return found

    def solve(self, transpose: MatVec, g: Leaves) -> Leaves:
        return self.outcome(transpose, g).value
