"""For every training: no waiting for the disk, and a run that nothing disturbs."""

from __future__ import annotations

import os

import pytest

from equilibria.training import TrainResult

from .small import config, run


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a small run; only a power cut would show the difference."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The run of ``config(folder)``, without options and without disturbance."""
    return run(config(tmp_path_factory.mktemp("whole")))
