"""``equilibria serve``: a trained network behind HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from equilibria.engine.optional import needs
from equilibria.serving import ServeOptions, create_app

from .flags import with_flags
from .loading import Device, Weights, device_of, load, run_server


@with_flags(ServeOptions, ("Limits",))
def serve(
    weights: Weights,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen at; 0: one that is free.")
    ] = 8000,
    device: Device = None,
    **given: Any,
) -> None:
    """Answer images over HTTP, with limits, batching and metrics.

    POST an image, or several as files of a form, to /predict; GET /health and /metrics. Ctrl-C or
    SIGTERM ends it when the requests at hand are answered.
    """
    with needs("uvicorn", "Serving a network", extra="serve"):
        import uvicorn
    options = ServeOptions(**given)
    model: Any = load(weights, device_of(device), onnx=True)
    app = create_app(model, options)
    quiet: Any = {"log_level": "warning", "server_header": False}
    seconds: Any = {"timeout_keep_alive": 30, "timeout_graceful_shutdown": 30}
    open_at_once: Any = {"limit_concurrency": options.connections + 1}  # it counts the one refused
    server = uvicorn.Server(uvicorn.Config(app, **quiet, **seconds, **open_at_once))
    run_server(server, host, port, f"serving {weights} at")
