"""``equilibria models``: the networks that can be created by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column

from .console import fail, print_json, print_table
from .loading import Json


def models(
    pattern: Annotated[str, typer.Argument(help="Show names that match, such as 'geq_*'.")] = "*",
    task: Annotated[
        str | None, typer.Option(help="classification or segmentation; both if not given.")
    ] = None,
    count: Annotated[
        bool, typer.Option(help="Build each one to count its parameters (seconds).")
    ] = True,
    as_json: Json = False,
) -> None:
    """List the networks, their size beside the papers', and what they are.

    For a single one its options follow: `equilibria train --option NAME=VALUE` sets them.
    """
    import torch

    from equilibria import models as zoo
    from equilibria.models.registry import nearest

    if task not in (None, "classification", "segmentation"):
        raise fail(f"--task {task}: expected classification or segmentation.")
    cards = [zoo.describe(name) for name in zoo.names(pattern, task)]
    if not cards:
        raise fail(
            f"no model matches {pattern!r}.{nearest(pattern)}",
            "`equilibria models` lists them all.",
        )
    with torch.device("meta"):  # shapes without numbers: there is nothing to initialize
        sizes = [zoo.count_parameters(zoo.create(card.name)) if count else None for card in cards]
    if as_json:
        shown = ("name", "task", "paper_parameters", "paper", "text")
        rows = [{key: getattr(card, key) for key in shown} for card in cards]
        print_json([{**row, "parameters": size} for row, size in zip(rows, sizes, strict=True)])
        return
    print_table(
        Column("name", no_wrap=True),
        Column("parameters", justify="right", no_wrap=True),
        Column("paper says", justify="right"),
        "what it is",
        rows=[
            (card.name, _size(size), _size(card.paper_parameters), card.text)
            for card, size in zip(cards, sizes, strict=True)
        ],
    )
    if len(cards) == 1:
        options = cards[0].options.items()
        print_table(Column("option", no_wrap=True), "default: what it is", rows=options)


def _size(count: int | None) -> str:
    if count is None:
        return "–"
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
