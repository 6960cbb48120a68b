"""Ctrl-C that has to wait: what must not be cut in two is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held"]


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C inside the block interrupts at its end: a file is whole, a worker is on the list.

    Blocks may be nested: the outermost interrupts. Outside the main thread Python gives no signals,
    and the block changes nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    # None: a handler that was not set by Python; there is no way to put that one back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
