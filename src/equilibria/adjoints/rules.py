"""What stands for (I − Jᵀ)⁻¹ in a backward pass: a solve, or a truncated series."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equilibria.engine.krylov import LinearSolver, MatVec
from equilibria.engine.result import BackwardStats
from equilibria.engine.solver import Solver
from equilibria.engine.tree import Leaves, where_sample

from .backward import note_backward, solve_adjoint
from .functional import Backward, Explicit, backward_functional


@dataclass
class Rule(ABC):
    """From the incoming gradient g to u; samples that ``failed`` [B] get zero."""

    stats: BackwardStats
    failed: Tensor | None
    coupled: bool = False
    """Whether samples are known to depend on each other."""

    def mask(self, g: Leaves) -> Leaves:
        if self.failed is None:
            return g
        return where_sample(~self.failed, g, [torch.zeros_like(x) for x in g])

    def solve(self, transpose: MatVec, g: Leaves) -> Leaves:
        """u ≈ (I − Jᵀ)⁻¹g, transpose(v) = Jᵀv."""
        if self.failed is not None and self.stats.masked < 0:
            self.stats.masked = int(self.failed.sum())
        if self.failed is None:
            return self.apply(transpose, g)
        # A failed sample is a constant: also to samples that it is coupled to.
        return self.apply(lambda v: self.mask(transpose(v)), self.mask(g))

    @abstractmethod
    def apply(self, transpose: MatVec, g: Leaves) -> Leaves:
        """The rule itself."""

    @abstractmethod
    def differentiable(
        self, explicit: Explicit, z: Leaves, sources: Sequence[Tensor], g: Leaves
    ) -> Leaves:
        """(∂T/∂sources)ᵀu as a differentiable function of z, sources and g."""


class SolveRule(Rule):
    """u solves u = g + Jᵀu: exact to the solver's tolerance, and differentiable to any order."""

    def __init__(
        self,
        solver: LinearSolver | Solver,
        stats: BackwardStats,
        failed: Tensor | None = None,
        *,
        coupled: bool = False,
    ) -> None:
        super().__init__(stats, failed, coupled)
        self.solver = solver

    def apply(self, transpose: MatVec, g: Leaves) -> Leaves:
        outcome = solve_adjoint(self.solver, transpose, g, coupled=self.coupled)
        note_backward(self.stats, outcome)
        return outcome.value

    def differentiable(
        self, explicit: Explicit, z: Leaves, sources: Sequence[Tensor], g: Leaves
    ) -> Leaves:
        how = Backward(self.solver, self.stats, len(z[0]), self.coupled)
        return backward_functional(explicit, z, sources, self.mask(g), how)


class SeriesRule(Rule):
    """u = β Σₖ (βJᵀ + (1 − β)I)ᵏ g, k < steps: Neumann's series, of first order only."""

    def __init__(
        self, steps: int, damping: float, stats: BackwardStats, failed: Tensor | None = None
    ) -> None:
        super().__init__(stats, failed)
        self.steps = steps
        self.damping = damping

    def apply(self, transpose: MatVec, g: Leaves) -> Leaves:
        term = [self.damping * x for x in g]
        total = term
        for _ in range(self.steps - 1):
            pulled = transpose(term)
            pairs = zip(term, pulled, strict=True)
            term = [torch.add((1.0 - self.damping) * t, p, alpha=self.damping) for t, p in pairs]
            total = [a + b for a, b in zip(total, term, strict=True)]
        return total

    def differentiable(
        self, explicit: Explicit, z: Leaves, sources: Sequence[Tensor], g: Leaves
    ) -> Leaves:
        raise RuntimeError(
            "Phantom(form='neumann') has no second derivative; use Phantom(form='unrolled') or "
            "Implicit()."
        )
