"""profile_model: where the time of a model goes, and what to do about it.

Whole passes are timed by torch.utils.benchmark, operators and memory come from torch.profiler. The
parts (layers, rest, backward) come from passes with marks around equilibrium layers and backward.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from equilibria.adjoints import Implicit
from equilibria.engine.files import json_value, write_json
from equilibria.engine.options import OptionError
from equilibria.engine.result import ConvergenceWarning
from equilibria.nn.observing import equilibrium_layers, observe

from .layer_solvers import SolverRecorder, SolverStatistics, solver_table
from .model_on_data import device_of, model_name
from .rich_output import as_text, group, make_table

__all__ = ["PassProfile", "Profile", "profile_model"]

PARTS = ("layers", "rest", "backward")
PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""As in training: the dtype of autocast, or None for the model's own."""


@dataclass(frozen=True, eq=False)
class PassProfile:
    """A training step or an inference: how long as it runs, and where the time goes."""

    kind: str
    """"train" or "inference"."""
    seconds: float
    """Median of passes as they run, without marks."""
    images_per_second: float
    parts: Mapping[str, float]
    """Seconds by part of the marked pass of median length: ``layers``, the forward pass of the
    equilibrium layers; ``rest``, the other layers, loss and optimizer; ``backward``."""
    operators: tuple[tuple[str, int, float], ...]
    """By torch.profiler: (name, calls, seconds of its own), the most expensive first."""
    peak_memory: int
    """Bytes beyond what was held before the pass (weights, batch, optimizer)."""
    idle: float
    """Share of the pass in which the GPU ran no kernel; 0 on a CPU."""
    layers: Mapping[str, SolverStatistics]
    """By equilibrium layer: steps per sample as a histogram, residuals, result codes."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def share(self, *parts: str) -> float:
        return sum(self.parts[part] for part in parts) / self.total


@dataclass(frozen=True, eq=False)
class Profile:
    """Where the time goes, and what to do about it."""

    model: str
    parameters: int
    shape: tuple[int, ...]
    device: str
    precision: str
    train: PassProfile | None
    inference: PassProfile
    suggestions: tuple[str, ...]
    """What to do, why, and how many times as fast it is at best: if the part took no time."""
    notes: tuple[str, ...]

    @property
    def main(self) -> PassProfile:
        """The training step where it was measured."""
        return self.inference if self.train is None else self.train

    def to_dict(self) -> dict[str, Any]:
        return dict(json_value(vars(self)))

    def save(self, folder: str | Path) -> list[Path]:
        """Write bench.json; its path."""
        return [write_json(Path(folder) / "bench.json", self.to_dict())]

    def __str__(self) -> str:
        return as_text(group(*self.tables()))

    def tables(self) -> list[Any]:
        """For ``rich.print``: times, solves, operators, what would help, notes."""
        main, passes = self.main, [p for p in (self.train, self.inference) if p is not None]
        rows = [
            ["time", *(_ms(p.seconds) for p in passes)],
            ["images per second", *(f"{p.images_per_second:,.4g}" for p in passes)],
            *([q, *(f"{_ms(p.parts[q])} {p.share(q):4.0%}" for p in passes)] for q in PARTS),
            ["the parts, with marks", *(_ms(p.total) for p in passes)],
            ["peak memory", *(f"{p.peak_memory / 2**20:,.1f} MiB" for p in passes)],
        ]
        if main.idle:
            rows.append(["the GPU was idle", *(f"{p.idle:.0%}" for p in passes)])
        shape = "×".join(map(str, self.shape))
        title = f"{self.model}, {self.parameters:,} parameters, {shape}, {self.precision}, "
        names = ["training step" if p.kind == "train" else "inference" for p in passes]
        found = [make_table(title + self.device, ["", *names], rows), solver_table(main.layers)]
        rows = [[name, f"{calls:,}", _ms(s)] for name, calls, s in main.operators[:8]]
        found.append(make_table(f"operators, {main.kind}", ("", "calls", "time"), rows))
        helps = [f"what would help: {one}" for one in self.suggestions]
        return [*found, *(helps or ["nothing is known that would help"]), *self.notes]


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


def _marked(
    model: nn.Module, run: Callable[[Callable[[str], None]], None], device: torch.device
) -> dict[str, float]:
    """Seconds by part of one run, which marks its own backward pass.

    A mark is a clock reading on a CPU, an event in the stream of a GPU, which is not waited for
    until the end. All time between two marks belongs to one part, so that the parts make the whole.
    """
    cuda = device.type == "cuda"
    marks: list[tuple[Any, str]] = []

    def mark(part: str, *_: Any) -> None:
        """From now on the time is this part's; a hook's arguments are left aside."""
        now: Any = time.perf_counter()
        if cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(device))
        marks.append((now, part))

    with ExitStack() as hooks:
        for layer in equilibrium_layers(model).values():
            hooks.enter_context(layer.register_forward_pre_hook(partial(mark, "layers")))
            hooks.enter_context(layer.register_forward_hook(partial(mark, "rest")))
        mark("rest")
        run(mark)
        mark("rest")
    found = dict.fromkeys(PARTS, 0.0)
    if cuda:
        torch.cuda.synchronize(device)
    for (start, part), (end, _) in itertools.pairwise(marks):
        found[part] += start.elapsed_time(end) * 1e-3 if cuda else end - start
    return found


def _profiled(
    run: Callable[[], None], device: torch.device
) -> tuple[list[tuple[str, int, float]], int]:
    """By torch.profiler: operators (kernels of a GPU); and the peak of memory."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes on stderr
    with profile(activities=activities, profile_memory=not cuda, acc_events=True) as found:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    place, name = ("CUDA", "device") if cuda else ("CPU", "cpu")
    rows = [
        (str(e.key), int(e.count), 1e-6 * float(getattr(e, f"self_{name}_time_total")))
        for e in found.key_averages()
        if e.device_type.name == place and not getattr(e, "is_user_annotation", False)
    ]
    rows.sort(key=lambda row: -row[2])
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return rows, torch.cuda.max_memory_allocated(device) - before
    events = sorted(found.events(), key=lambda e: float(e.time_range.end))
    return rows, max(itertools.accumulate(int(e.self_cpu_memory_usage) for e in events))


