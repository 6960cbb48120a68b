"""For every test: what collecting has made is left out of garbage collection."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Thousands of tests and every import live to the end; a walk over them finds no garbage.

    A full collection takes half a second with them and none without, and every measurement of
    time in the package begins with one. What tests make themselves is collected as ever.
    """
    gc.collect()
    gc.freeze()
