"""Broyden's good method with limited memory, for roots of g(z) = T(z) − z."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Point, Solver
from equilibria.engine.tree import (
    History,
    Leaves,
    add,
    sample_dot,
    sample_norm,
    scale_samples,
    subtract,
    where_sample,
    without_graph,
)


@dataclass
class BroydenState:
    """The inverse Jacobian H = −I + Σᵢ uᵢvᵢᵀ and the step s that led here from residual g."""

    u: History
    v: History
    valid: Tensor | None  # [B, m]: 0 where a sample was restarted; None before the first step
    s: Leaves
    g: Leaves
    norm: Tensor  # ‖g‖
    rank: int
    fresh: Tensor | None = None  # [B]: samples whose H was reset after the step s was taken


@options
class Broyden(Solver):
    """z ← z − Hg,  H ← H + (s − Hy)sᵀH / sᵀHy  (good Broyden),  g = T(z) − z, H₀ = −I.

    After ``memory`` updates H starts again from its latest secant pair, so memory does not grow:
    2m + 4 states. A sample whose residual jumps by a factor of ten forgets its H (the others
    keep theirs), and an update with |sᵀHy| < safeguard·‖s‖² is skipped.
    """

    memory: int = 10
    """m, rank-one updates that are kept."""
    safeguard: float | None = 1e-3
    """Skip updates that are nearly singular, and restart samples that jump; None: never."""
    accelerated = True

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "memory", low=1, integer=True)
        check_number(
            self, "safeguard", low=0.0, high=1.0, low_open=True, high_open=True, optional=True
        )

    def init(self, z: Leaves) -> BroydenState:
        norm = torch.zeros(0, device=z[0].device)
        return BroydenState(History(z, self.memory), History(z, self.memory), None, [], [], norm, 0)

    def step(self, point: Point, state: BroydenState) -> tuple[Leaves, BroydenState]:
        g, norm = point.residual, point.residual_norm
        if state.valid is None:
            valid = torch.ones(norm.shape[0], self.memory, dtype=norm.dtype, device=norm.device)
            return point.f, replace(state, valid=valid, s=g, g=g, norm=norm)
        s, valid = state.s, state.valid
        if state.rank == self.memory:
            state.u.clear()
            state.v.clear()
            valid = torch.ones_like(valid)
            state = replace(state, rank=0, valid=valid)
        if state.rank == 0:
            # H = −I, but s may come from another H: form Hy = g_old − g itself.
            h_g, h_y, v = [-x for x in g], subtract(state.g, g), [-x for x in s]
        else:
            usable = valid[:, : state.rank]
            h_g = subtract(state.u.combine(state.v.dot(g) * usable), g)
            # s = −H g_old by construction, so that Hy = Hg + s; not so where H was reset since.
            h_y = add(h_g, s)
            if state.fresh is not None:
                h_y = where_sample(state.fresh, subtract(state.g, g), h_y)
            v = subtract(state.v.combine(state.u.dot(s) * usable), s)
        # uvᵀ does not depend on the length of s. Taken as 1, neither 1/sᵀHy nor its derivative
        # (sᵀHy)⁻² can overflow, however short the last steps of a solve are.
        length = sample_norm(without_graph(s))
        unit = 1.0 / torch.where(length > 0, length, 1.0)
        s, h_y, v = scale_samples(unit, s), scale_samples(unit, h_y), scale_samples(unit, v)
        restarted = self._restarted(point, state)
        inverse = self._safe_inverse(sample_dot(s, h_y), restarted)
        u = scale_samples(inverse, subtract(s, h_y))
        step = subtract([-x for x in h_g], scale_samples(sample_dot(v, g), u))
        if restarted is not None:
            # H = −I for these samples: the step is g, and no earlier update counts.
            state = replace(state, valid=_forget(valid, restarted, state.rank))
            step = where_sample(restarted, g, step)
        state.u.write(state.rank, u)
        state.v.write(state.rank, v)
        state = replace(state, s=step, g=g, norm=norm, rank=state.rank + 1, fresh=None)
        return add(point.z, step), state

    def _restarted(self, point: Point, state: BroydenState) -> Tensor | None:
        """[B]: samples that forget their H, having jumped or having nothing left to gain."""
        jumped = None if self.safeguard is None else point.residual_norm > 10.0 * state.norm
        if not state.u.functional:
            return jumped
        return point.settled if jumped is None else jumped | point.settled

    def _safe_inverse(self, denominator: Tensor, restarted: Tensor | None) -> Tensor:
        """1/sᵀHy for ‖s‖ = 1, zero where the update is to be skipped."""
        usable = denominator.abs() > (self.safeguard or torch.finfo(denominator.dtype).eps)
        if restarted is not None:
            usable = usable & ~restarted
        return torch.where(usable, 1.0 / torch.where(usable, denominator, 1.0), 0.0)

    def restart(self, state: BroydenState, stalled: Tensor) -> BroydenState:
        if state.valid is None:
            return state
        # The slot about to be written stays usable; earlier ones are forgotten.
        fresh = stalled if state.fresh is None else stalled | state.fresh
        return replace(state, valid=_forget(state.valid, stalled, state.rank), fresh=fresh)

    def take(self, state: BroydenState, index: Tensor) -> BroydenState:
        if state.valid is None:
            return state
        return BroydenState(
            state.u.take(index),
            state.v.take(index),
            state.valid.index_select(0, index),
            [x.index_select(0, index) for x in state.s],
            [x.index_select(0, index) for x in state.g],
            state.norm.index_select(0, index),
            state.rank,
            None if state.fresh is None else state.fresh.index_select(0, index),
        )


def _forget(valid: Tensor, mask: Tensor, rank: int) -> Tensor:
    past = torch.arange(valid.shape[1], device=valid.device) < rank
    return torch.where(mask.unsqueeze(1) & past, 0.0, valid)
