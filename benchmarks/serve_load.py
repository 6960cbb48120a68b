"""Load on `equilibria serve` over loopback: requests a second, latencies, and what saturation does.

    python benchmarks/serve_load.py run/model.safetensors --out results

Starts the command in a process of its own, with and without certificates, and keeps 1, 2, 4, …
requests in flight, each one image, for some seconds; the last numbers are more than the queue
holds. Latencies are those of answered requests. After each overload one request must be answered.
Client and server share the machine, so these are lower bounds.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
from _record import parser, save
from PIL import Image

from equilibria import models


def image(size: int, channels: int) -> bytes:
    pixels = torch.randint(0, 256, (size, size, channels), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1).numpy()).save(file, "PNG")
    return file.getvalue()


async def load(port: int, body: bytes, in_flight: int, seconds: float) -> dict[str, Any]:
    """Keep ``in_flight`` requests open, each on a connection; who is refused comes back at once.

    Plain sockets: a pool of connections would cost more than the server.
    """
    codes: Counter[int] = Counter()
    times: list[float] = []
    refusals: list[float] = []
    without = 0
    head = f"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    began = time.perf_counter()

    async def client() -> None:
        nonlocal without
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (start := time.perf_counter()) < began + seconds:
            writer.write(head.encode() + body)
            try:
                answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(answer.split("content-length: ")[1].split()[0]))
            except (OSError, asyncio.IncompleteReadError):
                codes[0] += 1
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                continue
            if time.perf_counter() > began + seconds:
                break  # in the time of no level
            code = int(answer.split()[1])
            codes[code] += 1
            (times if code == 200 else refusals).append(time.perf_counter() - start)
            without += code == 503 and "retry-after" not in answer
        writer.close()

    await asyncio.gather(*(client() for _ in range(in_flight)))

    def at(values: list[float], share: float) -> float | None:
        ranked = sorted(values)
        return round(1e3 * ranked[int(share * (len(ranked) - 1))], 1) if ranked else None

    return {
        "in_flight": in_flight,
        "answered_per_second": round(len(times) / seconds, 1),
        "p50_ms": at(times, 0.5),
        "p99_ms": at(times, 0.99),
        "refused_per_second": round(len(refusals) / seconds, 1),
        "refusal_p50_ms": at(refusals, 0.5),
        "refused_without_retry_after": without,
        "broken_connections": codes[0],
        "status": {str(code): count for code, count in sorted(codes.items()) if code},
    }


def run(weights: Path, flags: list[str], levels: list[int], seconds: float) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    kind = models.load_onnx if weights.suffix == ".onnx" else models.load
    config = kind(weights).config
    torch.manual_seed(0)
    body = image(config.image_size, config.in_channels)
    command = [sys.executable, "-m", "equilibria", "serve", str(weights), "--port", str(port)]
    server = subprocess.Popen([*command, *flags])
    try:
        while True:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                if server.poll() is not None:
                    raise SystemExit("the server ended") from None
                time.sleep(0.2)
        rows = []
        for level in levels:
            rows.append(asyncio.run(load(port, body, level, seconds)))
            after = httpx.post(f"{url}/predict", content=body, timeout=120).status_code
            rows[-1]["then"] = after
            print(rows[-1], flush=True)
        server.send_signal(signal.SIGTERM)
        ended = server.wait(60)
    finally:
        server.kill()
    return {"file": weights.name, "flags": flags, "exit_code": ended, "levels": rows}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("weights", type=Path, nargs="+", help="networks or ONNX files")
    made.add_argument("--seconds", type=float, default=8.0, help="of each level")
    made.add_argument("--levels", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    given = made.parse_args()
    queue = ["--queue", "64"]
    found = []
    for weights in given.weights:
        found.append(run(weights, [*queue, "--no-certify"], given.levels, given.seconds))
        if weights.suffix != ".onnx":
            found.append(run(weights, queue, given.levels, given.seconds))
    machine = {"cores": os.cpu_count(), "load_average": [round(x, 1) for x in os.getloadavg()]}
    save("serve_load", given.out, machine=machine, servers=found)
    (given.out / "serve_load.json").replace(given.out / "serve.json")


if __name__ == "__main__":
    main()
