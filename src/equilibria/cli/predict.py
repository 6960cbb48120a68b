"""``equilibria predict``: image files in, labels with confidence out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from equilibria.engine import write_json

from .console import check_file, fail, print_json, print_table, say
from .loading import Batch, Converged, Device, Images, Json, Weights, device_of, load, solver_of


def predict(
    weights: Weights,
    images: Images,
    top: Annotated[int, typer.Option(min=1, help="How many labels an image.")] = 1,
    batch_size: Batch = 64,
    device: Device = None,
    converged: Converged = None,
    runtime: Annotated[
        Literal["torch", "onnx"] | None,
        typer.Option(help="onnx for an exported file; by the file's name if not given."),
    ] = None,
    on_corrupt: Annotated[
        Literal["raise", "skip"],
        typer.Option(help="What to do with a file that is no readable image."),
    ] = "raise",
    radius: Annotated[
        bool, typer.Option("--radius", help="Also the proven radius of the label (ℓ2, pixels 0–1).")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the answers to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Classify images with a trained network."""
    from equilibria import evaluation
    from equilibria.data import CorruptImageError

    onnx = weights.suffix.lower() == ".onnx"
    if runtime not in (None, "onnx" if onnx else "torch"):
        files = {"onnx": "an exported .onnx file", "torch": "a model.safetensors"}
        raise fail(f"--runtime {runtime}: expected {files[runtime]}, got {weights}.")
    if onnx and (radius or converged is not None):
        raise fail("--radius and --converged need the layers of a network; an ONNX file has none.")
    if out is not None:
        check_file(out)
    model = load(weights, device_of(device), onnx=True)
    if onnx and not as_json:
        say("run by onnxruntime: no residuals and no certificates")
    try:
        answers = evaluation.predict_files(
            model,
            images,
            top=top,
            batch_size=batch_size,
            skip_corrupt=on_corrupt == "skip",
            solver=solver_of(converged),
            certify=radius,
            progress=not as_json,
        )
    except CorruptImageError as error:
        raise fail(str(error), "--on-corrupt skip goes on without such files.") from error
    found = [answer.to_dict() for answer in answers]
    if out is not None:
        write_json(out, found)
    if as_json:
        print_json(found)
        return
    rows = []
    for answer in answers:
        state = "–" if answer.steps is None else f"{answer.steps} steps"
        state += "" if answer.converged in (None, True) else ", not converged"
        ends = [str(answer.file)], [state, *([f"{answer.radius:.4g}"] if radius else [])]
        for label, confidence in answer.labels:
            rows.append([*ends[0], label, f"{confidence:.1%}", *ends[1]])
            ends = [""], [""] * len(ends[1])  # of the first label alone
    print_table("file", "label", "confidence", "solver", *["radius"] * radius, rows=rows)
