"""Schedules against torch's own, and against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR

from equilibria.training import TrainConfig
from equilibria.training.schedules import make_schedule


def sgd(momentum: float = 0.9) -> torch.optim.SGD:
    weight = torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([weight], lr=0.4, momentum=momentum)


def walk(optimizer: Any, schedule: Any, steps: int) -> list[tuple[float, float]]:
    """(rate, momentum) of every step."""
    seen = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["momentum"]))
        optimizer.step()
        schedule.step()
    return seen


def ours(steps: int, per_epoch: int, momentum: float = 0.9, **options: Any) -> list[Any]:
    config = TrainConfig(lr=0.4, epochs=max(2, steps // per_epoch), **options)
    optimizer = sgd(momentum)
    schedule = make_schedule(optimizer, config, total=steps, per_epoch=per_epoch)
    return walk(optimizer, schedule, steps)


def test_onecycle_is_torchs() -> None:
    optimizer = sgd()
    expected = walk(optimizer, OneCycleLR(optimizer, 0.4, total_steps=40, pct_start=0.25), 40)
    assert ours(40, 10, schedule="onecycle") == expected
    assert {m for _, m in expected} != {0.9}


def test_onecycle_may_leave_momentum_alone() -> None:
    assert {m for _, m in ours(40, 10, schedule="onecycle", cycle_momentum=False)} == {0.9}


@given(st.integers(1, 60), st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=60)
def test_onecycle_works_at_every_length(steps: int, warmup: float) -> None:
    rates = [r for r, _ in ours(steps, 1, schedule="onecycle", warmup=warmup)]
    assert all(math.isfinite(r) and 0 <= r <= 0.4 + 1e-9 for r in rates)


@pytest.mark.parametrize(("steps", "warmup"), [(4, 0.25), (10, 0.1), (2, 0.5), (1, 0.25)])
def test_onecycle_survives_torchs_division_by_zero(steps: int, warmup: float) -> None:
    rates = [r for r, _ in ours(steps, 1, schedule="onecycle", warmup=warmup)]
    assert len(rates) == steps


def test_step_is_torchs_multistep() -> None:
    optimizer = sgd()
    expected = walk(optimizer, MultiStepLR(optimizer, [20, 30], gamma=0.2), 40)
    found = ours(40, 10, schedule="step", milestones=(2, 3), drop=0.2)
    assert [r for r, _ in found] == pytest.approx([r for r, _ in expected])


def test_cosine_is_torchs() -> None:
    optimizer = sgd()
    expected = walk(optimizer, CosineAnnealingLR(optimizer, T_max=40), 40)
    found = ours(40, 10, schedule="cosine", warmup=0.0)
    assert [r for r, _ in found] == pytest.approx([r for r, _ in expected])


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_warmup_rises_linearly_to_the_top(schedule: str) -> None:
    rates = [r for r, _ in ours(100, 10, schedule=schedule, warmup=0.2)]
    assert rates[:20] == pytest.approx([0.4 * (k + 1) / 20 for k in range(20)])
    assert max(rates) == pytest.approx(0.4)
    if schedule == "constant":
        assert set(rates[20:]) == {0.4}
    else:
        assert rates[60] == pytest.approx(0.2)  # half way down
        assert rates[-1] < 0.001


def test_a_schedule_comes_back_from_its_state() -> None:
    for kind in ("onecycle", "cosine"):
        config = TrainConfig(lr=0.4, schedule=kind)
        first = sgd()
        schedule = make_schedule(first, config, total=30, per_epoch=10)
        head = walk(first, schedule, 12)
        second = sgd()
        again = make_schedule(second, config, total=30, per_epoch=10)
        second.load_state_dict(first.state_dict())
        again.load_state_dict(schedule.state_dict())
        assert head + walk(second, again, 18) == ours(30, 10, schedule=kind)
