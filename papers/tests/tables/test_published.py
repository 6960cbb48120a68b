"""Printed numbers are read as a reader would."""

from __future__ import annotations

import pytest

from equilibria_papers.tables import Published


@pytest.mark.parametrize(
    ("text", "value", "spread", "limit"),
    [
        ("94.8 ± 0.1%", 94.8, 0.1, ""),
        ("95.2 ± 0.2", 95.2, 0.2, ""),
        ("80.9%", 80.9, None, ""),
        ("0.306", 0.306, None, ""),
        ("> 5", 5.0, None, ">"),
        ("1.22e-02", 0.0122, None, ""),
        ("16.3 s", 16.3, None, ""),
        ("1.3s", 1.3, None, ""),
        ("4597/s", 4597.0, None, ""),
        ("1.4 M", 1.4, None, ""),
        ("162 k", 162.0, None, ""),
    ],
)
def test_reads(text: str, value: float, spread: float | None, limit: str) -> None:
    found = Published.read(text)
    assert (found.text, found.value, found.spread, found.limit) == (text, value, spread, limit)


@pytest.mark.parametrize("text", ["", "about 94", "94.8 ±", "94.8 0.1", "95 %%", "1,000"])
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="no printed number"):
        Published.read(text)
