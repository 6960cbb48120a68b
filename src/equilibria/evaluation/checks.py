"""Checks of plain arguments; what a wrong value was, what is allowed."""

from __future__ import annotations

__all__ = ["check_whole"]


def check_whole(name: str, value: object, low: int) -> int:
    """An integer of at least ``low``, or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected an integer of at least {low}.")
    if value < low:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {low}.")
    return value
