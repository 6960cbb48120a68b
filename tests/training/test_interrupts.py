"""Ctrl-C: once finishes the step, twice stops at once; afterwards Python's own handler is back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from equilibria.training import Interrupted, read_checkpoint
from equilibria.training import run as run_module
from equilibria.training.run import Run, StopRequest

from .small import SignalAt, config, run, same_rows

ROOT = Path(__file__).parent.parent.parent


def test_the_first_asks_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    told: list[int] = []
    with StopRequest(lambda: told.append(1)) as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert request.asked
        assert told == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_run_works_in_a_thread(tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(config(tmp_path, epochs=1))))
    thread.start()
    thread.join()
    assert found[0].history[0]["epoch"] == 1


def test_twice_stops_at_once_and_still_saves(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        run(config(tmp_path), callbacks=[SignalAt(3, times=2)])
    assert signal.getsignal(signal.SIGINT) is before
    assert caught.value.checkpoint == tmp_path / "last.ckpt"
    found = read_checkpoint(tmp_path / "last.ckpt")["equilibria"]["progress"]
    assert found == {"epoch": 0, "batch": 3, "step": 3}


def _press_in(hook: str, epoch: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C as a method of the run begins, once so many epochs are behind it."""
    method = getattr(Run, hook)
    left = [times]

    def pressed(self: Run, *arguments: Any, **options: Any) -> Any:
        while self.progress.epoch == epoch and left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGINT)
        return method(self, *arguments, **options)

    monkeypatch.setattr(Run, hook, pressed)


@pytest.mark.parametrize(
    ("hook", "epoch"), [("on_validation_start", 2), ("save", 3), ("on_train_end", 3)]
)
def test_after_the_last_batch_the_run_is_completed_and_the_wish_is_kept(
    hook: str, epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(config(tmp_path / "whole", ema=0.9))
    folder = tmp_path / "cut"
    _press_in(hook, epoch, monkeypatch)
    with pytest.raises(Interrupted, match="training is complete") as caught:
        run(config(folder, ema=0.9))
    assert str(folder) in str(caught.value)
    assert "Go on with" not in str(caught.value)
    assert caught.value.checkpoint == folder / "last.ckpt"
    assert caught.value.exact
    names = {path.name for path in expected.folder.iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[k], v) for k, v in load_file(expected.weights).items())
    monkeypatch.undo()
    again = run(config(folder, ema=0.9), resume=folder)
    assert same_rows(again.history, expected.history)


def test_as_the_result_is_written_it_waits_and_twice_it_can_be_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_module.write_json
    for times, words in ((1, "training is complete"), (2, "Go on with")):
        folder = tmp_path / str(times)

        def pressed(*given: Any, presses: int = times) -> None:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            write(*given)

        with monkeypatch.context() as patch:
            patch.setattr(run_module, "write_json", pressed)
            with pytest.raises(Interrupted, match=words):
                run(config(folder, epochs=1))
        assert (folder / "result.json").exists() == (times == 1)
        run(config(folder, epochs=1), resume=folder)
        assert (folder / "result.json").exists()


def test_the_command_says_that_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from equilibria.cli.app import main

    _press_in("save", 1, monkeypatch)
    words = ["--epochs", "1", "--samples", "64", "--accelerator", "cpu", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--quiet", *words])
    assert ended.value.code == 130
    said = capsys.readouterr().err
    assert "the training is complete" in said
    assert "--resume" not in said
    assert (tmp_path / "result.json").exists()


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.training.small import config, run
import lightning.pytorch as pl

class Slow(pl.Callback):
    def on_train_batch_end(self, trainer, module, *args, **kwargs):
        import time
        print("step", flush=True)
        time.sleep(0.2)

run(config(Path(sys.argv[2]), epochs=50), callbacks=[Slow()])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Interrupted after 0 of 50 epochs" in errors
    assert f"resume={str(out)!r}" in errors
    assert read_checkpoint(out / "last.ckpt")["equilibria"]["exact"] is True
