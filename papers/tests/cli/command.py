"""Run a command as the shell does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from equilibria.cli.app import main


def command(*words: str) -> Callable[..., int]:
    """A function that runs ``equilibria WORDS ARGUMENTS`` and gives the exit code."""

    def run(*arguments: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([*words, *map(str, arguments)])
        code = ended.value.code
        assert isinstance(code, int)
        return code

    return run
