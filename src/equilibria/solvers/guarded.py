"""Anderson acceleration that takes a bad step back, for maps that do not expand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.options import options
from equilibria.engine.solver import Point
from equilibria.engine.tree import Leaves, sample_norm, select_samples, where_sample, without_graph

from .anderson import Anderson, AndersonState


@dataclass
class GuardedState:
    """Anderson's state; the image of the last accepted iterate, and the least residual so far."""

    inner: AndersonState
    image: Leaves | None
    scale: Tensor  # [B]: of the first image
    least: Tensor  # [B]
    plain: Tensor  # [B]: whether the iterate is such an image


@options
class Guarded(Anderson):
    """Anderson's method; where the residual is above twice the least, u ← S of the last accepted.

    Plain steps of a nonexpansive S bring the residual to zero, so this converges where they do. No
    step leads to more than 100 times the first scale, but a plain one: where S moves by a constant,
    a long step makes the residual small beside the iterate, and not small.
    """

    memory: int = 10
    fall = 1.0

    def init(self, z: Leaves) -> Any:
        inner = Anderson.init(self, z)
        least = inner.ones.new_full((z[0].shape[0],), torch.inf)
        return GuardedState(inner, None, least, least, torch.ones_like(least, dtype=torch.bool))

    def residual_memory(self, state: Any) -> Leaves | None:
        return Anderson.residual_memory(self, state.inner)

    def step(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        norm = point.residual_norm.to(state.least.dtype)
        worse = ~state.plain & ~(norm <= 2.0 * state.least)
        scale = state.scale
        image = [x.clone() for x in point.f]
        y, inner = Anderson.step(self, point, state.inner)
        if state.image is None:
            scale = norm + sample_norm(without_graph(image)).to(norm.dtype)
        else:
            image = where_sample(worse, state.image, image)
        worse = worse | (sample_norm(without_graph(y)).to(norm.dtype) > 100.0 * scale)
        y = where_sample(worse, image, y)
        inner = Anderson.restart(self, inner, worse)
        return y, GuardedState(inner, image, scale, torch.fmin(state.least, norm), worse)

    def restart(self, state: Any, stalled: Tensor) -> Any:
        return replace(state, inner=Anderson.restart(self, state.inner, stalled))

    def take(self, state: Any, index: Tensor) -> Any:
        image = None if state.image is None else select_samples(state.image, index)
        rest = (t.index_select(0, index) for t in (state.scale, state.least, state.plain))
        return GuardedState(Anderson.take(self, state.inner, index), image, *rest)
