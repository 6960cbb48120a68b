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
from .flipping import log_probabilities, mean_log_probabilities, mirrored
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


def _meter(dataset: ImageData) -> ClassificationMeter | SegmentationMeter:
    classes = len(dataset.classes)
    if dataset.task == "classification":
        return ClassificationMeter(classes)
    return SegmentationMeter(classes, dataset.ignore_index)


class _Watch:
    """One model under test: its metrics and its solves; apart from them the metrics with flip."""

    def __init__(
        self, model: nn.Module, dataset: ImageData, name: str, *, flip: bool = False
    ) -> None:
        self.model, self.dataset, self.name = model, dataset, name
        self.meter = _meter(dataset)
        self.recorder = SolverRecorder(model)
        self.flipped = _meter(dataset) if flip else None

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        with observe(self.model) as seen:
            logits = self._logits(x)
        self.meter.update(logits, y)
        self.recorder.add(seen)
        guess = logits.argmax(1)
        if self.flipped is not None:
            # A new tensor: a second pass may write over the logits of the first (CUDA graphs).
            own = log_probabilities(logits)
            other = self._logits(mirrored(x))
            if other.ndim == 4:
                other = mirrored(other)
            self.flipped.update(mean_log_probabilities(own, log_probabilities(other)), y)
        return guess

    def _logits(self, x: Tensor) -> Tensor:
        try:
            logits = self.model(x)
        except Exception as error:
            error.add_note(
                f"while {self.name} ran on a batch of {self.dataset.name}, shape "
                f"{tuple(x.shape)}, {x.dtype}, on {x.device}."
            )
            raise
        return check_logits(logits, self.dataset, len(self.dataset.classes), self.name)


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
    flip: bool = False,
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
        flip: beside the plain metrics, which stay as they are, also those of the mean of the
            softmax probabilities of each image and its mirror image: one more pass of the model as
            it is. Statistics and certificates are of the plain pass. See ``Report.flip``.
        nonfinite: what to do with samples whose logits are NaN or infinite: "raise" names them,
            "report" counts them as wrong and lists them.
    """
    if nonfinite not in ("raise", "report"):
        raise ValueError(f"nonfinite={nonfinite!r}: expected 'raise' or 'report'.")
    if not isinstance(flip, bool):
        raise TypeError(f"flip={flip!r}: expected True or False.")
    check_whole("certify", certify, 0)
    total = steps_in(dataset, batch_size)
    model = on_device(model, device)
    notes = check_pair(model, dataset)
    at, name = device_of(model), model_name(model)
    watches = [_Watch(model, dataset, name, flip=flip)]
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
    flipped = None if watches[0].flipped is None else watches[0].flipped.compute()
    seconds = time.perf_counter() - began
    for watch, (metrics, _) in zip(watches, results, strict=True):
        if nonfinite == "raise":
            check_finite(metrics.nonfinite, len(dataset), watch.name, optional=True)
    if flipped is not None and nonfinite == "raise":
        check_finite(flipped.nonfinite, len(dataset), f"{name} on mirror images", optional=True)
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
        flip=flipped,
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
