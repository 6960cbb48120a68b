"""``equilibria`` and ``python -m equilibria``: the command line, or what to install for it."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line; without its extra, say how to get it."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
        import yaml  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        sys.stderr.write(
            'The command line needs the train extra: pip install "equilibria[train]"\n'
        )
        raise SystemExit(1) from None
    from equilibria.cli.app import main

    main()


if __name__ == "__main__":
    run()
