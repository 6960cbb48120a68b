"""Train a network: Lightning underneath, one configuration on top.

::

    result = training.fit(training.TrainConfig(epochs=30, out="runs/first"))
    result.metrics["val_accuracy"], result.weights
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import TrainConfig
from .extras import need
from .graphs import GraphedModel
from .storing import SaveError

if TYPE_CHECKING:
    from .averaging import WeightAverage, settle_norms
    from .checkpoints import CheckpointError, read_checkpoint
    from .fitting import TrainResult, fit
    from .folder import RunExistsError
    from .interrupts import Interrupted
    from .keeper import RunKeeper
    from .module import EquilibriumModule
    from .nonfinite import NonFiniteLoss

__all__ = [
    "CheckpointError",
    "EquilibriumModule",
    "GraphedModel",
    "Interrupted",
    "NonFiniteLoss",
    "RunExistsError",
    "RunKeeper",
    "SaveError",
    "TrainConfig",
    "TrainResult",
    "WeightAverage",
    "fit",
    "read_checkpoint",
    "settle_norms",
]


def __getattr__(name: str) -> Any:
    """What needs Lightning is imported when first used: a command line's help need not wait."""
    if name not in __all__:
        raise AttributeError(f"module 'equilibria.training' has no attribute {name!r}")
    need("lightning")
    from . import averaging, checkpoints, fitting, folder, interrupts, keeper, module, nonfinite

    rooms = (averaging, checkpoints, fitting, folder, interrupts, keeper, module, nonfinite)
    found = next(getattr(room, name) for room in rooms if name in room.__all__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
