"""profile_model: parts against a clock that the model itself moves, counts against Solutions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.engine.options import options
from equilibria.engine.solver import Point
from equilibria.engine.tree import Leaves
from equilibria.evaluation import timing
from equilibria.evaluation.timing import (
    PassProfile,
    Profile,
    _marked,
    _profiled,
    _suggestions,
    profile_model,
)

CPU = torch.device("cpu")
MAP, MAP_BACK, STEP, INJECT, INJECT_BACK = 3.0, 5.0, 1.0, 6.0, 17.0
OUTER, OUTER_BACK = 7.0, 11.0
STEPS = 6


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the place of the time module where marks read it."""
    Clock.now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: Clock.now))


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


@options
class SlowPicard(eq.Picard):
    """Picard whose step takes a second."""

    def step(self, point: Point, state: None) -> tuple[Leaves, None]:
        Clock.now += STEP
        return eq.Picard.step(self, point, state)


@options
class SlowOneStep(eq.OneStep):
    """One step, and a second of thought after its evaluation."""

    def run(self, *given: Any) -> Any:
        done = eq.OneStep.run(self, *given)
        Clock.now += 1.0
        return done


FIXED = SlowPicard(rtol=0.0, atol=0.0, max_steps=STEPS)


class SlowLayer(eq.nn.MapLayer):
    """z* = tanh(½wz + ux); its map and its injection take their time."""

    def __init__(self, **how: Any) -> None:
        super().__init__(solver=FIXED, **how)
        self.u = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.linspace(0.1, 0.9, 4))

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (tick(self.u(x), INJECT, INJECT_BACK),)

    def step(self, z: Any, *injected: Tensor) -> Any:
        return torch.tanh(tick(0.5 * self.w * z + injected[0], MAP, MAP_BACK))

    def start(self, x: Tensor, *injected: Tensor) -> Any:
        return torch.zeros_like(injected[0])


class Pair(SlowLayer):
    """Two states at once: a product with Jᵀ is still one."""

    def step(self, z: Any, *injected: Any) -> Any:
        a = super().step(z["a"], *injected)
        return {"a": a, "b": 0.5 * torch.tanh(z["b"] + a)}

    def start(self, x: Any, *injected: Any) -> Any:
        zero = torch.zeros_like(injected[0])
        return {"a": zero, "b": zero.clone()}

    def forward(self, x: Any, z0: Any = None) -> Any:
        found = super().forward(x, z0)
        return found["a"] + found["b"]


