"""A training step of stacked GEQ layers beside its explicit twin: images a second, memory, profile.

    python benchmarks/geq_step.py --out results

Needs a CUDA device. The stack is that of geq_cifar.py (2.79 M parameters, 4 + 3 evaluations); its
twin has two convolutions in place of each layer. Synthetic images of CIFAR's shape, bf16, medians
over whole steps (forward, loss, backward, SGD). Writes geq_step.json and a profile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from geq_cifar import Block, network
from torch import Tensor, nn

import equilibria as eq
from equilibria.problems import gaussian as gaussian_module


class Twin(nn.Module):
    """x ↦ skip(x) + conv(relu(conv(norm(x)))): as many parameters as a GEQ block."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, bias=False)
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.second(torch.relu(self.first(self.norm(x))))


def twin() -> nn.Sequential:
    stages = network(1.2, 4, 3)
    for i, stage in enumerate(stages):
        if isinstance(stage, Block):
            stages[i] = Twin(stage.geq.in_channels, stage.geq.channels)
    return stages


@contextlib.contextmanager
def without_fusion() -> Iterator[None]:
    kept = gaussian_module.can_fuse
    gaussian_module.can_fuse = lambda *_: False
    try:
        yield
    finally:
        gaussian_module.can_fuse = kept


def step_function(model: nn.Module, batch: int, compile_: bool) -> tuple[Any, Any]:
    model = model.cuda().to(memory_format=torch.channels_last).train()
    called: Any = torch.compile(model) if compile_ else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")

    def train() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(called(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def infer() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            called(x)

    return train, infer


def seconds(run: Any, repeats: int) -> float:
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return sorted(times)[repeats // 2]


def profile(run: Any) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    return str(seen.key_averages().table(sort_by="cuda_time_total", row_limit=45))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="names of the rows to run, comma separated")
    parser.add_argument("--profile", default="", help="names of the rows to profile")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("geq_step.py needs a CUDA device.")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, tuple[Any, bool, bool]] = {
        "twin eager": (twin, False, True),
        "twin compiled": (twin, True, True),
        "geq eager plain": (lambda: network(1.2, 4, 3), False, False),
        "geq eager fused": (lambda: network(1.2, 4, 3), False, True),
        "geq compiled plain": (lambda: network(1.2, 4, 3), True, False),
        "geq compiled fused": (lambda: network(1.2, 4, 3), True, True),
    }
    record: dict[str, Any] = {
        "command": "python benchmarks/geq_step.py " + " ".join(sys.argv[1:]),
        "commit": options.commit,
        "version": eq.__version__,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(),
        "rows": {},
    }
    wanted = [n.strip() for n in options.only.split(",") if n.strip()] or list(rows)
    for name in wanted:
        make, compile_, fuse = rows[name]
        torch._dynamo.reset()
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        with contextlib.nullcontext() if fuse else without_fusion():
            train, infer = step_function(make(), options.batch, compile_)
            t = seconds(train, options.repeats)
            memory = torch.cuda.max_memory_allocated() / 2**30
            row = {
                "train_images_per_second": round(options.batch / t),
                "inference_images_per_second": round(options.batch / seconds(infer, 30)),
                "peak_memory_gib": round(memory, 2),
            }
            if name in options.profile:
                (out / f"profile_{name.replace(' ', '_')}.txt").write_text(profile(train))
        record["rows"][name] = row
        print(name, row, flush=True)
        (out / "geq_step.json").write_text(json.dumps(record, indent=1) + "\n")
        del train, infer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
