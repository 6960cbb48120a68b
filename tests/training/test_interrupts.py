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

from equilibria.training import Interrupted, read_checkpoint
from equilibria.training.interrupts import StopRequest, listen

from .small import SignalAt, config, run, same_rows, same_weights

ROOT = Path(__file__).parent.parent.parent


def test_the_first_asks_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    request, told = StopRequest(), []
    with listen(request, lambda: told.append(1)):
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
        with listen(StopRequest(), lambda: None):
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
    standing = read_checkpoint(tmp_path / "last.ckpt")["equilibria"]["standing"]
    assert standing == {"epoch": 0, "batch": 3, "step": 3}


def test_sigterm_saves_too(tmp_path: Path) -> None:
    expected = run(config(tmp_path / "whole"))
    with pytest.raises(Interrupted) as caught:
        run(config(tmp_path / "cut"), callbacks=[SignalAt(8, number=signal.SIGTERM)])
    assert caught.value.exact
    found = run(config(tmp_path / "cut"), resume=tmp_path / "cut")
    assert same_weights(found.model, expected.model)
    assert same_rows(found.history, expected.history)


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