class Explicit(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return tick(super().forward(x), OUTER, OUTER_BACK)


def parts_of(*layers: nn.Module, train: bool = True) -> dict[str, float]:
    """Of one pass of the layers between two explicit ones."""
    torch.manual_seed(0)
    model = nn.Sequential(Explicit(3, 4), *layers, Explicit(4, 2))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = model(x)
        if train:
            out.square().sum().backward()

    return _marked(model, run, CPU)


BACK = SlowPicard(rtol=0.0, atol=0.0, max_steps=7)
# Evaluations with a graph and products with Jᵀ of each adjoint, and what it does beside the map.
ADJOINTS: dict[str, tuple[Any, int, int, float]] = {
    "one step": (eq.OneStep(), 1, 1, 0.0),
    "one step, thinking": (SlowOneStep(), 1, 1, 1.0),
    "phantom": (eq.Phantom(steps=3), 3, 3, 0.0),
    # The series of 4 terms has 3 products; one more goes to the weights.
    "neumann": (eq.Phantom(steps=4, form="neumann"), 1, 4, 0.0),
    # Seven steps, one product for the residual and one to the weights.
    "implicit": (eq.Implicit(solver=BACK), 1, 9, 7 * STEP),
}


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")  # seven steps are few
@pytest.mark.parametrize("kind", [SlowLayer, Pair])
@pytest.mark.parametrize("name", ADJOINTS)
def test_every_part_of_a_training_step_is_found(clock: None, name: str, kind: Any) -> None:
    adjoint, graphs, products, more = ADJOINTS[name]
    found = parts_of(kind(adjoint=adjoint))
    assert found["map"] == STEPS * MAP
    assert found["solver"] == STEPS * STEP
    assert found["adjoint"] == graphs * MAP + products * MAP_BACK + more
    assert found["rest"] == INJECT + INJECT_BACK + 2 * (OUTER + OUTER_BACK)
    assert sum(found.values()) == Clock.now


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_unrolled_solve_is_the_solves_own(clock: None, checkpoint: bool) -> None:
    found = parts_of(SlowLayer(adjoint=eq.Unrolled(checkpoint=checkpoint)))
    again = STEPS * MAP if checkpoint else 0.0
    assert found["map"] == STEPS * MAP
    assert found["solver"] == STEPS * STEP
    assert found["adjoint"] == again + STEPS * MAP_BACK


def test_layers_add_up_and_an_inference_has_no_adjoint(clock: None) -> None:
    layers = [SlowLayer(adjoint=eq.Phantom(steps=steps)) for steps in (2, 4)]
    found = parts_of(*layers)
    assert found["map"] == 2 * STEPS * MAP
    assert found["adjoint"] == 6 * (MAP + MAP_BACK)
    assert parts_of(*layers, train=False) == {
        "map": 2 * STEPS * MAP,
        "solver": 2 * STEPS * STEP,
        "adjoint": 0.0,
        "rest": 2 * (OUTER + INJECT),
    }


def test_branches_are_seen() -> None:
    def branch() -> eq.nn.GEQ:
        return eq.nn.GEQ(4, 4, patch=eq.Patches(channels=2, size=2), hidden=None)

    model = eq.nn.MultiBranch([branch(), branch()], (4, 2))
    x = torch.randn(2, 4, 4, 4)
    found = _marked(model, lambda: model(x).sum().backward(), CPU)
    assert min(found["map"], found["adjoint"], found["rest"]) > 0


def test_marks_change_no_gradient_and_leave_nothing_behind() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 4, patch=eq.Patches(channels=2, size=2), hidden=None)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer).double()
    layer.W.parametrizations.weight[0].eval()  # the power iteration stands still
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    own, found = layer.adjoint, []

    def run() -> None:
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    run()
    _marked(model, run, CPU)
    assert len(found[0]) > 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert layer.adjoint is own
    with pytest.raises(ValueError, match="does not divide"):
        _marked(model, lambda: model(x[:, :, :1]), CPU)
    assert layer.adjoint is own


def test_the_fused_path_is_seen() -> None:
    """Map and update are one operation there: no time is the solver's."""
    torch.manual_seed(0)
    model = eq.models.create("geq_stack_cifar_3m", widths=(8, 16), depth=1, image_size=8)
    x = torch.randn(4, 3, 8, 8)
    found = _marked(model, lambda: model(x).square().sum().backward(), CPU)
    assert found["map"] > 0
    assert found["adjoint"] > 0
    assert found["solver"] == 0.0


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
        assert 0.2 * one.seconds < one.total < 5 * one.seconds
        names, _, seconds = zip(*one.operators, strict=True)
        assert any("convolution" in name for name in names)
        assert list(seconds) == sorted(seconds, reverse=True)
    assert profile.inference.parts["adjoint"] == 0.0


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
    for word in ("training step", "map", "solver", "adjoint", "rest", "steps", "would help"):
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
    assert found.train.parts["map"] > 0


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
    [("solver", "fixed steps"), ("map", "fewer evaluations"), ("adjoint", "looser adjoint")],
)
def test_what_to_do_about_a_large_part(profile: Profile, part: str, name: str) -> None:
    def suggested(solver: Any, share: float) -> dict[str, str]:
        parts = dict.fromkeys(timing.PARTS, 0.0) | {part: share, "rest": 1.0 - share}
        layers = profile_model(network(solver=solver), batch(), train=False, budget=0.0)
        main = PassProfile("train", 1.0, 1.0, parts, (), 0, 0.0, layers.inference.layers)
        model = network(solver=solver, adjoint=eq.Implicit())
        return dict(s.split(": ", 1) for s in _suggestions(model, main, batch(), "32-true"))

    found = suggested(eq.Picard(rtol=1e-4), 0.6)[name]
    assert "60% of the pass" in found
    assert "(at best 2.50×)" in found
    assert name not in suggested(eq.Picard(rtol=1e-4), 0.2)
    # Where steps are fixed, only the adjoint can be loosened.
    assert (name in suggested(eq.Picard(rtol=0.0, max_steps=2), 0.6)) == (part == "adjoint")
