"""fit: the promises of its result, from a name to weights that load again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.engine.result import ConvergenceWarning
from equilibria.training import Interrupted, TrainConfig, fit

from .small import RaiseAt, Tiny, config, digits, masks, run, same_weights

SMALL = {"widths": [8], "depth": 1, "hidden": 8}


def test_a_named_model_on_digits_comes_back_from_its_file(tmp_path: Path) -> None:
    settings = TrainConfig(
        model="geq_digits",
        model_options=SMALL,
        epochs=1,
        batch_size=128,
        ema=0.9,
        out=str(tmp_path),
        accelerator="cpu",
    )
    result = fit(settings, progress=False)
    assert not result.model.training
    loaded = eq.models.load(result.weights)
    assert same_weights(loaded, result.model)
    assert loaded.extra["classes"] == [str(k) for k in range(10)]
    assert loaded.extra["data"] == "digits"
    assert loaded.extra["split_seed"] == 0
    assert loaded.extra["image_size"] == [8, 8]
    assert loaded.extra["metrics"]["val_accuracy"] == result.metrics["val_accuracy"]
    # The reported accuracy is that of the held-out tenth, normalized as the file says.
    whole = eq.data.load("digits", progress=False)
    _, held = whole.split(0.1, 0)
    held = held.with_normalization_of(loaded.extra)
    x, y = next(iter(eq.data.Batches(held, len(held))))
    with torch.no_grad():
        accuracy = float((loaded(x).argmax(1) == y).double().mean())
    assert result.metrics["val_accuracy"] == pytest.approx(accuracy)
    assert {p.name for p in tmp_path.iterdir()} == {
        *("config.yaml", "history.csv", "last.ckpt", "model.safetensors", "result.json"),
        "tensorboard",
    }


def test_the_best_epoch_may_be_kept(tmp_path: Path) -> None:
    # A rate that ruins the last epochs: the best one lies before.
    options = {"epochs": 6, "select": "best", "schedule": "constant", "lr": 1.5, "ema": 0.5}
    result = run(config(tmp_path, **options))
    scores = [(row["val_accuracy"], -row["val_loss"]) for row in result.history]
    best = max(range(6), key=lambda k: scores[k])
    assert result.metrics["val_accuracy"] == result.history[best]["val_accuracy"]
    assert result.metrics["val_loss"] == result.history[best]["val_loss"]
    _, valid = digits()
    x, y = next(iter(eq.data.Batches(valid, len(valid))))
    with torch.no_grad():
        accuracy = float((result.model(x).argmax(1) == y).double().mean())
    assert accuracy == pytest.approx(result.history[best]["val_accuracy"])


def test_the_best_epoch_before_an_interruption_is_kept_too(tmp_path: Path) -> None:
    # After the first epoch the rate is so high that nothing better follows.
    options = {"epochs": 4, "select": "best", "schedule": "step", "milestones": [3], "lr": 3.0}
    whole = run(config(tmp_path / "whole", **options))
    best = max(range(4), key=lambda k: (whole.history[k]["val_accuracy"], -k))
    stop = RaiseAt(6 * (best + 1) + 2, KeyboardInterrupt())
    with pytest.raises(Interrupted):
        run(config(tmp_path / "cut", **options), callbacks=[stop])
    same = run(config(tmp_path / "other", **options), resume=tmp_path / "cut")
    assert same_weights(same.model, whole.model)
    assert same.metrics == whole.metrics


def test_early_stop_counts_epochs_without_a_better_one(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=40, early_stop=2, schedule="constant", lr=1e-12, ema=None))
    scores = [(row["val_accuracy"], -row["val_loss"]) for row in result.history]
    best = max(range(len(scores)), key=lambda k: scores[k])
    assert len(result.history) < 40
    assert len(result.history) == best + 1 + 2
    # It is complete: resuming trains no further.
    settings = config(tmp_path, epochs=40, early_stop=2, schedule="constant", lr=1e-12)
    assert len(run(settings, resume=tmp_path).history) == len(result.history)


def test_without_validation(tmp_path: Path) -> None:
    result = fit(config(tmp_path, epochs=1), data=(digits()[0], None), model=Tiny(), progress=False)
    assert "val_loss" not in result.history[0]
    assert set(result.metrics) == {"train_loss", "train_accuracy", "solver_steps", "residual"}


def test_steps_that_end_far_from_the_equilibrium_are_said(tmp_path: Path) -> None:
    """One step from zero is the whole state. The run is kept even where the warning is an error."""
    model = Tiny()
    model.geq.solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=1)
    with pytest.raises(ConvergenceWarning, match=r"last of 1 step still .* by 1 of .*max_steps"):
        fit(config(tmp_path, epochs=1), data=digits(), model=model, progress=False)
    for name in ("model.safetensors", "result.json", "history.csv"):
        assert (tmp_path / name).exists()


def test_a_set_smaller_than_a_batch_is_one_batch(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=2, batch_size=1000))
    assert result.history[-1]["step"] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": (1, 2)}, "two ImageData"),
        ({"data": "digits"}, "two ImageData"),
        ({"model": "tiny"}, "torch.nn.Module"),
    ],
)
def test_wrong_arguments(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        fit(config(tmp_path), progress=False, **{"data": digits(), "model": Tiny(), **given})


def test_a_dictionary_is_no_configuration() -> None:
    with pytest.raises(TypeError, match="from_yaml"):
        fit({"lr": 0.1})  # type: ignore[arg-type]


def test_a_network_for_another_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a network for classification"):
        fit(config(tmp_path, model="geq_digits"), data=(masks(), None), progress=False)


def test_two_data_sets_that_do_not_fit(tmp_path: Path) -> None:
    import dataclasses

    train, valid = digits()
    other = dataclasses.replace(valid, classes=tuple("abcdefghij"))
    with pytest.raises(ValueError, match="differ in classes"):
        fit(config(tmp_path), data=(train, other), model=Tiny(), progress=False)
    with pytest.raises(ValueError, match="there is no validation"):
        fit(config(tmp_path, early_stop=1), data=(train, None), model=Tiny(), progress=False)


def test_validation_is_normalized_as_the_training_images_are(tmp_path: Path) -> None:
    train, valid = digits()
    shifted = valid.with_normalization([0.9], [0.01])
    a = run(config(tmp_path / "a", epochs=1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tiny()
    b = fit(config(tmp_path / "b", epochs=1), data=(train, shifted), model=model, progress=False)
    assert b.metrics["val_loss"] == a.metrics["val_loss"]


@pytest.mark.slow
def test_the_defaults_reach_98_percent_on_digits(tmp_path: Path) -> None:
    result = fit(TrainConfig(out=str(tmp_path), accelerator="cpu"), progress=False)
    test = eq.data.load("digits", "test", progress=False)
    x, y = next(iter(eq.data.Batches(test, len(test))))
    with torch.no_grad():
        accuracy = float((result.model(x).argmax(1) == y).double().mean())
    assert accuracy >= 0.98


@pytest.mark.parametrize("ema", [None, 0.9])
def test_epochs_may_be_kept(tmp_path: Path, ema: float | None) -> None:
    folder = tmp_path / "run"
    small = {"model": "geq_digits", "model_options": SMALL, "data": "digits"}
    settings = config(folder, epochs=3, keep_every=2, ema=ema, **small)
    result = fit(settings, progress=False)
    kept = sorted((folder / "epochs").iterdir())
    assert [p.name for p in kept] == ["epoch_0000.safetensors", "epoch_0002.safetensors"]
    start, middle = (eq.models.load(p) for p in kept)
    assert middle.extra["metrics"]["epoch"] == 2
    assert middle.extra["metrics"]["val_loss"] == result.history[1]["val_loss"]
    last = eq.models.load(result.weights).state_dict()
    for state in (start.state_dict(), middle.state_dict()):
        assert state.keys() == last.keys()
        assert not torch.equal(state["stem.weight"], last["stem.weight"])
    # A new run in the same folder leaves none of the old one's behind.
    (folder / "epochs" / "mine.txt").write_text("not a run's")
    fit(config(folder, epochs=1, **small), progress=False, overwrite=True)
    assert [p.name for p in (folder / "epochs").iterdir()] == ["mine.txt"]
