"""A training step of GEQ networks, torchdeq and explicit twins: speed, memory, residual.

    python benchmarks/geq_step.py --out results

Needs a CUDA device. Two networks on synthetic images of CIFAR's shape, bf16, medians over whole
steps (forward, loss, backward, SGD):

- branches: six GEQ branches (4.45 M parameters); and the same weights with torchdeq (Anderson and
  Broyden, phantom gradient of 5 steps), the map written in plain PyTorch. Residuals are measured
  after the step, in float64, on the first samples.
- stack: six GEQ layers in sequence (2.79 M).
- of both an explicit twin, with two convolutions instead of each layer.

"graph" rows replay CUDA graphs (training.GraphedModel). Writes geq_step.json, and with --profile
a profile of the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _contestants import find_torchdeq
from _peers import PeerBranches, residuals
from torch import Tensor, nn

import equilibria as eq
from equilibria.training import GraphedModel

BRANCHES = "geq_cifar_5m"
STACK = "geq_stack_cifar_3m"


def ways(steps: int | None, terms: int | None) -> dict[str, Any]:
    """So many steps of the certificate's size and terms of the series; None: the network's own."""
    made: dict[str, Any] = {}
    if steps is not None:
        made["solver"] = eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=steps, accelerate=False)
    if terms is not None:
        made["adjoint"] = eq.Phantom(steps=terms, damping=1.0, form="neumann")
    return made


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    make: Callable[[argparse.Namespace], nn.Module]
    way: str
    """eager, compiled or graph."""


def branches(options: argparse.Namespace) -> nn.Module:
    return eq.models.create(BRANCHES, fusion=0, **ways(options.steps, options.terms))


def old_branches(_: argparse.Namespace) -> nn.Module:
    """Anderson 10 and unrolled phantom steps: as in the papers, on the general path."""
    solver = eq.Anderson(rtol=0.0, atol=0.0, max_steps=10, damping=0.8)
    return eq.models.create(BRANCHES, fusion=0, solver=solver, adjoint=eq.Phantom(steps=5))


def peer(name: str) -> Callable[[argparse.Namespace], nn.Module]:
    def make(options: argparse.Namespace) -> nn.Module:
        torchdeq, why = find_torchdeq(options.torchdeq)
        if torchdeq is None:
            raise SystemExit(f"--torchdeq: {why}")
        deq = torchdeq.get_deq(
            f_solver=name,
            f_max_iter=options.peer_steps,
            f_tol=0.0,
            grad=options.terms or 5,
            tau=0.8,
        )
        return PeerBranches(eq.models.create(BRANCHES, fusion=0), deq)

    return make


def stack(options: argparse.Namespace) -> nn.Module:
    return eq.models.create(STACK, **ways(options.stack_steps, options.stack_terms))


def old_stack(_: argparse.Namespace) -> nn.Module:
    """Four damped steps and three with a graph: the first recipe, on the general path."""
    solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=4, damping=0.8)
    return eq.models.create(STACK, solver=solver, adjoint=eq.Phantom(steps=3, damping=0.8))


def twin(_: argparse.Namespace) -> nn.Module:
    return eq.models.create("explicit_stack_cifar_3m")


def branches_twin(_: argparse.Namespace) -> nn.Module:
    return eq.models.create("explicit_cifar_5m", fusion=0)


ROWS = {
    "branches torchdeq anderson": Row(peer("anderson"), "eager"),
    "branches torchdeq broyden": Row(peer("broyden"), "eager"),
    "branches papers' way": Row(old_branches, "eager"),
    "branches eager": Row(branches, "eager"),
    "branches graph": Row(branches, "graph"),
    "branches twin graph": Row(branches_twin, "graph"),
    "stack first recipe": Row(old_stack, "eager"),
    "stack eager": Row(stack, "eager"),
    "stack graph": Row(stack, "graph"),
    "twin eager": Row(twin, "eager"),
    "twin graph": Row(twin, "graph"),
    "twin compiled": Row(twin, "compiled"),
    "stack first recipe compiled": Row(old_stack, "compiled"),
}
# Compiling a stack takes minutes: asked for by name alone.
DEFAULT = [name for name in ROWS if name != "stack first recipe compiled"]


class Bench:
    """One network, its batch and its optimizer."""

    def __init__(self, row: Row, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = row.make(options).cuda().to(memory_format=torch.channels_last).train()
        self.called: Any = self.model
        self.inferred: Any = self.model
        if row.way == "compiled":
            self.called = self.inferred = torch.compile(self.model, dynamic=False)
        elif row.way == "graph":
            self.called = GraphedModel(self.model)
            self.inferred = None
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(
            parameters, lr=1e-3, momentum=0.9, nesterov=True, fused=True
        )
        shape = (options.batch, 3, 32, 32)
        self.x = torch.randn(shape, device="cuda").to(memory_format=torch.channels_last)
        self.y = torch.randint(0, 10, (options.batch,), device="cuda")

    def train(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(self.called(self.x).float(), self.y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def infer(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            (self.model if self.inferred is None else self.inferred)(self.x)

    def inference(self) -> Callable[[], None]:
        """In eval mode; as a CUDA graph where the row asks for it."""
        self.model.eval()
        if self.inferred is not None:
            return self.infer
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.infer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.infer()
        return graph.replay

    def residual(self) -> float | None:
        """The largest relative residual over layers and the first samples, in float64."""
        self.model.eval()
        inputs: dict[nn.Module, Tensor] = {}
        hosts = [m for m in self.model.modules() if isinstance(m, eq.nn.GEQ)]
        if not hosts:
            return None
        hooks = [
            layer.U.register_forward_pre_hook(lambda m, a, at=layer: inputs.__setitem__(at, a[0]))
            for layer in hosts
        ]
        with eq.nn.observe(self.model) as seen:
            self.infer_eagerly()
        for hook in hooks:
            hook.remove()
        if isinstance(self.model, PeerBranches):
            states = dict(zip(hosts, self.model.states, strict=True))
        else:
            values = [found[-1].value for found in seen.solutions.values()]
            flat = [z for v in values for z in (v if isinstance(v, tuple) else (v,))]
            states = dict(zip(hosts, flat, strict=True))
        return max(float(residuals(h, inputs[h], states[h]).max()) for h in hosts)

    @torch.no_grad()
    def infer_eagerly(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            self.model(self.x[:16])


def seconds(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """(median, spread): half the distance between the quartiles over the median."""
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
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2 / middle


def profile(run: Callable[[], None]) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    return str(seen.key_averages().table(sort_by="cuda_time_total", row_limit=45))


def measure(name: str, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    bench = Bench(ROWS[name], options)
    torch.cuda.reset_peak_memory_stats()
    step, spread = seconds(bench.train, options.repeats)
    memory = torch.cuda.max_memory_allocated() / 2**30
    if name in options.profile.split(","):
        (out / f"profile_{name.replace(' ', '_')}.txt").write_text(profile(bench.train))
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "step_ms": round(step * 1e3, 3),
        "spread": round(spread, 4),
        "train_images_per_second": round(options.batch / step),
        "peak_memory_gib": round(memory, 3),
        "residual": bench.residual(),
    }
    row["inference_images_per_second"] = round(
        options.batch / seconds(bench.inference(), options.repeats)[0]
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="results")
    parser.add_argument("--tag", default="", help="added to the name of the result")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--steps", type=int, help="forward steps of the branches; default: the network's own"
    )
    parser.add_argument(
        "--terms", type=int, help="backward terms of the branches; default: the network's own"
    )
    parser.add_argument("--peer-steps", type=int, default=10, help="evaluations of torchdeq")
    parser.add_argument("--stack-steps", type=int)
    parser.add_argument("--stack-terms", type=int)
    parser.add_argument("--only", default="", help="names of the rows to run, comma separated")
    parser.add_argument("--profile", default="", help="names of the rows to profile")
    parser.add_argument("--torchdeq", help="a folder that holds torchdeq, if not installed")
    parser.add_argument("--commit", default="", help="recorded where git is not at hand")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("geq_step.py needs a CUDA device.")
    wanted = [n.strip() for n in options.only.split(",") if n.strip()] or DEFAULT
    unknown = [n for n in wanted if n not in ROWS]
    if unknown:
        raise SystemExit(f"--only {unknown}: the rows are {', '.join(ROWS)}.")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "command": "python benchmarks/geq_step.py " + " ".join(sys.argv[1:]),
        "commit": options.commit,
        "version": eq.__version__,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(),
        "rows": {},
    }
    for name in wanted:
        try:
            row = measure(name, options, out)
        except (RuntimeError, ValueError) as error:
            row = {"failed": str(error).strip().splitlines()[0][:300]}
        record["rows"][name] = row
        print(name, row, flush=True)
        (out / f"geq_step{options.tag}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
