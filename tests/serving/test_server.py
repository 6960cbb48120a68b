"""The server answers as ``predict`` does, and refuses what costs too much."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from equilibria import models
from equilibria.serving import Batcher, Busy, ServeOptions, create_app
from equilibria.solvers import Picard
from tests.models.small import make


@pytest.fixture(scope="module")
def model() -> models.Network:
    made = make("geq_digits", widths=(4,), solver=Picard(max_steps=60)).eval()
    made.extra = {"classes": list("abcde"), "mean": [0.5], "std": [0.25]}
    return made


def encoded(seed: int = 0, size: tuple[int, int] = (8, 8), kind: str = "PNG") -> bytes:
    source = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, size, generator=source, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, kind)
    return file.getvalue()


@contextmanager
def client(model: models.Network, **given: Any) -> Iterator[TestClient]:
    options = ServeOptions(**{"certify": False, **given})
    with TestClient(create_app(model, options)) as made:
        yield made


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_batch=0"):
        ServeOptions(max_batch=0)
    with pytest.raises(ValueError, match="rate"):
        ServeOptions(rate=-1.0)


def test_answers_are_those_of_predict(model: models.Network) -> None:
    images = [encoded(i, size=(8 + i, 11)) for i in range(3)]
    own = model.predict([Image.open(io.BytesIO(data)) for data in images])
    with client(model, certify=True) as http:
        many = http.post("/predict", files=[("images", (f"{i}", d)) for i, d in enumerate(images)])
        raw = http.post("/predict", content=images[1])
        health, metrics = http.get("/health").json(), http.get("/metrics").text
    assert many.status_code == raw.status_code == 200
    found = many.json()["predictions"]
    for answer, mine in zip([*found, *raw.json()["predictions"]], [*own, own[1]], strict=True):
        assert answer["label"] == mine.label
        assert answer["confidence"] == pytest.approx(mine.confidence, abs=1e-5)
        assert answer["steps"] == mine.steps
        assert answer["converged"] is True
        assert answer["certificate"]["unique"] is True
        (layer,) = answer["certificate"]["layers"].values()
        assert layer["guarantee"] == "contraction"
        assert 0 <= layer["error_bound"] < 1
    assert health["classes"] == list("abcde")
    assert 'equilibria_requests_total{path="/predict",status="200"} 2.0' in metrics
    assert "equilibria_predict_seconds_count 2.0" in metrics


def test_what_costs_too_much_is_refused_and_the_server_goes_on(model: models.Network) -> None:
    bomb = b"P5 9000 9000 255\n" + bytes(100)  # a header that claims 81 megapixels
    with client(model, max_bytes=2000, max_images=2, max_batch=4) as http:
        for body, status, said in [
            (b"", 400, "no image"),
            (b"no image at all", 400, "image 0"),
            (bomb, 400, "MOST_PIXELS"),
            (bytes(2001), 413, "2,000 bytes"),
        ]:
            answer = http.post("/predict", content=body)
            assert (answer.status_code, said in answer.text) == (status, True), answer.text

        def endless() -> Iterator[bytes]:  # no Content-Length
            for _ in range(100):
                yield bytes(1000)

        assert http.post("/predict", content=endless()).status_code == 413
        three = [("images", encoded(i)) for i in range(3)]
        assert http.post("/predict", files=three).status_code == 400
        broken = {"content-type": "multipart/form-data; boundary=x"}
        assert http.post("/predict", content=b"--y", headers=broken).status_code == 400
        none = {"content-type": "multipart/form-data"}
        assert http.post("/predict", content=b"--y", headers=none).status_code == 400
        assert http.get("/predict").status_code == 405
        assert http.post("/predict", content=encoded()).status_code == 200


def test_an_image_unlike_those_of_training_is_answered_with_a_warning(
    model: models.Network,
) -> None:
    file = io.BytesIO()
    Image.new("L", (8, 8), 200).save(file, "PNG")
    with client(model) as http:
        (answer,) = http.post("/predict", content=file.getvalue()).json()["predictions"]
    assert "contrast" in answer["warning"]
    assert answer["certificate"] is None


def test_a_client_has_its_rate_and_the_queue_its_length(
    model: models.Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(model, rate=1e-3) as http:  # one in a thousand seconds: however slow this machine
        first, last = (http.post("/predict", content=encoded()) for _ in range(2))
    assert (first.status_code, last.status_code) == (200, 429)
    assert 1 <= int(last.headers["retry-after"]) <= 1000
    with client(model, queue=2) as http:
        # What is longer than the queue never fits: it is not told to come back.
        never = http.post("/predict", files=[("images", encoded(i)) for i in range(3)])
        after = http.post("/predict", content=encoded())
        monkeypatch.setattr(Batcher, "ask", AsyncMock(side_effect=Busy(3)))
        full = http.post("/predict", content=encoded())
    assert (never.status_code, after.status_code, full.status_code) == (400, 200, 503)
    assert full.headers["retry-after"] == "3"


def test_a_refused_request_is_not_read_and_refusals_wait_for_each_other(
    model: models.Network,
) -> None:
    async def call(
        app: Any, body: bytes | None, read: asyncio.Event
    ) -> tuple[int, dict[bytes, bytes]]:
        heard: list[Any] = []

        async def receive() -> dict[str, Any]:
            read.set()
            if body is None:
                await asyncio.Event().wait()  # a client that never sends it
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            heard.append(message)

        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
        await app({**scope, "query_string": b"", "client": ("here", 1)}, receive, send)
        return heard[0]["status"], dict(heard[0]["headers"])

    async def main() -> None:
        app = create_app(model, ServeOptions(queue=1, certify=False))
        async with app.router.lifespan_context(app):
            first, others = asyncio.Event(), asyncio.Event()
            slow = asyncio.create_task(call(app, None, first))
            await first.wait()
            began = time.perf_counter()
            refused = await asyncio.gather(*(call(app, encoded(), others) for _ in range(30)))
            assert time.perf_counter() - began > 0.25  # 100 a second
            assert {status for status, _ in refused} == {503}
            assert all(int(headers[b"retry-after"]) >= 1 for _, headers in refused)
            assert not others.is_set()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            assert (await call(app, encoded(), others))[0] == 200

    asyncio.run(main())


def wait_for(passes: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not passes():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_the_command_serves_and_ends_on_sigterm(model: models.Network, tmp_path: Path) -> None:
    import httpx

    file = models.save(model, tmp_path / "a.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "equilibria", "serve", str(file), "--port", str(port)]
    command += ["--connections", "3"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                return httpx.get(f"{url}/health", timeout=60).status_code == 200
            return False

        wait_for(healthy)
        found = httpx.post(f"{url}/predict", content=encoded(), timeout=60)
        assert found.json()["predictions"][0]["certificate"]["unique"] is True
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 503
        for connection in idle:
            connection.close()
        wait_for(healthy)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "Traceback" not in said
