"""Ctrl-C that waits for the end of a block."""

from __future__ import annotations

import signal
import threading

import pytest

from equilibria_papers.tables.reproduction import held


def test_ctrl_c_comes_at_the_end_of_the_outermost_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()

    def write() -> None:
        with held():
            with held():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before


def test_without_ctrl_c_nothing_happens_and_errors_pass() -> None:
    before = signal.getsignal(signal.SIGINT)

    def fails() -> None:
        with held():
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        fails()
    with held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_may_use_it() -> None:
    found: list[str] = []

    def work() -> None:
        with held():
            found.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["done"]
