"""profile_model on small networks: sums, counts, histograms, and that nothing of the user moves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation import timing
from equilibria.evaluation.layer_solvers import SolverStatistics
from equilibria.evaluation.solve_marks import PARTS
from equilibria.evaluation.timing import (
    LayerProfile,
    Memory,
    PassProfile,
    Profile,
    Spread,
    Suggestion,
    _suggest,
    peak_memory,
    profile_model,
)
from equilibria.nn.constraints import OperatorNorm

from . import slow_clock as fakes
from .slow_clock import Clock, SlowLayer, SlowPicard, SlowSGD, clock, slow_loss, slow_model

__all__ = ["clock"]


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
    return profile_model(network(solver=eq.Picard(rtol=1e-6)), batch(), repeats=4)


def test_the_whole_split_is_known_under_a_known_clock(clock: Clock) -> None:
    layer = SlowLayer(
        solver=SlowPicard(rtol=0.0, atol=0.0, max_steps=5), adjoint=eq.Phantom(steps=2)
    )
    found = profile_model(
        slow_model(layer),
        torch.randn(4, 3),
        torch.tensor([0, 1, 0, 1]),
        loss=slow_loss,
        optimizer=lambda parameters: SlowSGD(parameters, lr=0.0),
        repeats=5,
    )
    assert found.train is not None
    whole = 5 * (fakes.MAP + fakes.STEP) + 2 * (fakes.MAP + fakes.MAP_BACK)
    rest = fakes.INJECT + fakes.INJECT_BACK + 2 * (fakes.OUTER + fakes.OUTER_BACK)
    rest += fakes.LOSS + fakes.LOSS_BACK + fakes.OPTIMIZER
    assert found.train.group("map") == 5 * fakes.MAP
    assert found.train.group("solver") == 5 * fakes.STEP
    assert found.train.group("adjoint") == 2 * (fakes.MAP + fakes.MAP_BACK)
    assert found.train.group("rest") == rest
    assert found.train.seconds.median == found.train.total == whole + rest
    assert found.train.overhead == 0.0
    assert found.train.images_per_second == 4 / (whole + rest)
    assert found.inference.total == 5 * (fakes.MAP + fakes.STEP) + fakes.INJECT + 2 * fakes.OUTER


def test_counts_and_histogram_are_those_of_the_solutions(profile: Profile) -> None:
    assert profile.train is not None
    model = network(solver=eq.Picard(rtol=1e-6)).eval()
    with torch.no_grad(), eq.nn.observe(model) as seen:
        model(batch())
    solution = seen.solutions["1"][0]
    layer = profile.inference.layers[0]
    assert layer.name == "1"
    assert layer.evaluations == solution.stats.evaluations
    assert layer.statistics is not None
    assert torch.equal(layer.statistics.histogram, torch.bincount(solution.stats.steps.long()))
    assert float(layer.statistics.residual[-1]) == pytest.approx(
        float(solution.stats.relative.max()), rel=0.5
    )
    stepped = profile.train.layers[0]
    assert stepped.graph_evaluations == 1
    assert stepped.backward_steps is not None
    # GMRES takes a product a step and one to confirm; one more goes to the weights.
    assert stepped.products >= len(stepped.backward_steps)
    assert int(stepped.backward_steps.sum()) == 6


def test_parts_make_the_whole(profile: Profile) -> None:
    for one in (profile.train, profile.inference):
        assert one is not None
        groups = sum(one.group(name) for name in ("map", "solver", "adjoint", "rest"))
        assert groups == pytest.approx(one.total)
        assert one.marked.low * 0.5 < one.total < one.marked.high * 2
        inner = sum(layer.total for layer in one.layers)
        assert inner == pytest.approx(one.total - one.group("rest"))
    assert profile.inference.group("adjoint") == 0.0


def test_the_model_is_left_as_it_is() -> None:
    model = network().append(nn.Dropout(0.5)).train()
    model[0].eval()
    kept = copy.deepcopy(model.state_dict())
    modes = [m.training for m in model.modules()]
    state = torch.random.get_rng_state()
    profile_model(model, batch(), repeats=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_it_is_written_and_read(profile: Profile, tmp_path: Path) -> None:
    written = profile.save(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["bench.json", "bench.png"]
    found = json.loads(written[0].read_text())
    assert found["train"]["layers"][0]["name"] == "1"
    assert found["inference"]["images_per_second"] > 0
    text = str(profile)
    for word in ("training step", "map", "solver", "adjoint", "rest", "steps per sample"):
        assert word in text


def test_a_network_without_equilibria_is_all_rest() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    found = profile_model(model, batch(), repeats=1)
    assert found.train is not None
    assert found.train.share("forward", "loss", "backward", "optimizer") == pytest.approx(1.0)
    assert any("no equilibrium layer" in note for note in found.notes)
    assert str(found)


def test_a_frozen_network_is_measured_in_inference_only() -> None:
    model = network().requires_grad_(False)
    found = profile_model(model, batch(), repeats=1, precision="bf16")
    assert found.precision == "bf16-mixed"
    assert found.train is None
    assert any("only inference" in note for note in found.notes)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"precision": "fp8"}, ValueError, "precision='fp8'.*bf16-mixed"),
        ({"repeats": 0}, ValueError, "repeats"),
        ({"budget": float("nan")}, ValueError, "budget"),
        ({"x": torch.zeros(0, 1, 4, 4)}, ValueError, "B ≥ 1"),
        ({"x": [1, 2]}, TypeError, "list"),
        ({"model": 3}, TypeError, "torch.nn.Module"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], error: type[Exception], match: str) -> None:
    chosen: dict[str, Any] = {"model": network(), "x": batch(), **given}
    with pytest.raises(error, match=match):
        profile_model(chosen.pop("model"), chosen.pop("x"), **chosen)


def test_outputs_without_labels_ask_for_a_loss() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Flatten(0))
    with pytest.raises(ValueError, match="Give y and loss"):
        profile_model(model, batch(), repeats=1)


def test_the_budget_ends_the_rounds(clock: Clock) -> None:
    layer = SlowLayer(solver=SlowPicard(rtol=0.0, atol=0.0, max_steps=1))
    found = profile_model(slow_model(layer), torch.randn(2, 3), repeats=50, budget=0.0)
    assert found.inference.seconds.count == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_a_compiled_model_is_timed_as_a_whole() -> None:
    model = network(solver=eq.Picard(rtol=0.0, max_steps=3), adjoint=eq.Phantom(steps=2))
    found = profile_model(torch.compile(model), batch(), repeats=2)  # type: ignore[arg-type]
    assert found.compiled
    assert any("cannot be split" in note for note in found.notes)
    assert found.train is not None
    assert found.train.seconds != found.train.eager
    assert found.train.layers[0].evaluations == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_marks_are_events_on_a_gpu() -> None:
    model = network(solver=eq.Picard(rtol=0.0, max_steps=5), adjoint=eq.Phantom(steps=2)).cuda()
    found = profile_model(model, batch(64), repeats=5)
    assert found.train is not None
    assert found.train.total == pytest.approx(found.train.marked.median, rel=0.3)
    assert found.train.waits == 0
    assert found.train.memory.peak > 0
    assert found.train.group("map") > 0


def test_the_fused_path_is_seen_and_counted() -> None:
    """Map and update are one operation there: no time is the solver's, and the counts are right."""
    torch.manual_seed(0)
    model = eq.models.create("geq_stack_cifar_3m", widths=(8, 16), depth=1, image_size=8)
    found = profile_model(model, torch.randn(2, 3, 8, 8), repeats=3, budget=0.5)
    assert found.train is not None
    for one in (found.train, found.inference):
        assert one.parts["solver"] == 0.0
        assert one.parts["map"] > 0.0
        for layer in one.layers:
            assert layer.evaluations == 4
            trained = one.kind == "train"
            assert (layer.graph_evaluations, layer.products) == ((1, 3) if trained else (0, 0))
            assert (layer.seconds["adjoint_map"] > 0.0) == trained


