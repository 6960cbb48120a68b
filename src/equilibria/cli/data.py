"""``equilibria data``: what data sets there are, fetching them, checking them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column

from .console import output, print_json, print_table
from .loading import Json, Root

data = typer.Typer(help="List, download and check data sets.", no_args_is_help=True)


@data.command("list")
def list_(as_json: Json = False) -> None:
    """The data sets known by name. Any folder of class folders works as well."""
    from equilibria import data as datasets

    cards = [datasets.describe(name) for name in datasets.names()]
    if as_json:
        print_json([vars(card) for card in cards])
        return
    rows = [(card.name, str(card.num_classes), card.images, card.text) for card in cards]
    print_table(Column("name", no_wrap=True), "classes", "images", "what it is", rows=rows)


@data.command()
def download(
    name: Annotated[str, typer.Argument(help="A name from `equilibria data list`.")],
    root: Root = None,
) -> None:
    """Fetch a data set into the local cache (or into --data-root) and decode it once."""
    from equilibria import data as datasets

    for split in datasets.describe(name).splits:
        loaded = datasets.load(name, split, root=root, download=True)
        output().print(f"{name} {split}: {len(loaded):,} images, {len(loaded.classes)} classes")


@data.command()
def check(
    name: Annotated[str, typer.Argument(help="A name, or a folder of class folders.")],
    root: Root = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Pixels of a side, for images of different sizes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every image of a data set and compare what is known of it: counts, classes, means."""
    from equilibria import data as datasets

    report = datasets.check(name, root=root, image_size=image_size)
    if as_json:
        print_json(report.to_dict())
    else:
        output().print(report.table())
    if not report.ok:
        raise typer.Exit(1)
