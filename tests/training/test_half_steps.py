"""Half of the steps in the first epochs of a training, all of them everywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import equilibria as eq
from equilibria.training import CheckpointError, EquilibriumModule, GraphedModel, TrainConfig
from equilibria.training.half_steps import HalfSteps

from .small import Pixels, Tiny, config, digits, run, same_state


def fixed(steps: int) -> eq.Picard:
    return eq.Picard(rtol=0.0, atol=0.0, max_steps=steps, damping=0.8)


def seeded(**ways: Any) -> Tiny:
    """The tiny network of three steps and two terms, from one seed, with other ways to solve."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tiny()
    for name, value in ways.items():
        setattr(model.geq, name, value)
    return model


@pytest.mark.filterwarnings("ignore:the layers are not at their equilibrium")  # after two steps
def test_the_first_epochs_train_with_half_of_the_steps(tmp_path: Path) -> None:
    model, seen = seeded(), []

    def note(layer: Any, *_: Any) -> None:
        seen.append((layer.training, layer.solver.max_steps, layer.adjoint.steps))

    model.geq.register_forward_hook(note)
    options: dict[str, Any] = {"epochs": 3, "keep_every": 1, "ema": 0.9, "half_steps": 0.7}
    images = digits(64)  # two steps an epoch
    result = run(config(tmp_path / "half", **options), model=model, data=images)
    train = [way for way in seen if way[0]]
    assert train == 4 * [(True, 2, 1)] + 2 * [(True, 3, 2)]
    assert [way for way in seen if not way[0]] == (len(seen) - 6) * [(False, 3, 2)]
    assert [row["solver_steps"] for row in result.history] == [2.0, 2.0, 3.0]
    assert result.model.geq.solver.max_steps == 3  # type: ignore[union-attr]
    # The first epochs are those of a network that has so many steps and terms, bit for bit.
    short = seeded(solver=fixed(2), adjoint=eq.Phantom(steps=1, damping=0.8))
    place = config(tmp_path / "short", **options | {"half_steps": 0.0})
    expected = run(place, model=short, data=images)
    kept = [f"epochs/epoch_000{n}.safetensors" for n in (1, 2, 3)]
    pairs = [(load_file(result.folder / k), load_file(expected.folder / k)) for k in kept]
    assert [same_state(*pair) for pair in pairs] == [True, True, False]
    # Validated were the averaged weights with all steps.
    whole = seeded().eval()
    whole.load_state_dict(pairs[0][0])
    x, y = next(iter(eq.data.Batches(images[1], 64)))
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(whole(x), y))
    assert result.history[0]["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert expected.history[0]["val_loss"] != pytest.approx(loss, rel=1e-5)


def test_a_network_saved_in_the_first_epochs_has_all_steps(tmp_path: Path) -> None:
    ways = {"solver": fixed(4), "adjoint": eq.Phantom(steps=3)}
    settings = config(
        tmp_path,
        model="geq_digits",
        model_options={"widths": [8], "depth": 1, "hidden": 8, **ways},
        half_steps=0.5,
        epochs=2,
        keep_every=1,
    )
    result = run(settings, model=None, data=digits(32, 32))
    for path in (tmp_path / "epochs/epoch_0001.safetensors", result.weights):
        for layer in eq.nn.equilibrium_layers(eq.models.load(path)).values():
            assert (layer.solver, layer.adjoint) == tuple(ways.values())
    assert [row["solver_steps"] for row in result.history] == [2.0, 4.0]


def test_half_is_rounded_up_and_a_tolerance_stays() -> None:
    def layer(solver: Any) -> eq.nn.OptEq:
        return eq.nn.OptEq(4, 4, solver=solver, adjoint=eq.Phantom(steps=5))

    branches = eq.nn.MultiBranch([layer(fixed(1)), layer(fixed(7))], scales=(4, 2))
    model = nn.Sequential(branches, layer(eq.Picard(rtol=1e-3, max_steps=50)))
    layers: list[Any] = [*branches.branches, model[1]]
    own = [(m.solver, m.adjoint) for m in layers]
    half = HalfSteps(model, TrainConfig(half_steps=0.29, epochs=100))
    assert half.epochs == 29  # 0.29 * 100 is 28.999999999999996
    with half.taken(28):
        found = [(m.solver.max_steps, m.adjoint.steps) for m in layers]
    assert found == [(1, 3), (4, 3), (50, 5)]
    assert [(m.solver, m.adjoint) for m in layers] == own
    with half.taken(29):
        assert [(m.solver, m.adjoint) for m in layers] == own


@pytest.mark.parametrize("model", [Pixels(3), eq.models.create("geq_digits", widths=(8,), depth=1)])
def test_without_fixed_steps_there_is_no_half(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"half_steps=0\.5\): .* fixed number of steps"):
        EquilibriumModule(model, TrainConfig(half_steps=0.5), num_classes=3)
    with pytest.raises(ValueError, match=r"half_steps=1\.0"):
        TrainConfig(half_steps=1.0)


def test_more_epochs_are_another_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "constant", "half_steps": 0.5}
    run(config(tmp_path, epochs=1, **options), data=digits(32, 32))
    with pytest.raises(CheckpointError, match="epochs: now 2, then 1"):
        run(config(tmp_path, epochs=2, **options), data=digits(32, 32), resume=tmp_path)


