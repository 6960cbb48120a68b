"""``equilibria export``: a trained network as a .pt2 or .onnx file, checked as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import check_file, fail, print_json, print_table
from .loading import Data, Json, Limit, Root, Split, Weights, device_of, load, prepared


def export(
    weights: Weights,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    kind: Annotated[
        Literal["pt2", "onnx"] | None,
        typer.Option("--format", help="By the ending of --out if not given."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Steps of every solve, in place of tolerances."),
    ] = None,
    early_stop: Annotated[
        bool, typer.Option("--early-stop", help="Keep tolerances: stop when all samples pass.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Weights in eight bits (ONNX), and what it costs.")
    ] = False,
    data: Data = None,
    root: Root = None,
    split: Split = "test",
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Write a network as a program for other runtimes: torch.export (.pt2) or ONNX.

    The file is compared with PyTorch on a batch of 1 and of 7 images before it is written. With
    --data (and always with --int8) accuracies before and after are measured.
    """
    from equilibria import evaluation, models

    ending = out.suffix.lstrip(".").lower()
    if ending not in ("pt2", "onnx") or kind not in (None, ending):
        asked = f"--out {out}" + ("" if kind is None else f" --format {kind}")
        raise fail(f"{asked}: expected a name that ends with .pt2 or .onnx, and its format.")
    measured = data is not None or int8
    if measured and ending == "pt2":
        raise fail("--int8 and --data are for .onnx files, which the command can run again.")
    if not measured and (root, split, limit) != (None, "test", None):
        raise fail("--data-root, --split and --limit go with --data or --int8.")
    check_file(out)
    dataset: Any = None
    if measured:
        model, dataset = prepared(weights, data, root, split, "cpu", limit)
    else:
        model = load(weights, device_of("cpu"))
    made = models.export(model, out, steps=steps, early_stop=early_stop, int8=int8)
    found: dict[str, Any] = made.to_dict()
    if dataset is not None:
        how: Any = {"certify": 0, "progress": not as_json}
        both = (model, models.load_onnx(out))
        judged = [evaluation.evaluate(each, dataset, **how).accuracy for each in both]
        found["accuracy"] = {"torch": judged[0], "exported": judged[1], "images": len(dataset)}
    if as_json:
        print_json(found)
        return
    solves = f"{made.steps} step{'s' * (made.steps > 1)}"
    solves = f"at most {solves}, early stop" if made.early_stop else solves
    rows = [
        ("file", f"{out}, {made.bytes:,} bytes"),
        ("solves", solves if made.steps else "none"),
    ]
    for count, gap in made.difference.items():
        rows.append((f"difference to the same in PyTorch, batch of {count}", f"{gap:.2g}"))
    if dataset is not None:
        images = f"on {len(dataset)} images of {dataset.name}"
        before, later = judged
        rows += [
            (f"accuracy in PyTorch, {images}", f"{before:.2%}"),
            ("accuracy of the file", f"{later:.2%} ({later - before:+.2%})"),
        ]
    print_table("exported", "", rows=rows)
