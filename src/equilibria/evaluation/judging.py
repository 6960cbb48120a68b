"""evaluate(model, dataset): accuracy, calibration, solver statistics and certificates in one go."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equilibria.data.image_data import ImageData
from equilibria.engine.solver import Solver
from equilibria.models.network import count_parameters
from equilibria.nn.observing import equilibrium_layers, observe

from .certifying import certify_model
from .checks import check_whole
from .metrics import ClassificationMeter, ClassificationMetrics, check_finite
from .report import Converged, Metrics, Report
from .running import (
    batches,
    check_logits,
    check_pair,
    device_of,
    evaluating,
    model_input,
    model_name,
    on_device,
    progress_bar,
    steps_in,
)
from .segmentation import SegmentationMeter
from .solver_statistics import SolverRecorder, SolverStatistics
from .solving import with_solver

__all__ = ["evaluate", "judge"]

OnNonFinite = Literal["raise", "report"]


class _Watch:
    """One model under test: its metrics and its solves."""

    def __init__(self, model: nn.Module, dataset: ImageData, name: str) -> None:
        classes = len(dataset.classes)
        self.model, self.dataset, self.name = model, dataset, name
        self.meter: ClassificationMeter | SegmentationMeter = (
            ClassificationMeter(classes)
            if dataset.task == "classification"
            else SegmentationMeter(classes, dataset.ignore_index)
        )
        self.recorder = SolverRecorder(model)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        with observe(self.model) as seen:
            try:
                logits = self.model(x)
            except Exception as error:
                error.add_note(
                    f"while {self.name} ran on a batch of {self.dataset.name}, shape "
                    f"{tuple(x.shape)}, {x.dtype}, on {x.device}."
                )
                raise
        logits = check_logits(logits, self.dataset, len(self.dataset.classes), self.name)
        self.meter.update(logits, y)
        self.recorder.add(seen)
        return logits.argmax(1)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: ImageData,
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    certify: int = 64,
    progress: bool = True,
    solver: Solver | None = None,
    nonfinite: OnNonFinite = "raise",
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
            ``eq.Auto(rtol=1e-5)``: what the network gives at its equilibria. See
            ``Report.converged``.
        nonfinite: what to do with samples whose logits are NaN or infinite: "raise" names them,
            "report" counts them as wrong and lists them.
    """
    if nonfinite not in ("raise", "report"):
        raise ValueError(f"nonfinite={nonfinite!r}: expected 'raise' or 'report'.")
    check_whole("certify", certify, 0)
    total = steps_in(dataset, batch_size)
    model = on_device(model, device)
    notes = check_pair(model, dataset)
    at, name = device_of(model), model_name(model)
    watches = [_Watch(model, dataset, name)]
    if solver is not None and equilibrium_layers(model):
        watches.append(_Watch(with_solver(model, solver), dataset, f"{name} with {solver!r}"))
    elif solver is not None:
        notes.append(f"{name} has no equilibrium layers: solver={solver!r} changes nothing")

    began = time.perf_counter()
    agree = torch.zeros((), dtype=torch.float64, device=at)
    guesses = 0
    with progress_bar(total, f"evaluating {name}", progress) as advance:
        for images, y in batches(dataset, batch_size, at):
            x = model_input(model, dataset, images)
            found = []
            for watch in watches:
                with evaluating(watch.model):
                    found.append(watch.run(x, y))
            agree += (found[0] == found[-1]).double().sum()
            guesses += found[0].numel()
            advance()
    results: list[tuple[Metrics, dict[str, SolverStatistics]]] = [
        (watch.meter.compute(), watch.recorder.compute()) for watch in watches
    ]
    seconds = time.perf_counter() - began
    for watch, (metrics, _) in zip(watches, results, strict=True):
        if nonfinite == "raise":
            check_finite(metrics.nonfinite, len(dataset), watch.name, optional=True)
    certificate: Any = None
    if certify > 0 and equilibrium_layers(model):
        first = dataset.images[slice(0, min(certify, len(dataset)))].to(at)
        certificate = certify_model(model, model_input(model, dataset, first))
    metrics, statistics = results[0]
    converged = None
    if len(results) == 2:
        converged = Converged(
            solver=repr(solver),
            metrics=results[1][0],
            statistics=results[1][1],
            agreement=float(agree) / guesses,
        )
    return Report(
        model=name,
        dataset=dataset.name,
        split=dataset.split_name,
        task=dataset.task,
        classes=dataset.classes,
        parameters=count_parameters(model),
        device=str(at),
        seconds=seconds,
        metrics=metrics,
        statistics=statistics,
        converged=converged,
        certificate=certificate,
        notes=tuple(notes),
    )


@torch.no_grad()
def judge(
    model: nn.Module,
    dataset: ImageData,
    *,
    batch_size: int,
    progress: bool,
    text: str,
    nonfinite: OnNonFinite = "raise",
) -> ClassificationMetrics:
    """The metrics alone, of a classifier; the model must be on its device already."""
    check_pair(model, dataset, task="classification")
    at, name = device_of(model), model_name(model)
    meter = ClassificationMeter(len(dataset.classes))
    total = steps_in(dataset, batch_size)
    with evaluating(model), progress_bar(total, text, progress) as advance:
        for images, y in batches(dataset, batch_size, at):
            logits = check_logits(
                model(model_input(model, dataset, images)), dataset, len(dataset.classes), name
            )
            meter.update(logits, y)
            advance()
    found = meter.compute()
    if nonfinite == "raise":
        check_finite(found.nonfinite, len(dataset), name)
    return found
