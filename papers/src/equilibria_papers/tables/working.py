"""A worker: a process of its own that carries out one order and says how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .choices import Choices
from .log import Log
from .planning import Planned
from .running import chosen_device, run_job

__all__ = ["START", "order_of", "work"]

# The parent's paths and command line come first: they lead to the modules that read the rest.
START = """
import os, pickle, signal, sys, time

PAUSE = 1.0  # seconds in which the way out is not cut by another Ctrl-C
raised = float("-inf")

def heed(*_):
    # Not once for all: an exception that lands in a __del__ is lost, and the next has to count.
    global raised
    now = time.monotonic()
    if now - raised >= PAUSE:
        raised = now
        raise KeyboardInterrupt

answers = os.dup(1)
os.dup2(2, 1)  # what is printed on the way, also by an import, is no answer
try:
    try:
        # Set here: where a shell started the parent in the background, it is ignored from birth.
        signal.signal(signal.SIGINT, heed)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.path[:], sys.argv[:] = pickle.load(sys.stdin.buffer)
        from equilibria_papers.tables.working import work
        work(answers)
    finally:
        # All is saved and said: an interpreter that is interrupted as it ends prints tracebacks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
except KeyboardInterrupt:
    raise SystemExit(130) from None
"""
"""What a worker's interpreter runs; its stdin holds what ``order_of`` gives. It is started with
Ctrl-C blocked, which would else end the start of an interpreter with a traceback."""


@dataclass(frozen=True)
class _Order:
    """What a worker is sent."""

    planned: Planned
    choices: Choices
    threads: int | None
    """Of torch, on the CPU."""
    until: float | None
    """The deadline, in Unix time: other clocks need not agree between processes."""


def _plain(value: Any) -> Any:
    """The same without read-only views, which cannot be sent to another process."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def order_of(planned: Planned, choices: Choices, at_once: int, until: float | None) -> bytes:
    """For one of ``at_once`` workers that share the processor, until a time of ``time.time()``."""
    job = planned.job
    views = {n: _plain(getattr(job, n)) for n in ("options", "recipe", "stand_in", "smoke")}
    sent = dataclasses.replace(planned, job=dataclasses.replace(job, **views))
    overrides = _plain(choices.overrides)
    own = dataclasses.replace(choices, progress=False, parallel=1, overrides=overrides)
    threads = None
    if chosen_device(choices.device).type == "cpu":
        threads = max(1, torch.get_num_threads() // at_once)
    return pickle.dumps((sys.path, sys.argv)) + pickle.dumps(_Order(sent, own, threads, until))


class _Sent(Log):
    """A log whose lines are sent to the parent."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        self.send = send

    def add(
        self,
        planned: Planned,
        outcome: str,
        seconds: float,
        result: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.send(("log", outcome, seconds, result, more))


def work(descriptor: int) -> None:
    """Carry out the one order that stdin holds, and say to the descriptor how it ended."""
    order: _Order = pickle.load(sys.stdin.buffer)
    answers = os.fdopen(descriptor, "wb", buffering=0)
    threading.Thread(target=_outlive_nobody, daemon=True).start()

    def send(message: tuple[Any, ...]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone; what is saved is saved
            answers.write(pickle.dumps(message))

    if order.threads is not None:
        torch.set_num_threads(order.threads)
    left = None if order.until is None else time.monotonic() + order.until - time.time()
    try:
        run_job(order.planned, order.choices, _Sent(send), deadline=left)
        send(("end", "done", ""))
    except KeyboardInterrupt as stopped:
        send(("end", "interrupted", str(stopped)))
    except Exception as error:
        send(("end", "failed", f"{type(error).__name__}: {str(error)[:200]}"))
        raise SystemExit(1) from error


def _outlive_nobody() -> None:
    """Stdin ends when the parent does, however it ends: then stop as by Ctrl-C."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGINT)
