"""Whole solves to one tolerance, and to one residual, against torchdeq 0.1.0.

    python benchmarks/equal_residual.py --out results

One thread, float32, tolerance 1e-4, Anderson (memory 6) and Broyden (memory 10), batch × state
8 × 32, 64 × 256 and 256 × 1024. Maps: those of solvers.py (radius 0.8), and "random",
tanh(zW + x) with W normal of spectral norm 0.9 and x normal, which needs few evaluations and is
the largest part of its solve. torchdeq returns T(z) of the z that passed its test, equilibria z
itself, so at one tolerance torchdeq's residual is smaller by a step; "equal residual" gives
equilibria the residual that torchdeq reached (largest of all samples, in float64) as its tolerance.
Both are timed in alternation by the CPU time of the thread; a speedup is the median of the ratios.
"map" is the part of our time that the map itself takes. Writes equal_residual.json.
"""

from __future__ import annotations

import statistics

import torch
from _contestants import (
    Contestant,
    Counted,
    MatMul,
    Problem,
    Stop,
    bare_forward,
    find_torchdeq,
    make_problem,
    our_contestants,
    torchdeq_contestants,
)
from _measure import race
from _record import parser, save

import equilibria as eq

CPU = torch.device("cpu")
TOLERANCE, LIMIT = 1e-4, 64


def problem(kind: str, batch: int, state: int) -> Problem:
    if kind != "random":
        return make_problem(kind, batch, state, 0.8, 0, CPU)
    random = torch.Generator().manual_seed(0)
    w = torch.randn(state, state, generator=random)
    x = torch.randn(batch, state, generator=random)
    start = torch.zeros(batch, state)
    return Problem(MatMul(x, 0.9 * w / torch.linalg.matrix_norm(w, 2)), start, start)


@torch.no_grad()
def reached(entrant: Contestant, given: Problem, rtol: float) -> tuple[int, float]:
    """Evaluations, and the largest residual of all samples in float64."""
    counted = Counted(given.fn)
    z = entrant.forward(Stop(LIMIT, rtol))(counted, given.z0).double()
    f = given.fn.wide(len(z))(z)
    return counted.evaluations, float(((f - z).norm(dim=1) / f.norm(dim=1)).max())


def compare(given: Problem, mine: Contestant, theirs: Contestant, rtol: float) -> dict[str, object]:
    steps, residual = reached(mine, given, rtol)
    ours, peer = mine.forward(Stop(LIMIT, rtol)), theirs.forward(Stop(LIMIT, TOLERANCE))
    bare = bare_forward(steps)
    runs = {
        "ours": lambda: ours(given.fn, given.z0),
        "theirs": lambda: peer(given.fn, given.z0),
        "map": lambda: bare(given.fn, given.z0),
    }
    times = race(runs, CPU, budget=3.0, most=60, clock="cpu")
    ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    part = [c / a for a, c in zip(times["ours"], times["map"], strict=True)]
    return {
        "evaluations": steps,
        "residual": float(f"{residual:.2g}"),
        "speedup": round(statistics.median(ratios), 2),
        "map": round(statistics.median(part), 2),
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    peer, version = find_torchdeq(None)
    if peer is None:
        raise SystemExit(version)
    ours, theirs = our_contestants(eq), torchdeq_contestants(peer)
    rows = []
    for kind in ("elementwise", "matmul", "random"):
        for batch, state in ((8, 32), (64, 256), (256, 1024)):
            given = problem(kind, batch, state)
            for a, b in (("Anderson", "anderson"), ("Broyden", "broyden")):
                steps, residual = reached(theirs[b], given, TOLERANCE)
                row = {"map": kind, "batch": batch, "state": state, "solver": a}
                row["torchdeq"] = {"evaluations": steps, "residual": float(f"{residual:.2g}")}
                row["equal tolerance"] = compare(given, ours[a], theirs[b], TOLERANCE)
                row["equal residual"] = compare(given, ours[a], theirs[b], residual)
                rows.append(row)
    save("equal_residual", options.out, torchdeq=version, rows=rows)


if __name__ == "__main__":
    main()
