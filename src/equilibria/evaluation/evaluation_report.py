"""evaluate(model, dataset): accuracy, calibration, solver statistics, certificates in a Report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from equilibria.certify import CompositeCertificate, Guaranteed
from equilibria.data.image_data import ImageData
from equilibria.engine.files import json_value, write_json, write_text
from equilibria.engine.solver import SolverOptions
from equilibria.models.network import count_parameters
from equilibria.nn.observing import equilibrium_layers, observe

from . import figures
from .label_stopping import LabelStopped, StoppedSubject, clock
from .layer_solvers import SolverRecorder, SolverStatistics, solver_table, with_solver
from .metrics import (
    ClassificationMeter,
    ClassificationMetrics,
    SegmentationMeter,
    SegmentationMetrics,
    check_finite,
)
from .model_certificate import certificate_dict, certify_dataset
from .model_on_data import (
    batches,
    check_logits,
    check_pair,
    check_whole,
    device_of,
    evaluating,
    model_input,
    model_name,
    on_device,
    steps_in,
)
from .rich_output import as_text, group, make_table, number, percent, progress_bar

Metrics: TypeAlias = ClassificationMetrics | SegmentationMetrics
Statistics: TypeAlias = Mapping[str, SolverStatistics]
_SHARES = ("accuracy", "pixel accuracy", "mIoU", "top-")


@dataclass(frozen=True, eq=False)
class Converged:
    """The same network with every layer solved by ``solver``."""

    solver: str
    metrics: Metrics
    statistics: Statistics
    agreement: float
    """Share of predictions (of pixels, for segmentation) that are those of the model as it is."""

    def to_dict(self) -> dict[str, Any]:
        return _with_layers(self)


def _with_layers(found: Converged | Report) -> dict[str, Any]:
    """Its fields; the statistics are called "layers"."""
    named = {"statistics": "layers"}
    return {named.get(key, key): value for key, value in vars(found).items()}


@dataclass(frozen=True, eq=False)
class Report:
    """The result of ``evaluate``."""

    model: str
    dataset: str
    split: str
    task: str
    classes: tuple[str, ...]
    parameters: int
    device: str
    seconds: float
    """Of all passes: also those at the equilibria and of mirror images, if asked for."""
    metrics: Metrics
    statistics: Statistics
    """Of each equilibrium layer, by name; empty for a network without any."""
    converged: Converged | None
    """With the solver that was asked for, or None."""
    certificate: CompositeCertificate | Mapping[str, Guaranteed] | None
    """On the first samples, or None where none was asked for or there are no layers."""
    flip: Metrics | None = None
    """With test-time flip (the mean of the probabilities of each image and its mirror image), or
    None where it was not asked for. ``metrics`` and ``accuracy`` are always without."""
    stopped: LabelStopped | None = None
    """With ``stop="label"``: steps and time saved by stopping samples whose label is proven."""
    notes: tuple[str, ...] = ()

    @property
    def accuracy(self) -> float:
        return self.metrics.accuracy

    @property
    def _title(self) -> str:
        return f"{self.model} on {self.dataset} ({self.split})"

    def table(self) -> Any:
        """For ``rich.print``: the metrics, and beneath them the solvers and the certificates."""
        # Those of a file that onnxruntime runs are not known.
        size = f"{self.parameters:,} parameters; " if self.parameters else ""
        parts = [
            self._metrics_table(),
            f"{self.metrics.samples:,} samples, {len(self.classes)} classes; "
            f"{size}{self.seconds:.1f} s on {self.device}",
        ]
        if self.statistics:
            others = {} if self.converged is None else self.converged.statistics
            parts += ["", solver_table(self.statistics, others)]
        if self.stopped is not None:
            parts += ["", self.stopped.table()]
        if self.certificate is not None:
            parts += ["", _certificate_table(self.certificate)]
        return group(*parts, *(f"note: {note}" for note in self.notes))

    def __str__(self) -> str:
        return as_text(self.table())

    def _metrics_table(self) -> Any:
        """The headline numbers; in columns of their own those at the equilibria and with flip."""
        columns = {"as it is": self.metrics}
        if self.converged is not None:
            columns["at equilibrium"] = self.converged.metrics
        if self.flip is not None:
            columns["with flip"] = self.flip
        rows = []
        for name in self.metrics.headline:
            values = [part.headline[name] for part in columns.values()]
            share = name.startswith(_SHARES)
            rows.append([name, *(percent(v) if share else f"{v:.4f}" for v in values)])
        if self.converged is not None:
            rows.append(["same prediction", "", percent(self.converged.agreement)])
        bad = [len(part.nonfinite) for part in columns.values()]
        if any(bad):
            rows.append(["not finite", *(f"{count:,} samples" for count in bad)])
        names = list(columns) if len(columns) > 1 else ["value"]
        return make_table(self._title, ["", *names], rows, boxed=True, min_width=len(self._title))

    def to_dict(self) -> dict[str, Any]:
        """All numbers in types that JSON has; what is not finite is None."""
        found, proven = _with_layers(self), self.certificate
        del found["certificate"]
        found["parameters"] = self.parameters or None  # those that onnxruntime runs are not known
        found["certificates"] = None if proven is None else certificate_dict(proven)
        return dict(json_value(found))

    def save(self, folder: Path | str) -> list[Path]:
        """Write report.json and the pictures into ``folder`` (made if missing); what was written.

        reliability.png (classification), confusion.png, per_class.png, solver.png (where there are
        equilibrium layers), certificate.txt (where there is one). The pictures are of the plain
        metrics; those with flip are in report.json.
        """
        out, metrics, certificate = Path(folder), self.metrics, self.certificate
        written = [write_json(out / "report.json", self.to_dict())]

        def draw(save: Callable[..., Path], name: str, *shown: Any) -> None:
            written.append(save(*shown, out / name, self._title))

        values, what = metrics.per_class, "accuracy"
        if isinstance(metrics, SegmentationMetrics):
            values, what = metrics.iou, "IoU"
        else:
            draw(figures.save_reliability, "reliability.png", metrics.reliability)
        draw(figures.save_confusion, "confusion.png", metrics.confusion, self.classes)
        draw(figures.save_per_class, "per_class.png", values, self.classes, what)
        if self.statistics:
            sets = {"as it is": self.statistics}
            if self.converged is not None:
                sets["at equilibrium"] = self.converged.statistics
            draw(figures.save_steps, "solver.png", sets)
        if certificate is not None:
            shown = str(certificate)
            if not isinstance(certificate, CompositeCertificate):
                shown = "\n".join(f"{name}: {part}" for name, part in certificate.items())
            written.append(write_text(out / "certificate.txt", shown + "\n"))
        return written


def _certificate_table(certificate: CompositeCertificate | Mapping[str, Guaranteed]) -> Any:
    """What is proven of every layer: guarantee, share unique, worst bound on the error."""
    found = certificate_dict(certificate)
    samples = max((part["samples"] for part in found.values()), default=0)
    names = ("layer", "guarantee", "proven", "unique", "ρ ≤", "‖z − z*‖ ≤", "Lipschitz")
    rows = []
    for name, part in found.items():
        # How far the row is a proof; where there is no guarantee, of nothing.
        proven = "yes" if part["rigorous"] else "partly"
        proven = "nothing" if part["kind"] == "none" else proven
        shares = [percent(part["unique"]), number(part["contraction"])]
        bounds = [number(part["error_bound"], 3), number(part["lipschitz"])]
        rows.append([name, part["kind"], proven, *shares, *bounds])
    return make_table(f"certificates ({samples} samples)", names, rows, left=3)


def _log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the classes of logits [B, K] or [B, K, H, W], in float64, a new tensor.

    NaN where a logit is not finite: −∞ alone would vanish in a mean of probabilities.
    """
    return logits.double().log_softmax(1).masked_fill_(~logits.isfinite(), float("nan"))


