"""Which parameters decay, what the optimizers are; schedules against torch's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, PolynomialLR

import equilibria as eq
from equilibria.training import TrainConfig
from equilibria.training.optimizer import decay_groups, make_optimizer, make_schedule


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.layer_norm = nn.LayerNorm((4, 2))  # a matrix of scales
        self.bounded = eq.nn.GEQ(4, 4, hidden=3, gamma=eq.LearnedGamma(0.5))
        self.scaled = eq.nn.constrain(nn.Linear(4, 4), "weight", eq.nn.WeightNormalized())
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_weights_decay_and_norms_biases_scales_do_not() -> None:
    model = Mixed()
    decayed, free = decay_groups(model, 0.1)
    names = {p: n for n, p in model.named_parameters()}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    weights = {"conv.weight", "bounded.U.weight", "scaled.parametrizations.weight.original1"}
    weights |= {f"bounded.{name}.parametrizations.weight.original" for name in ("W", "W_h")}
    assert {names[p] for p in decayed["params"]} == weights
    frozen = {"frozen.weight", "frozen.bias"}
    assert {names[p] for p in free["params"]} == set(names.values()) - weights - frozen


def test_the_options_reach_the_optimizer() -> None:
    config = TrainConfig(lr=0.3, momentum=0.8, nesterov=False, weight_decay=0.01)
    (group,) = make_optimizer(Mixed(), config).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.8, False)
    assert group["weight_decay"] == 0.01
    adamw = make_optimizer(Mixed(), config.with_overrides(optimizer="adamw", decay_norms=False))
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.01, 0.0]
    assert adamw.param_groups[0]["betas"] == (0.8, 0.999)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(nn.ReLU(), TrainConfig())


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4, momentum=0.9)


def walk(optimizer: Any, schedule: Any, steps: int) -> list[tuple[float, float]]:
    """(rate, momentum) of every step."""
    seen = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["momentum"]))
        optimizer.step()
        schedule.step()
    return seen


def ours(steps: int, per_epoch: int, **options: Any) -> list[Any]:
    config = TrainConfig(lr=0.4, epochs=max(2, steps // per_epoch), **options)
    optimizer = sgd()
    schedule = make_schedule(optimizer, config, total=steps, per_epoch=per_epoch)
    return walk(optimizer, schedule, steps)


@pytest.mark.parametrize(
    ("options", "torchs"),
    [
        ({"schedule": "onecycle"}, lambda o: OneCycleLR(o, 0.4, total_steps=40, pct_start=0.25)),
        ({"schedule": "cosine", "warmup": 0.0}, lambda o: CosineAnnealingLR(o, T_max=40)),
        ({"schedule": "poly"}, lambda o: PolynomialLR(o, total_iters=40, power=0.9)),
        (
            {"schedule": "step", "milestones": (2, 3), "drop": 0.2},
            lambda o: MultiStepLR(o, [20, 30], gamma=0.2),
        ),
    ],
)
def test_schedules_are_torchs(options: dict[str, Any], torchs: Any) -> None:
    optimizer = sgd()
    expected = np.array(walk(optimizer, torchs(optimizer), 40))
    np.testing.assert_allclose(ours(40, 10, **options), expected, rtol=1e-6, atol=1e-12)
    assert (set(expected[:, 1]) == {0.9}) == (options["schedule"] != "onecycle")


def test_onecycle_may_leave_momentum_alone() -> None:
    assert {m for _, m in ours(40, 10, schedule="onecycle", cycle_momentum=False)} == {0.9}


@given(st.integers(1, 60), st.floats(0.01, 0.99))
@example(4, 0.25)  # where torch would divide by zero
@example(1, 0.25)
@settings(deadline=None, max_examples=60)
def test_onecycle_works_at_every_length(steps: int, warmup: float) -> None:
    rates = [r for r, _ in ours(steps, 1, schedule="onecycle", warmup=warmup)]
    assert len(rates) == steps
    assert all(math.isfinite(r) and 0 <= r <= 0.4 + 1e-9 for r in rates)


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
