"""Anderson acceleration, type II: the combination of the last iterates with the least residual."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equilibria.engine.history import History
from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Point, Solver
from equilibria.engine.tree import Leaves, accumulation_dtype, sample_norm, scale_samples


@dataclass
class AndersonState:
    """Directions r̂ᵢ = rᵢ/‖rᵢ‖, candidates zᵢ + βrᵢ, the Gram matrix of r̂, and 1/‖rᵢ‖."""

    directions: History
    candidates: History
    gram: Tensor  # [B, m, m], ridge on the diagonal
    inverse_norm: Tensor  # [B, m]; 0 marks a slot that a sample must not use
    count: int  # steps taken


@options
class Anderson(Solver):
    """z ← Σᵢ αᵢ(zᵢ + βrᵢ),  α = argmin ‖Σᵢ αᵢrᵢ‖² + λ Σᵢ αᵢ²‖rᵢ‖²,  Σα = 1,  rᵢ = T(zᵢ) − zᵢ.

    The ridge is relative to each residual's own size, so scaling the problem changes nothing.
    One row of the Gram matrix is computed a step. State memory: 2m + 2 states.
    """

    memory: int = 5
    """m, how many past iterates are combined."""
    damping: float = 1.0
    """β in (0, 1]."""
    ridge: float | None = None
    """λ; None takes one for the dtype of the small system (1e-6 in float32, 1e-12 in float64)."""

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "memory", low=1, integer=True)
        check_number(self, "damping", low=0.0, high=1.0, low_open=True)
        check_number(self, "ridge", low=0.0, low_open=True, optional=True)

    def init(self, z: Leaves) -> AndersonState:
        dtype = _small_dtype(z)
        device = z[0].device
        ridge = self.ridge or (1e-12 if dtype == torch.float64 else 1e-6)
        gram = (1.0 + ridge) * torch.eye(self.memory, dtype=dtype, device=device)
        return AndersonState(
            History(z, self.memory),
            History(z, self.memory),
            gram.repeat(z[0].shape[0], 1, 1),
            torch.zeros(z[0].shape[0], self.memory, dtype=dtype, device=device),
            0,
        )

    def step(self, point: Point, state: AndersonState) -> tuple[Leaves, AndersonState]:
        slot = state.count % self.memory
        # Where autograd watches, the norm is part of the graph: r̂ has length one by derivation too.
        watched = state.directions.functional
        norm = sample_norm(point.residual) if watched else point.residual_norm
        norm = norm.to(state.gram.dtype)
        inverse = 1.0 / norm.clamp_min(torch.finfo(norm.dtype).tiny * 4)
        direction = scale_samples(inverse, point.residual)
        if self.damping == 1.0:
            candidate = point.f
        else:
            candidate = [
                torch.lerp(z, f, self.damping) for z, f in zip(point.z, point.f, strict=True)
            ]
        if self.memory == 1:
            return candidate, replace(state, count=state.count + 1)
        state.directions.write(slot, direction)
        state.candidates.write(slot, candidate)
        row = state.directions.dot(direction)
        state = self._insert(state, slot, row, inverse)
        if state.count == 1:
            return candidate, state
        used = state.directions.used
        weights = _solve(state.gram[:, :used, :used], state.inverse_norm[:, :used])
        return state.candidates.combine(weights), state

    def _insert(
        self, state: AndersonState, slot: int, row: Tensor, inverse: Tensor
    ) -> AndersonState:
        """Write one row and column of the Gram matrix; the diagonal 1 + λ stands already."""
        used = row.shape[1]
        diagonal = state.gram[:, slot, slot]
        live = row * (state.inverse_norm[:, :used] != 0)
        if state.directions.functional:
            # Same values without writing in place, so that autograd and torch.func can follow.
            here = torch.arange(self.memory, device=row.device) == slot
            full = torch.nn.functional.pad(live, (0, self.memory - used))
            full = torch.where(here, diagonal.unsqueeze(1), full)
            gram = torch.where(here.view(1, -1, 1), full.unsqueeze(1), state.gram)
            gram = torch.where(here.view(1, 1, -1), full.unsqueeze(2), gram)
            inverse_norm = torch.where(here, inverse.unsqueeze(1), state.inverse_norm)
            return replace(state, gram=gram, inverse_norm=inverse_norm, count=state.count + 1)
        live[:, slot] = diagonal
        state.gram[:, slot, :used] = live
        state.gram[:, :used, slot] = live
        state.inverse_norm[:, slot] = inverse
        state.count += 1
        return state

    def restart(self, state: AndersonState, stalled: Tensor) -> AndersonState:
        """Forget the history of stalled samples: their slots become unusable, not their mates'."""
        eye = torch.diag_embed(torch.diagonal(state.gram, dim1=1, dim2=2))
        gram = torch.where(stalled.view(-1, 1, 1), eye, state.gram)
        inverse_norm = torch.where(stalled.view(-1, 1), 0.0, state.inverse_norm)
        return replace(state, gram=gram, inverse_norm=inverse_norm)

    def take(self, state: AndersonState, index: Tensor) -> AndersonState:
        return AndersonState(
            state.directions.take(index),
            state.candidates.take(index),
            state.gram.index_select(0, index),
            state.inverse_norm.index_select(0, index),
            state.count,
        )


def _small_dtype(z: Leaves) -> torch.dtype:
    wide = [accumulation_dtype(x.dtype) for x in z]
    return torch.float64 if torch.float64 in wide else torch.float32


def _solve(gram: Tensor, inverse_norm: Tensor) -> Tensor:
    """α ∝ D⁻¹(Ĝ + λI)⁻¹D⁻¹1 with D = diag‖rᵢ‖, Σα = 1: [B, n]."""
    # Only ratios of the 1/‖rᵢ‖ matter; scaled to at most 1 they cannot overflow.
    scaled = inverse_norm / inverse_norm.amax(1, keepdim=True)
    solution = torch.linalg.solve_ex(gram, scaled.unsqueeze(-1)).result.squeeze(-1)
    weights: Tensor = scaled * solution
    return weights / weights.sum(1, keepdim=True)
