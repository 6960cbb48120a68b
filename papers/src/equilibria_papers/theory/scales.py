"""Logarithmic axes that can be read, on narrow ranges too."""

from __future__ import annotations

from typing import Any

__all__ = ["plain_ticks"]

_FEWEST = 2  # powers of ten on an axis, for its ticks to be those


def plain_ticks(axes: Any) -> None:
    """Plain numbers on a logarithmic y axis that shows fewer than two powers of ten.

    Matplotlib labels such an axis at 2.9 × 10⁰, 3 × 10⁰, …; to be called when all is drawn.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axes.get_ylim())
    if axes.get_yscale() != "log" or low <= 0.0:
        return
    powers = [t for t in LogLocator(10.0).tick_values(low, high) if low <= t <= high]
    if len(powers) >= _FEWEST:
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    """0.25, 3, 20000; a power of ten only where the digits would be many."""
    if 1e-3 <= value < 1e6:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    digits = mantissa.rstrip("0").rstrip(".")
    return rf"${digits} \times 10^{{{int(exponent)}}}$"
