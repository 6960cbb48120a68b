"""``equilibria theory ntk``: the tangent kernel of a network, or of several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from equilibria.cli import Device, Root, fail, make_folder, output

from .common import Data, Json, Model, Split, Weights, answer, images_of, networks, whole_numbers


def ntk(
    weights: Weights = None,
    model: Model = None,
    data: Data = None,
    root: Root = None,
    split: Split = "train",
    samples: Annotated[int, typer.Option(min=2, help="How many images, drawn by --seed.")] = 128,
    outputs: Annotated[
        str,
        typer.Option(help="all, trace (the mean over outputs), sum, or indices such as 3 or 0,1."),
    ] = "all",
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameters", help="Only parameters whose name fits, such as 'head.*'."),
    ] = None,
    layers: Annotated[bool, typer.Option(help="Also the share of each layer.")] = True,
    method: Annotated[str, typer.Option(help="auto, vmap or autograd.")] = "auto",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Images to differentiate at once.")
    ] = None,
    implicit: Annotated[
        float | None,
        typer.Option(
            metavar="RTOL",
            help="Solve every layer to this and differentiate the equilibrium itself.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the images, and of --model.")] = 0,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write ntk.json, ntk.safetensors and pictures into this folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """The neural tangent kernel: spectrum, layers, fit to the labels, drift from the first."""
    from equilibria_papers import theory
    from equilibria_papers.theory.progress import progress_bar

    chosen = _outputs(outputs)
    if (not weights) == (model is None):
        raise fail("give the weights of trained networks, or one --model by name.")
    if out is not None:
        make_folder(out)
    found, dataset = networks(weights or [], model, data, root, split, device, seed)
    if implicit is not None:
        found = {name: _implicit(each, implicit) for name, each in found.items()}
    x, y = images_of(dataset, samples, seed, device, "--samples")
    with progress_bar("kernel", not as_json) as tell:
        study = theory.study_kernels(
            found,
            x,
            y,
            progress=tell,
            about={"data": dataset.name, "split": dataset.split_name, "seed": seed},
            outputs=chosen,
            layers=layers,
            batch_size=batch_size,
            method=method,
            parameters=parameters or None,
        )
    answer(study.to_dict(), as_json, lambda: _show(study), [] if out is None else study.save(out))


def _outputs(text: str) -> Any:
    if text in ("all", "trace", "sum"):
        return text
    return whole_numbers("--outputs", text, "all, trace, sum, or indices such as 3 or 0,1")


def _implicit(model: Any, rtol: float) -> Any:
    from equilibria.adjoints import Implicit
    from equilibria.evaluation import replaced
    from equilibria.solvers import Auto

    return replaced(model, solver=Auto(rtol=rtol), adjoint=Implicit())


def _show(study: Any) -> None:
    table = Table("network", "λ_max", "λ_min", "condition", "effective rank", "alignment", "drift")
    for row in study.rows():
        numbers = (row[key] for key in ("largest", "smallest", "condition", "effective_rank"))
        more = (row["alignment"], row["drift"])
        table.add_row(row["network"], *(f"{v:.4g}" for v in (*numbers, *more)))
    output().print(table)
    name, last = list(study.kernels.items())[-1]
    if last.parts:
        shares = Table(
            *("layer", "of the trace", "of the parameters"),
            title=f"layers of {name}" + (", the last" if len(study.kernels) > 1 else ""),
        )
        total = sum(last.sizes.values())
        for layer, share in sorted(last.shares().items(), key=lambda pair: -pair[1]):
            shares.add_row(layer, f"{share:.2%}", f"{last.sizes[layer] / total:.2%}")
        output().print(shares)
