"""PL*, uniform conditioning and drift of the tangent kernel, at a point, on a ball, along a run."""

from typing import TYPE_CHECKING, Any

from .ball import BallConditioning, conditioning_on_ball
from .probe import KernelProbe

if TYPE_CHECKING:
    from .callback import KernelMonitor

__all__ = ["BallConditioning", "KernelMonitor", "KernelProbe", "conditioning_on_ball"]


def __getattr__(name: str) -> Any:
    # The callback is a class of Lightning's kind: it is made when Lightning is asked for.
    if name == "KernelMonitor":
        from .callback import KernelMonitor

        return KernelMonitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
