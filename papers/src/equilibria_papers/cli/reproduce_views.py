"""What ``equilibria reproduce`` prints: the list, the plans, the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from equilibria.cli import error_console, output, print_json

__all__ = ["show_list", "show_plans", "show_results"]


def show_results(results: list[Any], out: Path, quiet: bool) -> None:
    """The tables on stdout; unless quiet, their notes and pages on stderr, each once."""
    from equilibria_papers import tables as experiments

    for result in results:
        output().print(experiments.rich_table(result))
    if quiet:
        return
    for line in (*_notes(results), *_pages(results, out)):
        error_console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _notes(results: list[Any]) -> list[str]:
    """Each note once; of several tables, with those that it is of."""
    of: dict[str, list[str]] = {}
    for result in results:
        for note in result.experiment.notes:
            of.setdefault(note, []).append(result.experiment.id)
    several = len(results) > 1
    return [f"- {', '.join(ids) + ': ' if several else ''}{note}" for note, ids in of.items()]


def _pages(results: list[Any], out: Path) -> list[str]:
    """Where the whole tables stand, also the rows of which nothing is ours."""
    from equilibria_papers.tables.results import result_path

    made = [r for r in results if r.status != "not run"]
    found = [result_path(out, r.experiment.id, r.smoke, r.change) for r in made]
    return [f"written: {path.with_suffix('.md')} and .json" for path in found]


def _cost(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:,.0f} h"


def show_list(out: Path, data_root: Path | None, as_json: bool) -> None:
    from equilibria_papers import tables as experiments

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


def show_plans(plans: dict[str, list[Any]], several: bool, as_json: bool) -> None:
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
