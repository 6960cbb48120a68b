"""Extras, imported where they are used, with an error that names what to install."""

from __future__ import annotations

from typing import Any

__all__ = ["captum_attr", "matplotlib_figure", "pillow_image", "rich_module", "torchmetrics_module"]


def _missing(package: str, what: str, extra: str) -> ImportError:
    return ImportError(
        f'{what} needs {package}, which is not installed: pip install "equilibria[{extra}]".'
    )


def pillow_image() -> Any:
    """``PIL.Image``."""
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing("pillow", "JPEG compression", "train") from error
    return Image


def torchmetrics_module() -> Any:
    """``torchmetrics``."""
    try:
        import torchmetrics
        import torchmetrics.classification
    except ImportError as error:
        raise _missing("torchmetrics", "evaluation", "train") from error
    return torchmetrics


def rich_module() -> Any:
    """``rich``, with its tables and progress bars."""
    try:
        import rich
        import rich.box
        import rich.console
        import rich.progress
        import rich.table
    except ImportError as error:
        raise _missing("rich", "a table or a progress bar", "train") from error
    return rich


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


def captum_attr() -> Any:
    """``captum.attr``."""
    try:
        import captum.attr  # type: ignore[import-untyped]
    except ImportError as error:
        raise _missing("captum", "GradCAM", "analysis") from error
    return captum.attr
