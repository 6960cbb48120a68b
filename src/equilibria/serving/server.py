"""The web server: /predict, /health and /metrics, with limits on all that a request can cost.

Images are untrusted. They are decoded by the loader of ``data``, which refuses formats that run
code and images that claim more than ``MOST_PIXELS``, in two threads, to the size that the network
takes; only that waits in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from equilibria._version import __version__
from equilibria.data import CorruptImageError
from equilibria.data.decoding import decode_image
from equilibria.engine import json_value
from equilibria.engine.optional import needs
from equilibria.engine.options import check_number, options
from equilibria.evaluation import certify_model
from equilibria.evaluation.explanation import doubted
from equilibria.models import Network, OnnxNetwork
from equilibria.nn import equilibrium_layers

from .batching import Batcher, Busy

with needs("fastapi and python-multipart", "Serving a network", extra="serve"):
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.formparsers import MultiPartException, MultiPartParser
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
with needs("prometheus-client", "Serving a network", extra="serve"):
    import prometheus_client as prometheus

_CLIENTS = 10_000  # addresses whose rate is remembered
_BODY_SECONDS = 20.0
_REFUSALS = 100  # a second: clients that come back at once must not take the time of answers
_LOG = logging.getLogger(__name__)


def _limit(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text, "panel": "Limits"})


@options
class ServeOptions:
    """What a server takes on."""

    max_batch: int = _limit(32, "Images that are answered together.")
    max_bytes: int = _limit(8 * 2**20, "Bytes of a request.")
    max_images: int = _limit(32, "Images of a request, no more than the queue holds.")
    rate: float = _limit(0.0, "Requests a second from one address, with bursts; 0 for any number.")
    queue: int = _limit(128, "Images that wait, and bodies that are read; more are refused (503).")
    connections: int = _limit(2048, "Open connections; on more, every request is refused (503).")
    certify: bool = _limit(
        True, "Say with each answer whether its equilibria are unique, and how far it is from them."
    )

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_bytes", "max_images", "queue", "connections"):
            check_number(self, name, low=1, integer=True)
        check_number(self, "rate", low=0.0)


class _Judge:
    """Pixels, a uint8 [C, S, S] each ↦ an answer each; in one thread."""

    def __init__(self, model: Network, certify: bool) -> None:
        self.model = model
        proven = bool(equilibrium_layers(model)) and not isinstance(model, OnnxNetwork)
        self.certify = certify and proven

    def __call__(self, pixels: list[Tensor]) -> list[dict[str, Any]]:
        made = [doubted(self.model, image, names=["the image"]) for image in pixels]
        x = torch.cat([each for each, _ in made])
        found = self.model.predict_normalized(x, batch_size=len(x))
        proofs = self._certificates(x) if self.certify else [None] * len(x)
        return [
            {
                "label": answer.label,
                "confidence": answer.confidence,
                "steps": answer.steps,
                "converged": answer.converged,
                "certificate": proof,
                "warning": "; ".join(doubts) or None,
            }
            for answer, proof, (_, doubts) in zip(found, proofs, made, strict=True)
        ]

    def _certificates(self, x: Tensor) -> list[dict[str, Any] | None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts: Mapping[str, Any] = certify_model(self.model, x)
        if any(len(part.kinds) != len(x) for part in parts.values()):
            return [None] * len(x)  # layers that see patches: no certificate an image
        return [
            {
                "unique": all(bool(part.certified[i]) for part in parts.values()),
                "layers": {
                    name: {
                        "guarantee": str(part.kinds[i]),
                        "error_bound": json_value(float(part.error_bound[i])),
                    }
                    for name, part in parts.items()
                },
            }
            for i in range(len(x))
        ]

    def warm_up(self) -> None:
        """The first solve and the norms of the weights take long: before the first request."""
        shape = (self.model.in_channels, *[self.model.preprocessing.size] * 2)
        self([torch.randint(0, 256, shape, dtype=torch.uint8)])


class _Metrics:
    """What /metrics shows, of this server alone."""

    def __init__(self, batcher: Batcher[Tensor, dict[str, Any]]) -> None:
        self.registry = prometheus.CollectorRegistry()
        own: dict[str, Any] = {"namespace": "equilibria", "registry": self.registry}
        self.requests = prometheus.Counter("requests", "Requests", ["path", "status"], **own)
        self.seconds = prometheus.Histogram("predict_seconds", "Time of a prediction", **own)
        counts = {**own, "buckets": [1, 2, 4, 8, 16, 32, 64, 128]}
        self.steps = prometheus.Histogram("solver_steps", "Solver steps of an image", **counts)
        sizes = prometheus.Histogram("batch_size", "Images answered together", **counts)
        batcher.sizes = sizes.observe
        waiting = prometheus.Gauge("queue_images", "Images that wait", **own)
        waiting.set_function(lambda: len(batcher))


class _Gate:
    """Counts requests, and refuses predictions before anything of them is parsed or read.

    Refusals wait for each other, ``_REFUSALS`` a second and no longer than 5 s. uvicorn reads
    little of a body that nobody asks for: a refusal that waits is a connection and a timer.
    """

    def __init__(
        self, app: ASGIApp, rate: float, full: Callable[[], bool], metrics: _Metrics
    ) -> None:
        self.app, self.rate, self.full, self.metrics = app, rate, full, metrics
        self.tokens: dict[str, tuple[float, float]] = {}  # of each address: how many, and when
        self.refusing = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 500

        async def seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        path = scope["path"] if scope["path"] in ("/predict", "/health", "/metrics") else "other"
        refusal = self._refusal(scope) if path == "/predict" else None
        try:
            if refusal is not None:
                await self._in_turn()
            await (refusal or self.app)(scope, receive, seen)
        finally:
            self.metrics.requests.labels(path, status).inc()
            if path == "/predict" and status == 200:
                self.metrics.seconds.observe(time.perf_counter() - began)

    def _refusal(self, scope: Scope) -> Response | None:
        wait = self._wait((scope.get("client") or ("",))[0])
        if wait > 0.0:
            return _later(429, f"more than {self.rate:g} requests a second", wait)
        return _later(503, "the server is busy", 1.0) if self.full() else None

    def _wait(self, who: str) -> float:
        """0 where a request of this address may pass, else the seconds until it may."""
        if self.rate == 0.0:
            return 0.0
        now, most = time.monotonic(), max(1.0, 2 * self.rate)
        left, last = self.tokens.pop(who, (most, now))
        left = min(most, left + self.rate * (now - last))
        passes = left >= 1.0
        self.tokens[who] = (left - 1.0 if passes else left, now)  # last in the order of the dict
        if len(self.tokens) > _CLIENTS:
            del self.tokens[next(iter(self.tokens))]
        return 0.0 if passes else (1.0 - left) / self.rate

    async def _in_turn(self) -> None:
        self.refusing += 1
        try:
            await asyncio.sleep(min(self.refusing / _REFUSALS, 5.0))
        finally:
            self.refusing -= 1


def create_app(model: Network, given: ServeOptions | None = None) -> FastAPI:
    """The web application that serves ``model``, for uvicorn or another ASGI server.

    * ``POST /predict``: one image as the body, or any number as files of a multipart form; an
      answer for each.
    * ``GET /health``: what is served.
    * ``GET /metrics``: for Prometheus.

    Refusals: 400 not an image, 408 body too slow, 413 too large, 429 too many requests of one
    address, 503 queue full; 429 and 503 say when to come back (``Retry-After``).
    """
    chosen = ServeOptions() if given is None else given
    if model.task != "classification":
        raise ValueError(f"{model.config.name} segments images; serve a classification network.")
    judge = _Judge(model, chosen.certify)
    decoders = ThreadPoolExecutor(2, thread_name_prefix="decode")
    batcher = Batcher[Tensor, dict[str, Any]](judge, chosen.max_batch, chosen.queue)
    metrics = _Metrics(batcher)
    reading = 0  # requests whose images are read and decoded

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.get_running_loop().run_in_executor(None, judge.warm_up)
        worker = asyncio.create_task(batcher.run())
        yield
        batcher.close()
        await worker
        decoders.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="equilibria", version=__version__, lifespan=lifespan, docs_url=None)
    app.router.redirect_slashes = False

    def full() -> bool:
        return reading + len(batcher) >= chosen.queue

    app.add_middleware(_Gate, rate=chosen.rate, full=full, metrics=metrics)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        served = {"model": model.config.name, "classes": list(model.classes)}
        return {"status": "ok", "version": __version__, **served, "waiting": len(batcher)}

    @app.get("/metrics")
    async def measured() -> Response:
        text = prometheus.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        nonlocal reading
        reading += 1
        try:
            images = await _images(request, chosen)
            pixels = await _decoded(images, model, decoders)
        finally:
            reading -= 1
        try:
            answers = await batcher.ask(pixels)
        except Busy as busy:
            return _later(503, "the server is busy", busy.seconds)
        except Exception:  # noqa: BLE001  # a batch that fails must not end the server
            _LOG.exception("a batch failed")
            raise HTTPException(500, "the network failed on this batch") from None
        for answer in answers:
            if answer["steps"] is not None:
                metrics.steps.observe(answer["steps"])
        return JSONResponse({"predictions": json_value(answers)})

    return app


def _later(status: int, why: str, seconds: float) -> Response:
    headers = {"Retry-After": str(max(1, round(seconds)))}
    return JSONResponse({"detail": why}, status, headers)


async def _body(request: Request, most: int) -> bytes:
    """The whole body, refused as soon as it is known to be too large."""
    refusal = HTTPException(
        413, f"the request is larger than {most:,} bytes", {"Connection": "close"}
    )
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > most:
        raise refusal
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise refusal
    except TimeoutError:
        raise HTTPException(408, f"the body took more than {_BODY_SECONDS:g} s") from None
    return bytes(body)


async def _images(request: Request, chosen: ServeOptions) -> list[bytes]:
    """The encoded images of a request: its body, or the files of its form."""
    body = await _body(request, chosen.max_bytes)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        found = [body] if body else []
    else:

        async def stream() -> AsyncGenerator[bytes, None]:
            yield body

        most = min(chosen.max_images, chosen.queue)  # what never fits the queue is not told to wait
        parser = MultiPartParser(request.headers, stream(), max_files=most, max_fields=most)
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, ValueError) as error:
            why = getattr(error, "message", "") or "it cannot be parsed"
            raise HTTPException(400, f"multipart form: {why}") from None
        found = [await part.read() for _, part in form.multi_items() if not isinstance(part, str)]
        await form.close()
    if not found:
        raise HTTPException(400, "no image: send one as the body, or files in a multipart form")
    return found


async def _decoded(
    images: list[bytes], model: Network, threads: ThreadPoolExecutor
) -> list[Tensor]:
    size, loop = model.preprocessing.size, asyncio.get_running_loop()
    pixels = []
    for place, data in enumerate(images):
        decoding = loop.run_in_executor(threads, decode_image, data, model.in_channels, size)
        try:
            pixels.append(await decoding)
        except CorruptImageError as error:
            raise HTTPException(400, f"image {place}: {error}") from None
    return pixels
