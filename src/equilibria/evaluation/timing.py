"""profile_model: where the time of a model goes, and what to do about it.

Whole passes are timed as they are. The parts (map, solver, adjoint, rest) come from passes with
marks around every map, solve and adjoint (``solve_marks``), run in turn with those. Operators, the
memory of a CPU and the waits of a GPU come from a pass under torch.profiler.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from equilibria.adjoints import Implicit
from equilibria.engine.files import json_value, write_json
from equilibria.engine.krylov import LinearSolver
from equilibria.engine.options import OptionError
from equilibria.engine.result import ConvergenceWarning
from equilibria.engine.solver import Solver
from equilibria.engine.tree import flatten_state
from equilibria.nn.constraints import OperatorNorm
from equilibria.nn.observing import equilibrium_layers, observe
from equilibria.solvers import Anderson, ForwardBackward, PeacemanRachford
from equilibria.solvers.forward_backward import SplittingSolver

from .figures import save_bars
from .layer_solvers import SolverRecorder, SolverStatistics, layer_label
from .model_on_data import check_whole, device_of, model_name
from .rich_output import as_text, group, make_table, progress_bar
from .solve_marks import PARTS, Marks, marked, solving_layers

__all__ = [
    "LayerProfile",
    "Memory",
    "PassProfile",
    "Profile",
    "Spread",
    "Suggestion",
    "peak_memory",
    "profile_model",
    "quiet",
    "seconds_of",
]

Run = Callable[[], object]
_INNER = ("map", "solver", "adjoint_map", "adjoint_solver")
GROUPS = {
    "map": ("map",),
    "solver": ("solver",),
    "adjoint": ("adjoint_map", "adjoint_solver"),
    "rest": tuple(part for part in PARTS if part not in _INNER),
}
"""The four questions, and the parts that answer each."""
PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""As in training: the dtype of autocast, or None for the model's own."""
_WARM = 2


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements, in seconds."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: list[float]) -> Spread:
        several = values if len(values) > 1 else 2 * values
        low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
        return Spread(middle, low, high, len(values))


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a pass beyond what was held before it (weights, batch, optimizer)."""

    peak: int
    held: int
    method: str
    """Who counted: the caching allocator of a GPU, or the profiler on a CPU."""


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """One equilibrium layer in one pass."""

    name: str
    seconds: Mapping[str, float]
    """By part: map, solver, adjoint_map, adjoint_solver."""
    evaluations: int
    """Of T in the solve."""
    graph_evaluations: int
    """Of T with a graph, for the adjoint."""
    products: int
    """With the transposed Jacobian of T, in the backward pass."""
    statistics: SolverStatistics | None
    """Steps per sample as a histogram, residuals, result codes."""
    backward_steps: Tensor | None
    """Long: entry s counts the samples whose backward solve took s steps; None: no such solve."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": layer_label(self.name),
            "seconds": self.seconds,
            "evaluations": self.evaluations,
            "graph_evaluations": self.graph_evaluations,
            "products": self.products,
            "solves": self.statistics,
            "backward_steps_histogram": self.backward_steps,
        }


@dataclass(frozen=True, eq=False)
class PassProfile:
    """A training step or an inference: how long as it runs, and where the time goes."""

    kind: str
    """"train" or "inference"."""
    batch: int
    seconds: Spread
    """As it runs, without any mark."""
    eager: Spread
    """Without marks and not compiled, which is what the parts are of; else the same."""
    marked: Spread
    """With marks, run in turn with ``eager``."""
    overhead: float
    """What the marks cost, as a share: the median over rounds of marked/eager, less 1."""
    parts: Mapping[str, float]
    """Seconds by part (see ``PARTS``) of the marked pass of median length."""
    layers: tuple[LayerProfile, ...]
    operators: tuple[tuple[str, int, float], ...]
    """By torch.profiler: (name, calls, seconds of its own), the most expensive first."""
    memory: Memory
    waits: int | None
    """Times that the host waited for the GPU; None where there is none."""
    idle: float
    """Share of the pass in which the GPU ran no kernel; 0 on a CPU."""

    @property
    def images_per_second(self) -> float:
        return self.batch / self.seconds.median

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def group(self, name: str) -> float:
        """Seconds of "map", "solver", "adjoint" or "rest"."""
        return sum(self.parts[part] for part in GROUPS[name])

    def share(self, *parts: str) -> float:
        """Of the marked pass, 0 to 1."""
        return sum(self.parts[part] for part in parts) / self.total

    @property
    def steps(self) -> Tensor | None:
        """Long: entry s counts the solves of s steps, of all layers together; None without any."""
        known = [p.statistics.histogram for p in self.layers if p.statistics is not None]
        length = max((len(h) for h in known), default=0)
        padded = [nn.functional.pad(h, (0, length - len(h))) for h in known]
        return torch.stack(padded).sum(0) if known else None

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "calls", "seconds")
        return {
            "kind": self.kind,
            "batch": self.batch,
            "seconds": self.seconds,
            "images_per_second": self.images_per_second,
            "eager_seconds": self.eager,
            "marked_seconds": self.marked,
            "overhead_of_marks": self.overhead,
            "groups": {name: self.group(name) for name in GROUPS},
            "parts": self.parts,
            "layers": self.layers,
            "operators": [dict(zip(names, row, strict=True)) for row in self.operators],
            "memory": self.memory,
            "host_waits": self.waits,
            "device_idle": self.idle,
        }