CPU = torch.device("cpu")


@drawn(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_a_spread_is_what_sorting_gives(values: list[float]) -> None:
    found = Spread.of(values)
    at = torch.tensor([0.25, 0.5, 0.75]).double()
    exact = torch.quantile(torch.tensor(values, dtype=torch.float64), at)
    torch.testing.assert_close(torch.tensor([found.low, found.median, found.high]).double(), exact)
    assert found.count == len(values)


def test_the_peak_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(1000)
    weight = torch.ones(100, requires_grad=True)

    def chain() -> None:
        a = x * 2  # 4000 bytes
        b = a * 2  # 8000
        del a
        c = b + 1  # 8000 again
        c.add_(1)  # in place: nothing new
        d = c.view(10, 100)  # a view: nothing new
        del b, c
        torch.cat([d.flatten(), d.flatten()])  # 4000 + 8000

    def step() -> None:
        y = (weight.exp() * 1.0).exp()  # exp saves its output, twice
        y.sum().backward()
        weight.grad = None

    found = peak_memory(chain, CPU, held=7)
    assert found.held == 7
    assert 12000 <= found.peak < 14000  # the allocator rounds up
    assert peak_memory(step, CPU, held=0).peak >= 1200


class Linear(eq.nn.MapLayer):
    """z* = a z* + x, a of each sample in the first column."""

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def step(self, z: Tensor, *injected: Tensor) -> Tensor:
        return injected[0][:, :1] * z + injected[0]

    def start(self, x: Tensor, *injected: Tensor) -> Tensor:
        return torch.zeros_like(x)


def samples(*rates: float) -> Tensor:
    x = torch.ones(len(rates), 3)
    x[:, 0] = torch.tensor(rates)
    return x


def suggested(
    model: nn.Module, parts: dict[str, float], steps: list[int], x: Tensor
) -> dict[str, tuple[Suggestion, Any, dict[str, Any]]]:
    """Of a pass that is made up: ``parts`` in seconds, ``steps`` of the samples."""
    whole = dict.fromkeys(PARTS, 0.0) | parts
    histogram = torch.bincount(torch.tensor(steps))
    solver: Any = getattr(model, "solver", None)
    fixed = solver is None or solver.fixed_steps
    statistics = SolverStatistics("", "", len(x), {}, fixed, histogram, torch.zeros(7), 1.0)
    inner = ("map", "solver", "adjoint_map", "adjoint_solver")
    one = LayerProfile("", {p: whole[p] for p in inner}, 1, 1, 1, statistics, None)
    spread, memory = Spread(1.0, 1.0, 1.0, 1), Memory(0, 0, "")
    main = PassProfile(
        *("train", len(x), spread, spread, spread, 0.0, whole),
        *((one,) if solver is not None else (), (), memory, None, 0.0),
    )
    settings = {"precision": "32-true", "compiled": False}
    return {idea[0].name: idea for idea in _suggest(model, main, settings, x)}


IMPLICIT = eq.Implicit(solver=eq.GMRES(rtol=1e-8))
BOUNDED = eq.nn.NormBounded(bound=0.9, steps=4)
# Layer, the part that is large, steps of the samples, and what is suggested for it alone.
CASES: dict[str, tuple[Any, str, list[int], dict[str, Any]]] = {
    "fixed steps": (
        Linear(solver=eq.Anderson(rtol=1e-4)),
        "solver",
        [9, 4],
        {"solver": eq.Anderson(rtol=0.0, atol=0.0, max_steps=9)},
    ),
    "solver Anderson": (
        Linear(solver=eq.Picard(rtol=1e-4, max_steps=77)),
        "map",
        [9, 9],
        {"solver": eq.Anderson(rtol=1e-4, max_steps=77)},
    ),
    "looser tolerance": (
        Linear(solver=eq.Anderson(rtol=1e-4)),
        "map",
        [9, 9],
        {"solver": eq.Anderson(rtol=1e-3)},
    ),
    "compaction": (
        Linear(solver=eq.Anderson(rtol=1e-4)),
        "map",
        [4] * 7 + [40],
        {"solver": eq.Anderson(rtol=1e-4, compact=True)},
    ),
    "forward-backward": (
        eq.nn.MonotoneDEQ(3, solver=eq.PeacemanRachford(rtol=1e-4)),
        "prepare",
        [5, 5],
        {"solver": eq.ForwardBackward(rtol=1e-4, max_steps=500)},
    ),
    "looser adjoint": (
        Linear(solver=eq.Picard(rtol=1e-2), adjoint=IMPLICIT),
        "adjoint_map",
        [5, 5],
        {"adjoint": eq.Implicit(solver=eq.GMRES(rtol=1e-2))},
    ),
    "fewer power iterations": (eq.nn.GEQ(3, 3, hidden=None, constraint=BOUNDED), "norm", [5], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_to_do_about_a_large_part(name: str) -> None:
    layer, part, steps, expected = CASES[name]
    x = samples(*[0.5] * len(steps))
    rest = {"forward": 4.0} if part != "forward" else {"loss": 4.0}
    found = suggested(layer, {part: 6.0, **rest}, steps, x)[name]
    assert found[0].predicted == pytest.approx(10 / 4)
    assert "60%" in found[0].reason
    changed = found[1]
    assert changed is not layer
    for attribute, value in expected.items():
        assert getattr(changed, attribute) == value
    if name == "fewer power iterations":
        assert {m.steps for m in changed.modules() if isinstance(m, OperatorNorm)} == {1}
    # Where the part is small there is nothing to do about it.
    assert name not in suggested(layer, {part: 1.0, "loss": 9.0}, steps, x)


def test_channels_last_is_suggested_until_it_is_done() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    x = torch.randn(2, 3, 6, 6)
    found = suggested(model, {"forward": 1.0}, [1], x)
    assert found["channels last"][2] == {"channels_last": True}
    done = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert suggested(done, {"forward": 1.0}, [1], x) == {}


class Trained(nn.Module):
    """x ↦ U z*(x): something to train behind the equilibrium."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Linear(**how)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x))
        return out


@pytest.mark.slow
def test_a_trial_measures_gain_and_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def ideas(model: nn.Module, *_: Any) -> Any:
        broken, other = copy.deepcopy(model), copy.deepcopy(model)
        broken.head = nn.Linear(4, 2)  # type: ignore[assignment]
        other.layer.solver = eq.Anderson(rtol=1e-6)  # type: ignore[union-attr, assignment]
        yield Suggestion("broken", "", "", None), broken, {}
        yield Suggestion("Anderson", "", "", 2.0), other, {}

    monkeypatch.setattr(timing, "_suggest", ideas)
    model = Trained(solver=eq.Picard(rtol=1e-7, max_steps=3000, block=1))
    found = profile_model(model, samples(0.99, 0.99), repeats=3, try_suggestions=True)
    good, bad = found.suggestions
    # Over a thousand steps against a handful.
    assert good.name == "Anderson"
    assert good.measured is not None
    assert good.measured > 5
    assert good.change is not None
    assert good.change < 1e-3
    assert bad.measured is None
    assert bad.note.startswith("could not be tried: ")
    assert isinstance(model.layer.solver, eq.Picard)  # the given model is as it was
    assert "the answer changes by" in str(found)


def test_operators_are_those_of_the_profiler(profile: Profile) -> None:
    names = [name for name, _, _ in profile.main.operators]
    seconds = [s for _, _, s in profile.main.operators]
    assert any("convolution" in name for name in names)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 0.0
