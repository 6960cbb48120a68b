"""For every test: Ctrl-C is heard, and what collecting has made is no garbage."""

from __future__ import annotations

import gc
import signal


def pytest_configure() -> None:
    """A shell's background job is born deaf to Ctrl-C, and some tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of tests and every import live to the end; a walk over them finds no garbage.

    A full collection takes half a second with them and none without, and every measurement of
    time in the package begins with one. What tests make themselves is collected as ever.
    """
    gc.collect()
    gc.freeze()
