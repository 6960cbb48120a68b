"""Anderson acceleration, type II: the combination of the last iterates with the least residual."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equilibria.engine.dense import eliminate
from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Point, Solver
from equilibria.engine.tree import (
    History,
    Leaves,
    accumulation_dtype,
    sample_norm,
    strange,
    without_graph,
)

_RIDGE = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass
class AndersonState:
    """Residuals rᵢ, candidates zᵢ + βrᵢ, and the Gram matrix of the rᵢ."""

    residuals: History
    candidates: History
    gram: Tensor  # [B, m, m]
    ones: Tensor  # [B, m, 1]; 0 marks a slot that a sample must not use
    ridge: Tensor  # [m, m]: 1 + λ on the diagonal, 1 elsewhere
    floor: Tensor  # [m, m]: a smallest number on the diagonal, so that r = 0 can be solved
    count: int = 0  # steps taken
    restarted: bool = False  # whether any sample ever was
    inverse: Tensor | None = None  # [B]: what residuals are multiplied by in a fixed-step solve
    views: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of gram, by slot

    def lines(self, slot: int, used: int) -> tuple[Tensor, Tensor]:
        """Row and column ``slot`` of the Gram matrix, [B, used], as views made once."""
        if slot not in self.views or self.views[slot][0].shape[1] != used:
            self.views[slot] = (self.gram[:, slot, :used], self.gram[:, :used, slot])
        return self.views[slot]

    def take_samples(self, index: Tensor) -> AndersonState:
        """The state of some samples only."""
        return replace(
            self,
            residuals=self.residuals.take(index),
            candidates=self.candidates.take(index),
            gram=self.gram.index_select(0, index),
            ones=self.ones.index_select(0, index),
            inverse=None if self.inverse is None else self.inverse.index_select(0, index),
            views={},
        )


@options
class Anderson(Solver):
    """z ← Σᵢ αᵢ(zᵢ + βrᵢ),  α = argmin ‖Σᵢ αᵢrᵢ‖² + λ Σᵢ αᵢ²‖rᵢ‖²,  Σα = 1,  rᵢ = T(zᵢ) − zᵢ.

    The ridge is relative to each residual's own size, so scaling the problem changes nothing: α is
    (G + λ diag G)⁻¹1 up to its sum, G the Gram matrix of the residuals, of which one row is
    computed a step. A sample whose residual stops falling forgets its history and starts anew.
    State memory: 2m + 2 states.
    """

    memory: int = 5
    """m, how many past iterates are combined."""
    damping: float = 1.0
    """β in (0, 1]."""
    ridge: float | None = None
    """λ; None takes one for the dtype of the small system (1e-5 in float32, 1e-12 in float64)."""
    accelerated = True

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "memory", low=1, integer=True)
        check_number(self, "damping", low=0.0, high=1.0, low_open=True)
        check_number(self, "ridge", low=0.0, low_open=True, optional=True)

    def init(self, z: Leaves) -> AndersonState:
        wide = [accumulation_dtype(x.dtype) for x in z]
        dtype = torch.float64 if torch.float64 in wide else torch.float32
        m, batch = self.memory, z[0].shape[0]
        eye = torch.eye(m, dtype=dtype, device=z[0].device)
        return AndersonState(
            History(z, m),
            History(z, m),
            eye.new_zeros(batch, m, m),
            eye.new_ones(batch, m, 1),
            1.0 + (self.ridge or _RIDGE[dtype]) * eye,
            16 * torch.finfo(dtype).tiny * eye,
        )

    def residual_memory(self, state: AndersonState) -> Leaves | None:
        kept = state.residuals
        return None if kept.functional else kept.slot(state.count % self.memory)

    def step(self, point: Point, state: AndersonState) -> tuple[Leaves, AndersonState]:
        slot = state.count % self.memory
        candidate = self._candidate(point, state, slot)
        if self.fixed_steps:
            state = self._scale(point, state, slot)
        else:
            state.residuals.write(slot, point.residual)
        state.candidates.write(slot, candidate)
        state = self._insert(state, slot, state.residuals.dot_slot(slot))
        if state.count == 1:
            return candidate, state
        used = state.residuals.used
        gram, ones = state.gram, state.ones
        if used < self.memory:
            gram, ones = gram[:, :used, :used], ones[:, :used]
        if state.residuals.functional:
            weights = _balanced(gram, ones)
            unit = torch.arange(used, device=weights.device).view(1, -1, 1) == slot
            settled = point.settled.view(-1, 1, 1)
            weights = torch.where(settled, unit.to(weights.dtype), weights)
        else:
            # Rows in units of their residual: the largest of a column is its diagonal then. Other
            # pivots may lose residuals that are much shorter than the rest.
            unit = gram.diagonal(dim1=1, dim2=2).rsqrt().unsqueeze(2)
            solution = torch.linalg.solve_ex(unit * gram, unit * ones).result
            weights = solution / solution.sum(1, keepdim=True)
        return state.candidates.combine(weights.transpose(1, 2)), state

    def loop_state(self, z: Leaves) -> list[Tensor]:
        state = self.init(z)
        every = torch.ones_like(state.ones[:, 0, 0], dtype=torch.bool)
        state = self.restart(state, every)
        empty = [x.new_zeros(self.memory, x.shape[0], x[0].numel()) for x in z]
        return [state.gram, state.ones, *empty, *(x.clone() for x in empty)]

    def loop_step(self, point: Point, held: list[Tensor]) -> tuple[Leaves, list[Tensor]]:
        """Slot 0 holds the oldest residual and takes the new one; then all slots move by one."""
        gram, ones, *slots = held
        state, m = self.init(point.z), self.memory
        for history, parts in ((state.residuals, slots), (state.candidates, slots[len(point.z) :])):
            history.slots = [list(x.unbind(0)) for x, _ in zip(parts, point.z, strict=False)]
            history.used = m
        state = replace(state, gram=gram, ones=ones, restarted=True, count=m)
        z, state = self.step(point, state)
        kept = [*state.residuals.slots, *state.candidates.slots]
        turned = [torch.stack([*slot[1:], slot[0]]) for slot in kept]
        return z, [state.gram.roll((-1, -1), (1, 2)), state.ones.roll(-1, 1), *turned]

    def _scale(self, point: Point, state: AndersonState, slot: int) -> AndersonState:
        """Keep the residual in units of the first iterate, where its squares would leave the dtype.

        With a tolerance the driver sees to that; a fixed-step solve never looks at the start.
        """
        if state.inverse is None:
            size = torch.maximum(point.residual_norm, sample_norm(without_graph(point.f)))
            odd = strange(size) & (size > 0)
            state = replace(state, inverse=torch.where(odd, 1.0 / size, 1.0))
        assert state.inverse is not None
        state.residuals.write_scaled(slot, state.inverse, point.residual)
        return state

    def _candidate(self, point: Point, state: AndersonState, slot: int) -> Leaves:
        """z + βr, written where it is kept."""
        if self.damping == 1.0:
            return point.f
        pairs = zip(point.z, point.f, strict=True)
        if state.candidates.functional or state.count == 0:  # the first is returned as it is
            return [torch.lerp(z, f, self.damping) for z, f in pairs]
        kept = state.candidates.slot(slot)
        for (z, f), out in zip(pairs, kept, strict=True):
            torch.lerp(z, f, self.damping, out=out)
        return kept

    def _insert(self, state: AndersonState, slot: int, row: Tensor) -> AndersonState:
        """Write one row and column of the Gram matrix, with the ridge; row [B, 1, used]."""
        used = row.shape[2]
        if row.dtype != state.gram.dtype:
            row = row.to(state.gram.dtype)
        if state.restarted:
            here = torch.arange(self.memory, device=row.device).view(1, -1, 1) == slot
            state = replace(state, ones=torch.where(here, 1.0, state.ones), views={})
            row = row * state.ones[:, :used].transpose(1, 2)
        line = row.squeeze(1)
        if state.residuals.functional:
            # The same values without writing in place, so that autograd and torch.func can follow.
            here = torch.arange(self.memory, device=row.device) == slot
            full = torch.nn.functional.pad(line, (0, self.memory - used))
            full = torch.addcmul(state.floor[slot], full, state.ridge[slot])
            gram = torch.where(here.view(1, -1, 1), full.unsqueeze(1), state.gram)
            gram = torch.where(here.view(1, 1, -1), full.unsqueeze(2), gram)
            return replace(state, gram=gram, count=state.count + 1)
        across, down = state.lines(slot, used)
        across.copy_(line)
        torch.addcmul(state.floor[slot, :used], line, state.ridge[slot, :used], out=down)
        state.count += 1
        return state

    def restart(self, state: AndersonState, stalled: Tensor) -> AndersonState:
        """Forget the history of stalled samples: their slots become unusable, no others."""
        stalled = stalled.view(-1, 1, 1)
        eye = torch.eye(self.memory, dtype=state.gram.dtype, device=state.gram.device)
        gram = torch.where(stalled, eye, state.gram)
        ones = torch.where(stalled, 0.0, state.ones)
        return replace(state, gram=gram, ones=ones, restarted=True, views={})


def _balanced(gram: Tensor, ones: Tensor) -> Tensor:
    """G⁻¹1 up to its sum, [B, n, 1], with residuals of length 1.

    The same weights; but the derivative of a solve holds G⁻² and overflows for short residuals.
    """
    unit = gram.detach().diagonal(dim1=1, dim2=2).rsqrt().unsqueeze(2)
    right = ones * unit  # without the slots that a restart has emptied, whose size is arbitrary
    right = right / right.amax(1, keepdim=True)
    system = unit * gram * unit.mT
    if torch.compiler.is_exporting():
        solution = right * eliminate(system, right)
    else:
        solution = right * torch.linalg.solve_ex(system, right).result
    return solution / solution.sum(1, keepdim=True)
