"""``equilibria theory bounds``: the propositions of GEQ and KerDEQ on a network or a small pair."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column

from equilibria.cli import (
    Device,
    Root,
    device_of,
    error_console,
    fail,
    make_folder,
    output,
    prepared,
    write_json,
)

from .common import Data, Json, Split, answer, narrow_table, note, put_in_place, say_if_fewer


def bounds(
    weights: Annotated[
        Path | None,
        typer.Argument(help="A run folder or model.safetensors; a pair on the digits if none."),
    ] = None,
    data: Data = None,
    root: Root = None,
    split: Split = "test",
    images: Annotated[int, typer.Option(min=2, help="Inputs to measure on.")] = 32,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of inputs for κ.")] = 4,
    draws: Annotated[int, typer.Option(min=2, help="Random U for κ.")] = 128,
    margin: Annotated[float, typer.Option(help="η of Proposition 2.")] = 0.05,
    delta: Annotated[
        float, typer.Option(help="Proposition 2 holds with probability 1 − δ.")
    ] = 0.05,
    width: Annotated[int, typer.Option(min=1, help="Of the pair on the digits.")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="of training the pair.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the pair, the draws, the searches.")] = 0,
    device: Device = None,
    full: Annotated[bool, typer.Option("--full", help="Print every report whole.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write bounds.json and pictures into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Margin, Lipschitz and similarity bounds of GEQ beside OptEq: printed, ours, measured."""
    from equilibria_papers.theory import bounds as module
    from equilibria_papers.theory.pictures import save_picture

    if weights is None and (data is not None or root is not None):
        raise fail("--data and --root are for a trained network: give its WEIGHTS too.")
    if not 0.0 < margin < float("inf"):
        raise fail(f"--margin {margin:g}: expected a positive number, such as 0.05.")
    if not 0.0 < delta < 1.0:
        raise fail(f"--delta {delta:g}: expected a probability between 0 and 1, such as 0.05.")
    if out is not None:
        make_folder(out)
    numbers: dict[str, Any] = {"pairs": pairs, "draws": draws, "seed": seed}
    panels: dict[str, Any] = {}
    with error_console.status("") as status:
        progress = status.update
        if weights is not None:
            model, whole = prepared(weights, data, root, split, device)
            say_if_fewer("--images", images, whole)
            dataset = whole.subset(range(min(images, len(whole))))
            _say_if_fewer_pairs(pairs, len(dataset))
            x = dataset.normalize(dataset.images[slice(0, len(dataset))]).to(device_of(device))
            found = module.network_bounds(model, x, progress=progress, **numbers)
        else:
            progress("training a GEQ and an OptEq on the digits")
            pair = module.demonstration_pair(width=width, epochs=epochs, seed=seed)
            there = len(pair[0].x)
            if images > there:
                note(f"--images {images}: there are {there} training digits; all are taken.")
            _say_if_fewer_pairs(pairs, min(images, there))
            found = module.compare_bounds(
                pair, margin=margin, delta=delta, images=images, progress=progress, **numbers
            )
            if out is not None:
                panels = module.demonstration_curves(
                    pair, images=images, draws=draws, margin=margin, seed=seed, progress=progress
                )
    record = {**found.to_dict(), "curves": panels}
    written: list[Path] = []
    if out is not None:
        with put_in_place(out) as (aside, written):
            written.append(write_json(aside / "bounds.json", record))
            for stem, panel in panels.items():
                written += save_picture(module.draw_curves(panel), aside / stem)
    answer(record, as_json, partial(_show, found, full), written)


def _say_if_fewer_pairs(pairs: int, images: int) -> None:
    if pairs > images // 2:
        note(f"--pairs {pairs}: {images} images make {images // 2}; so many are taken.")


def _show(found: Any, full: bool) -> None:
    layers, rows = found.summary()
    if len(layers) <= 3:
        heads, cells = ["", *layers], [[name, *texts] for name, texts in rows]
    else:  # a network: one row per layer, in few words
        kept = [(name, texts) for name, texts in rows if "Eq" in name or "measured" in name]
        heads = ["layer", *(name.removeprefix("Prop ") for name, _ in kept)]
        cells = [[layer, *(texts[i] for _, texts in kept)] for i, layer in enumerate(layers)]
    output().print(narrow_table((Column(head, overflow="fold") for head in heads), cells))
    if full:
        output().print(f"\n{found}", markup=False, highlight=False, soft_wrap=True)
        return
    for text in dict.fromkeys((*found.notes, *(w for r in found.reports for w in r.warnings))):
        output().print(f"note: {text}", markup=False, highlight=False)
    for why in sorted({why for r in found.reports for why in r.refused.values()}):
        output().print(f"refused: {why}", markup=False, highlight=False)
