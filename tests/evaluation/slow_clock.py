"""A clock that only the model moves: what each part takes is then known exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.engine.options import options
from equilibria.engine.solver import Point
from equilibria.engine.tree import Leaves
from equilibria.evaluation import solve_marks, timing


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Takes the place of the time module where time is measured."""
    CLOCK.now = 0.0
    fake = SimpleNamespace(perf_counter=CLOCK.perf_counter)
    for module in (solve_marks, timing):
        monkeypatch.setattr(module, "time", fake)
    return CLOCK


class _Tick(torch.autograd.Function):
    """The identity; takes ``forward`` seconds there and ``backward`` seconds back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        CLOCK.now += forward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        CLOCK.now += ctx.backward_seconds
        return grads[0], None, None


def tick(x: Tensor, forward: float, backward: float = 0.0) -> Tensor:
    found: Tensor = _Tick.apply(x, forward, backward)
    return found


MAP, MAP_BACK, STEP, INJECT, INJECT_BACK = 3.0, 5.0, 1.0, 6.0, 17.0
OUTER, OUTER_BACK, LOSS, LOSS_BACK, OPTIMIZER = 7.0, 11.0, 2.0, 13.0, 4.0


@options
class SlowPicard(eq.Picard):
    """Picard whose step takes a second."""

    def step(self, point: Point, state: None) -> tuple[Leaves, None]:
        CLOCK.now += STEP
        return eq.Picard.step(self, point, state)


class SlowLayer(eq.nn.MapLayer):
    """z* = tanh(½wz + ux); its map and its injection take their time."""

    def __init__(self, width: int = 4, **how: Any) -> None:
        super().__init__(**how)
        self.u = nn.Linear(width, width)
        self.w = nn.Parameter(torch.linspace(0.1, 0.9, width))

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (tick(self.u(x), INJECT, INJECT_BACK),)

    def step(self, z: Tensor, *injected: Tensor) -> Tensor:
        return torch.tanh(tick(0.5 * self.w * z + injected[0], MAP, MAP_BACK))

    def start(self, x: Tensor, *injected: Tensor) -> Tensor:
        return torch.zeros_like(injected[0])


class Explicit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return tick(super().forward(x), OUTER, OUTER_BACK)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        CLOCK.now += OPTIMIZER
        return super().step(closure)


def slow_loss(out: Tensor, y: Tensor) -> Tensor:
    return tick(nn.functional.cross_entropy(out, y), LOSS, LOSS_BACK)


def slow_model(*layers: SlowLayer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Explicit(3, 4), *layers, Explicit(4, 2))
