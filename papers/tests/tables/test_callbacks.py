"""A limit of time stops the training that it was given to, in whichever thread that runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from equilibria.training import Interrupted, read_checkpoint
from equilibria_papers.tables.runs import Snapshots, Stop, StopWhenAsked
from tests.training.small import RaiseAt, SignalAt, config, run


def _progress(folder: Path) -> dict[str, int]:
    found: dict[str, int] = read_checkpoint(folder / "last.ckpt")["equilibria"]["progress"]
    return found


def test_it_stops_after_a_step_without_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", sent.append)
    with pytest.raises(Interrupted, match="Go on with"):
        run(config(tmp_path), callbacks=[StopWhenAsked(Stop(time.time()))])
    assert _progress(tmp_path) == {"epoch": 0, "batch": 1, "step": 1}
    assert not sent


def test_outside_the_main_thread_it_stops_the_training_and_nothing_else(tmp_path: Path) -> None:
    caught: list[Any] = []
    reached: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: reached.append(number))

    def work() -> None:
        try:
            caught.append(run(config(tmp_path), callbacks=[StopWhenAsked(Stop(time.time()))]))
        except Interrupted as stopped:
            caught.append(stopped)

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(caught[0], Interrupted)
    assert _progress(tmp_path)["step"] == 1
    assert reached == []


def test_ctrl_c_in_the_same_step_does_not_cut_it(tmp_path: Path) -> None:
    """The limit is no second Ctrl-C, nor is a Ctrl-C after it."""
    late = StopWhenAsked(Stop(time.time()))
    for folder, own in (("a", [SignalAt(1), late]), ("b", [late, SignalAt(1)])):
        with pytest.raises(Interrupted) as caught:
            run(config(tmp_path / folder), callbacks=own)
        assert caught.value.exact
        assert _progress(tmp_path / folder)["step"] == 1


def test_before_its_time_it_does_nothing(tmp_path: Path) -> None:
    result = run(config(tmp_path, epochs=1), callbacks=[StopWhenAsked(Stop(time.time() + 1e6))])
    assert result.history[-1]["epoch"] == 1


def test_a_file_or_a_parent_that_is_gone_ask_too(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    assert not Stop(file=file, parent=os.getppid()).asked()
    assert Stop(parent=1_000_000_000).asked()
    file.touch()
    assert Stop(file=file).asked()


def test_a_trainer_of_somebody_else_is_refused() -> None:
    other: Any = SimpleNamespace(callbacks=[])
    with pytest.raises(RuntimeError, match=r"equilibria\.training\.fit"):
        StopWhenAsked(Stop(0.0)).on_train_batch_end(other)


@pytest.mark.parametrize("cut", ["first epoch", "validation"])
def test_snapshots_of_a_training_that_was_cut_in_its_first_epoch(cut: str, tmp_path: Path) -> None:
    """By Ctrl-C after step 2, and by a second one in the first validation."""
    kinds = {
        "first epoch": SignalAt(2),
        "validation": RaiseAt(1, KeyboardInterrupt(), "on_validation_batch_end"),
    }
    epochs = (0, 1, 2, 3)
    run(config(tmp_path / "a"), callbacks=[Snapshots(tmp_path / "whole", epochs)])
    with pytest.raises(Interrupted):
        run(config(tmp_path / "b"), callbacks=[Snapshots(tmp_path / "cut", epochs), kinds[cut]])
    again = [Snapshots(tmp_path / "cut", epochs)]
    run(config(tmp_path / "b"), resume=tmp_path / "b", callbacks=again)
    for epoch in epochs:
        one, other = (
            safetensors.torch.load_file(tmp_path / name / f"weights_{epoch}.safetensors")
            for name in ("whole", "cut")
        )
        assert all(torch.equal(one[k], other[k]) for k in one), epoch
