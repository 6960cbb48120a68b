"""profile_model: parts against a clock that the model itself moves, steps against Solutions."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation import timing
from equilibria.evaluation.timing import (
    Profile,
    _marked,
    _profiled,
    _suggestions,
    profile_model,
)

CPU = torch.device("cpu")
MAP, MAP_BACK, INJECT, OUTER, OUTER_BACK, STEPS = 3.0, 5.0, 6.0, 7.0, 11.0, 6


class Clock:
    now = 0.0


class _Tick(torch.autograd.Function):
    """The identity; takes ``forward`` seconds there and ``backward`` seconds back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        Clock.now += forward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Clock.now += ctx.backward_seconds
        return grads[0], None, None


def tick(x: Tensor, forward: float, backward: float) -> Tensor:
    found: Tensor = _Tick.apply(x, forward, backward)
    return found


class SlowLayer(eq.nn.MapLayer):
    """z* = tanh(½wz + ux); its map and its injection take their time."""

    def __init__(self) -> None:
        fixed = eq.Picard(rtol=0.0, atol=0.0, max_steps=STEPS)
        super().__init__(solver=fixed, adjoint=eq.Phantom(steps=3))
        self.u = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.linspace(0.1, 0.9, 4))

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (tick(self.u(x), INJECT, 0.0),)

    def step(self, z: Any, *injected: Tensor) -> Any:
        return torch.tanh(tick(0.5 * self.w * z + injected[0], MAP, MAP_BACK))

    def start(self, x: Tensor, *injected: Tensor) -> Any:
        return torch.zeros_like(injected[0])


class Explicit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return tick(super().forward(x), OUTER, OUTER_BACK)


class Holder(nn.Sequential):
    """An equilibrium layer made of others: its time counts once."""

    is_equilibrium = True


@pytest.mark.parametrize("train", [True, False])
def test_parts_against_a_clock_that_the_model_moves(
    train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock.now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    model = nn.Sequential(Explicit(3, 4), SlowLayer(), Holder(SlowLayer()), Explicit(4, 2))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))

    def run(mark: Any) -> None:
        with torch.set_grad_enabled(train):
            out = model(x)
        if train:
            mark("backward")
            out.square().sum().backward()

    graphs = 3 if train else 0  # the steps of Phantom, which keep a graph
    found = _marked(model, run, CPU)
    assert found == {
        "layers": 2 * (INJECT + (STEPS + graphs) * MAP),
        "rest": 2 * OUTER,
        "backward": 2 * (OUTER_BACK + 3 * MAP_BACK) if train else 0.0,
    }
    assert sum(found.values()) == Clock.now


