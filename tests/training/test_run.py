"""fit: the promises of its result and of its folder, from a name to weights that load again."""

from __future__ import annotations

import csv
import dataclasses
import getpass
import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import equilibria as eq
from equilibria.engine.options import OptionError
from equilibria.engine.result import ConvergenceWarning
from equilibria.training import RunExistsError, TrainConfig, fit
from equilibria.training.run_folder import RunFolder, provenance

from .small import Tiny, accuracy, config, digits, masks, run, same_weights

SMALL: dict[str, Any] = {"widths": [8], "depth": 1, "hidden": 8}
SMALL["solver"] = eq.Picard(rtol=0.0, max_steps=6, damping=0.8)  # fixed steps, to be fast
SMALL["adjoint"] = eq.Phantom(steps=2, damping=0.8)


def test_a_named_model_on_digits_comes_back_from_its_file(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "geq_digits", "model_options": SMALL, "ema": 0.9}
    options["loggers"] = ["tensorboard"]
    result = fit(config(tmp_path, **options, epochs=1, batch_size=128), progress=False)
    assert not result.model.training
    loaded = eq.models.load(result.weights)
    assert same_weights(loaded, result.model)
    assert loaded.extra["classes"] == [str(k) for k in range(10)]
    assert loaded.extra["data"] == "digits"
    assert loaded.extra["split_seed"] == 0
    assert loaded.extra["image_size"] == [8, 8]
    assert loaded.extra["metrics"]["val_accuracy"] == result.metrics["val_accuracy"]
    # The reported accuracy is that of the held-out tenth, normalized as the file says.
    _, held = eq.data.load("digits", progress=False).split(0.1, 0)
    found = accuracy(loaded, held.with_normalization_of(loaded.extra))
    assert result.metrics["val_accuracy"] == pytest.approx(found)
    assert {p.name for p in tmp_path.iterdir()} == {
        *("config.yaml", "history.csv", "last.ckpt", "model.safetensors", "result.json"),
        "tensorboard",
    }


def test_what_a_run_leaves(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=2))
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, wanted in zip(rows, result.history, strict=True):
        assert {name: float(value) for name, value in row.items() if value} == wanted
    found = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert found["metrics"] == result.metrics
    assert (found["seed"], found["version"]) == (0, eq.__version__)
    assert found["data"] == {"name": "digits", "train": 192, "validation": 64, "classes": 10}
    assert found["parameters"] == sum(p.numel() for p in result.model.parameters())
    assert datetime.fromisoformat(found["started"]) <= datetime.fromisoformat(found["finished"])
    saved = TrainConfig.from_yaml(tmp_path / "config.yaml")
    assert saved == config(tmp_path, epochs=2).resolved()


def test_provenance_names_no_user_and_no_host() -> None:
    made = provenance(datetime.now(UTC), torch.device("cpu"), 3)
    text = json.dumps({k: v for k, v in made.items() if k != "command"})
    assert platform.node() not in text or not platform.node()
    assert f'"{getpass.getuser()}"' not in text


def test_history_with_uneven_rows(tmp_path: Path) -> None:
    rows = [{"epoch": 1, "a": 0.1}, {"epoch": 2, "b": float("nan")}]
    RunFolder(tmp_path).write_history(rows)
    assert (tmp_path / "history.csv").read_text() == "epoch,a,b\n1,0.1,\n2,,nan\n"


def test_the_best_epoch_may_be_kept(tmp_path: Path) -> None:
    # A rate that ruins the last epochs: the best one lies before.
    options = {"epochs": 6, "select": "best", "schedule": "constant", "lr": 1.5, "ema": 0.5}
    result = run(config(tmp_path, **options))
    scores = [(row["val_accuracy"], -row["val_loss"]) for row in result.history]
    best = result.history[max(range(6), key=lambda k: scores[k])]
    assert best["epoch"] < 6
    assert result.metrics["val_accuracy"] == best["val_accuracy"]
    assert result.metrics["val_loss"] == best["val_loss"]
    assert accuracy(result.model, digits()[1]) == pytest.approx(best["val_accuracy"])


def test_early_stop_counts_epochs_without_a_better_one(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=40, early_stop=2, schedule="constant", lr=1e-12)
    result = run(settings)
    scores = [(row["val_accuracy"], -row["val_loss"]) for row in result.history]
    best = max(range(len(scores)), key=lambda k: scores[k])
    assert len(result.history) == best + 1 + 2 < 40
    # It is complete: resuming trains no further. More patience does, from where it stopped.
    assert len(run(settings, resume=tmp_path).history) == len(result.history)
    longer = run(settings.with_overrides(early_stop=4), resume=tmp_path)
    assert longer.history[: best + 3] == result.history
    assert len(longer.history) >= best + 1 + 4


def test_epochs_may_be_kept(tmp_path: Path) -> None:
    small: dict[str, Any] = {"model": "geq_digits", "model_options": SMALL, "ema": 0.9}
    given: dict[str, Any] = {"data": digits(), "progress": False}
    result = fit(config(tmp_path, epochs=3, keep_every=2, **small), **given)
    kept = sorted((tmp_path / "epochs").iterdir())
    assert [p.name for p in kept] == ["epoch_0000.safetensors", "epoch_0002.safetensors"]
    start, middle = (eq.models.load(p) for p in kept)
    assert middle.extra["metrics"]["epoch"] == 2
    assert middle.extra["metrics"]["val_loss"] == result.history[1]["val_loss"]
    assert accuracy(middle, digits()[1]) == pytest.approx(result.history[1]["val_accuracy"])
    for model in (start, middle):
        assert not torch.equal(model.stem.weight, result.model.stem.weight)
    # A new run in the same folder leaves none of the old one's behind, and spares the rest.
    (tmp_path / "epochs" / "mine.txt").write_text("not a run's")
    fit(config(tmp_path, epochs=1, **small), **given, overwrite=True)
    assert [p.name for p in (tmp_path / "epochs").iterdir()] == ["mine.txt"]


