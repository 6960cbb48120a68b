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
    accumulation_dtype,
    add,
    quick_norm,
    read_freely,
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
    valid: Tensor | None  # [B, 1, used]: 0 where a sample was restarted after it; None: nowhere
    s: Leaves  # empty before the first step
    g: Leaves
    norm: Tensor  # ‖g‖
    one: Tensor  # [B]: ones; a Python number would be made a tensor at each use
    fresh: Tensor | None = None  # [B]: samples whose H was reset after the step s was taken

    def marks(self, valid: Tensor | None) -> Tensor:
        return self.norm.new_ones(len(self.norm), 1, self.u.used) if valid is None else valid


def _clearly_below(norm: Tensor, last: Tensor) -> bool:
    """Whether no norm is near 10 times the last one, where the host may read them."""
    if not read_freely(norm):
        return False
    return all(a < 9.99 * b for a, b in zip(norm.tolist(), last.tolist(), strict=True))


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
    heavy = True

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "memory", low=1, integer=True)
        check_number(
            self, "safeguard", low=0.0, high=1.0, low_open=True, high_open=True, optional=True
        )

    def init(self, z: Leaves) -> BroydenState:
        one = torch.ones(len(z[0]), dtype=accumulation_dtype(z[0].dtype), device=z[0].device)
        u, v = History(z, self.memory), History(z, self.memory)
        return BroydenState(u, v, None, [], [], one, one)

    def step(self, point: Point, state: BroydenState) -> tuple[Leaves, BroydenState]:
        g, norm, s = point.residual, self._norm(point, state), state.s
        if not s:
            return point.f, replace(state, s=g, g=g, norm=norm)
        valid, fresh = state.valid, state.fresh
        if state.u.used == self.memory:
            state.u.clear()
            state.v.clear()
            valid, fresh = None, None
        keep = self._kept(point, state, norm)
        if keep is not None:
            # H = −I for the others: no earlier update counts, and the step is g.
            valid = state.marks(valid) * keep.view(-1, 1, 1)
        # uvᵀ does not depend on the length of s. Taken as 1, neither 1/sᵀHy nor its derivative
        # (sᵀHy)⁻² can overflow, however short the last steps of a solve are.
        length = quick_norm(s) if self._in_units(state) else sample_norm(without_graph(s))
        unit = length.clamp_min(torch.finfo(length.dtype).tiny).reciprocal()
        s, rank = scale_samples(unit, s), state.u.used
        if rank == 0:
            d, v = g, [-x for x in s]  # d = −Hg, v = Hᵀs
        else:
            left, right = state.v.dot(g), state.u.dot(s)
            if valid is not None:
                left, right = left * valid, right * valid
            d = state.u.combine(left, g, alpha=-1.0)
            v = state.v.combine(right, s, beta=-1.0)
        # s = −H g_old by construction, so that e = s − Hy is d; not so where H was reset since.
        e = d
        if rank == 0 and state.s is not state.g:
            e = self._apart(g, state)
        elif fresh is not None:
            e = where_sample(fresh, self._apart(g, state), d)
        s_e = s_d = sample_dot(s, state.u.write_scaled(rank, unit, e))
        if e is not d:
            s_d = sample_dot(s, d) * unit
        s_s = sample_dot(s, s) if state.u.functional else state.one
        inverse = self._safe_inverse(s_s - s_e, keep)
        # H ← H + e vᵀ/sᵀHy, and vᵀg = −sᵀd.
        state.v.write_scaled(rank, inverse, v)
        if e is d:
            step = scale_samples(state.one + s_d * inverse, d)
        else:
            step = add(d, scale_samples(s_d * inverse, e))
        if valid is not None:
            valid = torch.cat([valid, valid.new_ones(len(valid), 1, 1)], 2)
        after = BroydenState(state.u, state.v, valid, step, g, norm, state.one)
        return add(point.z, step), after

    def _in_units(self, state: BroydenState) -> bool:
        """Whether the driver sees to it that squares of norms are ordinary numbers."""
        return not (self.fixed_steps or state.u.functional)

    def _norm(self, point: Point, state: BroydenState) -> Tensor:
        return point.quick_norm if self._in_units(state) else point.residual_norm

    def _apart(self, g: Leaves, state: BroydenState) -> Leaves:
        """s − Hy with H = −I."""
        return add(state.s, subtract(g, state.g))

    def _kept(self, point: Point, state: BroydenState, norm: Tensor) -> Tensor | None:
        """[B]: samples that keep their H, having neither jumped nor nothing left to gain."""
        keep = None
        if self.safeguard is not None:
            sure = self._in_units(state) and _clearly_below(norm, state.norm)
            keep = None if sure else norm <= 10.0 * state.norm
        if not state.u.functional:
            return keep
        return ~point.settled if keep is None else keep & ~point.settled

    def _safe_inverse(self, denominator: Tensor, keep: Tensor | None) -> Tensor:
        """1/sᵀHy for ‖s‖ = 1, zero where the update is to be skipped."""
        skip = denominator.abs() <= (self.safeguard or torch.finfo(denominator.dtype).eps)
        if keep is not None:
            skip = skip | ~keep
        return denominator.masked_fill(skip, torch.inf).reciprocal()

    def restart(self, state: BroydenState, stalled: Tensor) -> BroydenState:
        if not state.s:
            return state
        # The slot about to be written stays usable; earlier ones are forgotten.
        fresh = stalled if state.fresh is None else stalled | state.fresh
        valid = state.marks(state.valid) * ~stalled.view(-1, 1, 1)
        return replace(state, valid=valid, fresh=fresh)
