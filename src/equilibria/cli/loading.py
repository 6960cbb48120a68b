"""What evaluate, predict and certify share: weights, device, the solver asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from equilibria.engine import OptionError

from .console import fail

__all__ = ["Batch", "Converged", "Device", "Root", "Weights", "device_of", "load", "solver_of"]

Weights = Annotated[
    Path,
    typer.Argument(
        help="A trained network: model.safetensors, or the folder of a run that holds it."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one if not given.")
]
Root = Annotated[Path | None, typer.Option("--root", help="The folder that holds the data.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Images at a time.")]
Converged = Annotated[
    float | None,
    typer.Option(
        "--converged",
        metavar="RTOL",
        help="Solve every layer to this relative residual (such as 1e-4) in place of the solver "
        "that the network was trained with.",
    ),
]


def device_of(name: str | None) -> torch.device:
    """The device asked for, checked; a GPU where there is one by default."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise fail(f"--device {name}: expected cpu, cuda, cuda:0 or mps.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise fail(f"--device {name}: torch sees no CUDA device here.", "`equilibria info`")
    return device


def load(path: Path, device: torch.device) -> nn.Module:
    """The network in ``path``, in eval mode."""
    from equilibria import models

    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        where = f"{path} holds no model.safetensors" if path.is_dir() else f"there is no {path}"
        raise fail(
            f"{where}.",
            "Give the run folder that `equilibria train` printed, or its model.safetensors.",
        )
    # Published weights may be stored in half precision; images come in float32.
    return models.load(file, device=str(device), dtype=torch.float32).eval()


def solver_of(rtol: float | None) -> Any:
    """The solver to evaluate with, or None for the network's own."""
    from equilibria.solvers import Auto

    try:
        return None if rtol is None else Auto(rtol=rtol)
    except OptionError as error:
        raise fail(f"--converged {rtol}{error.text}") from None
