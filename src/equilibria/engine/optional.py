"""Packages that are not required: a missing one is an error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(package: str, purpose: str, *, extra: str = "train") -> Iterator[None]:
    """Import an optional package inside this block, ``with needs("pyarrow", "Reading Parquet")``.

    The import stays an ordinary statement, which type checkers and the test of the import order can
    read.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {package}, which cannot be imported ({error}): "
            f'pip install "equilibria[{extra}]"',
            name=error.name,
        ) from error
