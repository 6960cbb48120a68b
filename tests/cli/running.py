"""Commands run inside the tests' process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equilibria.cli.app import main


def run(*arguments: str | Path) -> int:
    """The exit code of ``equilibria ARGUMENTS``."""
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    """What ``equilibria ARGUMENTS --json`` prints."""
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The error with which ``equilibria ARGUMENTS`` ends, in one line."""
    assert run(*arguments) == 1
    return " ".join(capsys.readouterr().err.split())
