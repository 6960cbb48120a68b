"""Every test of the data package has a cache of its own and no hub."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test; an address where no hub answers."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EQUILIBRIA_DATA", str(folder))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return folder
