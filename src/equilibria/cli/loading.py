"""What the commands share: flags, the network, its data, its device, the solver asked for."""

from __future__ import annotations

import errno
import shlex
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from .console import fail, say

Weights = Annotated[
    Path,
    typer.Argument(
        help="A trained network: model.safetensors, the folder of a run that holds it, or, for "
        "evaluate, predict and serve, an exported .onnx file."
    ),
]
Images = Annotated[
    list[Path],
    typer.Argument(help="Image files, Parquet files with images, or folders of them."),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one if not given.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="A name or a folder; what it was trained on if not given."),
]
Root = Annotated[
    Path | None, typer.Option("--data-root", "--root", help="The folder that holds the data.")
]
Split = Annotated[str, typer.Option(help="Which part of the data: train, val or test.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Images at a time.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many images.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        *("--option", "-o"),
        metavar="KEY=VALUE",
        help="An option of the model, such as depth=2; may be repeated.",
    ),
]
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


def load(path: Path, device: torch.device, *, onnx: bool = False) -> nn.Module:
    """The network in ``path``, in eval mode; ``onnx``: whether one without layers will do."""
    from equilibria import models

    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        if (path / "last.ckpt").exists():
            again = shlex.join(["equilibria", "train", "--resume", str(path)])
            raise fail(f"the training in {path} has not ended.", f"Resume it: {again}")
        where = f"{path} holds no model.safetensors" if path.is_dir() else f"{path} does not exist"
        raise fail(
            f"{where}.",
            "Give the run folder that `equilibria train` printed, or its model.safetensors.",
        )
    if file.suffix.lower() == ".onnx":
        if onnx:
            return models.load_onnx(file)
        raise fail(
            f"{file}: this needs the layers of a network, and an ONNX file has none.",
            "Give the run, or its model.safetensors, that the file was exported from.",
        )
    # Published weights may be stored in half precision; images come in float32.
    return models.load(file, device=str(device), dtype=torch.float32)


def prepared(
    weights: Path,
    data: str | None,
    root: Path | None,
    split: str,
    device: str | None,
    limit: int | None = None,
    *,
    onnx: bool = False,
) -> tuple[Any, Any]:
    """The network, on the device, and the data to judge it on."""
    from equilibria import data as datasets
    from equilibria.data.catalog import split_of
    from equilibria.models.preprocessing import trained_side

    try:
        split_of(split)
    except datasets.DataError:
        raise fail(f"--split {split}: expected train, val or test.") from None
    model: Any = load(weights, device_of(device), onnx=onnx)
    extra: dict[str, Any] = model.extra
    name = data or extra.get("data")
    if name is None:
        raise fail("these weights do not say what they were trained on.", "Give --data.")
    given: dict[str, Any] = {"root": root}
    config = weights / "config.yaml"
    if data is None and config.exists():  # of a run: where its data were, and how it read them
        from equilibria.training import TrainConfig

        own = TrainConfig.from_yaml(config)
        given = {"root": root or own.data_root, "on_corrupt": own.on_corrupt}
    size = extra.get("image_size")  # of the images that it was trained on
    size = trained_side(size, model.task == "segmentation") if size else None
    channels = len(extra.get("mean") or ())
    # Image files are gray or color as the network asks, which is what `predict` makes of them.
    wanted = channels if channels in (1, 3) and name not in datasets.names() else None
    dataset = datasets.load(name, split, image_size=size, channels=wanted, **given)
    if channels:
        if channels != dataset.channels:
            raise fail(
                f"the network was trained on images of {channels} channel(s), those of {name} "
                f"have {dataset.channels}.",
                "Give --data with images like those that it was trained on.",
            )
        dataset = dataset.with_normalization_of(extra)
    if limit is not None:
        dataset = dataset.subset(range(min(limit, len(dataset))))
    return model, dataset


def solver_of(rtol: float | None) -> Any:
    """The solver to evaluate with, or None for the network's own."""
    from equilibria.solvers import Auto

    if rtol is None:
        return None
    if not 0.0 < rtol < 1.0:  # at 1 every start passes, and 0 is no tolerance
        raise fail(f"--converged {rtol:g}: expected a number between 0 and 1, such as 1e-4.")
    return Auto(rtol=rtol)


def run_server(server: Any, host: str, port: int, what: str) -> None:
    """Let a uvicorn.Server answer at the address until Ctrl-C; ``what`` is said before it."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with bound, suppress(KeyboardInterrupt):
        try:
            bound.bind((host, port))
        except OSError as error:
            why = error.strerror
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise fail(f"--host {host}: no address of this machine ({why}).") from None
            why = f"--port {port}: it cannot be used at {host} ({why})."
            raise fail(why, "Give another one, or 0 for one that is free.") from None
        at = f"[{host}]" if ":" in host else host
        say(f"{what} http://{at}:{bound.getsockname()[1]} (Ctrl-C ends it)")
        server.run(sockets=[bound])
    if not server.started:  # it says why itself
        raise typer.Exit(1)
