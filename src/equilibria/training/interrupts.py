"""Ctrl-C: the step in progress is finished, the run is saved, and the user is told how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "Stop", "StopRequest", "listen"]


class Interrupted(KeyboardInterrupt):
    """The run was interrupted; ``checkpoint`` is what it can be resumed from, if anything.

    One that was asked to stop as its last epoch ended is complete, which the message says.
    ``exact`` says whether resuming repeats the uninterrupted run bit for bit (on the CPU): it does
    unless the interruption cut a step in two.
    """

    def __init__(self, message: str, checkpoint: Path | None, *, exact: bool = True) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint
        self.exact = exact


class Stop(Exception):
    """How a run leaves Lightning's loops: between two steps, after the checkpoint was written."""


class StopRequest:
    """Whether somebody asked to stop: Ctrl-C, or a callback that sets ``asked``, in any thread."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def listen(request: StopRequest, tell: Callable[[], Any]) -> Iterator[None]:
    """Inside the block the first Ctrl-C sets ``request.asked``; the second interrupts at once.

    Outside the main thread Python gives no signals, and the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = False  # not request.asked: a callback may have set that, and this is the first Ctrl-C

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = request.asked = True
        tell()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        # None: a handler that was not set by Python; there is no way to put that one back.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
