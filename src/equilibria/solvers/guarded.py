"""Anderson acceleration that takes a bad step back, for maps that do not expand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.options import options
from equilibria.engine.solver import Point
from equilibria.engine.tree import Leaves, sample_norm, where_sample, without_graph

from .anderson import Anderson, AndersonState


@dataclass
class GuardedState:
    """Anderson's state; the image of the last accepted iterate, and the least residual so far."""

    inner: AndersonState
    image: Leaves | None
    scale: Tensor  # [B]: where the residual was last halved
    mark: Tensor  # [B]: that residual
    least: Tensor  # [B]
    plain: Tensor  # [B]: whether the iterate is such an image


@options
class Guarded(Anderson):
    """Anderson's method; where the residual is above the least, u ← S of the last accepted.

    Plain steps of a nonexpansive S bring the residual to zero, so this converges where they do.
    Steps to any larger residual would be taken in turn for ever.
    Where S moves by a constant, a long step makes the residual small beside the iterate, and not
    small. So an iterate of more than twice the scale counts as converged, and one of more than 100
    times the scale is accepted, if it halves the residual.
    """

    memory: int = 10
    fall = 1.0

    def init(self, z: Leaves) -> Any:
        inner = Anderson.init(self, z)
        no = inner.ones.new_full((z[0].shape[0],), torch.inf)
        return GuardedState(inner, None, no, no, no, torch.ones_like(no, dtype=torch.bool))

    def residual_memory(self, state: Any) -> Leaves | None:
        return Anderson.residual_memory(self, state.inner)

    def doubts(self, point: Point, state: Any) -> Tensor:
        return self._grown(point, state, 2.0)

    def _grown(self, point: Point, state: GuardedState, times: float) -> Tensor:
        """Iterates, [B], of more than so many times the scale that do not halve the residual."""
        far = sample_norm(without_graph(point.f)) > times * state.scale
        return far & ~(point.residual_norm <= 0.5 * state.mark)

    def step(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        norm = point.residual_norm.to(state.least.dtype)
        worse = ~(norm <= state.least) | self._grown(point, state, 100.0)
        worse = worse & ~state.plain
        size = norm + sample_norm(without_graph(point.f)).to(norm.dtype)
        halved = ~worse & (norm <= 0.5 * state.mark)
        mark = torch.where(halved, norm, state.mark)
        scale = torch.where(halved, size, state.scale)
        image = [x.clone() for x in point.f]
        y, inner = Anderson.step(self, point, state.inner)
        if state.image is not None:
            image = where_sample(worse, state.image, image)
        y = where_sample(worse, image, y)
        inner = Anderson.restart(self, inner, worse)
        least = torch.where(worse, state.least, torch.fmin(state.least, norm))
        return y, GuardedState(inner, image, scale, mark, least, worse)

    def restart(self, state: Any, stalled: Tensor) -> Any:
        return replace(state, inner=Anderson.restart(self, state.inner, stalled))
