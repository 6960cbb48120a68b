"""``equilibria explore``: a local page on which to draw an image and watch it being solved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import say
from .loading import Device, device_of, load, run_server


def explore(
    weights: Annotated[
        Path | None,
        typer.Argument(
            help="A trained network: model.safetensors, or the folder of a run. Not given: a "
            "small one for the digits, trained once and kept in the cache."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.")] = 8080,
    device: Device = None,
) -> None:
    """Draw an image, see its equilibrium form, change kernel, γ, solver and tolerance.

    Serves a page on this machine only (127.0.0.1). Ctrl-C ends it.
    """
    from equilibria import data, evaluation
    from equilibria.engine.optional import needs

    with needs("uvicorn", "equilibria explore", extra="explore"):
        import uvicorn
    place = _digits() if weights is None else weights
    model: Any = load(place, device_of(device))
    examples = None
    if model.extra.get("data") == "digits":
        examples = data.load("digits", "test", progress=False)
    app = evaluation.explorer_app(evaluation.Explorer(model, examples))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    run_server(server, "127.0.0.1", port, "open")


def _digits() -> Path:
    """The run of a small GEQ on the digits, in the cache."""
    from equilibria import data, training

    from .train import on_threads

    folder = data.cache_dir() / "explore" / "geq_digits"
    if not (folder / "result.json").exists():
        say("training a small network on the digits, once; this takes about half a minute")
        settings = training.TrainConfig(out=str(folder), loggers=())
        with on_threads(None, settings.data):
            training.fit(settings, overwrite=True)
    return folder