@dataclass(frozen=True)
class Suggestion:
    """What to do, why, and by how much it may help."""

    name: str
    reason: str
    """From measured numbers."""
    do: str
    """What to write."""
    predicted: float | None
    """Times as fast, at best, by what was measured; None: only a trial can tell."""
    measured: float | None = None
    """Times as fast, tried side by side in this run."""
    change: float | None = None
    """How much the tried model's answer differs: ‖a − b‖/‖b‖."""
    note: str = ""
    """Why a trial failed, or what it leaves open."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Where the time goes, and what to do about it."""

    model: str
    parameters: int
    shape: tuple[int, ...]
    device: str
    machine: str
    threads: int
    precision: str
    compiled: bool
    train: PassProfile | None
    inference: PassProfile
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]

    @property
    def main(self) -> PassProfile:
        """The training step where it was measured."""
        return self.inference if self.train is None else self.train

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return dict(json_value(vars(self)))

    def tables(self) -> list[Any]:
        """For ``rich.print``: times, layers, operators, what would help, notes."""
        main, passes = self.main, [p for p in (self.train, self.inference) if p is not None]
        rows = [
            ["time", *(_ms(p.seconds.median) for p in passes)],
            ["  quartiles", *(f"{_ms(p.seconds.low)} to {_ms(p.seconds.high)}" for p in passes)],
            ["images a second", *(f"{p.images_per_second:,.4g}" for p in passes)],
        ]
        for name, parts in GROUPS.items():
            lines = {name: parts, **{f"  {PARTS[part]}": (part,) for part in parts}}
            for label, some in lines.items():
                if label == name or (len(parts) > 1 and any(p.share(*some) for p in passes)):
                    shares = [(p.total, p.share(*some)) for p in passes]
                    rows.append([label, *(f"{_ms(whole * s)} {s:4.0%}" for whole, s in shares)])
        rows.append(["peak memory", *(f"{p.memory.peak / 2**20:,.1f} MiB" for p in passes)])
        if main.waits is not None:
            rows.append(["the host waited for the GPU", *(f"{p.waits} times" for p in passes)])
            rows.append(["the GPU was idle", *(f"{p.idle:.0%}" for p in passes)])
        rows.append(["the marks cost", *(f"{p.overhead:+.0%}" for p in passes)])
        title = (
            f"{self.model}, {self.parameters:,} parameters, {'×'.join(map(str, self.shape))}, "
            f"{self.precision}{', compiled' * self.compiled}, {self.device} ({self.machine})"
        )
        names = ["training step" if p.kind == "train" else "inference" for p in passes]
        found = [make_table(title, ["", *names], rows)]
        if main.layers:
            found.append(_layer_table(main))
        rows = [[name, f"{calls:,}", _ms(s)] for name, calls, s in main.operators[:8]]
        found.append(make_table(f"operators, {main.kind}", ("", "calls", "time"), rows))
        rows = []
        for s in self.suggestions:
            change = "" if s.change is None else f"the answer changes by {s.change:.1e}"
            why = "\n".join(filter(None, (f"{s.reason}.", s.do, change, s.note)))
            gains = ["–" if g is None else f"{g:.2f}×" for g in (s.predicted, s.measured)]
            rows.append([s.name, why.replace("[", "\\["), *gains])
        title = f"what would help the {main.kind} pass{'' if rows else ': nothing that is known'}"
        names = ["what", "why, and how", "at best", "measured"]
        found.append(make_table(title, names, rows, left=2))
        return [*found, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        return as_text(group(*self.tables()))

    def save(self, folder: str | Path) -> list[Path]:
        """Write bench.json and bench.png; the paths."""
        out, main = Path(folder), self.main
        bars = {
            p.kind: {name: p.group(name) for name in GROUPS}
            for p in (self.train, self.inference)
            if p is not None
        }
        for layer in sorted(main.layers, key=lambda p: -p.total):
            adjoint = sum(layer.seconds[part] for part in GROUPS["adjoint"])
            bars[layer_label(layer.name)] = {**layer.seconds, "adjoint": adjoint}
        title = f"{self.model}, batch {main.batch}, {self.precision}, {self.device}"
        return [
            write_json(out / "bench.json", self.to_dict()),
            save_bars(bars, main.steps, out / "bench.png", title),
        ]


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _layer_table(main: PassProfile) -> Any:
    rows = []
    for layer in main.layers:
        seconds, found = layer.seconds, layer.statistics
        adjoint = seconds["adjoint_map"] + seconds["adjoint_solver"]
        times = (seconds["map"], seconds["solver"], adjoint)
        steps = residual = "–"
        if found is not None:
            taken = found.histogram.nonzero()[:, 0].tolist()
            steps = "–".join(map(str, sorted({taken[0], taken[-1]})))
            residual = f"{float(found.residual[3]):.1e}"
        counts = (layer.evaluations, layer.graph_evaluations, layer.products)
        cells = [*(f"{1e3 * s:.3g}" for s in times), *map(str, counts), steps, residual]
        rows.append([layer_label(layer.name), f"{layer.total / main.total:.0%}", *cells])
    names = ("layer", "share", "map", "solver", "adjoint", "T", "graph", "Jᵀ", "steps", "residual")
    title = "layers: ms, evaluations (T, with a graph, Jᵀ), steps per sample"
    return make_table(title, names, rows)


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside: it would fall on whoever happens to run."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def seconds_of(run: Run, device: torch.device) -> float:
    """One run: by events in the stream on a GPU, by the wall clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream(device))
    run()
    end.record(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e-3


def peak_memory(run: Run, device: torch.device, held: int) -> Memory:
    """Of one pass; ``held`` is what is reported for a CPU, where no allocator can be asked."""
    if device.type != "cuda":
        return _profiled(run, device, held)[2]
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return Memory(peak, before, "CUDA's caching allocator")


def _profiled(
    run: Run, device: torch.device, held: int
) -> tuple[tuple[tuple[str, int, float], ...], int | None, Memory]:
    """By torch.profiler: operators (kernels of a GPU), waits for a GPU, peak of memory on a CPU."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes on stderr
    with quiet(), profile(activities=activities, profile_memory=not cuda, acc_events=True) as found:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    averages: Any = found.key_averages()
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = [
        (str(e.key), int(e.count), 1e-6 * float(getattr(e, name)))
        for e in averages
        if e.device_type.name == ("CUDA" if cuda else "CPU")
        and not getattr(e, "is_user_annotation", False)
    ]
    # Not cudaDeviceSynchronize, which is the profiler's and ours.
    named = [e for e in averages if e.key in ("cudaStreamSynchronize", "cudaEventSynchronize")]
    now = most = 0
    for event in sorted(found.events(), key=lambda e: float(e.time_range.end)):
        now += int(event.self_cpu_memory_usage)
        most = max(most, now)
    memory = Memory(most, held, "torch.profiler's record of allocations")
    waits = sum(e.count for e in named) if cuda else None
    return tuple(sorted(rows, key=lambda row: -row[2])), waits, memory


class _Workload:
    """One training step and one inference of a copy of a model on one batch: what is timed."""

    def __init__(self, model: nn.Module, x: Tensor, y: Any, settings: Mapping[str, Any]) -> None:
        """``settings``: loss, optimizer, precision, channels_last, compiled."""
        self.model: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model))
        self.x, self.y, self.dtype = x, y, PRECISIONS[settings["precision"]]
        if settings["channels_last"]:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
        # What is called: the model, or its compiled form.
        self.called: Any = torch.compile(self.model) if settings["compiled"] else self.model
        self.loss = settings["loss"] or nn.functional.cross_entropy
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # At a rate of 0 SGD does all of its work, and the weights stay where they are.
        make = settings["optimizer"] or functools.partial(
            torch.optim.SGD, lr=0.0, momentum=0.9, weight_decay=5e-4
        )
        self.optimizer: torch.optim.Optimizer | None = make(trained) if trained else None
        if y is None and settings["loss"] is None:
            out = self.answer()
            if not isinstance(out, Tensor) or out.ndim < 2 or not out.is_floating_point():
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"the model returned {got}, for which no labels can be made up: logits "
                    "[B, K, ...] are expected. Give y and loss (a function of output and y)."
                )
            draw = torch.Generator().manual_seed(0)
            shape = (out.shape[0], *out.shape[2:])
            self.y = torch.randint(0, out.shape[1], shape, generator=draw).to(out.device)

    def cast(self) -> Any:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.x.device.type, dtype=self.dtype)

    @contextmanager
    def mode(self, kind: str) -> Iterator[None]:
        """Train or eval mode; solves that miss their tolerance are counted, not warned of."""
        self.model.train(kind == "train")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            yield

    def answer(self) -> Any:
        """The output in eval mode, by the model that is not compiled."""
        with self.mode("inference"), torch.no_grad(), self.cast():
            return self.model(self.x)

    def run(self, kind: str, marks: Marks | None = None, *, eager: bool = True) -> None:
        """Once: forward, loss, backward and optimizer, or a forward pass without a graph."""
        model, to = self.model if eager else self.called, marks.to if marks else lambda *_: None
        to("", "forward")
        with torch.set_grad_enabled(kind == "train"), self.cast():
            out = model(self.x)
            if kind == "train":
                to("", "loss")
                loss = self.loss(out, self.y)
        if kind == "train":
            del out
            to("", "backward")
            if marks is not None:
                marks.in_backward = True
            if self.optimizer is not None:
                self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            to("", "optimizer")
            if self.optimizer is not None:
                self.optimizer.step()
        to("", "end")

    def held(self) -> int:
        """Bytes of weights, batch and optimizer."""
        state = [] if self.optimizer is None else list(self.optimizer.state.values())
        moments = [t for one in state for t in one.values() if isinstance(t, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), self.x, *moments]
        return sum(t.numel() * t.element_size() for t in tensors)


