"""Ctrl-C and SIGTERM: the step in progress is finished and the run saved, to go on from there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "Stop", "StopRequest"]


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
    """Whether somebody asked to stop: Ctrl-C, SIGTERM, or a callback that sets ``asked``.

    Inside a ``with`` block the first Ctrl-C and every SIGTERM set ``asked``, and the second Ctrl-C
    interrupts at once. Outside the main thread Python gives no signals, and the block changes
    nothing.
    """

    def __init__(self, tell: Callable[[], Any] = lambda: None) -> None:
        self.asked = False
        self._tell = tell
        self._pressed = False  # not asked: a callback may have set that before the first Ctrl-C
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals (again). Lightning's own handler of SIGTERM leaves its loops in the
        middle of a validation, and that epoch would have no result."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set by Python; there is no way to put that one back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._pressed:
                raise KeyboardInterrupt
            self._pressed = True
        if not self.asked:
            self.asked = True
            self._tell()
