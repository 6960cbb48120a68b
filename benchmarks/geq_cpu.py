"""GEQ networks on a CPU and the same weights with torchdeq, at the same residual.

    python benchmarks/geq_cpu.py --network geq_cifar_5m --threads 2 --out results

Float32, images of CIFAR's shape, W at its norm bound as in trained networks. "created" is the
network with the defaults of eq.models.create; "best" is channels-last, four fixed steps of damped
Anderson and Implicit(GMRES(rtol=1e-2)); "tight" takes two more steps and GMRES(rtol=2e-3), for a
gradient as accurate as that of torchdeq's phantom steps, which also refine z; "auto" is each
layer's own default solver at rtol=1e-3, with Implicit(GMRES(rtol=1e-2)). torchdeq gets the loosest
tolerance with which its worst residual ‖z − T(z)‖/‖z‖ (float64, of all samples and layers) is at
most twice that of "best". A training step is forward, loss and backward. All rows are timed in
alternation; torchdeq's other solvers (--peers), which take two to six times as long as its
Anderson, in the first round of the inference only. Gradient errors are relative to torchdeq's
implicit gradient in float64, solved to 1e-6. The rows of a run replace those of the same network
and threads in geq_cpu.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _geq_ablation import switched_off
from _geq_peer import Peer, Watch, through_torchdeq
from _report import _commit, _cpu_model
from torch import Tensor, nn

import equilibria as eq

TOLERANCES = [8e-3 / 1.6**k for k in range(12)]


def created(name: str) -> nn.Module:
    """The network with every W scaled onto its norm bound."""
    torch.manual_seed(0)
    model: nn.Module = eq.models.create(name, num_classes=10)
    for layer in model.modules():
        if isinstance(layer, eq.nn.GEQ):
            with torch.no_grad():
                layer.W.weight = 100.0 * layer.W.parametrizations.weight.original
    return model


def with_options(model: nn.Module, solver: Any, adjoint: Any) -> nn.Module:
    """A channels-last copy whose layers have these options."""
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for layer in other.modules():
        if isinstance(layer, eq.nn.GEQ):
            layer.solver, layer.adjoint = solver, adjoint
    return other


def best(model: nn.Module, steps: int, backward: float = 1e-2) -> nn.Module:
    solver = eq.Anderson(rtol=0.0, atol=0.0, max_steps=steps, damping=0.7)
    return with_options(model, solver, eq.Implicit(solver=eq.GMRES(rtol=backward)))


def auto(model: nn.Module) -> nn.Module:
    return with_options(model, eq.Auto(rtol=1e-3), eq.Implicit(solver=eq.GMRES(rtol=1e-2)))


def reached(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Residuals and evaluations of an inference, layer by layer."""
    model.eval()
    with torch.no_grad(), Watch(model) as watch:
        model(x)
    found = list(watch.layers())
    return {
        "worst_residual": max(float(r.max()) for _, r in found),
        "residuals": [float(f"{float(r.max()):.2e}") for _, r in found],
        "evaluations": [s.evaluations for s, _ in found],
    }


def calibrated(model: nn.Module, peer: Peer, x: Tensor, target: float) -> Peer:
    """The peer with the loosest tolerance that reaches the target."""
    for tol in TOLERANCES:
        tried = replace(peer, tol=tol)
        if reached(through_torchdeq(model, tried).eval(), x)["worst_residual"] <= target:
            return tried
    return tried


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    model = copy.deepcopy(model).train()
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.double() for p in _parameters(model) if p.grad is not None]


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """In an order that does not depend on where torchdeq's wrappers put them."""
    named = {re.sub(r"\.(layer|plan)(?=\.)", "", n): p for n, p in model.named_parameters()}
    return [named[n] for n in sorted(named)]


def gradient_error(found: list[Tensor], exact: list[Tensor]) -> float:
    if [f.shape for f in found] != [e.shape for e in exact]:
        raise RuntimeError("the two networks do not have the same parameters in the same order")
    gap = sum(float((f - e).square().sum()) for f, e in zip(found, exact, strict=True))
    return (gap / sum(float(e.square().sum()) for e in exact)) ** 0.5


