"""For every command: what it prints and exits with."""

from __future__ import annotations

import pytest

from tests.cli.running import Cli


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
