"""The fused Gaussian patch message and its plain twin: time, and share of the copy bandwidth.

    python benchmarks/gaussian_op.py --out results
    python benchmarks/gaussian_op.py --tune --out results

Needs a CUDA device. For each shape: forward and backward, fused, plain and plain under
torch.compile; bytes are those that a perfect kernel must move (forward a, c → out; backward a, c, g
→ dr). Kernels are timed as CUDA graphs of a few calls, each with maps of its own, so that maps of
more than 2 MB are not in the cache; the three forms in a queue of calls. ``share_of_copy`` is
relative to the bandwidth of a large copy, ``share_of_same_copy`` to a copy that moves as many bytes
and is timed in the same way: on small maps it does not reach that bandwidth either. Errors are
relative to float64. Writes gaussian_op.json.

--tune times the candidates for the table of launches, ``PLANS`` in ops/gaussian_triton.py, in bf16,
and prints the best of them as lines of that table. Writes gaussian_op_tuning.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
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

from equilibria.ops.gaussian import permuted, plain_message
from equilibria.ops.gaussian_patches import fused_message

SHAPES = [
    # batch, channels, pixels, c_s, p
    (512, 64, 32, 8, 2),
    (512, 128, 16, 8, 2),
    (512, 256, 8, 8, 2),
    (512, 256, 32, 8, 2),
    (256, 64, 64, 4, 4),
    (512, 128, 32, 32, 2),
    (512, 48, 32, 3, 2),
    (512, 128, 32, 16, 2),
    (128, 64, 8, 8, 2),
    (512, 320, 8, 8, 2),
    (512, 80, 32, 8, 2),
]
KERNELS = ("forward", "backward", "metric", "energies")  # "metric": backward with that of M


if torch.cuda.is_available():
    from triton import TritonError

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


def rotated_ms(calls: list[Any], repeats: int = 40) -> float:
    """Of one of the calls, all in one graph; what they return is kept until the last has run."""
    return median_ms(lambda: [run() for run in calls], repeats) / len(calls)


def same_copy_ms(moved: int, calls: int, repeats: int = 40) -> float:
    """Of a copy that reads and writes ``moved`` bytes together, timed as the kernels are."""
    half = [torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2 * calls)]
    copies = [partial(x.copy_, y) for x, y in zip(half[:calls], half[calls:], strict=True)]
    return rotated_ms(copies, repeats)


def kernel_calls(
    kernel: str, given: list[Tensor], cut: tuple[int, int], wrap: Any = None
) -> list[Any]:
    """The kernel on copies of (a, c, g, metric, gamma): half a GB of each map, or ten."""
    a, wrap = given[0], wrap or kernels.direct
    count = max(2, min(10, 2**29 // (a.numel() * a.element_size())))
    calls = []
    for a, c, g, metric, gamma in [given, *([t.clone() for t in given] for _ in range(count - 1))]:
        if kernel == "forward":
            calls.append(partial(kernels.forward, a, c, metric, gamma, *cut, wrap))
        elif kernel == "energies":
            calls.append(partial(kernels.energies, c, metric, *cut, wrap))
        else:
            pulled = (a, c, metric, gamma, g, *cut, kernel == "metric", False, wrap)
            calls.append(partial(kernels.backward, *pulled))
    return calls


def moved_bytes(kernel: str, a: Tensor, cut: tuple[int, int]) -> int:
    """What a perfect kernel reads and writes."""
    size = a.numel() * a.element_size()
    if kernel == "energies":
        return size + 4 * a.numel() // (cut[0] * cut[1] ** 2)
    return (3 if kernel == "forward" else 4) * size


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
    wanted = [leaves[0], leaves[2]]  # the gradient of c is that of a, negated by the caller
    for name, form in forms.items():
        with torch.no_grad():
            row[f"{name}_forward_ms"] = queued_ms(partial(form, a, c, metric, gamma, *cut))
        out = form(a, c.detach(), metric, gamma, *cut)
        pull = partial(torch.autograd.grad, out, wanted, g, retain_graph=True)
        row[f"{name}_backward_ms"] = queued_ms(pull)
    given = [a.detach(), c.detach(), g, permuted(metric.detach(), *cut), gamma.float()]
    for name, kernel in (("forward", "forward"), ("backward", "metric"), ("energies", "energies")):
        moved, calls = moved_bytes(kernel, a, cut), kernel_calls(kernel, given, cut)
        ms, copy = rotated_ms(calls), same_copy_ms(moved, len(calls))
        row[f"kernel_{name}_ms"] = ms
        row[f"{name}_share_of_copy"] = moved / (ms * 1e-3) / speed
        row[f"{name}_share_of_same_copy"] = copy / ms
    with torch.no_grad():
        row["fused_launch_ms"] = launch_ms(
            lambda: fused_message(a[few], c[few], metric, gamma[few], *cut)
        )
    return row


TILES = {
    # columns: (rows, warps, stages) of a tile, and programs a multiprocessor
    16: ([(128, 4, 1), (128, 4, 2), (256, 4, 2), (256, 4, 3)], (4, 8, 32)),
    32: (
        [(32, 4, 1), (64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 4, 1), (128, 4, 2), (128, 4, 3)],
        (4, 8, 32),
    ),
    64: (
        [(32, 4, 2), (64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 4, 2), (128, 8, 1), (128, 8, 2)],
        (2, 4, 16),
    ),
    128: (
        [(32, 4, 3), (64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 1), (128, 8, 2)],
        (1, 2, 8),
    ),
}


def columns_of(shape: tuple[int, ...]) -> int:
    return max(16, 1 << (shape[3] * shape[4] ** 2 - 1).bit_length())


class OnlyCompile:
    """A kernel that is compiled and not run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.kernel.warmup, grid=grid)


