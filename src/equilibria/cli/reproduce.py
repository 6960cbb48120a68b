"""``equilibria reproduce``: the papers' tables and figures, beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import error_console, fail, make_folder, output, print_json, stop
from .flags import pairs
from .loading import device_of
from .wording import as_flags

__all__ = ["reproduce"]

_LIST = "list"


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="ID",
            help="Tables or figures: what they share is trained once. Or 'list' for all of them.",
        ),
    ],
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Tiny networks on the digits, in a minute: a test, no result."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trainings with their options and stop.")
    ] = False,
    seeds: Annotated[str, typer.Option(help="A training for each: 0,1,2.")] = "0",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROW", help="Only this row; may be repeated."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Other epochs than the recipe's; the table says so.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another option of `equilibria train` than the recipe's, such as batch_size=256; "
            "may be repeated, and the table says so.",
        ),
    ] = None,
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in", help="Take other data where the paper's are not at hand; it is said."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop training after this long; the same command goes on from there."),
    ] = None,
    gather: Annotated[
        bool,
        typer.Option(
            "--gather", help="Train nothing: write the tables of what the run folders hold."
        ),
    ] = False,
    parallel: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="N trainings at once, each in a process of its own; times are measured alone.",
        ),
    ] = 1,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 …; a GPU where there is one if not given.")
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option("--data-root", help="The folder that holds the data.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where tables and the log are written.")] = Path(
        "results/reproduce"
    ),
    runs: Annotated[Path, typer.Option(help="Where trainings are kept.")] = Path("runs/reproduce"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train what tables of the papers need and print the papers' numbers beside ours.

    Trainings are kept and shared between tables; Ctrl-C saves, and the same command goes on. The
    test images are looked at once, when a training is over.
    """
    from equilibria import experiments

    if _LIST in names:
        if len(names) > 1:
            others = " ".join(name for name in names if name != _LIST) or _LIST
            raise fail(f"'list' stands alone; it was given with {others}.")
        _show_list(out, data_root, as_json)
        return
    overrides = {**pairs("set", change or []), **({} if epochs is None else {"epochs": epochs})}
    if device is not None:
        device_of(device)
    try:
        choices = experiments.Choices(
            seeds=_seeds(seeds),
            only=tuple(only or ()),
            smoke=smoke,
            stand_in=stand_in,
            overrides=overrides,
            device=device,
            data_root=data_root,
            out=out,
            runs=runs,
            minutes=minutes,
            parallel=parallel,
            gather=gather,
            progress=not (quiet or as_json),
        )
        asked = experiments.cells_asked(map(experiments.describe, names), choices.only)
        plans = {one.id: experiments.plan(cells, choices) for one, cells in asked}
    except (ValueError, TypeError) as error:
        raise fail(as_flags(str(error))) from None
    if dry_run:
        _show_plans(plans, len(names) > 1, as_json)
        return
    make_folder(out)
    told = None if quiet or as_json else _tell
    try:
        results = experiments.reproduce_all(names, choices, tell=told)
    except KeyboardInterrupt as stopped:
        said = str(stopped).split(" Go on with")[0] or "interrupted."
        raise stop(f"{said}\nThe same command goes on from there.") from None
    if as_json:
        found = [result.to_dict() for result in results]
        print_json(found if len(names) > 1 else found[0])
    else:
        _show_results(results)
    idle = [result.experiment.id for result in results if result.status == "not run"]
    if idle:
        raise fail(
            f"nothing was run of {', '.join(idle)}.",
            "See the state of each row; --stand-in, --data-root, --smoke.",
        )


def _show_results(results: list[Any]) -> None:
    from equilibria import experiments

    for result in results:
        output().print(experiments.rich_table(result))
        for note in result.experiment.notes:
            error_console.print(f"- {note}", style="dim", markup=False, highlight=False)


def _tell(text: str) -> None:
    error_console.print(text, markup=False, highlight=False, soft_wrap=True)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise fail(f"--seeds {text}: expected whole numbers, such as 0,1,2.") from None


def _cost(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:,.0f} h"


def _show_list(out: Path, data_root: Path | None, as_json: bool) -> None:
    from equilibria import experiments

    found = experiments.listing(out, data_root)
    if as_json:
        print_json(
            [
                {
                    "id": one.experiment.id,
                    "paper": one.experiment.paper,
                    "title": one.experiment.title,
                    "gpu_minutes": one.experiment.minutes,
                    "data": list(one.experiment.data),
                    "missing": list(one.missing),
                    "status": one.status,
                    "measured": one.measured,
                    "cells": len(one.experiment.cells),
                }
                for one in found
            ]
        )
        return
    table = Table(caption="cost: GPU time of one seed, estimated for one H200; ✗: not at hand")
    table.add_column("id", no_wrap=True)
    for title in ("what", "cost", "data", "status"):
        table.add_column(title, justify="right" if title == "cost" else "left")
    paper = ""
    for one in found:
        if one.experiment.paper != paper:
            paper = one.experiment.paper
            table.add_section()
            table.add_row(paper, style="bold")
        table.add_row(
            one.experiment.id,
            one.experiment.title,
            _cost(one.experiment.minutes),
            ", ".join(n + (" ✗" if n in one.missing else "") for n in one.experiment.data),
            _status(one),
        )
    output().print(table)


def _status(one: Any) -> str:
    if not one.measured:
        return str(one.status)
    return f"{one.status} ({one.measured} of {len(one.experiment.cells)})"


def _show_plans(plans: dict[str, list[Any]], several: bool, as_json: bool) -> None:
    """Every training of every id; what ids share stands under each."""
    rows = {name: _plan_rows(planned) for name, planned in plans.items()}
    if as_json:
        found = [{"id": name, "jobs": jobs} for name, jobs in rows.items()]
        print_json(found if several else found[0])
        return
    console = output()
    for name, jobs in rows.items():
        console.print(f"{name}: {len(jobs)} training(s)", highlight=False)
        for row in jobs:
            _show_job(console, row)
        console.print()
    if several:
        keys = {row["key"] for jobs in rows.values() for row in jobs}
        console.print(f"together: {len(keys)} training(s), shared ones once", highlight=False)


def _plan_rows(planned: list[Any]) -> list[dict[str, Any]]:
    """Each training with the options that differ from the defaults."""
    from equilibria.training.config import TrainConfig

    usual = TrainConfig()
    return [
        {
            "job": one.job.name,
            "seed": one.seed,
            "key": one.key,
            "folder": str(one.folder),
            "measures": list(one.job.measures),
            "classes": one.job.classes,
            "trained": one.job.trained,
            "stands_in": one.stands_in,
            "missing": one.missing,
            "options": {
                k: now for k, (now, _) in one.config.differences(usual).items() if k != "out"
            },
        }
        for one in planned
    ]


def _show_job(console: Any, row: dict[str, Any]) -> None:
    note = f" [{row['missing']} is not at hand]" if row["missing"] else ""
    note += f" [{row['stands_in']} stands in]" if row["stands_in"] else ""
    line = f"\n{row['job']}, seed {row['seed']}{note}\n  folder: {row['folder']}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"  measures: {', '.join(row['measures'])}", markup=False, highlight=False)
    for key, value in row["options"].items():
        console.print(f"  {key}: {value}", markup=False, highlight=False, soft_wrap=True)
