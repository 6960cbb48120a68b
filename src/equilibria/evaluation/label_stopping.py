"""evaluate(stop="label"): what it saves to stop each sample once its label is proven."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.certify import LabelStopping
from equilibria.nn.observing import observe

from .layer_solvers import SolverRecorder, SolverStatistics
from .metrics import ClassificationMeter, ClassificationMetrics, SegmentationMetrics
from .model_on_data import evaluating
from .rich_output import make_table, percent


@dataclass(frozen=True, eq=False)
class Level:
    """The samples that stopped after ``steps`` steps of every layer."""

    steps: int
    samples: int
    accuracy: float | None
    """Share of right labels among them."""
    agreement: float | None
    """Share of them with the label of the full solve."""


@dataclass(frozen=True, eq=False)
class LabelStopped:
    """What stopping by the label gives, beside the full solve of every sample.

    A sample stops when its label is proven to be that of the converged network
    (``certify.LabelStopping``); the others get the full solve.
    """

    full: str
    """The solver of the full solve: "as it is", or the one that was asked for."""
    metrics: ClassificationMetrics
    full_accuracy: float
    agreement: float
    """Share of samples with the label of the full solve."""
    proven: float
    """Share of samples that stopped early."""
    levels: tuple[Level, ...]
    mean_steps: float
    """Steps a layer and sample, those before a full solve included."""
    full_steps: float
    """The same of the full solve, the mean over its layers."""
    seconds: float
    """Of all samples, certificates included."""
    full_seconds: float
    samples_steps: Tensor
    """[N]: the steps after which the sample stopped; 0: it got the full solve."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "accuracy": self.metrics.accuracy}

    def table(self) -> Any:
        """Steps, samples, accuracy, time: each level, all samples, and the full solve."""
        names = ("stopped", "steps", "samples", "accuracy", "same as full", "seconds")
        total = len(self.samples_steps)
        rows = []
        for part in self.levels:
            if not part.samples:
                continue
            name = "proven" if part.steps else "full solve"
            shown = [percent(part.accuracy), percent(part.agreement)]
            rows.append([name, str(part.steps or "all"), f"{part.samples:,}", *shown, ""])
        ours = [percent(self.metrics.accuracy), percent(self.agreement), f"{self.seconds:.2f}"]
        rows.append(["all samples", f"{self.mean_steps:.3g}", f"{total:,}", *ours])
        other = [percent(self.full_accuracy), "", f"{self.full_seconds:.2f}"]
        rows.append(["without stopping", f"{self.full_steps:.3g}", f"{total:,}", *other])
        return make_table(f'stop="label" (full solve: {self.full.split("(")[0]})', names, rows)


class StoppedSubject:
    """The labels of a model whose samples stop early; ``full`` solves the rest."""

    def __init__(self, model: nn.Module, classes: int, full: Callable[[Tensor], Tensor]) -> None:
        self.model, self.full = model, full
        self.stopping = LabelStopping(getattr(model, "_orig_mod", model))  # of torch.compile
        self.meter, self.recorder = ClassificationMeter(classes), SolverRecorder(model)
        self.seconds = 0.0
        self.kept: list[tuple[Tensor, ...]] = []
        self.notes: dict[str, None] = {}

    def run(self, x: Tensor, y: Tensor, others: Tensor) -> None:
        """One batch; ``others`` are the labels of the full solve, for the comparison alone."""
        began = clock(x)
        found = self.stopping.certify(x)
        rest = (~found.proven).nonzero()[:, 0]
        logits = found.logits
        if len(rest):
            with evaluating(self.model), observe(self.model) as seen:
                logits[rest] = self.full(x[rest]).to(logits)
            self.recorder.add(seen)
        self.seconds += clock(x) - began
        self.meter.update(logits, y)
        label = logits.argmax(1)
        row = (found.proven, found.steps, label == y, label == others)
        self.kept.append(tuple(t.cpu() for t in row))
        self.notes |= dict.fromkeys(found.notes)

    def compute(
        self,
        full: str,
        metrics: ClassificationMetrics | SegmentationMetrics,
        statistics: Mapping[str, SolverStatistics],
        seconds: float,
    ) -> LabelStopped:
        """What was found, beside what the full solve gave."""
        proven, steps, right, same = (torch.cat(part) for part in zip(*self.kept, strict=True))
        stopped, share = torch.where(proven, steps, 0), float(proven.double().mean())
        levels = []
        for count in (*self.stopping.steps, 0):
            here = stopped == count
            samples = int(here.sum())
            sure, agree = (
                float(t[here].double().mean()) if samples else None for t in (right, same)
            )
            levels.append(Level(count, samples, sure, agree))
        return LabelStopped(
            full=full,
            metrics=self.meter.compute(),
            full_accuracy=metrics.accuracy,
            agreement=float(same.double().mean()),
            proven=share,
            levels=tuple(levels),
            mean_steps=float(steps.double().mean())
            + (1.0 - share) * _mean_steps(self.recorder.compute()),
            full_steps=_mean_steps(statistics),
            seconds=self.seconds,
            full_seconds=seconds,
            samples_steps=stopped,
            notes=tuple(self.notes),
        )


def _mean_steps(statistics: Mapping[str, SolverStatistics]) -> float:
    """The mean over layers."""
    each = [part.mean_steps for part in statistics.values()]
    return sum(each) / max(len(each), 1)


def clock(x: Tensor) -> float:
    """Seconds, once the device of x is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
