"""Ticks of logarithmic axes."""

from __future__ import annotations

import pytest

from equilibria_papers.theory.pictures import new_figure, plain_ticks


def labels(low: float, high: float) -> list[str]:
    figure = new_figure()
    axes = figure.add_subplot()
    axes.semilogy([0, 1], [low, high])
    plain_ticks(axes)
    figure.canvas.draw()
    inside = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    found = [(t.get_loc(), t.label1.get_text()) for t in ticks]
    return [text for place, text in found if text and inside[0] <= place <= inside[1]]


@pytest.mark.parametrize(
    ("low", "high"), [(2.9, 3.1), (0.3, 0.8), (0.004, 0.009), (1.1e4, 4e4), (2.0, 30.0)]
)
def test_a_narrow_range_has_plain_numbers(low: float, high: float) -> None:
    found = labels(low, high)
    assert len(found) >= 2
    numbers = [float(text) for text in found]
    assert numbers == sorted(numbers)
    span = high / low
    assert all(low / span <= n <= high * span for n in numbers)


def test_wide_ranges_keep_powers_and_huge_numbers_are_short() -> None:
    assert any("10^{" in text for text in labels(1e-3, 1e3))
    assert all("e+07" in text for text in labels(2e7, 4e7))
