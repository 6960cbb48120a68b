"""The packages of the extra ``train``, imported where they are used."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import missing_extra

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["arrow", "kornia_enhance", "numpy", "parquet", "pillow", "progress_bar"]


def numpy(purpose: str = "Reading images") -> ModuleType:
    """The module ``numpy``."""
    try:
        import numpy as module
    except ImportError as error:
        raise missing_extra("numpy", purpose) from error
    return module


def pillow(purpose: str = "Decoding images") -> ModuleType:
    """The module ``PIL.Image``."""
    try:
        from PIL import Image as module
    except ImportError as error:
        raise missing_extra("pillow", purpose) from error
    return module


def arrow(purpose: str = "Reading Parquet files") -> Any:
    """The module ``pyarrow``."""
    try:
        import pyarrow as module  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.compute  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.ipc  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise missing_extra("pyarrow", purpose) from error
    return module


def parquet(purpose: str = "Reading Parquet files") -> Any:
    """The module ``pyarrow.parquet``."""
    try:
        import pyarrow.parquet as module  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise missing_extra("pyarrow", purpose) from error
    return module


def kornia_enhance(purpose: str = "RandAugment") -> Any:
    """The module ``kornia.enhance``."""
    try:
        import kornia.enhance as module
    except ImportError as error:
        raise missing_extra("kornia", purpose) from error
    return module


def progress_bar(shown: bool, *, of_bytes: bool = False) -> Progress:
    """A progress bar on stderr that leaves nothing behind; silent where ``shown`` is false."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError as error:
        raise missing_extra("rich", "The progress bar (progress=True)") from error
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not shown,
    )
