"""``equilibria models``: the networks that can be created by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column, Table

from .console import fail, output, print_json


def models(
    pattern: Annotated[str, typer.Argument(help="Show names that match, such as 'geq_*'.")] = "*",
    task: Annotated[
        str | None, typer.Option(help="classification or segmentation; both if not given.")
    ] = None,
    count: Annotated[
        bool, typer.Option(help="Build each one to count its parameters (seconds).")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the networks, their size beside the papers', and what they are.

    For a single one its options follow: `equilibria train --option NAME=VALUE` sets them.
    """
    from equilibria import models as zoo

    names = zoo.names(pattern, task)
    if not names:
        raise fail(f"no model matches {pattern!r}", "`equilibria models` lists them all.")
    rows = []
    for name in names:
        card = zoo.describe(name)
        rows.append(
            {
                "name": name,
                "task": card.task,
                "parameters": zoo.count_parameters(zoo.create(name)) if count else None,
                "paper_parameters": card.paper_parameters,
                "paper": card.paper,
                "text": card.text,
            }
        )
    if as_json:
        print_json(rows)
        return
    table = Table(
        Column("name", no_wrap=True),
        Column("parameters", justify="right", no_wrap=True),
        Column("paper says", justify="right"),
        "what it is",
    )
    for row in rows:
        table.add_row(
            str(row["name"]),
            _size(row["parameters"]),
            _size(row["paper_parameters"]),
            str(row["text"]),
        )
    output().print(table)
    if len(names) == 1:
        options = Table(Column("option", no_wrap=True), "default: what it is")
        for name, text in zoo.describe(names[0]).options.items():
            options.add_row(name, str(text))
        output().print(options)


def _size(count: object) -> str:
    if not isinstance(count, (int, float)):
        return "–"
    if count >= 1e6:
        return f"{count / 1e6:.2f} M"
    return f"{count / 1e3:.1f} k"