def test_marks_are_taken_away_when_a_pass_fails() -> None:
    model = network()
    with pytest.raises(ValueError, match="does not divide"):
        _marked(model, lambda mark: model(batch()[:, :, :1]), CPU)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def network(**how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(8, 8, patch=eq.Patches(channels=2, size=2), hidden=None, **how)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def batch(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_model(network(solver=eq.Picard(rtol=1e-6)), batch(), budget=0.0)


def test_steps_operators_and_speed(profile: Profile) -> None:
    model = network(solver=eq.Picard(rtol=1e-6)).eval()
    with torch.no_grad(), eq.nn.observe(model) as seen:
        model(batch())
    stats = seen.solutions["1"][0].stats
    histogram = profile.inference.layers["1"].histogram
    assert torch.equal(histogram, torch.bincount(stats.steps.long()))
    for one in (profile.train, profile.inference):
        assert one is not None
        assert one.images_per_second == pytest.approx(6 / one.seconds)
        # Seconds in both; other programs may stretch either.
        assert 0.01 * one.seconds < one.total < 100 * one.seconds
        names, _, seconds = zip(*one.operators, strict=True)
        assert any("convolution" in name for name in names)
        assert list(seconds) == sorted(seconds, reverse=True)
    assert profile.inference.parts["backward"] == 0.0
    assert min(profile.main.parts.values()) > 0.0


def test_the_model_is_left_as_it_is() -> None:
    model = network().append(nn.Dropout(0.5)).train()
    model[0].eval()
    kept = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    targets, losses = torch.zeros(6, dtype=torch.long), []

    def loss(out: Tensor, y: Any) -> Tensor:
        losses.append(y is targets)
        return nn.functional.cross_entropy(out, y)

    profile_model(model, batch(), targets, budget=0.0, loss=loss)
    assert all(losses)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_it_is_written_and_read(profile: Profile, tmp_path: Path) -> None:
    (written,) = profile.save(tmp_path / "new")
    found = json.loads(written.read_text())
    assert found["train"]["layers"]["1"]["solves"] == 6
    text = str(profile)
    for word in ("training step", "layers", "rest", "backward", "steps", "would help"):
        assert word in text


def test_a_frozen_network_without_equilibria() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).requires_grad_(False)
    found = profile_model(model, batch(), budget=0.0, precision="bf16-mixed")
    assert found.train is None
    assert found.inference.share("rest") == 1.0
    assert "only inference" in str(found)
    assert "no equilibrium layer" in str(found)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"precision": "fp8"}, ValueError, "precision='fp8'.*bf16-mixed"),
        ({"budget": float("nan")}, ValueError, "budget"),
        ({"x": torch.zeros(0, 1, 4, 4)}, ValueError, "B ≥ 1"),
        ({"x": [1, 2]}, ValueError, "list"),
        ({"model": 3}, TypeError, "torch.nn.Module"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], error: type[Exception], match: str) -> None:
    chosen: dict[str, Any] = {"model": network(), "x": batch(), **given}
    with pytest.raises(error, match=match):
        profile_model(chosen.pop("model"), chosen.pop("x"), **chosen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_a_compiled_model_is_timed_as_a_whole() -> None:
    model = network(solver=eq.Picard(rtol=0.0, max_steps=3), adjoint=eq.Phantom(steps=2))
    found = profile_model(torch.compile(model), batch(), budget=0.0)  # type: ignore[arg-type]
    assert any("compiled" in note for note in found.notes)
    assert found.train is not None
    assert found.train.layers["1"].max_steps == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_marks_are_events_on_a_gpu() -> None:
    model = network(solver=eq.Picard(rtol=0.0, max_steps=5), adjoint=eq.Phantom(steps=2)).cuda()
    found = profile_model(model, batch(64), budget=0.5)
    assert found.train is not None
    assert found.train.total == pytest.approx(found.train.seconds, rel=0.5)
    assert found.train.peak_memory > 0
    assert found.train.parts["layers"] > 0


def test_the_peak_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(1000)

    def chain() -> None:
        a = x * 2  # 4000 bytes
        b = a * 2  # 8000
        del a
        c = b + 1  # 8000 again
        c.add_(1)  # in place: nothing new
        d = c.view(10, 100)  # a view: nothing new
        del b, c
        torch.cat([d.flatten(), d.flatten()])  # 4000 + 8000

    assert 12000 <= _profiled(chain, CPU)[1] < 14000  # the allocator rounds up


@pytest.mark.parametrize(
    ("part", "name"),
    [("layers", "fewer evaluations"), ("backward", "looser adjoint")],
)
def test_what_to_do_about_a_large_part(profile: Profile, part: str, name: str) -> None:
    def suggested(share: float, *, fixed: bool = False) -> dict[str, str]:
        parts = dict.fromkeys(timing.PARTS, 0.0) | {part: share, "rest": 1.0 - share}
        solves = dataclasses.replace(profile.inference.layers["1"], fixed_steps=fixed)
        main = dataclasses.replace(profile.inference, parts=parts, layers={"1": solves})
        model = network(adjoint=eq.Implicit())
        return dict(s.split(": ", 1) for s in _suggestions(model, main, batch(), "32-true"))

    found = suggested(0.6)[name]
    assert "60% of the pass" in found
    assert "(at best 2.50×)" in found
    assert name not in suggested(0.2)
    # Where steps are fixed, only the adjoint can be loosened.
    assert (name in suggested(0.6, fixed=True)) == (part == "backward")
