"""Picard: z ← (1 − β)z + βT(z)."""

from __future__ import annotations

import torch

from equilibria.engine.options import check_number, options
from equilibria.engine.solver import Point, Solver
from equilibria.engine.tree import Leaves


@options
class Picard(Solver):
    """Plain (damped) iteration z ← (1 − β)z + βT(z).

    Converges linearly where T is a contraction; with β < 1 also where T is averaged or its
    spectrum lies to the left of 1 within a disc. One evaluation per step and no memory.
    """

    damping: float = 1.0
    """β in (0, 1]; 1 is plain iteration."""

    def __post_init__(self) -> None:
        Solver.__post_init__(self)
        check_number(self, "damping", low=0.0, high=1.0, low_open=True)

    @property
    def stride(self) -> float:
        return self.damping

    def init(self, z: Leaves) -> None:
        return None

    def step(self, point: Point, state: None) -> tuple[Leaves, None]:
        if self.damping == 1.0:
            return point.f, None
        return [torch.lerp(z, f, self.damping) for z, f in zip(point.z, point.f, strict=True)], None
