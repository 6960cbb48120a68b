"""Where numbers come from: command, commit, versions, machine, time."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from equilibria import __version__

from .plan import Planned

COMMIT_VARIABLE = "EQUILIBRIA_COMMIT"
"""Names the commit on machines without git."""


def command() -> str:
    """What was typed: the program by its name, without the folder it lies in."""
    program = Path(sys.argv[0])
    name = "equilibria" if program.name in ("__main__.py", "equilibria") else program.name
    return shlex.join([name, *sys.argv[1:]])


def commit() -> str:
    """The commit of the source, marked where files differ from it; "unknown" without git."""
    named = os.environ.get(COMMIT_VARIABLE, "")
    if named:
        return named
    here = Path(__file__).resolve().parent
    try:
        found = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found + (", with uncommitted files" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kind = platform.processor() or platform.machine()
    return f"{device.type}: {kind}, {torch.get_num_threads()} thread(s)"


def made_by(device: torch.device) -> dict[str, Any]:
    """What goes beside a number."""
    return {
        "command": command(),
        "commit": commit(),
        "version": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": device_name(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# The log of experiments: one line of JSON for every training, also for those that failed.


class Log:
    """``log.jsonl`` in a folder; lines are only ever added."""

    def __init__(self, folder: Path, experiment: str, change: str) -> None:
        self.path = folder / "log.jsonl"
        self.experiment = experiment
        self.change = change
        self.kept: list[dict[str, Any]] | None = None
        """Lines that another process will write; None: they are written."""

    def add(
        self,
        planned: Planned,
        outcome: str,
        seconds: float,
        result: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Note how a training ended: "done", "measured", "failed", "interrupted"."""
        line = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "id": self.experiment,
            "job": planned.job.name,
            "key": planned.key,
            "seed": planned.seed,
            "smoke": planned.smoke,
            "stand_in": planned.stands_in,
            "change": self.change,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "result": dict(result or {}),
            **more,
        }
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        if self.kept is not None:
            self.kept.append(line)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, oldest first; an incomplete last line is left out."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
