"""``equilibria theory dynamics``: the NTK thesis' theorems beside runs of its model."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from equilibria.cli import (
    fail,
    make_folder,
    output,
    print_json,
    write_json,
)

if TYPE_CHECKING:
    from equilibria_papers.theory.monotone_ntk import Outcome

from .common import Json, Quiet, narrow_table


def dynamics(
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            help="guaranteed-flow, guaranteed-descent, guaranteed-random, usual-flow, "
            "usual-descent or counterexample; may be given several times.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All scenarios.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the usual initialization and its data.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the pictures and dynamics.json.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Does training keep the rate that the NTK thesis proves? One run a scenario.

    The loss with the guaranteed curve drawn in, where the condition on λ₀ holds, where it does
    not, and where the printed theorem breaks.
    """
    from equilibria_papers.theory import monotone_ntk

    known = list(monotone_ntk.SCENARIOS)
    names = known if everything else list(dict.fromkeys(scenario or []))
    if not names:
        raise fail("no scenario was given.", f"give --all, or --scenario {'|'.join(known)}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise fail(f"--scenario {unknown[0]}: expected one of {', '.join(known)}.")
    folder = None if out is None else make_folder(out)
    outcomes = _run(names, seed, shown=not quiet)
    found = [outcome.to_dict() for outcome in outcomes]
    written = [] if folder is None else _write(folder, outcomes, found)
    if as_json:
        print_json(found)
        return
    output().print(_table(outcomes))
    for outcome in outcomes:
        output().print(f"{outcome.scenario.name}: {outcome.verdict}", highlight=False)
    for path in written:
        output().print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _run(names: list[str], seed: int, *, shown: bool) -> list[Outcome]:
    from equilibria_papers.theory.monotone_ntk import run_scenario
    from equilibria_papers.theory.progress import progress_bar

    outcomes = []
    for name in names:
        with progress_bar(name, shown) as update:
            share = partial(update, total=1.0)
            outcomes.append(run_scenario(name, seed=seed, progress=share))
    return outcomes


def _write(folder: Path, outcomes: list[Outcome], found: list[dict[str, Any]]) -> list[Path]:
    """Pictures and JSON, made in a folder of their own and moved when all are there."""
    from equilibria_papers.theory.monotone_ntk import draw_outcome

    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as name:
        made = []
        for outcome in outcomes:
            made += draw_outcome(outcome, Path(name) / outcome.scenario.name)
        made.append(write_json(Path(name) / "dynamics.json", found))
        written = [folder / path.name for path in made]
        for path, final in zip(made, written, strict=True):
            path.replace(final)
    return written


def _table(outcomes: list[Outcome]) -> Table:
    table = narrow_table(
        Column("scenario", overflow="fold"),
        *("slack", "holds", "loss at the end", "guaranteed", "worst ratio"),
    )
    for outcome in outcomes:
        run, report = outcome.run, outcome.report
        table.add_row(
            outcome.scenario.name,
            f"{report.slack:.3g}",
            "yes" if report.holds else "no",
            f"{run.loss[-1]:.3g}",
            f"{run.guaranteed[-1]:.3g}",
            f"{run.worst:.3g}",
        )
    return table
