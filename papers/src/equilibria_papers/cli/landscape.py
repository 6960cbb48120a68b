"""``equilibria theory landscape``: the loss around trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from equilibria.cli import Batch, Device, Root, make_folder, output, stop, write_json

from .common import Data, Json, Model, Split, answer, images_of, narrow_table, networks, numbers_of


def landscape(
    weights: Annotated[
        list[Path] | None, typer.Argument(help="Run folders or model.safetensors, side by side.")
    ] = None,
    model: Model = None,
    data: Data = None,
    root: Root = None,
    split: Split = "train",
    images: Annotated[int, typer.Option(min=1, help="How many, drawn by --seed.")] = 1024,
    points: Annotated[int, typer.Option(min=3, help="Of the grid in each direction; odd.")] = 51,
    radius: Annotated[float, typer.Option(help="The grid goes from −RADIUS to RADIUS.")] = 1.0,
    repeats: Annotated[
        str, typer.Option(metavar="K,K", help="Also twins that repeat the layer's map K times.")
    ] = "",
    rtol: Annotated[
        float | None, typer.Option(help="Solve by Anderson to this; 1e-2 is enough for a picture.")
    ] = None,
    max_steps: Annotated[
        int, typer.Option("--max-steps", min=1, help="Of the solver that --rtol asks for.")
    ] = 30,
    batch_size: Batch = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of the directions and the images.")] = 0,
    log: Annotated[bool, typer.Option("--log/--linear", help="Spacing of the levels.")] = True,
    top: Annotated[
        float | None, typer.Option(help="The highest level that is drawn; the largest loss if not.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace grids of other settings in the folder.")
    ] = False,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Write grids, landscape.json and pictures into this folder.")
    ] = Path("runs/landscape"),
    as_json: Json = False,
) -> None:
    """Loss and accuracy around the weights, along filter-normalized directions (Figures 4.4, 4.5).

    Every row of the grid is kept as soon as it is measured: after an interruption the same command
    goes on where it was.
    """
    from equilibria.solvers import Anderson
    from equilibria_papers.theory import landscapes as module
    from equilibria_papers.theory.pictures import save_picture

    twins = numbers_of("--repeats", repeats, "6,11,18", whole=True)
    grid = module.Grid(points=points, radius=radius)
    solver = None if rtol is None else Anderson(rtol=rtol, max_steps=max_steps)
    make_folder(out)
    found, dataset = networks(weights or [], model, data, root, split, device, seed)
    pair = images_of(dataset, images, seed, device)
    surfaces = []
    for name, network, is_twin in _with_twins(found, twins):
        file = out / f"{name.replace('/', '-').replace(' ', '-')}.landscape.safetensors"
        try:
            surface = module.measure_landscape(
                network,
                pair,
                grid=grid,
                name=name,
                seed=seed,
                # A twin's steps are counted: it has no tolerance to meet.
                solver=None if is_twin else solver,
                batch_size=batch_size,
                file=file,
                overwrite=overwrite,
                progress=not as_json,
            )
        except KeyboardInterrupt:
            raise stop(
                f"interrupted: the rows measured so far are kept in {file}; the same command "
                "goes on from there"
            ) from None
        surfaces.append(surface)
    written = save_picture(module.contour_figure(surfaces, log=log, top=top), out / "contours")
    record = [{**s.summary(), "about": dict(s.about)} for s in surfaces]
    written.append(write_json(out / "landscape.json", record))
    answer(record, as_json, lambda: output().print(_table(record)), written)


def _with_twins(found: dict[str, Any], repeats: list[int]) -> list[tuple[str, Any, bool]]:
    """(name, network, whether it is a twin) of every network, each before its twins."""
    from equilibria_papers.theory.landscapes import repeated

    made: list[tuple[str, Any, bool]] = []
    for name, network in found.items():
        made.append((name, network, False))
        made += [(f"{name} repeat-{k}", repeated(network, k), True) for k in repeats]
    return made


def _table(record: list[dict[str, Any]]) -> Table:
    columns = ("loss", "accuracy", "highest", "within 1", "holes", "converged")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    rows = [
        (
            *(row["name"], f"{row['center_loss']:.4g}", f"{row['center_accuracy']:.1%}"),
            *(f"{row['max_loss']:.4g}", f"{row['small_loss_share']:.1%}", str(row["holes"])),
            "–" if row.get("converged") is None else f"{row['converged']:.0%}",
        )
        for row in record
    ]
    return narrow_table((Column("network", overflow="fold"), *numbers), rows)
