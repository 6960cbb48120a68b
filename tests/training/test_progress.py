"""What the user sees: numbers in a line, logs that TensorBoard can read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from equilibria.training import fit
from equilibria.training.progress import RichDisplay, epoch_line
from tests.optional import optional

from .small import RaiseAt, Tiny, config, digits, run

accumulator = optional("tensorboard.backend.event_processing.event_accumulator")

ROW: dict[str, Any] = {
    "epoch": 3,
    "train_loss": 0.4123,
    "train_accuracy": 0.875,
    "val_loss": 0.5,
    "val_accuracy": 0.91234,
    "solver_steps": 4.0,
    "residual": 0.0031,
    "converged": 0.995,
    "failed": 0.0,
    "seconds": 1.24,
}


def test_the_line_of_an_epoch() -> None:
    assert epoch_line(ROW, 10) == (
        "epoch  3/10  loss 0.412 · acc 87.5% · 4.0 steps · residual 3.1e-03 · 100% converged  "
        "validation loss 0.500 · acc 91.23%  1.2 s"
    )
    bare = {k: ROW[k] for k in ("epoch", "train_loss", "train_accuracy", "seconds")}
    assert epoch_line(bare, 3) == "epoch 3/3  loss 0.412 · acc 87.5%  1.2 s"
    assert "2.0% failed" in epoch_line({**ROW, "failed": 0.02}, 10)
    assert "mIoU 50.00%" in epoch_line({**ROW, "val_miou": 0.5}, 10)


def test_in_80_columns_the_bar_is_one_line_with_every_number(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    display = RichDisplay()
    display.start(90, 391, 10, 0)
    display.step(10, 390)
    display.numbers(
        {"loss": 0.5, "accuracy": 0.75, "solver_steps": 4, "residual": 1e-3, "converged": 1.0}
    )
    display._bar.refresh()
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    assert "epoch 11/90 390/391 loss 0.500 · acc 75% · 4.0 steps · res 1e-03 · 100% conv" in shown


def test_the_bar_shows_everything(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    display = RichDisplay()
    display.start(3, 10, 0, 0)
    display.step(0, 5)
    display.numbers({"loss": 0.5, "accuracy": 0.75, "solver_steps": 4, "residual": 1e-3})
    display._bar.refresh()
    display.validating()
    display._bar.refresh()
    display.epoch({**ROW, "epoch": 1}, 3)
    display.say("stopping")
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    for part in ("epoch 1/3", "5/10", "loss 0.500", "acc 75.0%", "4.0 steps", "residual 1.0e-03"):
        assert part in shown
    assert "validating" in shown
    assert "stopping" in shown
    assert "99% converged" in shown or "100% converged" in shown


def test_a_run_writes_a_line_for_each_epoch(tmp_path: Path, capfd: Any) -> None:
    fit(config(tmp_path, epochs=2), data=digits(), model=Tiny(), progress=True)
    out, errors = capfd.readouterr()
    assert out == ""
    lines = [line for line in errors.splitlines() if line.startswith("epoch")]
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]


def test_silence_is_silence(tmp_path: Path, capfd: Any) -> None:
    run(config(tmp_path, epochs=1))
    assert capfd.readouterr() == ("", "")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=2, log_every=4))
    found = scalars(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [1, 5, 9]
    assert found["train/solver_steps"][0][1] == 3.0
    for name in ("train/lr", "train/gradient_norm", "train/samples_per_second", "train/residual"):
        assert len(found[name]) == 3
    assert [step for step, _ in found["epoch/val_accuracy"]] == [6, 12]
    assert found["epoch/val_accuracy"][1][1] == pytest.approx(result.metrics["val_accuracy"])


def test_after_a_resume_no_step_is_logged_twice(tmp_path: Path) -> None:
    place = config(tmp_path, epochs=3, log_every=2)
    with pytest.raises(RuntimeError, match="power cut"):
        # The checkpoint is of step 6; steps 7, 9 and 11 are in the log already.
        run(place, callbacks=[RaiseAt(11, RuntimeError("power cut"))])
    run(place, resume=tmp_path)
    steps = [step for step, _ in scalars(tmp_path)["train/loss"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 17
