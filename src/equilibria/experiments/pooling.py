"""Several trainings at once, each in a process of its own: what dies takes no other along.

A worker is a fresh interpreter (never a fork: CUDA does not survive one). It gets its order by
stdin, does what a single run does, and answers by stdout. Only the parent writes the log.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from equilibria.engine.optional import needs

from .choices import Choices
from .interrupting import held
from .log import Log
from .planning import Planned
from .running import complete
from .working import START, order_of

__all__ = ["TIMING", "Pool", "Task", "split"]

TIMING = frozenset({"throughput", "times"})
"""Measures of time: true only where nothing else runs."""

_LOOK = 0.5  # seconds after which a worker that ended unheard is noticed
_DEATH = 10.0  # seconds that a killed process may take: one that hangs in a driver is left


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


class _Worker:
    """A running process; what it answers goes to ``events`` as (worker, message)."""

    def __init__(self, task: Task, order: bytes, events: queue.SimpleQueue[Any]) -> None:
        self.task, self.events = task, events
        self.began = time.perf_counter()
        self.logged = False
        self.end: tuple[str, str] | None = None
        # A session of its own: Ctrl-C in the terminal reaches the parent alone, which passes it on
        # once. A second one would cut the step in two.
        with _blocked(signal.SIGINT):  # until START is ready for it; the process inherits this
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the listener will say so
            self.process.stdin.write(order)
            self.process.stdin.flush()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        # It ended, perhaps in the middle of a word: whatever unpickling says of that.
        with contextlib.suppress(Exception):
            while True:
                self.events.put((self, pickle.load(self.process.stdout)))
        self.events.put((self, ("exit", self.process.wait())))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def sweep(self) -> None:
        """Remove what an end in the middle of a file left beside it (``storing.write_bytes``)."""
        for part in self.task.planned.folder.rglob(f".*.{self.process.pid}.part"):
            with contextlib.suppress(OSError):
                part.unlink()


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """The signal waits, here and in a process that is started here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(code: int) -> str:
    if code >= 0:
        return f"the process ended with code {code}"
    hint = "; out of memory?" if -code == signal.SIGKILL else ""
    return f"the process was killed by signal {-code} ({signal.strsignal(-code)}{hint})"


class Pool:
    """Runs tasks side by side. ``failures`` gets, by the key of a training, why it gave nothing."""

    def __init__(
        self,
        choices: Choices,
        deadline: float | None,
        say: Callable[[str], None],
        total: int,
        failures: dict[str, str],
    ) -> None:
        self.choices, self.say, self.total, self.failures = choices, say, total, failures
        self.until = None if deadline is None else time.time() + deadline - time.monotonic()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._alive: list[_Worker] = []
        self._begun = self._interrupted = 0
        self._stopping = False
        self._advance: Callable[[], None] = lambda: None

    def run(self, tasks: Sequence[Task], at_once: int) -> None:
        """All tasks, ``at_once`` of them at a time; raises KeyboardInterrupt where some are left.

        One that fails or dies is logged and said, and the others go on (a smoke test ends: it
        passes nothing over). Ctrl-C is passed on to the workers, which save what they have.
        """
        waiting = deque(tasks)
        try:
            while waiting or self._alive:
                while waiting and len(self._alive) < at_once and self._in_time(at_once):
                    self._begin(waiting.popleft(), at_once)
                if not self._alive:
                    break
                # With a limit: Ctrl-C that another thread takes does not wake one that waits.
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=_LOOK)
                    with held():  # an end is logged whole
                        self._hear(*event)
        except BaseException:
            self._stop()
            raise
        if waiting or self._interrupted:
            over = self.until is not None and time.time() >= self.until
            raise KeyboardInterrupt(
                f"The {self.choices.minutes:g} minutes are over."
                if over
                else f"{self._interrupted} training(s) were interrupted."
            )

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """Jobs done of all, on stderr, where that is a terminal."""
        if not self.choices.progress:
            yield
            return
        with needs("rich", "the progress of several trainings"):
            import rich  # noqa: F401
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(stderr=True)
        columns = (TextColumn("jobs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        with shown:
            task = shown.add_task("", total=self.total)
            self._advance = lambda: shown.advance(task)
            yield

    def _in_time(self, at_once: int) -> bool:
        # The first ones get their step in any case: calls that are too short get on too.
        return self.until is None or self._begun < at_once or time.time() < self.until

    def _begin(self, task: Task, at_once: int) -> None:
        order = order_of(task.planned, self.choices, at_once, self.until)
        with held():  # a process that runs is on the list
            worker = _Worker(task, order, self._events)
            self._alive.append(worker)
        self._begun += 1
        where = f"in {task.planned.folder} (process {worker.process.pid})"
        self.say(f"{task.label}: started {where}")

    def _hear(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        match message:
            case ("log", outcome, seconds, result, more):
                worker.logged = True
                worker.task.log.add(worker.task.planned, outcome, seconds, result, **more)
            case ("end", how, why):
                worker.end = (how, why)
            case ("exit", code):
                if worker in self._alive:
                    self._ended(worker, code)

    def _ended(self, worker: _Worker, code: int) -> None:
        self._alive.remove(worker)
        worker.close()
        worker.sweep()
        task, spent = worker.task, worker.seconds
        how, why = worker.end or ("interrupted" if self._stopping else "failed", _death(code))
        if not worker.logged and how != "done":
            task.log.add(task.planned, how, spent, error=why)
        if how == "done":
            self._advance()
            self.say(f"{task.label}: done in {spent:.0f} s")
        elif how == "interrupted":
            self._interrupted += 1
            self.say(f"{task.label}: stopped after {spent:.0f} s")
        else:
            self._advance()
            self.failures[task.planned.key] = f"failed: {why}"
            self.say(f"{task.label}: failed after {spent:.0f} s: {why}")
            if self.choices.smoke and not self._stopping:  # a test: nothing may be passed over
                raise RuntimeError(f"{task.planned.job.name}, seed {task.planned.seed}: {why}")

    def _stop(self) -> None:
        """Ask the workers to save and end, and wait; Ctrl-C asks again, then ends them."""
        self._stopping = True
        for again in (False, True):
            with contextlib.suppress(KeyboardInterrupt):
                if self._alive and not again:
                    self.say(f"stopping: {len(self._alive)} training(s) finish their step and save")
                self._signal(signal.SIGINT)
                self._drain()
                return
        with held():
            self._signal(signal.SIGKILL)
            self._drain(time.monotonic() + _DEATH)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._alive:
            worker.process.send_signal(number)

    def _drain(self, until: float = math.inf) -> None:
        """Hear the workers to their ends, or as long as there is time."""
        while self._alive and time.monotonic() < until:
            try:
                event = self._events.get(timeout=_LOOK)
                with held():  # an end is logged whole
                    self._hear(*event)
            except queue.Empty:
                # Ctrl-C may have come between taking an event and heeding it.
                for worker in list(self._alive):
                    if not worker.listener.is_alive():
                        with held():
                            self._ended(worker, worker.process.wait())
