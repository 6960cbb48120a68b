"""Two processes on the CPU take the steps that one takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equilibria.training import Run, read_checkpoint
from equilibria.training.progress import StopRequest

from .small import config, run

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import json, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import torch
from tests.training.small import config, run

torch.set_num_threads(1)
place = config(Path(sys.argv[1]), devices=2, strategy="ddp", **json.loads(sys.argv[2]))
result = run(place)
rank = int(os.environ.get("LOCAL_RANK", "0"))
torch.save(
    {{"state": result.model.state_dict(), "history": result.history}},
    Path(sys.argv[1]) / f"rank{{rank}}.pt",
)
"""


def start(out: Path, **options: Any) -> subprocess.Popen[str]:
    """A run of two processes, in a group of its own, as a terminal makes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    script = out.with_suffix(".py")
    script.write_text(SCRIPT.format(root=str(ROOT)))
    return subprocess.Popen(
        [sys.executable, str(script), str(out), json.dumps(options)],
        env={**clean, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_end_alike_and_close_to_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 3, "ema": 0.9, "log_every": 2, "lr": 0.02}
    process = start(tmp_path / "two", **options)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    first, second = (torch.load(tmp_path / "two" / f"rank{k}.pt") for k in range(2))
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    for a, b in zip(first["history"], second["history"], strict=True):
        assert all(a[name] == b[name] for name in ("val_loss", "val_accuracy"))
    one = run(config(tmp_path / "one", **options))
    # The same images in every step; batch norm sees half of them at a time.
    for a, b in zip(first["history"], one.history, strict=True):
        assert a["step"] == b["step"]
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=0.1)
        assert a["val_accuracy"] == pytest.approx(b["val_accuracy"], abs=0.15)
    result = json.loads((tmp_path / "two" / "result.json").read_text("utf-8"))
    assert result["processes"] == 2
    # The checkpoint is one that a single process can read.
    found = read_checkpoint(tmp_path / "two" / "last.ckpt")["equilibria"]["progress"]
    assert found == {"epoch": 3, "batch": 0, "step": 18}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_both_processes_at_one_step(tmp_path: Path, number: int) -> None:
    """Ctrl-C goes to the group, as from a terminal; SIGTERM to the first process alone."""
    out = tmp_path / "two"
    process = start(out, epochs=500, log_every=3)
    began = time.monotonic()
    while not (out / "last.ckpt").exists() and time.monotonic() - began < 200:
        time.sleep(0.2)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    text, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "Go on with" in text
    saved = read_checkpoint(out / "last.ckpt")["equilibria"]
    assert saved["exact"]
    assert saved["progress"]["step"] >= 6


def test_a_signal_that_comes_as_the_processes_agree_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Run.__new__(Run)
    one.request, one.module = StopRequest(), SimpleNamespace(device="cpu")  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(world_size=2)

    def heard(flag: torch.Tensor, op: Any) -> None:
        one.request.asked = True

    monkeypatch.setattr(torch.distributed, "all_reduce", heard)
    assert not one._asked(trainer)  # the others do not know of it yet
    assert one._asked(trainer)
