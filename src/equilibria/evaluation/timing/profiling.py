"""profile_model: run a model's own training step and inference, and say where the time goes."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.evaluation.checks import check_whole
from equilibria.evaluation.running import device_of, model_name, progress_bar
from equilibria.evaluation.solver_statistics import SolverRecorder, SolverStatistics, layer_label
from equilibria.nn.observing import Observed, equilibrium_layers, observe

from .instrument import EVALUATIONS, GRAPHS, PRODUCTS, instrumented, solving_layers
from .measuring import Spread, cuda_waits, peak_memory, quiet, seconds_of
from .report import GROUPS, LayerProfile, PassProfile, Profile
from .suggesting import suggest
from .timeline import PARTS, Timeline
from .trying import try_all
from .workload import Loss, MakeOptimizer, Workload, check_precision, plain_model

__all__ = ["profile_model"]

_WARM = 2
_INNER = (*GROUPS["map"], *GROUPS["solver"], *GROUPS["adjoint"])


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
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
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
        repeats: rounds at most; each runs a pass with marks and one without.
        budget: seconds after which no further round of a pass begins; three are run anyway.
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
    precision = check_precision(precision)
    compiled = compile or plain_model(model) is not model
    device = device_of(model)
    settings: dict[str, Any] = {
        "loss": loss,
        "optimizer": optimizer,
        "precision": precision,
        "channels_last": channels_last,
        "compiled": compiled,
    }
    random = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(random, enabled=True):
        x, y = x.to(device), y.to(device) if isinstance(y, Tensor) else y
        work = Workload.of(model, x, y, **settings)
        trained = train and work.optimizer is not None
        total = (repeats + _WARM) * (2 if trained else 1)
        with progress_bar(total, "timing", progress) as advance:
            stepped = _pass(work, "train", repeats, budget, advance) if trained else None
            inferred = _pass(work, "inference", repeats, budget, advance)
        main = inferred if stepped is None else stepped
        ideas = suggest(work, main)
        if try_suggestions:
            ideas = try_all(model, x, work.y, settings, ideas, main.kind, repeats, progress)
    return Profile(
        model=model_name(plain_model(model)),
        parameters=sum(p.numel() for p in model.parameters()),
        shape=tuple(x.shape),
        device=str(device),
        machine=_machine(device),
        threads=torch.get_num_threads(),
        precision=precision,
        compiled=compiled,
        train=stepped,
        inference=inferred,
        suggestions=tuple(idea.said for idea in ideas),
        notes=tuple(_notes(work, main, trained=trained, wanted=train, compiled=compiled)),
    )


def _pass(
    work: Workload, kind: str, repeats: int, budget: float, advance: Callable[..., None]
) -> PassProfile:
    """Time and split in turn; then count and weigh, each in a run of its own."""
    run = work.step if kind == "train" else work.infer
    with work.mode(train=kind == "train"):
        for _ in range(_WARM):
            _round(work, run)
            advance()
        rounds: list[_Round] = []
        began = time.perf_counter()
        with quiet():
            for number in range(repeats):
                rounds.append(_round(work, run, marked_first=number % 2 == 1))
                advance()
                if number >= 2 and time.perf_counter() - began > budget:
                    break
        statistics, backward = _observed(work, run)
        held = sum(t.numel() * t.element_size() for t in _held(work))
        memory = peak_memory(run, work.device, held)
        waits = cuda_waits(run, work.device)
    eager = [r.eager for r in rounds]
    marked = [r.marked for r in rounds]
    seconds = [rounds[i].line.seconds() for i in _middle(marked)]
    keys = {key for one in seconds for key in one}
    mean = {key: sum(one.get(key, 0.0) for one in seconds) / len(seconds) for key in keys}
    ratios = [m / e for m, e in zip(marked, eager, strict=True)]
    return PassProfile(
        kind=kind,
        batch=work.batch,
        seconds=Spread.of([r.seconds for r in rounds]),
        eager=Spread.of(eager),
        marked=Spread.of(marked),
        overhead=Spread.of(ratios).median - 1.0,
        parts={part: sum(t for (_, p), t in mean.items() if p == part) for part in PARTS},
        layers=tuple(
            _layer(name, mean, rounds[-1].line, statistics.get(name), backward.get(name))
            for name in solving_layers(work.model)
        ),
        memory=memory,
        waits=waits,
    )


@dataclass(frozen=True)
class _Round:
    """Seconds of a pass as it runs, run eagerly, and run eagerly with marks."""

    seconds: float
    eager: float
    marked: float
    line: Timeline


def _round(work: Workload, run: Callable[..., Any], *, marked_first: bool = False) -> _Round:
    line = Timeline(work.device)

    def with_marks() -> float:
        with instrumented(work.model, line):
            return seconds_of(lambda: run(line), work.device)

    marked = with_marks() if marked_first else 0.0
    eager = seconds_of(run, work.device)
    marked = marked or with_marks()
    seconds = eager
    if work.called is not work.model:
        seconds = seconds_of(lambda: run(eager=False), work.device)
    return _Round(seconds, eager, marked, line)


def _middle(totals: list[float]) -> list[int]:
    """The passes between the quartiles: their mean is robust, and its parts still add up."""
    order = sorted(range(len(totals)), key=totals.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _layer(
    name: str,
    mean: dict[tuple[str, str], float],
    line: Timeline,
    statistics: SolverStatistics | None,
    backward: Tensor | None,
) -> LayerProfile:
    return LayerProfile(
        name=name,
        seconds={part: mean.get((name, part), 0.0) for part in _INNER},
        evaluations=line.counts[name, EVALUATIONS],
        graph_evaluations=line.counts[name, GRAPHS],
        products=line.counts[name, PRODUCTS],
        statistics=statistics,
        backward_steps=backward,
    )


def _observed(
    work: Workload, run: Callable[..., Any]
) -> tuple[dict[str, SolverStatistics], dict[str, Tensor]]:
    """What the solvers did in one pass, forward and backward, by layer."""
    recorder = SolverRecorder(work.model)
    with observe(work.model) as seen:
        run()
    backward = {
        name: torch.bincount(torch.cat(steps))
        for name, steps in _backward_steps(seen, work.model).items()
    }
    recorder.add(seen)
    return recorder.compute(), backward


def _backward_steps(seen: Observed, model: nn.Module) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    layers: dict[str, Any] = equilibrium_layers(model)
    for name, solutions in seen.solutions.items():
        for solution in solutions:
            parts = getattr(solution, "parts", ()) if not _joint(layers[name]) else ()
            prefix = f"{name}." if name else ""
            named = {f"{prefix}branches.{i}": part for i, part in enumerate(parts)}
            for inner, one in (named or {name: solution}).items():
                steps = one.stats.backward.steps
                if steps is not None:
                    found.setdefault(inner, []).append(steps.long().flatten().cpu())
    return found


def _joint(layer: Any) -> bool:
    return bool(getattr(layer, "joint", False))


def _held(work: Workload) -> list[Tensor]:
    state = [] if work.optimizer is None else list(work.optimizer.state.values())
    moments = [t for one in state for t in one.values() if isinstance(t, Tensor)]
    return [*work.model.parameters(), *work.model.buffers(), work.x, *moments]


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _notes(
    work: Workload, main: PassProfile, *, trained: bool, wanted: bool, compiled: bool
) -> list[str]:
    notes = []
    if compiled:
        faster = main.eager.median / main.seconds.median
        notes.append(
            "compiled: the whole is timed compiled, and the parts are those of the same model run "
            f"eagerly, which takes {faster:.2f} times as long; what was fused cannot be split"
        )
    if wanted and not trained:
        notes.append("no parameter takes a gradient: only inference was measured")
    if main.overhead > 0.15:
        notes.append(
            f"marks cost {main.overhead:.0%} of the pass, which is made of short operations: the "
            "shares of map and solver are rough"
        )
    layers = solving_layers(work.model)
    outer = equilibrium_layers(work.model)
    hidden = [n for n in outer if not any(m.startswith(f"{n}." if n else "") for m in layers)]
    hidden = [n for n in hidden if n not in layers]
    if hidden:
        names = ", ".join(map(layer_label, hidden))
        notes.append(f"these layers have no adjoint of this library and count as rest: {names}")
    silent = [layer.name for layer in main.layers if layer.statistics is None]
    if silent:
        notes.append(f"did not run in this pass: {', '.join(map(layer_label, silent))}")
    if not outer:
        notes.append("the model has no equilibrium layer: all of its time is rest")
    return notes