def profile_model(
    model: nn.Module,
    x: Tensor,
    y: Any = None,
    *,
    train: bool = True,
    budget: float = 2.0,
    precision: str = "32-true",
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Profile:
    """Seconds of a training step and of an inference on the batch x, split into parts.

    The parts are: equilibrium layers in the forward pass; the rest of the forward pass, loss and
    optimizer; backward. A copy of the model runs; the user's own keeps its weights and statistics.
    The optimizer is SGD with momentum and a rate of 0, so that every pass solves the same problems.
    A model from torch.compile is timed compiled, and its parts are those of the same model run
    eagerly: what was fused cannot be told apart.

    Args:
        model: on the device to measure on; x is moved there.
        x: a batch as the model takes it, [B, ...].
        y: targets of the loss.
        train: measure the training step too.
        budget: seconds for which passes of each kind are timed.
        precision: "32-true", "bf16-mixed" or "16-mixed" (autocast).
        loss: loss(output, y); if not given, cross-entropy, and without y the mean of squares.
    """
    _check_asked(model, x, budget, precision)
    copied: Any = copy.deepcopy(getattr(model, "_orig_mod", model))
    compiled, device = hasattr(model, "_orig_mod"), device_of(copied)
    called = torch.compile(copied) if compiled else copied
    x, y = x.to(device), y.to(device) if isinstance(y, Tensor) else y
    trained = [p for p in copied.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained or [torch.zeros(1)], lr=0.0, momentum=0.9)
    criterion = loss or (_squares if y is None else nn.functional.cross_entropy)
    dtype = PRECISIONS[precision]

    def run(network: Any, kind: str, mark: Callable[[str], None] = lambda part: None) -> None:
        """Forward, loss, backward and optimizer, or a forward pass without a graph."""
        cast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
        with torch.set_grad_enabled(kind == "train"), cast:
            out = network(x)
            if kind == "inference":
                return
            value = criterion(out, y)
        del out
        optimizer.zero_grad(set_to_none=True)
        mark("backward")
        value.backward()
        mark("rest")
        optimizer.step()

    passes = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for kind in ("train", "inference") if train and trained else ("inference",):
            copied.train(kind == "train")
            with warnings.catch_warnings():
                # Solves that miss their tolerance are counted, not warned of.
                warnings.simplefilter("ignore", ConvergenceWarning)
                whole, eagerly = partial(run, called, kind), partial(run, copied, kind)
                passes[kind] = _pass(kind, copied, whole, eagerly, x, budget)
    main = passes.get("train", passes["inference"])
    notes = []
    if compiled:
        notes.append("compiled: the parts are those of the same model run eagerly")
    if train and not trained:
        notes.append("no parameter takes a gradient: only inference was measured")
    if not main.layers:
        notes.append("the model has no equilibrium layer: all of its time is rest")
    return Profile(
        model=model_name(copied),
        parameters=sum(p.numel() for p in copied.parameters()),
        shape=tuple(x.shape),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        precision=precision,
        train=passes.get("train"),
        inference=passes["inference"],
        suggestions=tuple(_suggestions(copied, main, x, precision)),
        notes=tuple(notes),
    )


def _check_asked(model: object, x: object, budget: float, precision: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model (torch.nn.Module), got {type(model).__name__}.")
    shape = tuple(getattr(x, "shape", ()))
    if not shape or shape[0] < 1:
        got = f"{type(x).__name__} of shape {shape}"
        raise ValueError(f"x must be a batch, a tensor [B, ...] with B ≥ 1, got {got}.")
    if not budget >= 0.0:
        raise ValueError(f"budget={budget!r}: expected seconds, a number of at least 0.")
    if precision not in PRECISIONS:
        wrong = f": expected one of {', '.join(PRECISIONS)}."
        raise OptionError("profile_model", {"precision": precision}, wrong)


def _squares(out: Any, _: Any) -> Any:
    return sum(leaf.float().square().mean() for leaf in pytree.tree_leaves(out))


def _pass(
    kind: str,
    model: nn.Module,
    run: Callable[[], None],
    eagerly: Callable[..., None],
    x: Tensor,
    budget: float,
) -> PassProfile:
    """Watch its solves; time it, and then with marks; profile it."""
    recorder = SolverRecorder(model)
    with observe(model) as seen:
        eagerly()
    recorder.add(seen)
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    seconds = timer.blocked_autorange(min_run_time=budget).median
    count = min(max(int(budget / seconds), 3), 25)
    marked = [_marked(model, eagerly, x.device) for _ in range(count)]
    # The pass of median length: its parts still add up.
    parts = sorted(marked, key=lambda one: sum(one.values()))[count // 2]
    # Else the profiler sees memory freed that it did not count.
    model.zero_grad(set_to_none=True)
    gc.collect()
    operators, memory = _profiled(eagerly, x.device)
    busy = sum(s for *_, s in operators) / sum(parts.values())
    return PassProfile(
        kind=kind,
        seconds=seconds,
        images_per_second=x.shape[0] / seconds,
        parts=parts,
        operators=tuple(operators[:20]),
        peak_memory=memory,
        idle=max(1.0 - busy, 0.0) if x.is_cuda else 0.0,
        layers=recorder.compute(),
    )


_ADVICE = {
    "layers": (
        "fewer evaluations",
        "is in solves to a tolerance",
        "eq.Anderson(...) where another solver runs, 10 times its rtol, compact=True where few "
        "samples take long, or fixed steps (rtol=0.0, atol=0.0, max_steps=...); check the accuracy "
        "on your data",
    ),
    "backward": (
        "looser adjoint",
        "is in the backward pass, by implicit gradients",
        "adjoint=eq.Implicit(solver=...) with 10 times its rtol, or eq.Phantom(...); check the "
        "accuracy on your data",
    ),
}
"""Of a part: name, reason, what to do."""


def _suggestions(model: nn.Module, main: PassProfile, x: Tensor, precision: str) -> Iterator[str]:
    """What to do about parts above 30%, and what the device offers and is not used."""
    implicit = any(isinstance(getattr(m, "adjoint", None), Implicit) for m in model.modules())
    fixed = all(layer.fixed_steps for layer in main.layers.values())
    for part, (name, reason, do) in _ADVICE.items():
        share = main.share(part)
        if share > 0.3 and (implicit if part == "backward" else not fixed):
            gain = 1 / max(1 - share, 1e-3)
            yield f"{name}: {share:.0%} of the pass {reason} (at best {gain:.2f}×). {do}"
    if main.idle > 0.3:
        waits = f"the GPU is idle for {main.idle:.0%} of the pass: kernels wait for their launch"
        yield f"larger batch: {waits}. --batch-size, --cuda-graphs{' or --compile' * fixed}"
    if x.is_cuda and precision == "32-true":
        yield "bf16: float32 on a GPU whose tensor cores take bf16. --precision bf16-mixed"
