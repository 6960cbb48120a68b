"""Commands run inside the tests' process."""

from __future__ import annotations

from pathlib import Path

import pytest

from equilibria.cli.app import main


def run(*arguments: str | Path) -> int:
    """The exit code of ``equilibria ARGUMENTS``."""
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code
