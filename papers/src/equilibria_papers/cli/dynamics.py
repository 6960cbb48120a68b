"""``equilibria theory dynamics``: the NTK thesis' theorems beside runs of its model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column

from equilibria.cli import fail, make_folder, output, write_json

from .common import Json, Quiet, answer, narrow_table, put_in_place


def dynamics(
    scenario: Annotated[
        list[str] | None, typer.Option(help="One of those above; may be repeated.")
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

    The loss with the guaranteed curve drawn in, where the condition on λ₀ holds (guaranteed-flow,
    guaranteed-descent, guaranteed-random), where it does not (usual-flow, usual-descent), and where
    the printed theorem breaks (counterexample).
    """
    from equilibria_papers.theory import monotone_ntk
    from equilibria_papers.theory.progress import progress_bar

    known = list(monotone_ntk.SCENARIOS)
    names = known if everything else list(dict.fromkeys(scenario or []))
    if not names:
        raise fail("no scenario was given.", f"give --all, or --scenario {'|'.join(known)}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise fail(f"--scenario {unknown[0]}: expected one of {', '.join(known)}.")
    folder = None if out is None else make_folder(out)
    outcomes = []
    for name in names:
        with progress_bar(name, not quiet) as update:
            share = partial(update, total=1.0)
            outcomes.append(monotone_ntk.run_scenario(name, seed=seed, progress=share))
    found = [outcome.to_dict() for outcome in outcomes]
    written: list[Path] = []
    if folder is not None:
        with put_in_place(folder) as (aside, written):
            for outcome in outcomes:
                written += monotone_ntk.draw_outcome(outcome, aside / outcome.scenario.name)
            written.append(write_json(aside / "dynamics.json", found))
    answer(found, as_json, partial(_show, outcomes), written)


def _show(outcomes: list[Any]) -> None:
    columns = ("slack", "holds", "loss at the end", "guaranteed", "worst ratio")
    rows = [
        (
            *(one.scenario.name, f"{one.report.slack:.3g}", "yes" if one.report.holds else "no"),
            *(f"{v:.3g}" for v in (one.run.loss[-1], one.run.guaranteed[-1], one.run.worst)),
        )
        for one in outcomes
    ]
    output().print(narrow_table((Column("scenario", overflow="fold"), *columns), rows))
    for outcome in outcomes:
        output().print(f"{outcome.scenario.name}: {outcome.verdict}", highlight=False)