def _mean_log_probabilities(one: Tensor, other: Tensor) -> Tensor:
    """log((eᵃ + eᵇ)/2) = max(a, b) + log(1 + (e^−|a − b| − 1)/2), element by element.

    Exact where a = b, so that a network which does not tell left from right keeps its metrics.
    """
    gap = (one - other).abs_().neg_().expm1_().mul_(0.5).log1p_()
    return one.maximum(other).add_(gap)


class _Subject:
    """One model under test: its metrics and its solves; apart from them the metrics with flip."""

    def __init__(
        self, model: nn.Module, dataset: ImageData, name: str, *, flip: bool = False
    ) -> None:
        self.model, self.dataset, self.name = model, dataset, name
        self.meter, self.flipped = self._meter(), self._meter() if flip else None
        self.recorder = SolverRecorder(model)
        self.seconds = 0.0
        """Of the plain passes of ``run``."""

    def _meter(self) -> ClassificationMeter | SegmentationMeter:
        classes = len(self.dataset.classes)
        if self.dataset.task == "classification":
            return ClassificationMeter(classes)
        return SegmentationMeter(classes, self.dataset.ignore_index)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        """Judge one batch; the predictions."""
        with evaluating(self.model):
            began = clock(x)
            with observe(self.model) as seen:
                logits = self.logits(x)
            self.seconds += clock(x) - began
            self.meter.update(logits, y)
            self.recorder.add(seen)
            guess = logits.argmax(1)
            if self.flipped is not None:
                # A new tensor: a second pass may write over the logits of the first (CUDA graphs).
                own = _log_probabilities(logits)
                other = self.logits(x.flip(-1))
                other = other.flip(-1) if other.ndim == 4 else other
                self.flipped.update(_mean_log_probabilities(own, _log_probabilities(other)), y)
        return guess

    def compute(self) -> tuple[Metrics, Statistics]:
        """Of the plain passes; here the host waits."""
        return self.meter.compute(), self.recorder.compute()

    def logits(self, x: Tensor) -> Tensor:
        try:
            logits = self.model(x)
        except Exception as error:
            error.add_note(
                f"while {self.name} ran on a batch of {self.dataset.name}, shape "
                f"{tuple(x.shape)}, {x.dtype}, on {x.device}."
            )
            raise
        return check_logits(logits, self.dataset, self.name)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: ImageData,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    certify: int = 64,
    progress: bool = True,
    solver: SolverOptions | None = None,
    flip: bool = False,
    nonfinite: Literal["raise", "report"] = "raise",
    stop: Literal["label"] | None = None,
) -> Report:
    """How good ``model`` is on ``dataset``: a Report to print, save or read.

    Classification: accuracy, top-5, NLL, Brier, ECE with 15 bins, per class, confusion.
    Segmentation: mIoU, pixel accuracy, per class. For both: the statistics of every solve, and
    certificates of every equilibrium layer on the first ``certify`` samples.

    Args:
        model: takes normalized images [B, C, H, W], gives logits. It is left as it is: its mode is
            restored, and on another device or with another solver a copy runs.
        dataset: from ``data.load``.
        batch_size: images at a time.
        device: where to run; None: where the model is.
        certify: how many samples to certify (0: none).
        progress: whether to show a bar.
        solver: beside the model as it is, judge a copy in which this solves every layer, such as
            ``eq.Auto(rtol=1e-5)``: what the network gives at its equilibria (``Report.converged``).
        flip: beside the plain metrics, those of p = (softmax f(x) + softmax f(x̃))/2, x̃ the image
            mirrored left to right (``Report.flip``); for segmentation f(x̃) is mirrored back first.
            NLL and Brier, convex in p, are at most the means of theirs.
        nonfinite: what to do with samples whose logits are NaN or infinite: "raise" names them,
            "report" counts them as wrong and lists them.
        stop: "label": one more pass, in which a sample stops stepping when its label is proven to
            be that of the converged network (``certify.LabelStopping``), and the others get the
            full solve: by ``solver`` if given, else by the model as it is (``Report.stopped``).
    """
    _check_choices(dataset, flip, nonfinite, stop)
    check_whole("certify", certify, 0)
    model = on_device(model, device)
    notes = check_pair(model, dataset)
    name, layers = model_name(model), bool(equilibrium_layers(model))
    first = last = _Subject(model, dataset, name, flip=flip)
    if solver is not None and layers:
        last = _Subject(with_solver(model, solver), dataset, f"{name} with {solver!r}")
    elif solver is not None:
        notes.append(f"{name} has no equilibrium layers: solver={solver!r} changes nothing")
    stopping = None
    if stop is not None:
        stopping = StoppedSubject(last.model, len(dataset.classes), last.logits)

    began = time.perf_counter()
    agreement = _run(first, last, stopping, batch_size, progress)
    metrics, statistics = full = first.compute()
    converged = stopped = certificate = None
    if last is not first:
        full = last.compute()
        converged = Converged(repr(solver), *full, agreement)
    if stopping is not None:
        solved_by = "as it is" if last is first else repr(solver)
        stopped = stopping.compute(solved_by, *full, last.seconds)
        notes += stopped.notes
    flipped = None if first.flipped is None else first.flipped.compute()
    seconds = time.perf_counter() - began

    judged = {name: metrics, last.name: full[0], f"{name} on mirror images": flipped}
    judged[f"{name} with stop='label'"] = None if stopped is None else stopped.metrics
    for what, found in judged.items():
        if nonfinite == "raise" and found is not None:
            check_finite(found.nonfinite, found.samples, what)
    if certify > 0 and layers:
        certificate = certify_dataset(model, dataset, certify, progress=progress)
    return Report(
        model=name,
        dataset=dataset.name,
        split=dataset.split_name,
        task=dataset.task,
        classes=dataset.classes,
        parameters=count_parameters(model),
        device=str(device_of(model)),
        seconds=seconds,
        metrics=metrics,
        statistics=statistics,
        converged=converged,
        certificate=certificate,
        flip=flipped,
        stopped=stopped,
        notes=tuple(notes),
    )


