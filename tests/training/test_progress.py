"""What the user sees: numbers in a line, logs that TensorBoard can read."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich

from equilibria.training.progress import epoch_line
from tests.optional import optional

from .small import RaiseAt, SignalAt, config, run

accumulator = optional("tensorboard.backend.event_processing.event_accumulator")
event_file_writer = optional("tensorboard.summary.writer.event_file_writer")

BARE: dict[str, Any] = {"epoch": 3, "train_loss": 0.4123, "train_accuracy": 0.875, "seconds": 1.24}
SOLVER = {"solver_steps": 4.0, "residual": 0.0031, "converged": 0.995, "failed": 0.0}
ROW = {**BARE, **SOLVER, "val_loss": 0.5, "val_accuracy": 0.91234}


def test_the_line_of_an_epoch() -> None:
    assert epoch_line(ROW, 10) == (
        "epoch  3/10  loss 0.412 · acc 87.5% · steps 4.0 · res 3.1e-03 · conv 100%  "
        "validation loss 0.500 · acc 91.23%  1.2 s"
    )
    assert epoch_line(BARE, 3) == "epoch 3/3  loss 0.412 · acc 87.5%  1.2 s"
    assert "failed 2.0%" in epoch_line({**ROW, "failed": 0.02}, 10)
    assert "mIoU 50.00%" in epoch_line({**ROW, "val_miou": 0.5}, 10)


@pytest.mark.parametrize("columns", [80, 160])
def test_the_bar_shows_every_number_in_one_line(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Also of a run that is stopped and goes on; afterwards rich's own console is on stdout."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(columns))):
        monkeypatch.setenv(name, value)
    settings = config(tmp_path, epochs=2, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        run(settings, progress=True, callbacks=[SignalAt(2)])
    run(settings, progress=True, resume=tmp_path)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capfd.readouterr().err)
    numbers = r"acc: \d+\.\d% steps: 3\.0 res: \d\.\de-\d\d img/s: \d+ left: 0:\d\d:\d\d"
    numbers = r"loss: \d\.\d+ " + numbers if columns > 132 else numbers
    bar = r".*\d:\d\d:\d\d" if columns > 132 else ""
    assert re.search(rf"epoch 1/2 .*\d/6{bar} .*{numbers}", shown)
    assert re.search(rf"epoch 2/2 .*6/6{bar} .*{numbers}", shown)
    assert "stopping after this step" in shown
    assert "epoch 1/2  loss" in shown
    assert not rich.get_console().stderr


def test_a_run_writes_a_line_for_each_epoch_or_nothing(tmp_path: Path, capfd: Any) -> None:
    run(config(tmp_path / "silent", epochs=1))
    assert capfd.readouterr() == ("", "")
    run(config(tmp_path / "told", epochs=2), progress=True)
    out, errors = capfd.readouterr()
    assert out == ""
    lines = [line for line in errors.splitlines() if line.startswith("epoch")]
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=2, log_every=4, loggers=["tensorboard"]))
    found = scalars(tmp_path)
    for name in ("loss", "lr", "gradient_norm", "samples_per_second", "residual", "solver_steps"):
        assert [step for step, _ in found[f"train/{name}"]] == [1, 5, 9]
    assert found["train/solver_steps"][0][1] == 3.0
    assert [step for step, _ in found["epoch/val_accuracy"]] == [6, 12]
    assert found["epoch/val_accuracy"][1][1] == pytest.approx(result.metrics["val_accuracy"])


def test_the_rate_is_that_of_the_step_and_not_of_the_next(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "step", "milestones": [1, 2], "lr": 0.1, "drop": 0.5}
    result = run(config(tmp_path, log_every=1, loggers=["tensorboard"], **options))
    assert [row["lr"] for row in result.history] == pytest.approx([0.1, 0.05, 0.025])
    found = [value for _, value in scalars(tmp_path)["train/lr"]]
    assert found == pytest.approx([0.1] * 6 + [0.05] * 6 + [0.025] * 6)


def test_after_a_resume_no_step_is_logged_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = config(tmp_path, epochs=3, log_every=2, loggers=["tensorboard"])
    with pytest.raises(RuntimeError, match="power cut"):
        # The checkpoint is of step 6; steps 7, 9 and 11 are in the log already.
        run(place, callbacks=[RaiseAt(11, RuntimeError("power cut"))])
    # The files of one process and second are read in the order of 0, 1, 10, 2: a later second.
    later = SimpleNamespace(time=lambda: time.time() + 2.0)
    monkeypatch.setattr(event_file_writer, "time", later)
    run(place, resume=tmp_path)
    steps = [step for step, _ in scalars(tmp_path)["train/loss"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 17
