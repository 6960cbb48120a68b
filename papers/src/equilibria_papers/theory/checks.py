"""Sizes that a caller gives, checked."""

from __future__ import annotations

from collections.abc import Mapping


def check_sizes(owner: str, sizes: Mapping[str, object]) -> None:
    """Raise unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{owner}({name}={value!r}): expected an integer of at least 1.")
