"""profile_model on small networks: sums, counts, histograms, and that nothing of the user moves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.evaluation.timing import Profile, profile_model
from equilibria.evaluation.timing.profiling import _middle
from equilibria.evaluation.timing.tables import binned

from . import fakes
from .fakes import Clock, SlowLayer, SlowPicard, SlowSGD, clock, slow_loss, slow_model

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
    found = profile_model(model, batch(), repeats=1)
    assert found.train is None
    assert any("only inference" in note for note in found.notes)


def test_bf16_runs() -> None:
    found = profile_model(network(), batch(), repeats=1, precision="bf16")
    assert found.precision == "bf16-mixed"


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


def test_the_middle_half_is_kept() -> None:
    assert sorted(_middle([5.0, 1.0, 9.0, 2.0, 4.0, 3.0, 8.0, 7.0])) == [0, 4, 5, 7]
    assert _middle([2.0]) == [0]


def test_bins_hold_every_solve() -> None:
    histogram = torch.zeros(60, dtype=torch.long)
    histogram[[3, 17, 40, 59]] = torch.tensor([1, 2, 3, 4])
    found = binned(histogram, rows=12)
    assert len(found) <= 12
    assert found[0][0] == 3
    assert found[-1][1] == 59
    assert sum(count for *_, count in found) == 10
    assert binned(torch.tensor([0, 0, 5])) == [(2, 2, 5)]


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


def test_the_express_lane_is_seen_and_counted() -> None:
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
    assert "express lane" not in [s.name for s in found.suggestions]


def test_fixed_steps_on_the_general_path_are_shown_the_express_lane() -> None:
    torch.manual_seed(0)
    model = eq.models.create("geq_stack_digits", widths=(8,), depth=1)
    found = profile_model(
        model, torch.randn(4, 1, 8, 8), repeats=3, budget=0.5, try_suggestions=True
    )
    idea = next(s for s in found.suggestions if s.name == "express lane")
    assert idea.measured is not None
    assert "1 Gaussian layers" in idea.reason
