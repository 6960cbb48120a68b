"""``equilibria models``: the networks that can be created by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column

from .console import fail, output, print_json, print_table
from .loading import Json


def models(
    pattern: Annotated[
        str,
        typer.Argument(
            help="Show names that match, such as 'geq_*'. Or `pull`, with REPO: fetch a network."
        ),
    ] = "*",
    repo: Annotated[
        str | None, typer.Argument(help="For pull: the network's name on the hub, owner/name.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For pull: where to; the hub's cache if not given.")
    ] = None,
    task: Annotated[
        Literal["classification", "segmentation"] | None,
        typer.Option(help="Networks for this; for both if not given."),
    ] = None,
    count: Annotated[
        bool, typer.Option(help="Build each one to count its parameters (seconds).")
    ] = True,
    as_json: Json = False,
) -> None:
    """List the networks, their size beside the papers', and what they are.

    For a single one its options follow: `equilibria train --option NAME=VALUE` sets them.
    `equilibria models pull REPO` fetches a trained network from the Hugging Face hub.
    """
    if pattern == "pull" and repo is not None:
        _pull(repo, folder, as_json)
        return
    if pattern == "pull" or repo is not None or folder is not None:
        raise fail(
            "REPO and --folder go with pull, and pull needs REPO.",
            "`equilibria models pull owner/name`",
        )
    import torch

    from equilibria import models as zoo
    from equilibria.models.registry import nearest

    cards = [zoo.describe(name) for name in zoo.names(pattern, task)]
    if not cards:
        raise fail(
            f"no model{f' for {task}' if task else ''} matches {pattern!r}."
            f"{'' if task else nearest(pattern)}",
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


def _pull(repo: str, folder: Path | None, as_json: bool) -> None:
    """Fetch model.safetensors of a repository and check it as ``models.load`` does."""
    from equilibria import models as zoo
    from equilibria.models.hub import fetch

    file = fetch(repo, download=True, local_dir=folder)
    name = zoo.load(file).config.name
    if as_json:
        print_json({"name": name, "file": str(file)})
    else:
        output().print(f"{name}: {file}", soft_wrap=True)


def _size(count: int | None) -> str:
    if count is None:
        return "–"
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
