"""Modules that a machine may lack: a test that uses one skips there, its neighbors run."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def optional(name: str) -> Any:
    """``cp = optional("cvxpy")`` in place of ``import cvxpy as cp``."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return _Missing(name)


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest looks at every name of a module while it collects, too.
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(f"{self._name} is not installed")
        raise AttributeError(f"{self._name} is not installed, so it has no {attribute}.")