def _pass(
    work: _Workload, kind: str, repeats: int, budget: float, advance: Callable[..., None]
) -> PassProfile:
    """Time it with and without marks, in turn; then profile it and watch its solves."""
    device, compiled = work.x.device, work.called is not work.model

    def with_marks() -> tuple[float, dict[tuple[str, str], float], Marks]:
        marks = Marks(device)
        with marked(work.model, marks):
            seconds = seconds_of(lambda: work.run(kind, marks), device)
        return seconds, marks.seconds(), marks

    rounds: list[tuple[float, float, tuple[float, dict[tuple[str, str], float], Marks]]] = []
    with work.mode(kind):
        with quiet():
            for number in range(_WARM + repeats):
                if number == _WARM:
                    began, rounds = time.perf_counter(), []
                first = with_marks() if number % 2 else None
                eager = seconds_of(lambda: work.run(kind), device)
                as_it_is = eager
                if compiled:
                    as_it_is = seconds_of(lambda: work.run(kind, eager=False), device)
                rounds.append((as_it_is, eager, first or with_marks()))
                advance()
                if number >= _WARM + 2 and time.perf_counter() - began > budget:
                    break
        recorder = SolverRecorder(work.model)
        with observe(work.model) as seen:
            work.run(kind)
        recorder.add(seen)
        work.model.zero_grad(set_to_none=True)
        operators, waits, memory = _profiled(lambda: work.run(kind), device, work.held())
        if device.type == "cuda":
            memory = peak_memory(lambda: work.run(kind), device, work.held())
    # The pass of median length: its parts still add up.
    _, parts, marks = sorted((r[2] for r in rounds), key=lambda m: m[0])[len(rounds) // 2]
    solves, backward = recorder.compute(), recorder.backward()
    return PassProfile(
        kind=kind,
        batch=work.x.shape[0],
        seconds=Spread.of([r[0] for r in rounds]),
        eager=Spread.of([r[1] for r in rounds]),
        marked=Spread.of([r[2][0] for r in rounds]),
        overhead=statistics.median(m[0] / eager for _, eager, m in rounds) - 1.0,
        parts={part: sum(s for (_, p), s in parts.items() if p == part) for part in PARTS},
        layers=tuple(
            LayerProfile(
                name,
                {part: parts.get((name, part), 0.0) for part in _INNER},
                marks.counts[name, "evaluations"],
                marks.counts[name, "graph_evaluations"],
                marks.counts[name, "products"],
                solves.get(name),
                backward.get(name),
            )
            for name in solving_layers(work.model)
        ),
        operators=operators[:20],
        memory=memory,
        waits=waits,
        idle=max(1.0 - sum(s for *_, s in operators) / sum(parts.values()), 0.0)
        if device.type == "cuda"
        else 0.0,
    )


def profile_model(
    model: nn.Module,
    x: Tensor,
    y: Any = None,
    *,
    train: bool = True,
    repeats: int = 10,
    budget: float = 20.0,
    precision: str = "32-true",
    channels_last: bool = False,
    compile: bool = False,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    try_suggestions: bool = False,
    progress: bool = False,
) -> Profile:
    """Seconds of a training step and of an inference on the batch x, split into parts.

    The parts are: evaluations of the map; the rest of the solves; the adjoints (products with the
    transposed Jacobian, and the rest); everything else. They come from passes with marks around
    every map, solve and adjoint, run in turn with passes without any: ``overhead`` says what the
    marks cost. On a GPU marks are events in the stream, so that nothing waits for them.

    A copy of the model runs; the user's own keeps its weights and statistics. Of a compiled model
    (or ``compile=True``) the whole is timed compiled and the parts are those of the same model run
    eagerly: what a compiler has fused cannot be told apart.

    Args:
        model: on the device to measure on; x is moved there.
        x: a batch as the model takes it, [B, ...].
        y: targets; None: labels at random for logits [B, K, ...].
        train: measure the training step too.
        repeats: timed passes at most.
        budget: seconds after which no further timed pass begins; three are run anyway.
        precision: "32-true", "bf16-mixed" or "16-mixed" (autocast).
        channels_last: memory format of the weights and of x.
        compile: time the model as torch.compile makes it.
        loss: loss(output, y); cross-entropy if not given.
        optimizer: from parameters to an optimizer; if not given SGD with momentum and a rate of 0,
            which does all of its work and leaves the weights, and so the solver's steps, as they
            are.
        try_suggestions: measure each suggestion side by side, where it can be tried.
        progress: a bar on stderr.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (torch.nn.Module), got {type(model).__name__}.")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a batch, a tensor [B, ...], got {type(x).__name__}.")
    if x.ndim < 1 or x.shape[0] < 1:
        raise ValueError(f"x must be a batch [B, ...] with B ≥ 1, got shape {tuple(x.shape)}.")
    check_whole("repeats", repeats, 1)
    if not budget >= 0.0:
        raise ValueError(f"budget={budget!r}: expected seconds, a number of at least 0.")
    known = {name.split("-")[0]: name for name in PRECISIONS} | {n: n for n in PRECISIONS}
    if precision not in known:
        wrong = f": expected one of {', '.join(PRECISIONS)}."
        raise OptionError("profile_model", {"precision": precision}, wrong)
    plain: nn.Module = getattr(model, "_orig_mod", model)
    device = device_of(model)
    settings: dict[str, Any] = {
        "loss": loss,
        "optimizer": optimizer,
        "precision": known[precision],
        "channels_last": channels_last,
        "compiled": compile or plain is not model,
    }
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        x, y = x.to(device), y.to(device) if isinstance(y, Tensor) else y
        work = _Workload(model, x, y, settings)
        kinds = ["train", "inference"] if train and work.optimizer is not None else ["inference"]
        with progress_bar((repeats + _WARM) * len(kinds), "timing", progress) as advance:
            passes = {kind: _pass(work, kind, repeats, budget, advance) for kind in kinds}
        main = passes[kinds[0]]
        ideas = list(_suggest(work.model, main, settings, work.x))
        said = [one for one, _, _ in ideas]
        if try_suggestions:
            with progress_bar(len(ideas), "trying", progress) as advance:
                for number, (one, changed, other) in enumerate(ideas):
                    if other or changed is not work.model:
                        base = _Workload(work.model, x, work.y, settings)
                        said[number] = _tried(one, base, changed, {**settings, **other}, main)
                    advance()
    return Profile(
        model=model_name(plain),
        parameters=sum(p.numel() for p in model.parameters()),
        shape=tuple(x.shape),
        device=str(device),
        machine=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        threads=torch.get_num_threads(),
        precision=known[precision],
        compiled=settings["compiled"],
        train=passes.get("train"),
        inference=passes["inference"],
        suggestions=tuple(sorted(said, key=lambda s: -(s.measured or s.predicted or 1.0))),
        notes=tuple(_notes(work, main, wanted=train)),
    )


def _notes(work: _Workload, main: PassProfile, *, wanted: bool) -> Iterator[str]:
    if work.called is not work.model:
        faster = main.eager.median / main.seconds.median
        yield (
            "compiled: the whole is timed compiled, and the parts are those of the same model run "
            f"eagerly, which takes {faster:.2f} times as long; what was fused cannot be split"
        )
    if wanted and work.optimizer is None:
        yield "no parameter takes a gradient: only inference was measured"
    layers, outer = solving_layers(work.model), equilibrium_layers(work.model)
    hidden = [n for n in outer if not any(m == n or m.startswith(f"{n}.") for m in layers)]
    if hidden:
        names = ", ".join(map(layer_label, hidden))
        yield f"these layers have no adjoint of this library and count as rest: {names}"
    silent = [layer_label(layer.name) for layer in main.layers if layer.statistics is None]
    if silent:
        yield f"did not run in this pass: {', '.join(silent)}"
    if not outer:
        yield "the model has no equilibrium layer: all of its time is rest"


def _tolerant(layer: Any) -> bool:
    solver = layer.solver
    return not (solver.fixed_steps or isinstance(solver, SplittingSolver))


def _solver(layer: Any, **options: Any) -> bool:
    layer.solver = dataclasses.replace(layer.solver, **options)
    return True


def _other(layer: Any, kind: type[Solver], steps: int) -> bool:
    own, layer.solver = layer.solver, kind(max_steps=steps)
    return _solver(layer, rtol=own.rtol, atol=own.atol)


def _rtol(layer: Any) -> float:
    return float(layer.solver.relative_tolerance(torch.float32, device_of(layer).type))


def _looser_adjoint(layer: Any, _: SolverStatistics) -> bool:
    own = layer.adjoint
    if not (isinstance(own, Implicit) and isinstance(own.solver, LinearSolver)):
        return False
    solver = dataclasses.replace(own.solver, rtol=max(_rtol(layer), 1e-3))
    layer.adjoint = dataclasses.replace(own, solver=solver)
    return True


def _one_power_iteration(layer: nn.Module, _: SolverStatistics) -> bool:
    norms = [m for m in layer.modules() if isinstance(m, OperatorNorm) and m.steps > 1]
    for norm in norms:
        norm.steps = 1
    return bool(norms)


_ADVICE: tuple[tuple[str, str, Callable[[Any, SolverStatistics], bool], str, str], ...] = (
    (
        *("fixed steps", "solver"),
        lambda m, s: _tolerant(m) and _solver(m, rtol=0.0, atol=0.0, max_steps=s.max_steps),
        "is the solver's own work (tests, norms, algebra), not the map",
        "dataclasses.replace(layer.solver, rtol=0.0, atol=0.0, max_steps=...): no tests, no waits, "
        "compiles whole; or block=8 to test less often",
    ),
    (
        *("solver Anderson", "map solver"),
        lambda m, s: (
            _tolerant(m)
            and not isinstance(m.solver, Anderson)
            and _other(m, Anderson, m.solver.max_steps)
        ),
        "is in solves by other solvers than Anderson, which often takes fewer steps",
        "layer.solver = eq.Anderson(rtol=..., max_steps=...)",
    ),
    (
        *("looser tolerance", "map solver"),
        lambda m, s: _tolerant(m) and _solver(m, rtol=10.0 * _rtol(m)),
        "is in solves to a tolerance",
        "solver with 10 times its rtol; check the accuracy on your data",
    ),
    (
        *("compaction", "map solver"),
        lambda m, s: (
            _tolerant(m)
            and s.solves >= 8
            and s.mean_steps < 0.7 * s.max_steps
            and not m.solver.compact
            and _solver(m, compact=True)
        ),
        "is in solves whose samples are mostly done long before the slowest",
        "solver with compact=True: finished samples leave the batch",
    ),
    (
        *("forward-backward", "prepare"),
        lambda m, s: isinstance(m.solver, PeacemanRachford) and _other(m, ForwardBackward, 500),
        "prepares solves: the resolvent of Peaceman–Rachford is made anew while weights move",
        "layer.solver = eq.ForwardBackward(...): more steps, and nothing to factorize",
    ),
    (
        *("looser adjoint", "adjoint_map adjoint_solver"),
        _looser_adjoint,
        "is in backward solves: gradients cannot be better than the point they are taken at",
        "adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-3)), or eq.Phantom(...)",
    ),
    (
        *("fewer power iterations", "norm"),
        _one_power_iteration,
        "is in norm constraints",
        "NormBounded(bound=..., steps=1): the bound lags more while weights move fast; certify",
    ),
)
"""Name, parts, change of a layer with these statistics (False: not for it), reason, what to do."""


def _suggest(
    model: nn.Module, main: PassProfile, settings: Mapping[str, Any], x: Tensor
) -> Iterator[tuple[Suggestion, nn.Module, dict[str, Any]]]:
    """What to do about parts above 30%, with a changed copy and settings to try it with.

    At best such a part takes no time at all.
    """
    seen = {p.name: p.statistics for p in main.layers if p.statistics is not None}
    for name, parts, change, reason, do in _ADVICE:
        share, changed = main.share(*parts.split()), copy.deepcopy(model)
        layers = [(changed.get_submodule(n), s) for n, s in seen.items()]
        if share > 0.3 and sum(change(layer, s) for layer, s in layers):
            reason = f"{share:.0%} of the pass {reason}"
            yield Suggestion(name, reason, do, 1 / max(1 - share, 1e-3)), changed, {}

    cuda, solving = x.device.type == "cuda", solving_layers(model).values()
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    last = all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    whole = all(m.solver.fixed_steps and not isinstance(m.adjoint, Implicit) for m in solving)
    plain = cuda and settings["precision"] == "32-true" and torch.cuda.is_bf16_supported()
    launched = f"the GPU is idle for {main.idle:.0%} of the pass: kernels wait for their launch"
    for wanted, name, reason, do, other in (
        (main.idle > 0.3, "larger batch", launched, "a larger --batch-size, or --cuda-graphs", {}),
        (
            *(plain, "bf16", "float32 on a GPU whose tensor cores take bf16"),
            *("--precision bf16-mixed (torch.autocast)", {"precision": "bf16-mixed"}),
        ),
        (
            *(x.ndim == 4 and not last, "channels last", "convolutions run on NCHW maps"),
            *("model.to(memory_format=torch.channels_last), x too", {"channels_last": True}),
        ),
        (
            *(cuda and whole and not settings["compiled"], "torch.compile"),
            "every solve has fixed steps and an adjoint that compiles: the network fuses whole",
            *("torch.compile(model), or --compile", {"compiled": True}),
        ),
    ):
        if wanted:
            yield Suggestion(name, reason, do, None), model, other


def _tried(
    said: Suggestion, base: _Workload, model: nn.Module, other: dict[str, Any], main: PassProfile
) -> Suggestion:
    """Both run in turn; a change that fails says why and costs nothing else."""
    try:
        work = _Workload(model, base.x, base.y, other)
        change = _relative_change(work.answer(), base.answer())
        times: dict[_Workload, list[float]] = {base: [], work: []}
        with base.mode(main.kind), work.mode(main.kind), quiet():
            for number in range(_WARM + max(main.seconds.count, 3)):
                for one in (base, work) if number % 2 else (work, base):
                    run = functools.partial(one.run, main.kind, eager=False)
                    times[one].append(seconds_of(run, one.x.device))
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        note = f"could not be tried: {str(error).splitlines()[0][:200]}"
        return dataclasses.replace(said, note=note)
    before, after = (statistics.median(column[_WARM:]) for column in times.values())
    return dataclasses.replace(said, measured=before / after, change=change)


def _relative_change(a: Any, b: Any) -> float:
    """‖a − b‖/‖b‖ over all leaves."""
    ours, theirs = (
        torch.cat([t.detach().double().flatten() for t in flatten_state(v)[0]]) for v in (a, b)
    )
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))