def _run(
    first: _Subject,
    last: _Subject,
    stopping: StoppedSubject | None,
    batch_size: int,
    progress: bool,
) -> float:
    """All of them over the data; the share of guesses in which the first two agree."""
    model, dataset, guesses = first.model, first.dataset, 0
    agree = torch.zeros((), dtype=torch.float64, device=device_of(model))
    total, text = steps_in(dataset, batch_size), f"evaluating {first.name}"
    with progress_bar(total, text, progress) as advance:
        for images, y in batches(dataset, batch_size, device_of(model)):
            x = model_input(model, dataset, images)
            guess = other = first.run(x, y)
            if last is not first:
                other = last.run(x, y)
            agree += (guess == other).double().sum()
            guesses += guess.numel()
            if stopping is not None:
                stopping.run(x, y, other)
            advance()
    return float(agree) / guesses


def _check_choices(dataset: ImageData, flip: object, nonfinite: object, stop: object) -> None:
    if stop not in (None, "label"):
        raise ValueError(f"stop={stop!r}: expected 'label' or None.")
    if stop is not None and dataset.task != "classification":
        raise ValueError(
            f"stop={stop!r} is for classification; {dataset.name} is for segmentation."
        )
    if nonfinite not in ("raise", "report"):
        raise ValueError(f"nonfinite={nonfinite!r}: expected 'raise' or 'report'.")
    if not isinstance(flip, bool):
        raise TypeError(f"flip={flip!r}: expected True or False.")
