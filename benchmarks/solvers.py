"""Compare the solvers with torchdeq 0.1.0: both libraries in one process, timed in alternation.

    python benchmarks/solvers.py --quick            about a minute on two CPU cores
    python benchmarks/solvers.py                    all sizes: about ten minutes on two CPU cores
    python benchmarks/solvers.py --device cuda      adds the profiler's counts and CUDA graphs

Writes results/solvers_<cpu|cuda>.json and .md (with --quick: …_quick).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _contestants import (
    ANDERSON_MEMORY,
    BROYDEN_MEMORY,
    NEVER,
    Contestant,
    Counted,
    Problem,
    Stop,
    bare_forward,
    bare_gradient,
    find_equilibria,
    find_torchdeq,
    gradient,
    make_problem,
    our_contestants,
    torchdeq_contestants,
    true_gradient,
    true_residual,
)
from _cuda import cuda_section
from _measure import Run, Spread, count, cuda_peak, difference, inside_map, race
from _report import Steps, Table, describe_run, progress, show, write
from torch import Tensor

PAIRS = [
    ("Picard", "fixed_point_iter"),
    ("Picard", "simple_fixed_point_iter"),
    ("Anderson", "anderson"),
    ("Broyden", "broyden"),
]
GRADIENT_PAIRS = [*PAIRS, ("Anderson, GMRES back", "anderson")]
BATCHES = (1, 8, 64, 512)
STATES = (32, 1024, 8192, 65536)
QUICK = [(1, 32), (8, 32), (64, 1024), (8, 65536)]
SMALL = 2**13
"""Batch × state up to which a map counts as small in the checks: calls cost more than bytes."""
LARGE, HUGE, GIANT = 2**18, 2**20, 2**24
"""Batch × state above which a CPU measures less: fewer evaluations; no Broyden and no fixed-step
race; nothing but the forward race at equal evaluations."""
TOLERANCE = 1e-4
LIMIT = 64
SLOW, FAST = 0.99, 0.8
"""Radius of the maps: one that no solver finishes early, one that all solve within LIMIT."""

NOTES = f"""
Float32. Both libraries solve the same map object from the same start in one process and are timed
in alternation, in rotating order. Numbers are medians, ± half the distance of the quartiles;
'of minima' compares the minima of all rounds, which contain no time of other programs.
Anderson's memory is {ANDERSON_MEMORY} in both, Broyden's {BROYDEN_MEMORY} (torchdeq's backward
Broyden keeps all its steps). Both stop by ‖T(z) − z‖/‖T(z)‖ of every sample; the rest of the
options are each library's defaults. torchdeq's solvers are called directly forward; gradients go
through its get_deq(ift=True). The iteration simple_fixed_point_iter has no convergence test: for
a tolerance it gets the number of steps that Picard needed, which a user would not know. It has no
backward form, so fixed_point_iter is used there. Maps: elementwise z ↦ x + s·tanh(z); matmul
z ↦ tanh(zW + x). On a CPU large states are measured less: above {HUGE} numbers without Broyden,
above {GIANT} only forward at equal evaluations.
"""


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    device: torch.device
    quick: bool
    seed: int
    clock: str
    only: tuple[tuple[int, int], ...] = ()
    seconds: float | None = None

    @property
    def cells(self) -> list[tuple[int, int]]:
        if self.only:
            return list(self.only)
        return QUICK if self.quick else [(b, n) for n in STATES for b in BATCHES]

    @property
    def budget(self) -> float:
        """Seconds for the timed rounds of one race."""
        if self.seconds is not None:
            return self.seconds
        if self.device.type == "cuda":
            return 0.4 if self.quick else 0.8
        return 0.5 if self.quick else 1.5


class Bench:
    """The contestants, the options, and the rows found so far."""

    def __init__(self, options: Options, ours: Any, peer: Any) -> None:
        self.options = options
        self.ours: dict[str, Contestant] = our_contestants(ours)
        self.peers: dict[str, Contestant] = {} if peer is None else torchdeq_contestants(peer)
        self.rows: dict[str, list[dict[str, Any]]] = {
            key: [] for key in ("overhead", "counts", "end_to_end")
        }

    def problem(self, kind: str, batch: int, state: int, radius: float) -> Problem:
        return make_problem(kind, batch, state, radius, self.options.seed, self.options.device)

    def above(self, size: int, problem: Problem) -> bool:
        """Whether this is a CPU and the problem larger than ``size``."""
        return self.options.device.type == "cpu" and problem.z0.numel() > size

    def entrants(self, pairs: list[tuple[str, str]], problem: Problem) -> list[Contestant]:
        """Both sides of the pairs, each once."""
        if self.above(HUGE, problem):
            pairs = [p for p in pairs if p[0] in ("Picard", "Anderson")]
        mine = {a: self.ours[a] for a, _ in pairs}
        theirs = {b: self.peers[b] for _, b in pairs if b in self.peers}
        return [*mine.values(), *theirs.values()]

    def race(self, runs: dict[str, Run], problem: Problem) -> dict[str, list[float]]:
        return race(
            runs,
            self.options.device,
            budget=self.options.budget,
            least=2 if self.above(HUGE, problem) else 3,
            clock=self.options.clock,
        )

    # ------------------------------------------------------------------------ equal evaluations

    def overhead(self, problem: Problem, mode: str) -> None:
        """Time besides the map, per step, at a fixed number of evaluations."""
        n = 24
        if self.above(LARGE, problem):
            n = 8 if self.above(HUGE, problem) else 12
        stop = Stop(n, None if mode == "fixed" else NEVER)
        pairs = [p for p in PAIRS if mode == "fixed" or not p[1].startswith("simple")]
        runs: dict[str, Run] = {}
        for entrant in self.entrants(pairs, problem):
            if mode == "gradient":
                runs[entrant.name] = _gradient_run(entrant, problem, stop)
            else:
                runs[entrant.name] = _forward_run(entrant, problem, stop)
        if mode == "gradient":
            runs["map"] = lambda: bare_gradient(problem, n, n)
        else:
            bare = bare_forward(n)
            runs["map"] = lambda: bare(problem.fn, problem.z0)
        samples = self.race(runs, problem)
        batch, state = problem.shape
        for name, times in samples.items():
            if name == "map":
                continue
            spread = difference(times, samples["map"], n).scaled(1e6)
            self.rows["overhead"].append(
                {
                    "map": problem.fn.name,
                    "mode": mode,
                    "batch": batch,
                    "state": state,
                    "evaluations": n,
                    "contestant": name,
                    "map_us": 1e6 * Spread.of(samples["map"]).median / n,
                    "overhead_us": asdict(spread),
                }
            )

    def counts(self) -> None:
        """Kernels, traffic, waits and memory: independent of the machine, but for peak memory."""
        batch, state = 8, 1024
        problem = self.problem("elementwise", batch, state, SLOW)
        few, many = 16, 48
        everyone = [*self.ours.values(), *self.peers.values()]
        one = problem.z0.numel() * problem.z0.element_size()

        def steps(make: Callable[[int], Run], base: Callable[[int], Run]) -> dict[str, float]:
            solve = count(make(many), problem.z0).minus(count(make(few), problem.z0), many - few)
            bare = count(base(many), problem.z0).minus(count(base(few), problem.z0), many - few)
            return {
                "kernels": solve.kernels - bare.kernels,
                "traffic": (solve.traffic - bare.traffic) / one,
                "syncs": solve.syncs,
            }

        def bare(n: int) -> Run:
            return lambda: bare_forward(n)(problem.fn, problem.z0)

        def bare_back(n: int) -> Run:
            return lambda: bare_gradient(problem, few, n)

        for entrant in everyone:
            row: dict[str, Any] = {"contestant": entrant.name, "batch": batch, "state": state}
            simple = entrant.solver.startswith("simple")
            if "GMRES" not in entrant.solver:
                for mode, rtol in (("fixed", None), ("tested", NEVER)):
                    if simple and mode == "tested":
                        continue
                    make = lambda n, e=entrant, r=rtol: _forward_run(e, problem, Stop(n, r))
                    row[mode] = steps(make, bare)
                    quiet = replace(problem, fn=inside_map(problem.fn))
                    found = count(_forward_run(entrant, quiet, Stop(24, rtol)), problem.z0)
                    row[mode] |= {"syncs_a_solve": found.syncs, "peak": found.peak / one}
                    if self.options.device.type == "cuda":
                        row[mode]["cuda_peak"] = self._cuda_peak(entrant, Stop(24, rtol))
            back = lambda n, e=entrant: _gradient_run(e, problem, Stop(few, NEVER), Stop(n, NEVER))
            row["backward"] = steps(back, bare_back)
            row["backward"]["peak"] = count(back(24), problem.z0).peak / one
            self.rows["counts"].append(row)

    def _cuda_peak(self, entrant: Contestant, stop: Stop) -> float:
        problem = self.problem("elementwise", 64, 8192, SLOW)
        run = _forward_run(entrant, problem, stop)
        one = problem.z0.numel() * problem.z0.element_size()
        return cuda_peak(run, self.options.device) / one

    # -------------------------------------------------------------------------- equal tolerance

    def end_to_end(self, problem: Problem, *, backward: bool) -> None:
        """Time to the same tolerance, and what was reached, checked in float64."""
        stop = Stop(LIMIT, TOLERANCE)
        pairs = GRADIENT_PAIRS if backward else PAIRS
        entrants = self.entrants(pairs, problem)
        true = true_gradient(problem) if backward else None
        reached = {e.name: self._examine(e, problem, stop, true) for e in entrants}
        picard = Stop(reached["equilibria:Picard"]["evaluations"] - backward, TOLERANCE)
        runs: dict[str, Run] = {}
        for entrant in entrants:
            mine = stop
            if entrant.solver.startswith("simple"):
                mine = picard
                reached[entrant.name] = self._examine(entrant, problem, mine, true)
            if backward:
                runs[entrant.name] = _gradient_run(entrant, problem, mine, stop)
            else:
                runs[entrant.name] = _forward_run(entrant, problem, mine)
        samples = self.race(runs, problem)
        batch, state = problem.shape
        for name, times in samples.items():
            self.rows["end_to_end"].append(
                {
                    "map": problem.fn.name,
                    "backward": backward,
                    "batch": batch,
                    "state": state,
                    "contestant": name,
                    "ms": asdict(Spread.of(times).scaled(1e3)),
                    **reached[name],
                }
            )

    def _examine(
        self, entrant: Contestant, problem: Problem, stop: Stop, true: Tensor | None
    ) -> dict[str, Any]:
        """Evaluations, products, residual and gradient error of one run, untimed."""
        counted = Counted(problem.fn)
        found: dict[str, Any] = {}
        if true is None:
            z = entrant.forward(stop)(counted, problem.z0)
        else:
            z = entrant.differentiable(stop, Stop(LIMIT, TOLERANCE))(counted, problem.z0)
            g = torch.autograd.grad(z, problem.fn.x, problem.cotangent)[0]
            error = (g[: len(true)].double() - true).norm(dim=1) / true.norm(dim=1)
            found = {"products": counted.products, "gradient_error": float(error.max())}
        found["evaluations"] = counted.evaluations
        found["residual"] = true_residual(problem, z)
        found["reached"] = found["residual"] <= 1.02 * TOLERANCE
        return found


def _forward_run(entrant: Contestant, problem: Problem, stop: Stop) -> Run:
    solve = entrant.forward(stop)
    return lambda: solve(problem.fn, problem.z0)


def _gradient_run(
    entrant: Contestant, problem: Problem, stop: Stop, back: Stop | None = None
) -> Run:
    solve = entrant.differentiable(stop, stop if back is None else back)

    def run() -> Tensor:
        return gradient(solve, problem)

    return run


# ---------------------------------------------------------------------------------------- plan


def plan(bench: Bench) -> list[tuple[str, Callable[[], None]]]:
    """What is measured, in order: a name and a function each."""
    todo: list[tuple[str, Callable[[], None]]] = [("operations per step", bench.counts)]
    for batch, state in bench.options.cells:
        kinds = ["elementwise"]
        if state <= 1024 and batch * state <= (1024 if bench.options.quick else 2**16):
            kinds.append("matmul")
        for kind in kinds:

            def cell(kind: str = kind, batch: int = batch, state: int = state) -> None:
                slow = bench.problem(kind, batch, state, SLOW)
                bench.overhead(slow, "tested")
                if bench.above(GIANT, slow):
                    return
                if not bench.above(HUGE, slow):
                    bench.overhead(slow, "fixed")
                bench.overhead(slow, "gradient")
                fast = bench.problem(kind, batch, state, FAST)
                bench.end_to_end(fast, backward=False)
                bench.end_to_end(fast, backward=True)

            todo.append((f"{kind}, batch {batch}, state {state}", cell))
    return todo


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--quick", action="store_true", help="a few sizes, about a minute")
    parser.add_argument(
        "--cell",
        action="append",
        default=[],
        metavar="BATCHxSTATE",
        help="only this size, such as 512x8192; may be given again",
    )
    parser.add_argument("--commit", help="recorded where git is not at hand")
    parser.add_argument("--seconds", type=float, help="for the timed rounds of one race")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads; torch's default if not given")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: this thread's own time, for busy machines; goes with --threads 1",
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the tables")
    parser.add_argument("--torchdeq", metavar="FOLDER", help="where to import torchdeq from")
    args = parser.parse_args()
    kind = args.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; use --device cpu.")
    if args.clock == "cpu" and (kind == "cuda" or args.threads != 1):
        parser.error("--clock cpu sees one CPU thread: use it with --device cpu --threads 1.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # solves that are made not to converge say so
    only = tuple(_cell(parser, given) for given in args.cell)
    options = Options(torch.device(kind), args.quick, args.seed, args.clock, only, args.seconds)
    eq = find_equilibria()
    peer, version = find_torchdeq(args.torchdeq)
    command = f"python benchmarks/solvers.py --device {kind} --seed {args.seed}"
    command += "" if args.threads is None else f" --threads {args.threads}"
    command += "" if args.clock == "wall" else f" --clock {args.clock}"
    command += " --quick" if args.quick else ""
    command += "" if args.seconds is None else f" --seconds {args.seconds:g}"
    command += "".join(f" --cell {given}" for given in args.cell)
    meta = describe_run(
        command, args.seed, options.device, equilibria=eq.__version__, torchdeq=version
    )
    if args.commit:
        meta["commit"] = args.commit
    notes = NOTES
    if peer is None:
        notes = f"**torchdeq is missing: {version}. Only equilibria was measured.**\n\n" + NOTES
        print(f"torchdeq is missing: {version}. Measuring equilibria alone.")
    bench = Bench(options, eq, peer)
    todo = plan(bench)
    cuda: dict[str, Any] = {}
    extra: list[Table] = []
    with progress(len(todo) + (kind == "cuda")) as steps:
        _run_all(todo, steps)
        if kind == "cuda":
            steps.next("profiler and CUDA graphs")
            contestants = [*bench.ours.values(), *bench.peers.values()]
            cuda, extra = cuda_section(contestants, options.device, options.seed, TOLERANCE, LIMIT)
    from _tables import make_tables

    tables, checks = make_tables(bench.rows, GRADIENT_PAIRS, SMALL, ANDERSON_MEMORY)
    tables = [*tables, *extra]
    for table in tables:
        show(table)
    name = f"solvers_{kind}" + ("_quick" if args.quick else "") + ("_cells" if only else "")
    data = {"checks": checks, **bench.rows, **({"cuda": cuda} if cuda else {})}
    for path in write(args.out, name, meta, notes, tables, data):
        print(f"wrote {path}")


def _cell(parser: argparse.ArgumentParser, given: str) -> tuple[int, int]:
    parts = given.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        parser.error(f"--cell {given}: expected BATCHxSTATE, such as 512x8192.")
    return int(parts[0]), int(parts[1])


def _run_all(todo: list[tuple[str, Callable[[], None]]], steps: Steps) -> None:
    for what, measure in todo:
        steps.next(what)
        measure()


if __name__ == "__main__":
    main()
