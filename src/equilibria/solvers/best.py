"""BestIterate: whatever the solver, samples that do not converge return their best iterate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.solver import Bounds, Choice, Point, Reached, Solver, SolverOptions
from equilibria.engine.tree import Leaves, sample_norm, take_samples, where_sample, without_graph


@dataclass
class BestState:
    """The state of the inner solver, and each sample's best iterate so far."""

    inner: Any
    best: Reached | None = None


@dataclass(frozen=True, init=False, repr=False, eq=False)
class BestIterate(Solver):
    """Wrap a solver: a sample that fails to converge gets its iterate of least ‖T(z) − z‖.

    Costs two passes over the state a step, which is why it is a wrapper and not the rule.
    """

    inner: Any  # a Solver; or Auto, until for_map or for_problem has chosen one

    def __init__(self, inner: SolverOptions, **limits: Any) -> None:
        """``limits``, which ``dataclasses.replace`` gives, are set in the inner solver."""
        wraps: object = inner
        if not isinstance(wraps, SolverOptions) or isinstance(wraps, BestIterate):
            raise TypeError(
                f"BestIterate wraps a solver such as Anderson(), got {type(inner).__name__}."
            )
        inner = replace(inner, **limits)
        object.__setattr__(self, "inner", inner)
        for name in SolverOptions.__dataclass_fields__:
            object.__setattr__(self, name, getattr(inner, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BestIterate) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash((BestIterate, self.inner))

    def __repr__(self) -> str:
        return f"BestIterate({self.inner!r})"

    # What the driver asks of a solver is the inner one's to say.
    stride = property(lambda self: self.inner.stride)
    fall = property(lambda self: self.inner.fall)
    accelerated = property(lambda self: self.inner.accelerated)
    joins = property(lambda self: self.inner.joins)

    def doubts(self, point: Point, state: BestState) -> Tensor | None:
        doubts: Tensor | None = self.inner.doubts(point, state.inner)
        return doubts

    def for_map(self) -> Solver:
        return BestIterate(self.inner.for_map())

    def for_problem(self, bounds: Bounds) -> Choice:
        choice = self.inner.for_problem(bounds)
        return Choice(BestIterate(choice.solver), choice.tau, choice.reason)

    def init(self, z: Leaves) -> BestState:
        return BestState(self.inner.init(z))

    def step(self, point: Point, state: BestState) -> tuple[Leaves, BestState]:
        best = self.fallback(point, state)
        z, inner = self.inner.step(point, state.inner)
        return z, BestState(inner, best)

    def fallback(self, point: Point, state: BestState) -> Reached:
        norm, scale = point.residual_norm, sample_norm(without_graph(point.f))
        if state.best is None:
            return point.z, norm, scale
        best, least, size = state.best
        better = norm < least
        z = where_sample(better, point.z, best)
        return z, torch.where(better, norm, least), torch.where(better, scale, size)

    def residual_memory(self, state: BestState) -> Leaves | None:
        memory: Leaves | None = self.inner.residual_memory(state.inner)
        return memory

    def restart(self, state: BestState, stalled: Tensor) -> BestState:
        return replace(state, inner=self.inner.restart(state.inner, stalled))

    def take(self, state: BestState, index: Tensor) -> BestState:
        return BestState(self.inner.take(state.inner, index), take_samples(state.best, index))
