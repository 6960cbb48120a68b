"""What can be wrong with data, as exceptions that say where and what to do."""

from __future__ import annotations

__all__ = ["CorruptImageError", "DataError", "DataNotFoundError", "missing_extra"]


class DataError(ValueError):
    """Data that cannot be used as it is; the message names the file and the remedy."""


class DataNotFoundError(DataError, FileNotFoundError):
    """Data that is in none of the places tried; the message names them all."""


class CorruptImageError(DataError):
    """An image that cannot be decoded; the message names it."""


def missing_extra(package: str, purpose: str) -> ImportError:
    """The error for a package of an extra that is not installed."""
    return ImportError(
        f'{purpose} needs {package}, which is not installed: pip install "equilibria[train]"',
        name=package,
    )
