"""What only a GPU can show: waits and kernels seen by the profiler, and CUDA graphs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from _contestants import Contestant, Counted, Forward, Problem, Stop, make_problem
from _measure import Spread, count, cuda_profile, cuda_sync_warnings, race, wait
from _report import Table

GRAPH_STEPS = 24
GRAPH_SIZES = [(8, 32), (64, 1024), (64, 65536)]


def cuda_section(
    contestants: list[Contestant],
    device: torch.device,
    seed: int,
    tolerance: float,
    limit: int,
) -> tuple[dict[str, Any], list[Table]]:
    """Rows and tables: host waits of a solve to tolerance, and captured fixed-step solves."""
    forward = [c for c in contestants if "GMRES" not in c.solver]
    waits = [_waits(c, device, seed, Stop(limit, tolerance)) for c in forward]
    ours = [c for c in forward if c.library == "equilibria"]
    waits += [_waits(c, device, seed, Stop(GRAPH_STEPS)) for c in ours]
    capturable = [c for c in ours if c.solver in ("Picard", "Anderson")]
    graphs = [_graph(c, device, seed, b, n) for b, n in GRAPH_SIZES for c in capturable]
    return {"waits": waits, "graphs": graphs}, [_waits_table(waits), _graph_table(graphs)]


def _waits(entrant: Contestant, device: torch.device, seed: int, stop: Stop) -> dict[str, Any]:
    problem = make_problem("elementwise", 64, 1024, 0.8, seed, device)
    if entrant.solver.startswith("simple"):
        stop = Stop(GRAPH_STEPS)
    solve = entrant.forward(stop)
    counted = Counted(problem.fn)
    solve(counted, problem.z0)
    run = lambda: solve(problem.fn, problem.z0)
    seen = cuda_profile(run, device)
    return {
        "contestant": entrant.name,
        "mode": "fixed" if stop.rtol is None else "to tolerance",
        "evaluations": counted.evaluations,
        "operators_waiting": count(run, problem.z0).syncs,
        "sync_warnings": cuda_sync_warnings(run),
        **asdict(seen),
    }


def _waits_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "Host waits and kernels of one solve, by the profiler (batch 64, state 1024)",
        ["solver", "mode", "evals", "stream waits", "copies to host", "torch warns", "kernels"],
        "Stream waits: cudaStreamSynchronize and cudaEventSynchronize; torch warns: "
        "torch.cuda.set_sync_debug_mode. Kernels include the map's own (two an evaluation).",
    )
    for r in rows:
        keys = ("evaluations", "waits", "copies_to_host", "sync_warnings", "kernels")
        table.add(r["contestant"], r["mode"], *(str(r[k]) for k in keys))
    return table


def _capture(solve: Forward, problem: Problem) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            solve(problem.fn, problem.z0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = solve(problem.fn, problem.z0)
    return graph, value


def _graph(
    entrant: Contestant, device: torch.device, seed: int, batch: int, state: int
) -> dict[str, Any]:
    """Capture a fixed-step solve, replay it on other data, compare with eager, time both."""
    problem = make_problem("elementwise", batch, state, 0.8, seed, device)
    other = make_problem("elementwise", batch, state, 0.8, seed + 1, device)
    solve = entrant.forward(Stop(GRAPH_STEPS))
    row: dict[str, Any] = {"contestant": entrant.name, "batch": batch, "state": state}
    try:
        graph, value = _capture(solve, problem)
    except RuntimeError as error:
        return row | {"captured": False, "error": str(error).strip().splitlines()[0]}
    with torch.no_grad():
        problem.fn.x.copy_(other.fn.x)
        problem.z0.copy_(torch.randn_like(problem.z0))
    graph.replay()
    wait(device)
    replayed = value.clone()
    eager = solve(problem.fn, problem.z0)
    gap = float((replayed - eager).double().norm() / eager.double().norm())
    runs = {"eager": lambda: solve(problem.fn, problem.z0), "graph": graph.replay}
    times = race(runs, device, budget=0.5)
    spread = {key: asdict(Spread.of(v).scaled(1e3)) for key, v in times.items()}
    return row | {"captured": True, "difference": gap, **spread}


def _graph_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        f"A fixed-step solve ({GRAPH_STEPS} steps) as a CUDA graph",
        ["solver", "batch", "state", "difference", "eager ms", "graph ms", "speed-up"],
        "Replayed on data that was not there at capture; difference: ‖graph − eager‖/‖eager‖.",
    )
    for r in rows:
        name, where = r["contestant"], (str(r["batch"]), str(r["state"]))
        if not r["captured"]:
            table.add(name, *where, f"not captured: {r['error']}", "–", "–", "–")
            continue
        eager, graph = r["eager"]["median"], r["graph"]["median"]
        table.add(
            name,
            *where,
            f"{r['difference']:.1e}",
            f"{eager:.3f}",
            f"{graph:.3f}",
            f"{eager / graph:.1f}×",
        )
    return table
