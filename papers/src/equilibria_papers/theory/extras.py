"""Extras of this room, imported where they are used, with an error that names what to install."""

from __future__ import annotations

from typing import Any

__all__ = ["lightning_module", "matplotlib_figure", "numpy_module", "scipy_module"]


def _missing(package: str, what: str, extra: str) -> ImportError:
    return ImportError(
        f'{what} needs {package}, which is not installed: pip install "equilibria[{extra}]".'
    )


def matplotlib_figure(width: float, height: float) -> Any:
    """A new figure, in inches, drawn by Agg: no window, no state shared with the user's plots."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing("matplotlib", "a picture", "analysis") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def numpy_module() -> Any:
    """``numpy``."""
    try:
        import numpy
    except ImportError as error:
        raise _missing("numpy", "this study", "analysis") from error
    return numpy


def scipy_module() -> Any:
    """``scipy``, with its integrators, optimizers and special functions."""
    try:
        import scipy  # type: ignore[import-untyped]
        import scipy.integrate  # type: ignore[import-untyped]
        import scipy.optimize  # type: ignore[import-untyped]
        import scipy.special  # type: ignore[import-untyped]
        import scipy.stats  # type: ignore[import-untyped]
    except ImportError as error:
        raise _missing("scipy", "this study", "analysis") from error
    return scipy


def lightning_module() -> Any:
    """``lightning.pytorch``."""
    try:
        import lightning.pytorch
    except ImportError as error:
        raise _missing("lightning", "a training callback", "train") from error
    return lightning.pytorch
