"""One image through the published stack on a CPU, and the arithmetic that bounds it.

    python benchmarks/one_image.py --out results

Float32. "gflop" is what torch's counter finds in one forward pass; "gflop_per_second" the rate of
one 3 × 3 convolution of each stage's shape on one thread, the best of twenty; "bound_ms" the one
over the other, for one and two threads. Times are those of the forward pass: CPU time on one
thread, and wall time on two (least and median). "frozen" is nn.frozen_copy in channels-last with
so many steps a layer, on two threads. "chain" is the same of GEQ 5M (six branches in a chain,
random weights) beside its explicit twin. Writes one_image.json.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _record import parser, save
from torch.utils.flop_counter import FlopCounterMode

import equilibria as eq

WEIGHTS = Path(__file__).parents[1] / "results/weights/geq_stack_cifar_8m.safetensors"
STAGES = ((96, 32), (192, 16), (320, 8))


def timed(run: Callable[[], object], clock: Callable[[], float], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        began = clock()
        run()
        found.append(1e3 * (clock() - began))
    return found


def gflop_of(model: torch.nn.Module, x: torch.Tensor) -> float:
    with FlopCounterMode(display=False) as counter:
        model(x)
    return round(counter.get_total_flops() / 1e9, 2)


def wall(model: torch.nn.Module, x: torch.Tensor) -> list[float]:
    """Milliseconds, least and median of 25 rounds."""
    times = timed(lambda: model(x), time.perf_counter, 30)[5:]
    return [round(min(times), 1), round(statistics.median(times), 1)]


def frozen(model: eq.models.Network, steps: int) -> eq.models.Network:
    few = eq.nn.frozen_copy(eq.nn.set_steps(copy.deepcopy(model), steps))
    return few.to(memory_format=torch.channels_last)


@torch.no_grad()
def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    model = eq.models.load(WEIGHTS).eval()
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    x = model.preprocess(image)
    gflop = gflop_of(model, x)
    rates = []
    for width, side in STAGES:
        z, w = torch.randn(1, width, side, side), torch.randn(width, width, 3, 3)
        least = min(
            timed(lambda z=z, w=w: torch.conv2d(z, w, padding=1), time.thread_time, 20)  # type: ignore[misc]
        )
        rates.append(round(2 * 9 * (width * side) ** 2 / least / 1e6, 1))
    one = timed(lambda: model(x), time.thread_time, 9)
    torch.set_num_threads(2)
    two = timed(lambda: model(x), time.perf_counter, 9)
    last = x.contiguous(memory_format=torch.channels_last)
    chain = eq.models.create("geq_cifar_5m").eval()
    twin = eq.models.create("explicit_cifar_5m").eval().to(memory_format=torch.channels_last)
    ways = {f"{steps} steps": frozen(chain, steps) for steps in (3, 2, 1)} | {"explicit twin": twin}
    bound = gflop / statistics.mean(rates) * 1e3
    save(
        "one_image",
        options.out,
        gflop=gflop,
        gflop_per_second=rates,
        bound_ms=[round(bound), round(bound / 2)],
        one_thread_cpu_ms=[round(min(one)), round(statistics.median(one))],
        two_threads_wall_ms=[round(min(two)), round(statistics.median(two))],
        frozen_two_threads_wall_ms={f"{k} steps": wall(frozen(model, k), last) for k in (4, 2, 1)},
        chain={k: {"gflop": gflop_of(w, last), "wall_ms": wall(w, last)} for k, w in ways.items()},
        load_average=os.getloadavg()[0],
    )


if __name__ == "__main__":
    main()
