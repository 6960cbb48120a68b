"""``equilibria certify``: what is proven about a trained network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column

from equilibria.engine import write_json

from .console import output, print_json, print_table
from .loading import Data, Device, Json, Root, Split, Weights, prepared


def certify(
    weights: Weights,
    data: Data = None,
    root: Root = None,
    split: Split = "test",
    images: Annotated[int, typer.Option(min=1, help="How many images to certify on.")] = 64,
    device: Device = None,
    full: Annotated[
        bool, typer.Option("--full", help="Print the whole certificate of every layer.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Is each layer's equilibrium unique, and how far from it is the answer?

    Exits with 1 if some layer's equilibrium is not certified to be unique.
    """
    from equilibria import evaluation

    model, dataset = prepared(weights, data, root, split, device, images)
    whole = evaluation.certify_dataset(model, dataset, images)
    rows = [_row(name, part) for name, part in whole.items()]
    unique = all(part.unique for part in whole.values())
    rigorous = all(bool(getattr(part, "rigorous", False)) for part in whole.values())
    found = {"unique": unique, "rigorous": rigorous, "layers": rows}
    if out is not None:
        write_json(out, found)
    if as_json:
        print_json(found)
    else:
        # Without edges seven columns and a layer's whole name fit into 80.
        print_table(
            Column("layer", overflow="fold"),
            *("guarantee", "unique", "ρ", "m", "‖z − z*‖ ≤", "Lipschitz"),
            rows=[[_text(row[key]) for key in row if key != "residual"] for row in rows],
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
        )
        if full:
            for name, part in whole.items():
                output().print(f"\n{name}\n{part}", markup=False, highlight=False)
    if not unique:
        raise typer.Exit(1)


def _row(name: str, part: Any) -> dict[str, Any]:
    """One layer's certificate in plain numbers."""
    return {
        "layer": name or "(the network)",
        "guarantee": str(part.kind),
        "unique": part.unique,
        "contraction": _worst(getattr(part, "contraction", None)),
        "modulus": _worst(getattr(part, "modulus", None), largest=False),
        "error_bound": _worst(getattr(part, "error_bound", None)),
        "residual": _worst(part.residual),
        "lipschitz": getattr(part, "lipschitz", None),
    }


def _worst(value: Any, *, largest: bool = True) -> float | None:
    if value is None or isinstance(value, float):
        return value
    return float(value.max() if largest else value.min())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
