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


class Cli:
    """``equilibria WORDS ...`` inside the tests' process, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self.read, self.words = capsys.readouterr, words

    def __call__(self, *arguments: Any) -> int:
        """The exit code."""
        return run(*self.words, *arguments)

    def shown(self, *arguments: Any) -> str:
        """What it prints where it succeeds."""
        assert self(*arguments) == 0
        return self.read().out

    def json(self, *arguments: Any) -> Any:
        """What it prints with ``--json``."""
        return json.loads(self.shown(*arguments, "--json"))

    def err(self, *arguments: Any, code: int = 1) -> str:
        """What it says where it ends with this code, in one line."""
        assert self(*arguments) == code
        return " ".join(self.read().err.split())
