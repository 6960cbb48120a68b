"""Lightning's loggers of a run. A log that cannot be written ends with a warning, and the training
goes on: what must not be lost is in the checkpoint, whose failed write is an error."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import loggers

from equilibria.engine.optional import needs

from .config import TrainConfig
from .run_folder import RunFolder


def make_loggers(config: TrainConfig, folder: RunFolder, step: int) -> list[Any]:
    """The loggers of the configuration; a resumed run drops what came after ``step``."""
    path, name = folder.path, folder.path.name
    purge: dict[str, Any] = {"purge_step": step or None}
    make: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: loggers.TensorBoardLogger(path, folder.logs.name, "", **purge),
        "csv": lambda: loggers.CSVLogger(path, "csv"),
        "wandb": lambda: loggers.WandbLogger(name, path, project="equilibria"),
        "mlflow": lambda: loggers.MLFlowLogger("equilibria", name),
    }
    with needs(" and ".join(config.loggers), f"loggers={config.loggers!r}"):
        return [_forgiving(make[kind](), kind, folder) for kind in config.loggers]


def _forgiving(logger: Any, kind: str, folder: RunFolder) -> Any:
    """The logger, whose first failed write is its last."""
    ended = False

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(call)
        def write(*args: Any, **kwargs: Any) -> None:
            nonlocal ended
            if ended:
                return
            try:
                call(*args, **kwargs)
            except (OSError, ValueError) as error:
                # Lightning takes every error of TensorBoard for a wrong value.
                cause = error.__cause__ if isinstance(error, ValueError) else error
                if not isinstance(cause, OSError):
                    raise
                ended = True
                if folder.lock.held():  # else the folder is gone, and the next checkpoint says so
                    why = cause.strerror or str(cause)
                    warnings.warn(
                        f"the {kind} log in {folder.path} cannot be written ({why}) and ends here; "
                        "the training goes on.",
                        stacklevel=2,
                    )

        return write

    for name in ("log_metrics", "log_hyperparams", "save", "finalize"):
        setattr(logger, name, guarded(getattr(logger, name)))
    return logger


@contextmanager
def quiet_writers() -> Iterator[None]:
    """No traceback from TensorBoard's thread: its next call raises the same error again."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        writer = type(args.thread).__module__.startswith("tensorboard.")
        if not (writer and issubclass(args.exc_type, OSError)):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
