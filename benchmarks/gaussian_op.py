"""The fused Gaussian patch message and its plain twin: time, and share of the copy bandwidth.

    python benchmarks/gaussian_op.py --out results

Needs a CUDA device. For each shape: forward and backward, fused, plain and plain under
torch.compile; bytes are those that a perfect kernel must move (forward
a, c → out; backward a, c, g → dr). Kernels are timed as CUDA graphs, without launches from Python;
the three forms in a queue of calls. Errors are relative to float64. Writes gaussian_op.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import equilibria as eq
except ImportError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    import equilibria as eq

from equilibria.ops.gaussian_patches import fused_message, permuted, plain_message

SHAPES = [
    # batch, channels, pixels, c_s, p
    (512, 64, 32, 8, 2),
    (512, 128, 16, 8, 2),
    (512, 256, 8, 8, 2),
    (512, 256, 32, 8, 2),
    (256, 64, 64, 4, 4),
    (512, 128, 32, 32, 2),
    (512, 48, 32, 3, 2),
]


if torch.cuda.is_available():
    from equilibria.ops import gaussian_triton as kernels


def median_ms(run: Any, repeats: int = 40) -> float:
    """Of one replay of a CUDA graph of ``run``: device time, without the launch from Python."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def queued_ms(run: Any, calls: int = 20) -> float:
    """Of one of many calls in a row: the device's time where it is longer than the launch."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def launch_ms(run: Any, repeats: int = 100) -> float:
    """Host time of one call from Python, which dominates for small maps."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats * 1e3


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read plus written."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source))
    return 2 * source.numel() * 4 / (ms * 1e-3)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], tuple[int, int]]:
    batch, channels, pixels, group, size = shape
    width = group * size * size
    big = [
        torch.randn(batch, channels, pixels, pixels, device="cuda", dtype=dtype).to(
            memory_format=torch.channels_last
        )
        for _ in range(3)
    ]
    hidden = torch.randn(width, 2 * width, device="cuda") / (2 * width) ** 0.5
    metric = (hidden @ hidden.T).to(dtype)
    gamma = torch.rand(batch, device="cuda") / width + 0.2 / width
    return [*big, metric, gamma], (group, size)


def relative(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def measure(shape: tuple[int, ...], dtype: torch.dtype, speed: float) -> dict[str, Any]:
    (a, c, g, metric, gamma), cut = inputs(shape, dtype)
    row: dict[str, Any] = {"shape": shape, "dtype": str(dtype)}
    leaves = [a.requires_grad_(), c.requires_grad_(), metric.requires_grad_()]
    few = slice(0, 8)
    wide = [t[few].detach().double().requires_grad_() for t in (a, c)]
    wide_metric = metric.detach().double().requires_grad_()
    true = plain_message(*wide, wide_metric, gamma[few].double(), *cut)
    true_grads = torch.autograd.grad(true, [*wide, wide_metric], g[few].double())
    forms = {"fused": fused_message, "plain": plain_message}
    for name, form in forms.items():
        small = [a[few].detach().requires_grad_(), c[few].detach().requires_grad_(), leaves[2]]
        out = form(*small, gamma[few], *cut)
        grads = torch.autograd.grad(out, small, g[few])
        row[f"{name}_error"] = relative(out.detach(), true.detach())
        row[f"{name}_gradient_errors"] = [
            relative(x, y) for x, y in zip(grads, true_grads, strict=True)
        ]
    forms["compiled"] = torch.compile(plain_message)
    size = a.numel() * a.element_size()
    wanted = [leaves[0], leaves[2]]  # the gradient of c is that of a, negated by the caller
    for name, form in forms.items():
        with torch.no_grad():
            row[f"{name}_forward_ms"] = queued_ms(partial(form, a, c, metric, gamma, *cut))
        out = form(a, c.detach(), metric, gamma, *cut)
        pull = partial(torch.autograd.grad, out, wanted, g, retain_graph=True)
        row[f"{name}_backward_ms"] = queued_ms(pull)
    given = (a.detach(), c.detach(), permuted(metric.detach(), *cut), gamma.float())
    forward = median_ms(partial(kernels.forward, *given, *cut, _direct))
    backward = median_ms(partial(kernels.backward, *given, g, *cut, True, False, _direct))
    row |= {"kernel_forward_ms": forward, "kernel_backward_ms": backward}
    with torch.no_grad():
        row["fused_launch_ms"] = launch_ms(
            lambda: fused_message(a[few], c[few], metric, gamma[few], *cut)
        )
    row["forward_share_of_copy"] = 3 * size / (forward * 1e-3) / speed
    row["backward_share_of_copy"] = 4 * size / (backward * 1e-3) / speed
    return row


def _direct(kernel: Any) -> Any:
    return kernel


def tune(speed: float) -> list[dict[str, Any]]:
    """Tile, warps and waves on two shapes in bf16: shares of the copy bandwidth."""
    found = []
    for shape in (SHAPES[0], SHAPES[3]):
        (a, c, g, metric, gamma), cut = inputs(shape, torch.bfloat16)
        size = a.numel() * a.element_size()
        for tile, warps, waves in itertools.product((2048, 4096, 8192), (4, 8), (4, 16)):
            kernels._TILE, kernels._WARPS, kernels._WAVES = tile, warps, waves

            given = (a, c, metric, gamma)
            forward = partial(kernels.forward, *given, *cut, _direct)
            backward = partial(kernels.backward, *given, g, *cut, True, False, _direct)
            row = {
                "shape": shape,
                "tile": tile,
                "warps": warps,
                "waves": waves,
                "forward": 3 * size / (median_ms(forward) * 1e-3) / speed,
                "backward": 4 * size / (median_ms(backward) * 1e-3) / speed,
            }
            found.append(row)
            print(row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--tune", action="store_true", help="try tiles, warps and waves instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gaussian_op.py needs a CUDA device.")
    torch.manual_seed(0)
    speed = copy_bandwidth()
    record: dict[str, Any] = {
        "command": "python benchmarks/gaussian_op.py " + " ".join(sys.argv[1:]),
        "commit": options.commit,
        "version": eq.__version__,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(),
        "copy_bytes_per_second": speed,
        "rows": [],
    }
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.tune:
        record["rows"] = tune(speed)
        path = Path(options.out) / "gaussian_op_tuning.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        return
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            torch._dynamo.reset()
            row = measure(shape, dtype, speed)
            record["rows"].append(row)
            times = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
            print(shape, dtype, times, flush=True)
            path = Path(options.out) / "gaussian_op.json"
            path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
