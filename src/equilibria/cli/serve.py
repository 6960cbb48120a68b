"""``equilibria serve``: a trained network behind HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from equilibria.engine import OptionError
from equilibria.engine.optional import needs
from equilibria.serving import ServeOptions, create_app

from .console import fail, say
from .flags import with_flags
from .loading import Device, Weights, device_of, load


@with_flags(ServeOptions, ("Limits",))
def serve(
    weights: Weights,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at.")] = 8000,
    device: Device = None,
    **given: Any,
) -> None:
    """Answer images over HTTP, with limits, batching and metrics.

    POST an image, or several as files of a form, to /predict; GET /health and /metrics. Ctrl-C or
    SIGTERM ends it when the requests at hand are answered.
    """
    with needs("uvicorn", "Serving a network", extra="serve"):
        import uvicorn
    try:
        options = ServeOptions(**given)
    except OptionError as error:
        raise fail(str(error)) from None
    onnx = weights.suffix.lower() == ".onnx"
    model: Any = load(weights, device_of("cpu" if onnx else device), onnx=True)
    app = create_app(model, options)
    say(f"serving {weights} at http://{host}:{port} (Ctrl-C ends it)")
    quiet: Any = {"log_level": "warning", "server_header": False}
    seconds: Any = {"timeout_keep_alive": 30, "timeout_graceful_shutdown": 30}
    open_at_once: Any = {"limit_concurrency": options.connections + 1}  # it counts the one refused
    uvicorn.run(app, host=host, port=port, **quiet, **seconds, **open_at_once)