def compile_one(shape: tuple[int, ...], kernel: str, tile: tuple[int, int, int]) -> None:
    """In a process of its own, into Triton's cache on disk."""
    plan = kernels.Plan(*tile, 1)
    kernels.PLANS[kernel, columns_of(shape)] = plan, plan
    given, cut = small_inputs(shape)
    kernel_calls(kernel, given, cut, OnlyCompile)[0]()


@functools.cache
def small_inputs(shape: tuple[int, ...]) -> Any:
    return inputs((2, *shape[1:]), torch.bfloat16)


def tune_shape(shape: tuple[int, ...], kernel: str, speed: float) -> dict[str, Any] | None:
    """Milliseconds of all candidates, of the plan in the table, and of a copy."""
    given, cut = inputs(shape, torch.bfloat16)
    moved, calls = moved_bytes(kernel, given[0], cut), kernel_calls(kernel, given, cut)
    key, times = (kernel, columns_of(shape)), {}
    before = kernels.PLANS[key]
    small = given[0].numel() <= kernels.SMALL
    tiles, waves = TILES[key[1]]
    plans = [kernels.Plan(*tile, wave) for tile in tiles for wave in waves]
    right: list[Tensor] = []  # what the plan of the table gives; the tests compare that
    for plan in dict.fromkeys([before[small], *plans]):
        kernels.PLANS[key] = plan, plan
        try:
            found = calls[0]()
            found = [t for t in ([found] if isinstance(found, Tensor) else found) if t.numel()]
            right = right or found
            off = max(relative(x, y.double()) for x, y in zip(found, right, strict=True))
            if not off < 1e-2:
                raise RuntimeError(f"differs from the plan of the table by {off}")
            times[",".join(map(str, plan))] = rotated_ms(calls, 10)
        except (RuntimeError, TritonError) as error:  # such as a tile that does not fit
            print("left out", shape, kernel, plan, repr(error)[:150], flush=True)
    kernels.PLANS[key] = before
    if not times:
        return None
    copy, best = same_copy_ms(moved, len(calls), 10), min(times, key=lambda plan: times[plan])
    return {
        "shape": shape,
        "kernel": kernel,
        "columns": key[1],
        "small": small,
        "same_size_copy_ms": copy,
        "best": best,
        "best_share_of_copy": moved / (times[best] * 1e-3) / speed,
        "best_share_of_same_copy": copy / times[best],
        "default": ",".join(map(str, before[small])),
        "default_share_of_same_copy": copy / times.get(",".join(map(str, before[small])), math.inf),
        "ms": times,
    }


def winners(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of the table: the plans that are least slower, on average, than the best of a shape."""

    def best(kernel: str, columns: int, small: bool) -> str | None:
        alike = [r for r in rows if (r["kernel"], r["columns"]) == (kernel, columns)]
        alike = [r for r in alike if r["small"] == small] or alike
        plans = set.intersection(*[set(r["ms"]) for r in alike]) if alike else set()
        cost = {p: sum(r["ms"][p] / min(r["ms"].values()) for r in alike) for p in plans}
        return min(cost, key=lambda plan: (cost[plan], plan)) if cost else None

    lines = []
    for kernel in KERNELS:
        for columns in TILES:
            large, small = (best(kernel, columns, small) for small in (False, True))
            if large is not None and small is not None:
                plans = [f"Plan({x.replace(',', ', ')})" for x in (large, small)]
                lines.append(f'    ("{kernel}", {columns}): ({plans[0]}, {plans[1]}),')
    return lines


def tune(record: dict[str, Any], path: Path) -> None:
    """All candidates on all shapes; the file is written after each shape."""
    gc.freeze()  # or each graph would look through all of torch
    speed, began = record["copy_bytes_per_second"], time.perf_counter()
    jobs: dict[tuple[int, ...], list[Future[None]]] = {}
    cores = min(14, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        for shape in SHAPES:  # maps with the same patches share their kernels
            if shape[3:] not in jobs:
                todo = [(k, tile) for k in KERNELS for tile in TILES[columns_of(shape)][0]]
                jobs[shape[3:]] = [pool.submit(compile_one, shape, *each) for each in todo]
        for shape in SHAPES:
            wait(jobs[shape[3:]])
            for kernel in KERNELS:
                row = tune_shape(shape, kernel, speed)
                if row is None:
                    continue
                record["rows"].append(row)
                shown = {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}
                print(shape, kernel, "best", row["best"], "default", row["default"], shown)
            record["winners"] = winners(record["rows"])
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{time.perf_counter() - began:.0f} s", flush=True)
    print("\n".join(record["winners"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    parser.add_argument("--tune", action="store_true", help="try launches instead")
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
        tune(record, Path(options.out) / "gaussian_op_tuning.json")
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