def test_a_run_is_not_written_over_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")  # a folder with other things is welcome
    run(config(tmp_path, epochs=2, loggers=["csv"]))
    (tmp_path / "csv" / "mine.txt").write_text("mine")
    (tmp_path / "nonfinite.json").write_text("{}")
    (tmp_path / "report.html").write_text("the numbers of this run")
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(RunExistsError, match=r"already holds a run.*overwrite=True"):
        run(config(tmp_path, epochs=1))
    with pytest.raises(ValueError, match="there is no model"):  # a mistake costs nothing
        fit(config(tmp_path, model="geq_digts"), overwrite=True, progress=False)
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    found = run(config(tmp_path, epochs=1, seed=1), overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [p.name for p in (tmp_path / "csv").iterdir()] == ["mine.txt"]
    assert not (tmp_path / "nonfinite.json").exists()
    assert not (tmp_path / "report.html").exists()  # it would be taken for that of the new run
    assert len(found.history) == 1
    assert TrainConfig.from_yaml(tmp_path / "config.yaml").seed == 1


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotADirectoryError, match="needs a folder"):
        run(config(tmp_path / "run", epochs=1))
    with pytest.raises(OSError, match=r"cannot make the folder .*: .*another one as out"):
        run(config(tmp_path / "run" / "deeper", epochs=1))


def test_without_validation_and_with_one_batch(tmp_path: Path) -> None:
    """A set smaller than a batch is one batch."""
    result = run(config(tmp_path, epochs=2, batch_size=1000), data=(digits()[0], None))
    assert result.history[-1]["step"] == 2
    assert "val_loss" not in result.history[0]
    assert set(result.metrics) == {"train_loss", "train_accuracy", "solver_steps", "residual"}


def test_the_loss_of_validation_is_not_rounded_to_the_precision(tmp_path: Path) -> None:
    """In bfloat16 a sum over 1,184 images would be a multiple of 8, and 256 + 1 is 256."""
    parts = digits(64, 1184)
    options: dict[str, Any] = {"precision": "bf16-true", "batch_size": 2}
    result = run(config(tmp_path, epochs=1, **options), data=(parts[0], parts[1]))
    x = parts[1].normalize(parts[1].images).bfloat16()
    with torch.no_grad():
        logits = torch.cat([result.model(part) for part in x.split(4)]).double()
    loss = torch.nn.functional.cross_entropy(logits, parts[1].targets)
    assert result.metrics["val_loss"] == pytest.approx(float(loss), rel=1e-6)


def test_steps_that_end_far_from_the_equilibrium_are_said(tmp_path: Path) -> None:
    """One step from zero is the whole state. The run is kept even where the warning is an error."""
    model = Tiny()
    model.geq.solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=1)
    with pytest.raises(ConvergenceWarning, match=r"last of 1 step still .* by 1 of .*max_steps"):
        run(config(tmp_path, epochs=1), model=model)
    for name in ("model.safetensors", "result.json", "history.csv"):
        assert (tmp_path / name).exists()


OBLONG = dataclasses.replace(digits()[0], images=digits()[0].images[:, :, :6])


@pytest.mark.parametrize(
    ("given", "options", "error", "said"),
    [
        ({"data": (1, 2)}, {}, TypeError, "two ImageData"),
        ({"data": "digits"}, {}, TypeError, "two ImageData"),
        ({"model": "tiny"}, {}, TypeError, "torch.nn.Module"),
        ({"data": (digits()[0], None)}, {"early_stop": 1}, ValueError, "there is no validation"),
        ({"data": (digits()[0], masks())}, {}, ValueError, "differ in classes"),
        ({"data": (masks(), None), "model": None}, {"model": "geq_digits"}, ValueError, "for cl"),
        ({"data": (OBLONG, None), "model": None}, {"model": "geq_digits"}, ValueError, "squares"),
        pytest.param(
            *({}, {"accelerator": "mps"}, OptionError, r"accelerator='mps'.*`equilibria info`"),
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="it is there"),
        ),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, given: Any, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(config(tmp_path, **options), **given)
    with pytest.raises(TypeError, match="from_yaml"):
        fit({"lr": 0.1})  # type: ignore[arg-type]


def test_validation_is_normalized_as_the_training_images_are(tmp_path: Path) -> None:
    train, valid = digits()
    shifted = dataclasses.replace(valid).with_normalization([0.9], [0.01])
    a = run(config(tmp_path / "a", epochs=1))
    b = run(config(tmp_path / "b", epochs=1), data=(train, shifted))
    assert b.metrics["val_loss"] == a.metrics["val_loss"]


@pytest.mark.slow
def test_the_defaults_reach_98_percent_on_digits(tmp_path: Path) -> None:
    result = fit(TrainConfig(out=str(tmp_path), accelerator="cpu"), progress=False)
    assert accuracy(result.model, eq.data.load("digits", "test", progress=False)) >= 0.98
