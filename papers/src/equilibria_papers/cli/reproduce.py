"""``equilibria reproduce``: the papers' tables and figures, beside ours."""

from __future__ import annotations

import atexit
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from equilibria.cli import (
    Device,
    as_flags,
    device_of,
    error_console,
    fail,
    make_folder,
    output,
    pairs,
    print_json,
    stop,
)

from .common import Json, whole_numbers

_LIST = "list"
_HELP = "Tables or figures; 'list' shows all of them, 'list ID' the numbers of one."
_OUT = Path("results/reproduce")
_OF_LIST = frozenset({"out", "data_root", "as_json"})
_OF_TRAINING = frozenset({"parallel", "minutes", "device", "data_root", "dry_run"})


def reproduce(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="ID", help=_HELP)],
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny networks on the digits: a test, no result.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trainings with their options and stop.")
    ] = False,
    seeds: Annotated[str, typer.Option(help="A training for each: 0,1,2.")] = "0",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROW", help="Only this row; may be repeated."),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="ours|randaugment|printed",
            help="How networks on CIFAR are trained: by our recipe, by ours with RandAugment and "
            "120 epochs, or by the paper's as printed (steps of the rate, RandAugment).",
        ),
    ] = "ours",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Other epochs than the recipe's; the table says so.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another option of a training than the recipe's: batch_size=256; may be repeated.",
        ),
    ] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="Other data where the paper's are missing.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Stop training after this long, as by Ctrl-C.")
    ] = None,
    gather: Annotated[
        bool, typer.Option("--gather", help="Train nothing: the tables of what --runs holds.")
    ] = False,
    parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="Trainings at once; times are measured alone.")
    ] = 1,
    device: Device = None,
    data_root: Annotated[
        Path | None, typer.Option("--data-root", help="The folder that holds the data.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where tables and the log are written.")] = _OUT,
    runs: Annotated[Path, typer.Option(help="Where trainings are kept.")] = Path("runs/reproduce"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The tables alone.")] = False,
    as_json: Json = False,
) -> None:
    """Train what tables of the papers need and print the papers' numbers beside ours.

    Trainings are kept and shared between tables; Ctrl-C saves, and the same command goes on. The
    test images are looked at once, when a training is over.
    """
    from equilibria_papers import tables

    _check_together(context, names, gather)
    if names[0] == _LIST:
        _show_list(names[1:], out, data_root, as_json)
        return
    if device is not None:
        device_of(device)
    try:
        choices = tables.Choices(
            seeds=tuple(whole_numbers("--seeds", seeds, "whole numbers, such as 0,1,2")),
            only=tuple(only or ()),
            smoke=smoke,
            stand_in=stand_in,
            recipe=recipe,
            overrides=_overrides(change or [], epochs),
            device=device,
            data_root=data_root,
            out=out,
            runs=runs,
            minutes=minutes,
            parallel=parallel,
            gather=gather,
            progress=not (quiet or as_json),
        )
        asked = tables.cells_asked(map(tables.describe, names), choices.only)
        plans = {one.id: tables.plan(cells, choices) for one, cells in asked}
    except (ValueError, TypeError) as error:
        raise fail(as_flags(error)) from None
    if dry_run:
        _show_plans(plans, len(names) > 1, as_json)
        return
    make_folder(out)
    results = _run(names, choices, quiet or as_json)
    if as_json:
        found = [result.to_dict() for result in results]
        print_json(found if len(names) > 1 else found[0])
    else:
        _show_results(results, out, quiet)
    idle = [result.experiment.id for result in results if result.status == "not run"]
    if idle:
        way = "--stand-in, --data-root, --smoke."
        if gather:
            way = "--runs names the run folders, without --gather it trains."
        raise fail(f"nothing was run of {', '.join(idle)}.", f"See the reasons above; {way}")


def _check_together(context: typer.Context, names: list[str], gather: bool) -> None:
    """Flags that would do nothing beside others are wrong usage."""
    given = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name != "names" and source is not None and source.name == "COMMANDLINE":
            given[parameter.name] = parameter.opts[0]
    if _LIST in names:
        if names[0] != _LIST or names.count(_LIST) > 1:
            raise fail(f"'list' comes first, and once; given: {' '.join(names)}.")
        idle = [flag for name, flag in given.items() if name not in _OF_LIST]
        if idle:
            said = f"it takes --out, --data-root and --json; leave out {', '.join(idle)}."
            raise typer.BadParameter(said, param_hint=_LIST)
    idle = [flag for name, flag in given.items() if name in _OF_TRAINING]
    if gather and idle:
        said = f"it trains nothing and reads no data; leave out {', '.join(idle)}, or leave out "
        raise typer.BadParameter(f"{said}--gather to train.", param_hint="--gather")


def _overrides(change: list[str], epochs: int | None) -> dict[str, Any]:
    found = pairs("set", change)
    if epochs is None:
        return found
    if "epochs" in found:
        raise typer.BadParameter(
            f"{epochs}, and --set epochs={found['epochs']}: give one of them.",
            param_hint="--epochs",
        )
    return {**found, "epochs": epochs}


