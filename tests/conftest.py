"""For every test: Ctrl-C is heard, and what collecting has made is no garbage. For GPU tests:
waits for the device as errors.
"""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch


def pytest_configure() -> None:
    """A shell's background job is born deaf to Ctrl-C, and some tests press it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that compile, inherited by many classes: how many of each run every day. The rest are slow.
COMPILED = {
    "test_a_fixed_step_layer_compiles_whole": 4,
    "test_fixed_steps_of_anderson_compile_to_one_graph": 1,
    "test_fixed_steps_compile_into_one_graph": 2,
    "test_fixed_steps_compile_to_one_graph": 2,
    "test_the_map_compiles": 3,
    "test_vmap_and_compile": 8,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before slow tests are deselected: mark those of COMPILED beyond their number. Skip those of
    the GPU where there is none."""
    left, cuda = dict(COMPILED), torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") is not None and not cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        name = getattr(item, "originalname", item.name)
        if name in left and item.get_closest_marker("slow") is None:
            daily = getattr(getattr(item, "cls", None), "compiles_daily", True)
            left[name] -= daily
            if left[name] < 0 or not daily:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Thousands of tests and every import live to the end; a walk over them finds no garbage.

    A full collection takes half a second with them and none without, and every measurement of
    time in the package begins with one. What tests make themselves is collected as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def forbid_waits() -> Iterator[Callable[[bool], None]]:
    """``forbid_waits(True)``: from here on each wait for the GPU is an error; False ends it.

    torch warns that the mode is a prototype, which our filters would turn into an error after the
    mode was set. It is off after the test, whatever happened.
    """

    def switch(on: bool) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    try:
        yield switch
    finally:
        if torch.cuda.is_available():
            switch(False)
