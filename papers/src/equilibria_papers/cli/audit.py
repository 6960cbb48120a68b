"""``equilibria theory audit``: every proposition of the papers against thousands of trials."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.table import Column, Table
from rich.text import Text

from equilibria.cli import error_console, make_folder, output, stop
from equilibria.engine import write_text

from .common import Json, Quiet, answer
from .plain_math import plain_math

_STYLES = {"holds": "green", "holds under": "yellow", "fails": "red", "vacuous": "magenta"}


def audit(
    out: Annotated[
        Path | None, typer.Option(help="A folder for audit.json and audit.md; goes on from there.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Random trials of each reading.")] = 2000,
    seconds: Annotated[
        float, typer.Option(help="Processor time for a reading's random trials, at most.")
    ] = 20.0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Claims such as 'opteq.lemma*'. May be repeated."),
    ] = None,
    paper: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="GEQ, OptEq, 'NTK thesis', … May be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all random trials.")] = 0,
    show: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Print one claim in full: statement, readings, numbers."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run again what --out already holds.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """What holds: random trials, adversarial ones, hill climbing; the verdict is counted.

    Each claim is tried as printed and, where that fails, with the change that repairs it. Ctrl-C
    keeps the claims that are done; the same command goes on from there. Expensive readings have
    fewer random trials; adversarial ones have as many seconds again, hill climbing a fifth of them.
    """
    from equilibria_papers import claims as module
    from equilibria_papers.theory.progress import progress_bar

    settings = module.Settings(trials=trials, seconds=seconds, seed=seed)
    claims = module.load_claims(paper, [show] if show is not None else only)
    file = None if out is None else make_folder(out) / "audit.json"
    order = {claim.id: number for number, claim in enumerate(claims, 1)}
    try:
        with progress_bar("claims", not quiet) as update:

            def report(claim: Any, reading: str, done: int, total: int) -> None:
                update(done, total, f"{order[claim.id]}/{len(claims)} {claim.id}: {reading}")

            records = module.run_audit(claims, settings, out=file, fresh=fresh, progress=report)
    except KeyboardInterrupt:
        if file is None or not file.exists():
            raise
        _write_page(file, settings)
        raise stop(f"interrupted; {file} keeps the claims that are done, run it again") from None
    if file is not None:
        _write_page(file, settings)

    def printed() -> None:
        if show is not None:
            for record in records:
                text = re.sub(r" \{#.*\}$", "", module.claim_section(record), flags=re.MULTILINE)
                output().print(Markdown(plain_math(text)))
            return
        output().print(_table(records))
        if file is not None:
            error_console.print(f"wrote {file} and {file.with_suffix('.md')}")

    answer([record.to_dict() for record in records], as_json, printed)


def _write_page(file: Path, settings: Any) -> None:
    """audit.md from all of audit.json, in the order of the papers."""
    from equilibria_papers import claims as module

    records = module.read_records(file)
    papers = list(module.PAPERS)
    known = module.load_claims(sorted({record.paper for record in records}))
    order = {claim.id: number for number, claim in enumerate(known)}
    records.sort(key=lambda r: (papers.index(r.paper), order.get(r.id, len(order))))
    command = ["equilibria", "theory", "audit", "--out", file.parent.name]
    usual = module.Settings()
    for name in ("trials", "seconds", "seed"):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            command += [f"--{name}", f"{value:g}"]
    write_text(file.with_suffix(".md"), module.audit_page(records, shlex.join(command)))


def _table(records: Any) -> Table:
    from equilibria_papers.claims.page import ratio_text

    table = Table(
        Column("claim", no_wrap=True), "where", Column("trials", justify="right"),
        Column("worst", justify="right"), "verdict",
    )  # fmt: skip
    for record in records:
        worst = record.printed.worst
        ratio = "–" if worst is None else ratio_text(worst.ratio)
        said = Text(record.verdict, style=_STYLES[record.verdict])
        decisive = record.printed
        if record.verdict == "holds under":
            decisive = record.repair
            said.append(f": {decisive.name}")
        if decisive.few:
            said.append(" (few trials)", style="dim")
        table.add_row(record.id, record.where, f"{record.printed.trials:,}", ratio, said)
    return table
