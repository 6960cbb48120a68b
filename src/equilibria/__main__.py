"""``equilibria`` and ``python -m equilibria``: the command line, or what to install for it."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def run() -> None:
    """Run the command line; without its extra, say how to get it."""
    if any(find_spec(name) is None for name in ("rich", "typer", "yaml")):
        sys.exit('The command line needs the train extra: pip install "equilibria[train]"')
    from equilibria.cli.app import main

    main()


if __name__ == "__main__":
    run()