def test_graphs_of_half_steps_are_dropped_when_all_are_taken() -> None:
    model, x = seeded(), torch.randn(4, 64)
    settings = TrainConfig(cuda_graphs=True, half_steps=0.5, epochs=4)
    ours = EquilibriumModule(model, settings, num_classes=10, steps_per_epoch=6)
    first: GraphedModel = ours.__dict__["_compiled"]
    with ours._half.taken(0):
        key = first._key(x)
    assert key != first._key(x)  # never replayed for another number of steps
    kept = []
    for ours.step in (0, 6, 12, 18):
        ours.on_train_epoch_start()
        kept.append(ours.__dict__["_compiled"] is first)
    assert kept == [True, True, False, False]


@pytest.mark.gpu
def test_both_phases_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    captures: list[int] = []
    call, capture = GraphedModel.__call__, GraphedModel._capture

    def layers(graphed: GraphedModel) -> list[Any]:
        return list(eq.nn.equilibrium_layers(graphed.model).values())

    def noted_call(self: GraphedModel, x: torch.Tensor) -> torch.Tensor:
        out = call(self, x)
        assert list(self._graphed) == [self._key(x)]  # replayed, and no other graph is kept
        taken.extend({(m.solver.max_steps, m.adjoint.steps) for m in layers(self)})
        return out

    def noted_capture(self: GraphedModel, x: torch.Tensor) -> nn.Module:
        captures.append(layers(self)[0].solver.max_steps)
        return capture(self, x)

    monkeypatch.setattr(GraphedModel, "__call__", noted_call)
    monkeypatch.setattr(GraphedModel, "_capture", noted_capture)
    options: dict[str, Any] = {"epochs": 4, "half_steps": 0.5, "lr": 0.01, "accelerator": "gpu"}
    results = []
    for graphs in (True, False):
        torch.manual_seed(0)
        ways = {"solver": fixed(4), "adjoint": eq.Phantom(steps=3, damping=0.8)}
        model = eq.models.create("geq_digits", widths=(16,), depth=1, hidden=16, **ways)
        place = config(tmp_path / str(graphs), cuda_graphs=graphs, **options)
        results.append(run(place, model=model))
    assert captures == [2, 4]
    assert taken == 12 * [(2, 2)] + 12 * [(4, 3)]
    graphed, eager = (r.model.state_dict() for r in results)
    for name, value in eager.items():
        torch.testing.assert_close(graphed[name], value, rtol=5e-2, atol=5e-3)
    assert [row["solver_steps"] for row in results[0].history] == [2.0, 2.0, 4.0, 4.0]
