"""``equilibria evaluate``: how good a trained network is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import fail, make_folder, output, print_json, say
from .flags import numbers
from .loading import (
    Batch,
    Converged,
    Data,
    Device,
    Json,
    Limit,
    Root,
    Split,
    Weights,
    prepared,
    solver_of,
)


def evaluate(
    weights: Weights,
    data: Data = None,
    root: Root = None,
    split: Split = "test",
    batch_size: Batch = 256,
    device: Device = None,
    converged: Converged = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Let every layer take this many steps, where it takes a fixed number."
        ),
    ] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Also, reported apart, averaged with the mirror images.")
    ] = False,
    stop: Annotated[
        Literal["label"] | None,
        typer.Option(help="label: also with images that stop once it is proven."),
    ] = None,
    certify: Annotated[
        int, typer.Option(min=0, help="Certify every layer on this many images; 0 for none.")
    ] = 64,
    corruptions: Annotated[
        bool, typer.Option("--corruptions", help="Also under 19 corruptions at 5 severities.")
    ] = False,
    severities: Annotated[
        str | None, typer.Option(help="Severities of the corruptions, 1 to 5; all if not given.")
    ] = None,
    limit: Limit = None,
    out: Annotated[
        Path | None, typer.Option(help="Write report.json and pictures into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Accuracy, calibration, solver statistics and certificates on a data set."""
    from equilibria import evaluation
    from equilibria.nn import set_steps

    # What is wrong with the flags is said before minutes are spent.
    levels = [1, 2, 3, 4, 5]
    if severities is not None:
        if not corruptions:
            raise fail("--severities goes with --corruptions.")
        known, wanted = lambda s: 1 <= min(s) <= max(s) <= 5, "numbers from 1 to 5, such as 1,3,5"
        levels = numbers("--severities", severities, int, known, wanted)
    solver = solver_of(converged)
    onnx = weights.suffix.lower() == ".onnx"
    if onnx and (converged, steps, stop) != (None, None, None):
        raise fail("--converged, --steps and --stop need layers, and an ONNX file has none.")
    if out is not None:
        make_folder(out)
    model, dataset = prepared(weights, data, root, split, device, limit, onnx=True)
    if corruptions and dataset.task != "classification":
        raise fail(f"--corruptions is for classification; {dataset.name} is for {dataset.task}.")
    if corruptions:
        evaluation.corrupt(dataset.images[:1], "contrast", 1)  # refuses images of other sizes
    if onnx:
        certify = 0
        if not as_json:
            say("run by onnxruntime: no residuals and no certificates")
    if steps is not None:
        try:
            set_steps(model, steps)
        except ValueError as error:
            raise fail(f"--steps {steps}: {error}") from None
    how: dict[str, Any] = {"batch_size": batch_size, "progress": not as_json}
    asked: dict[str, Any] = {"certify": certify, "solver": solver, "flip": flip, "stop": stop}
    report = evaluation.evaluate(model, dataset, **asked, **how)
    found: dict[str, Any] = report.to_dict()
    written = [] if out is None else report.save(out)
    if not as_json:
        output().print(report.table())
    if corruptions:
        study = evaluation.corruption_study(model, dataset, severities=levels, **how)
        found["corruptions"] = study.to_dict()
        written += [] if out is None else study.save(out)
        if not as_json:
            output().print(study.table())
    if as_json:
        print_json(found)
    elif written:
        output().print("wrote " + ", ".join(str(path) for path in written), soft_wrap=True)
