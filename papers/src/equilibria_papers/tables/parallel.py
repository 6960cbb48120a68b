"""Several trainings at once, each in a process of joblib's (loky): a death costs one row.

Only the parent writes the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from joblib.externals.loky import (  # type: ignore[import-untyped]
    FIRST_COMPLETED,
    BrokenProcessPool,
    Future,
    ProcessPoolExecutor,
    wait,
)

from .plan import Choices, Planned
from .provenance import Log
from .runs import Stop, complete, run_job

TIMING = frozenset({"throughput", "times"})
"""Measures of time: true only where nothing else runs."""

Tell = Callable[[str], None]

_LOOK = 0.5  # seconds after which it is looked whether a stop is asked for


@dataclass(frozen=True)
class Task:
    """A training, or what is left to measure of one."""

    planned: Planned
    label: str
    log: Log


def split(planned: Planned) -> tuple[Planned | None, Planned | None]:
    """(what may run beside others, what has to run alone); None where nothing is left to do."""
    if complete(planned):
        return None, None
    asked = planned.job.measures
    beside = planned.measuring(tuple(name for name in asked if name not in TIMING))
    alone = planned.measuring(tuple(name for name in asked if name in TIMING))
    left = bool(alone.job.measures) and not complete(alone)
    return None if complete(beside) else beside, alone if left else None


def _work(planned: Planned, log: Log, choices: Choices, stop: Stop) -> tuple[str, str, list[Any]]:
    """In a worker: how it ended, why, and the lines of the log, which the parent alone writes."""
    lines: list[Any] = []
    log.kept = lines
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the tables
            run_job(planned, choices, log, stop=stop)
        how, why = "done", ""
    except KeyboardInterrupt as stopped:
        how, why = "interrupted", str(stopped)
    except Exception as error:  # noqa: BLE001 – said and logged by the parent
        how, why = "failed", f"{type(error).__name__}: {str(error)[:200]}"
    if stop.orphaned():
        os._exit(1)  # all is saved, and nobody hears the answer
    return how, why, lines


@dataclass(frozen=True, eq=False)
class _Running:
    """A task in a process of its own: what dies breaks no pool but this one."""

    task: Task
    executor: ProcessPoolExecutor
    began: float


def run_beside(
    tasks: Sequence[Task], choices: Choices, stop: Stop, failures: dict[str, str], say: Tell
) -> None:
    """All tasks, ``choices.parallel`` at a time; raises KeyboardInterrupt where some are left.

    One that fails or dies is logged and said, and the others go on (a smoke test ends: it passes
    nothing over). Ctrl-C asks the workers to save; the third one ends them. ``failures`` gets, by
    the key of a training, why it gave nothing.
    """
    waiting, running, begun, cut = deque(tasks), dict[Any, _Running](), 0, 0
    own = replace(choices, progress=False, parallel=1)
    threads = max(1, torch.get_num_threads() // choices.parallel)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stop"
        stop = replace(stop, file=file, parent=os.getpid())
        try:
            with _ctrl_c(file, say):
                while waiting or running:
                    while waiting and len(running) < choices.parallel:
                        # Late, the first get their step all the same: short calls get on too.
                        if stop.asked() and (begun >= choices.parallel or not stop.late()):
                            break
                        task = waiting.popleft()
                        executor = ProcessPoolExecutor(1, env={"OMP_NUM_THREADS": str(threads)})
                        # Not heard by the worker, which is born here: it reads the file.
                        with handled(signal.SIG_IGN):
                            future = executor.submit(_work, task.planned, task.log, own, stop)
                        running[future] = _Running(task, executor, time.perf_counter())
                        begun += 1
                        say(f"{task.label}: started in {task.planned.folder}")
                    if not running:
                        break
                    for future in wait(running, _LOOK, return_when=FIRST_COMPLETED).done:
                        cut += _ended(running.pop(future), future, choices, failures, say)
        finally:
            for one in running.values():
                one.executor.shutdown(kill_workers=True)
                for part in one.task.planned.folder.rglob(".*.part"):  # of a file it was writing
                    part.unlink(missing_ok=True)
        if waiting or cut:
            over = f"The {choices.minutes:g} minutes are over." if stop.late() else ""
            raise KeyboardInterrupt(over or f"{cut} training(s) were interrupted.")


def _ended(
    one: _Running, future: Future[Any], choices: Choices, failures: dict[str, str], say: Tell
) -> bool:
    """Log and say how it ended; whether it was interrupted."""
    task, seconds = one.task, time.perf_counter() - one.began
    try:
        how, why, lines = future.result()
    except BrokenProcessPool:
        how, why, lines = "failed", "its process was killed (out of memory?)", []
        task.log.add(task.planned, how, seconds, error=why)
    one.executor.shutdown()
    for line in lines:
        task.log.write(line)
    said = {"done": "done in", "interrupted": "stopped after", "failed": "failed after"}[how]
    say(f"{task.label}: {said} {seconds:.0f} s{f': {why}' if how == 'failed' else ''}")
    if how == "failed":
        failures[task.planned.key] = f"failed: {why}"
        if choices.smoke:  # a test: nothing may be passed over
            raise RuntimeError(f"{task.planned.job.name}, seed {task.planned.seed}: {why}")
    return bool(how == "interrupted")


def _ctrl_c(file: Path, say: Tell) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C makes the file that the workers look for; from the third on it is what it was."""
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: Any) -> None:
        if file.exists():
            signal.signal(signal.SIGINT, before)
            say("still saving: the next Ctrl-C ends the trainings as they are")
            return
        file.touch()
        say("stopping: the trainings finish their step and save")

    return handled(ask)


@contextlib.contextmanager
def handled(by: Any) -> Iterator[None]:
    """Ctrl-C is handled so inside the block; outside the main thread nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    # None: a handler that was not set by Python; there is no way to put that one back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, by)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