def inference(model: nn.Module, x: Tensor) -> Callable[[], object]:
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def training(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    model = copy.deepcopy(model).train()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()

    return run


def race(runs: dict[str, Callable[[], object]], slow: set[str], rounds: int) -> dict[str, Any]:
    """Seconds of wall and of processor time (all threads), in turn, in rotating order."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for name in names:
        if name not in slow:
            runs[name]()
    gc.collect()
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            if name in slow and i > 0:
                continue
            wall, own = time.perf_counter(), time.process_time()
            runs[name]()
            times[name].append((time.perf_counter() - wall, time.process_time() - own))
    found: dict[str, Any] = {}
    for name, pairs in times.items():
        columns = {"wall_s": [a for a, _ in pairs], "cpu_s": [b for _, b in pairs]}
        found[name] = {
            key: {"least": round(min(v), 4), "median": round(statistics.median(v), 4)}
            for key, v in columns.items()
        }
    return found


Rows = dict[str, dict[str, Any]]


def measure_inference(
    model: nn.Module, ours: dict[str, nn.Module], solvers: list[str], x: Tensor, rounds: int
) -> tuple[Rows, dict[str, Peer]]:
    """What each row reached and how long it took; and torchdeq's solvers with their tolerances."""
    last = x.to(memory_format=torch.channels_last)
    rows: Rows = {"ours created": reached(copy.deepcopy(model), x)}
    for key, made in ours.items():
        rows[f"ours {key}"] = reached(made, last)
    target = 2.0 * rows["ours best"]["worst_residual"]
    peers: dict[str, Peer] = {}
    for solver in solvers:
        found = calibrated(model, Peer(solver, 0.0), x, target)
        peers[f"torchdeq {solver}"] = found
        row = reached(through_torchdeq(model, found), x)
        rows[f"torchdeq {solver}"] = {**row, "tolerance": found.tol}
        _say(f"torchdeq {solver}", rows[f"torchdeq {solver}"])
    runs = {"ours created": inference(copy.deepcopy(model), x)}
    runs |= {f"ours {key}": inference(made, last) for key, made in ours.items()}
    runs |= {key: inference(through_torchdeq(model, p), x) for key, p in peers.items()}
    slow = {"torchdeq fixed_point_iter", "torchdeq broyden"}
    for key, seconds in race(runs, slow, rounds).items():
        rows[key]["inference"] = seconds
        _say(key, seconds)
    return rows, peers


def measure_training(
    model: nn.Module, ours: dict[str, nn.Module], peer: Peer, x: Tensor, rounds: int
) -> Rows:
    """Seconds of a training step and the error of its gradient."""
    last = x.to(memory_format=torch.channels_last)
    y = torch.arange(x.shape[0]) % 10
    given = {"ours created": (model, x)}
    given |= {f"ours {key}": (made, last) for key, made in ours.items()}
    for kind in ("phantom", "implicit"):
        other = through_torchdeq(model, replace(peer, gradient=kind, backward_tol=1e-2))
        given[f"torchdeq anderson, {kind}"] = other, x
    rows: Rows = {}
    runs = {key: training(made, images, y) for key, (made, images) in given.items()}
    for key, seconds in race(runs, set(), rounds).items():
        rows[key] = {"training": seconds}
        _say(key, seconds)
    exact_peer = Peer("anderson", 1e-6, "implicit", 1e-6)
    wide = through_torchdeq(copy.deepcopy(model).double(), exact_peer)
    exact = gradient(wide, x.double(), y)
    for key, (made, images) in given.items():
        error = gradient_error(gradient(made, images, y), exact)
        rows[key]["gradient_error"] = float(f"{error:.2e}")
        _say(key, f"gradient error {error:.1e}")
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model, rounds = created(options.network), options.rounds
    x = torch.randn(options.batch, 3, 32, 32)
    ours = {"best": best(model, options.steps), "auto": auto(model)}
    ours["tight"] = best(model, options.steps + 2, 2e-3)
    solvers = ["anderson", *[s for s in options.peers.split(",") if s and s != "anderson"]]
    rows, peers = measure_inference(model, ours, solvers, x, rounds)
    for key, row in measure_training(model, ours, peers["torchdeq anderson"], x, rounds).items():
        rows[key] = {**rows.get(key, {}), **row}
    return {"rows": rows, "ratios": ratios(rows)}


def ablation(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the row "best" with each idea switched off, and with the layout of torchdeq."""
    made = best(created(options.network), options.steps)
    x, y = torch.randn(options.batch, 3, 32, 32), torch.arange(options.batch) % 10
    last = x.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(made).to(memory_format=torch.contiguous_format)
    found: dict[str, Any] = {}
    for what, run, other in (
        ("inference", inference(made, last), inference(plain, x)),
        ("training", training(made, last, y), training(plain, x, y)),
    ):
        runs = switched_off(run, training=what == "training") | {"channels first": other}
        found[what] = race(runs, set(), options.rounds)
        _say(what, found[what])
    return {"without": found}


def ratios(rows: dict[str, Any]) -> dict[str, Any]:
    """Their time over ours, for the minimum wall times and the minimum CPU times."""
    found: dict[str, Any] = {}
    for mine in ("ours best", "ours tight", "ours auto", "ours created"):
        for key, row in rows.items():
            for what in ("inference", "training"):
                if key.startswith("torchdeq") and what in row:
                    pair = row[what], rows[mine][what]
                    found[f"{what}: {mine} against {key}"] = {
                        clock: round(pair[0][clock]["least"] / pair[1][clock]["least"], 2)
                        for clock in ("wall_s", "cpu_s")
                    }
    return found


def _say(key: str, what: object) -> None:
    print(f"{key}: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="geq_cifar_5m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of Anderson in the row 'best'")
    parser.add_argument("--peers", default="anderson", help="torchdeq's solvers, comma separated")
    parser.add_argument("--ablate", action="store_true", help="each idea switched off instead")
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    warnings.simplefilter("ignore", eq.ConvergenceWarning)
    how = ablation if options.ablate else measure
    torch.set_num_threads(options.threads)
    part = how(options)
    file = Path(options.out) / "geq_cpu.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    what = ", ideas one by one" if options.ablate else ""
    record[f"{options.network}, {options.threads} threads{what}"] = {
        "command": "python benchmarks/geq_cpu.py " + " ".join(sys.argv[1:]),
        "commit": _commit() or "working tree",
        "version": eq.__version__,
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "threads": options.threads,
        "batch": options.batch,
        "load_average": round(os.getloadavg()[0], 2),
        **part,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(file)
    for key, ratio in part.get("ratios", {}).items():
        print(key, ratio)


if __name__ == "__main__":
    main()
