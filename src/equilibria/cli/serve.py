"""``equilibria serve``: a trained network behind HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from equilibria.engine import OptionError
from equilibria.engine.optional import needs

from .console import fail, say
from .loading import Device, Weights, device_of, load


def serve(
    weights: Weights,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Images that are answered together.")] = 32,
    max_bytes: Annotated[int, typer.Option(help="Bytes of a request.")] = 8 * 2**20,
    max_images: Annotated[int, typer.Option(help="Images of a request.")] = 32,
    rate: Annotated[
        float, typer.Option(help="Requests a second from one address; 0 for any number.")
    ] = 0.0,
    queue: Annotated[int, typer.Option(help="Images that may wait; more are refused.")] = 128,
    certify: Annotated[
        bool, typer.Option("--certify/--no-certify", help="A certificate with each answer.")
    ] = True,
    device: Device = None,
) -> None:
    """Answer images over HTTP, with limits, batching and metrics.

    POST an image, or several as files of a form, to /predict; GET /health and /metrics. Ctrl-C or
    SIGTERM ends it when the requests at hand are answered.
    """
    with needs("uvicorn", "Serving a network", extra="serve"):
        import uvicorn

    from equilibria import serving

    try:
        options = serving.ServeOptions(
            max_batch=max_batch,
            max_bytes=max_bytes,
            max_images=max_images,
            rate=rate,
            queue=queue,
            certify=certify,
        )
    except OptionError as error:
        raise fail(str(error)) from None
    model = load(weights, device_of("cpu" if weights.suffix.lower() == ".onnx" else device))
    app = serving.create_app(model, options)  # type: ignore[arg-type]
    say(f"serving {weights} at http://{host}:{port} (Ctrl-C ends it)")
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=30,
        server_header=False,
    )
