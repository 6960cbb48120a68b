"""Train a network: Lightning underneath, one configuration on top.

Here belongs what one training needs beyond Lightning: the configuration, the module, the folder of
a run, and exact resuming. Data sets and networks have their own packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equilibria.engine.files import SaveError
from equilibria.engine.optional import needs

from .config import TrainConfig
from .graphed_model import GraphedModel

if TYPE_CHECKING:
    from equilibria.nn.constraints import settle_norms

    from .average import WeightAverage
    from .lock import RunInUseError
    from .module import EquilibriumModule
    from .nonfinite import NonFiniteLoss
    from .processes import ProcessLostError
    from .progress import Interrupted
    from .run import Run, TrainResult, fit
    from .run_folder import CheckpointError, RunExistsError, read_checkpoint

# fmt: off
__all__ = [
    "CheckpointError", "EquilibriumModule", "GraphedModel", "Interrupted", "NonFiniteLoss",
    "ProcessLostError", "Run", "RunExistsError", "RunInUseError", "SaveError", "TrainConfig",
    "TrainResult", "WeightAverage", "fit", "read_checkpoint", "settle_norms",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """What needs Lightning is imported when first used: a command line's help need not wait."""
    if name not in __all__:
        raise AttributeError(f"module 'equilibria.training' has no attribute {name!r}")
    with needs("lightning", "equilibria.training"):
        import lightning.pytorch  # noqa: F401
    from . import average, lock, module, nonfinite, processes, progress, run, run_folder

    files = (average, lock, module, nonfinite, processes, progress, run, run_folder)
    found = next(getattr(file, name) for file in files if hasattr(file, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