def _run(names: list[str], choices: Any, quiet: bool) -> list[Any]:
    from equilibria_papers import tables

    try:
        return tables.reproduce_all(names, choices, tell=None if quiet else _tell)
    except KeyboardInterrupt as stopped:
        # Another Ctrl-C while the interpreter ends would show where in it, or change the exit code.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        said = str(stopped).split(" Go on with")[0] or "interrupted."
        raise stop(f"{said}\nThe same command goes on from there.") from None


def _tell(text: str) -> None:
    error_console.print(text, markup=False, highlight=False, soft_wrap=True)


def _show_results(results: list[Any], out: Path, quiet: bool) -> None:
    """The tables on stdout; unless quiet, their notes and pages on stderr, each once."""
    from equilibria_papers import tables
    from equilibria_papers.tables.results import result_path

    for result in results:
        output().print(tables.rich_table(result))
    if quiet:
        return
    of: dict[str, list[str]] = {}  # each note once, with the tables that it is of
    for result in results:
        for note in result.experiment.notes:
            of.setdefault(note, []).append(result.experiment.id)
    several = len(results) > 1
    lines = [f"- {', '.join(ids) + ': ' if several else ''}{note}" for note, ids in of.items()]
    for one in results:
        if one.status != "not run":
            path = result_path(out, one.experiment.id, one.smoke, one.change)
            lines.append(f"written: {path.with_suffix('.md')} and .json")
    for line in lines:
        error_console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _listed(one: Any) -> dict[str, Any]:
    words = {name: getattr(one.experiment, name) for name in ("id", "paper", "title", "verdict")}
    more = {"gpu_minutes": one.experiment.minutes, "data": one.experiment.data}
    numbers = [
        {
            **longest.found.to_dict(),
            "recipe": longest.recipe,
            "epochs": longest.epochs,
            "outdated": longest.found.outdated,
        }
        for longest in one.longest
    ]
    state = {"missing": one.missing, "status": one.status, "measured": len(numbers)}
    cells = {"cells": len(one.experiment.cells), "numbers": numbers}
    return {**words, **more, **state, **cells}


def _show_list(names: list[str], out: Path, data_root: Path | None, as_json: bool) -> None:
    """Every table in a line; those that are named with their numbers."""
    from equilibria_papers import tables

    try:
        asked = {tables.describe(name).id for name in names}
    except ValueError as error:
        raise fail(str(error)) from None
    found = [
        one for one in tables.listing(out, data_root) if not asked or one.experiment.id in asked
    ]
    if as_json:
        print_json([_listed(one) for one in found])
    elif asked:
        for one in found:
            _show_numbers(one)
    else:
        _show_verdicts(found)


def _show_verdicts(found: list[Any]) -> None:
    table = Table(caption="hours: of one seed on one H200, estimated; ✗: data not at hand")
    table.add_column("table or figure")
    for title in ("hours", "epochs", "seeds"):
        table.add_column(title, justify="right")
    table.add_column("claim holds", no_wrap=True)
    paper = ""
    for one in found:
        if one.experiment.paper != paper:
            paper = one.experiment.paper
            table.add_section()
            table.add_row(Text(paper, style="bold"))
        missing = f" (✗ {', '.join(one.missing)})" if one.missing else ""
        hours = one.experiment.minutes / 60
        table.add_row(
            Text.assemble(one.experiment.id, (f"\n{one.experiment.title}{missing}", "dim")),
            f"{hours:,.1f}" if hours < 10 else f"{hours:,.0f}",
            _span(one.epochs),
            _span(one.seeds),
            one.experiment.verdict,
        )
    output().print(table)
    say = "'equilibria reproduce list ID' shows the paper's numbers beside ours."
    error_console.print(say, style="dim", markup=False, highlight=False, soft_wrap=True)


def _span(numbers: tuple[int, ...]) -> str:
    ends = dict.fromkeys((numbers[0], numbers[-1])) if numbers else ()
    return "–".join(map(str, ends))


def _show_numbers(one: Any) -> None:
    from equilibria_papers.tables.pages import number_table

    experiment, console = one.experiment, output()
    console.print(Text(f"{experiment.paper}, {experiment.id}: {experiment.title}", style="bold"))
    if experiment.verdict != "–":
        console.print(Text(f"{experiment.claim} Does it hold here? {experiment.verdict}."))
    console.print(Text(experiment.why))
    if one.numbers:
        rows = (longest.texts for longest in one.numbers)
        console.print(number_table(rows, "paper", "ours", "epochs", "seeds"))
    console.print()


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
    from equilibria.training import TrainConfig

    usual = TrainConfig()
    return [
        {
            "job": one.job.name,
            **{name: getattr(one, name) for name in ("seed", "key", "stands_in", "missing")},
            **{name: getattr(one.job, name) for name in ("measures", "classes", "trained")},
            "folder": str(one.folder),
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
