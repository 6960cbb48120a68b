"""Reproduced tables for people: for the terminal (rich) and as Markdown."""

from __future__ import annotations

from typing import Any

from equilibria.training.epoch_metrics import UNSETTLED

from .results import MEASURED, NOT_RUN, SMOKE, CellResult, Result, largest

__all__ = ["markdown", "rich_table", "rows_of"]


def rows_of(result: Result) -> list[list[str]]:
    """Row, column, the paper's number, ours, state: one line a cell, in order."""
    return [
        [
            found.cell.row,
            found.cell.column,
            "–" if found.cell.published is None else found.cell.published.text,
            found.ours,
            SMOKE if result.smoke and found.samples else _state(found),
        ]
        for found in result.cells
    ]


def _state(found: CellResult) -> str:
    if found.status == MEASURED:
        return MEASURED + (f": {found.cell.note}" if found.cell.note else "")
    if found.outdated:
        return f"{found.status}: measured by an earlier recipe"
    if found.samples:
        return f"{found.status}: {found.samples[0].stands_in}"
    if found.status == NOT_RUN and found.why:
        return f"{NOT_RUN}: {found.why}"
    return f"{found.status}{': ' if found.cell.note else ''}{found.cell.note}"


def heading(result: Result) -> str:
    """The paper, the id and what the table is of."""
    smoke = "SMOKE TEST, NO RESULT: " if result.smoke else ""
    return f"{smoke}{result.experiment.paper}, {result.experiment.id}: {result.experiment.title}"


def rich_table(result: Result) -> Any:
    """For ``Console.print``: as the terminal is wide."""
    from .terminal import Shown

    return Shown(result)


def caption(result: Result) -> str:
    """State, seconds, and what was changed of the recipe."""
    change = f" Changed recipe: {result.change}." if result.change else ""
    return f"{result.status}; {result.seconds:,.0f} s of training and measuring.{change}"


def markdown(result: Result) -> str:
    """The page that stands beside the JSON."""
    experiment, made = result.experiment, result.made_by
    lines = [f"# {heading(result)}", ""]
    if result.smoke:
        lines += [
            "Tiny networks, a few hundred digits, two epochs: this shows that the code runs. The "
            "numbers under *ours* mean nothing.",
            "",
        ]
    lines += [f"Paper: {experiment.source}.", ""]
    if experiment.claim:
        lines += [f"The paper's reading: {experiment.claim}", ""]
    change = f", by a changed recipe: {result.change}" if result.change else ""
    lines += [f"State: **{result.status}**{change}. Seeds: {', '.join(map(str, result.seeds))}."]
    lines += ["", *_wide(result), ""]
    lines += ["Ours / the paper's; ours is mean ± standard deviation (number of seeds).", ""]
    lines += [*_remarks(result), ""]
    pictures = [name for name in result.files if name.endswith(".png")]
    lines += [line for name in pictures for line in (f"![{name}]({name})", "")]
    if result.change and experiment.notes:
        lines += [f"The notes speak of the recipe as declared; here {result.change}:", ""]
    lines += [f"- {note}" for note in experiment.notes]
    lines += [
        "",
        f"Numbers from {_machines(result)}; {result.seconds:,.0f} s of training and measuring, "
        "longer where trainings ran side by side. They were made by:",
        "",
        *(f"- `{command}`" for command in _commands(result)),
        "",
        f"Written by `{made.get('command', '')}`, commit {made.get('commit', 'unknown')}, "
        f"equilibria {made.get('version', '')}, {made.get('date', '')}.",
        "",
    ]
    return "\n".join(lines)


def _wide(result: Result) -> list[str]:
    """A line for each row of the table, a column for each of its columns: ours / the paper's."""
    columns = result.experiment.columns
    found = {(one.cell.row, one.cell.column): one for one in result.cells}
    lines = [f"| | {' | '.join(map(_cell, columns))} |", "|---|" + "---:|" * len(columns)]
    for row in result.experiment.rows:
        texts = [pair(found.get((row, column))) for column in columns]
        lines.append(f"| {_cell(row)} | {' | '.join(map(_cell, texts))} |")
    return lines


def pair(found: CellResult | None) -> str:
    """``94.90 / 94.8 ± 0.1%``: ours / the paper's; empty where the table has no cell."""
    if found is None:
        return ""
    paper = "" if found.cell.published is None else f" / {found.cell.published.text}"
    return f"{found.ours}{paper}"


def _remarks(result: Result) -> list[str]:
    """What is to be said of cells: why there is no number, whose data, notes; each once."""
    said: dict[str, list[str]] = {}
    for row, column, _, _, state in rows_of(result):
        if state not in (MEASURED, SMOKE):
            said.setdefault(state, []).append(f"{row}, {column}")
    remarks = [f"{state}: {_named(places)}" for state, places in said.items()]
    return [f"- {remark}" for remark in (*remarks, *unsettled(result))]


def unsettled(result: Result) -> list[str]:
    """A line on the trainings whose last step still moves the state, where there are such."""
    if result.smoke:
        return []
    seen: dict[str, list[float]] = {}
    for found in result.cells:
        if found.cell.job is not None and found.residual is not None:
            seen.setdefault(found.cell.job.name, []).append(found.residual)
    worst = {name: largest(residuals) for name, residuals in seen.items()}
    far = {name: r for name, r in worst.items() if r is not None and not r <= UNSETTLED}
    if not far:
        return []
    named = "; ".join(f"{name} ({residual:.2g})" for name, residual in far.items())
    return [
        "not at their equilibrium; the last step still moved the state (by this share of it, the "
        f"median over the test images): {_cell(named)}."
    ]


def _named(places: list[str]) -> str:
    """Some places by name, the rest as a number."""
    shown = "; ".join(places[:_NAMED])
    more = len(places) - _NAMED
    return _cell(shown + (f"; and {more} more." if more > 0 else "."))


_NAMED = 4


def _commands(result: Result) -> list[str]:
    """What was typed for the numbers, each once."""
    samples = (sample for cell in result.cells for sample in cell.samples)
    return sorted({str(sample.made_by.get("command", "unknown")) for sample in samples})


def _machines(result: Result) -> str:
    """Where the numbers were made, each machine and commit once; a table may have several."""
    found = {
        f"{by.get('device', 'an unknown machine')}, torch {by.get('torch', '?')}, commit "
        f"{by.get('commit', 'unknown')}"
        for cell in result.cells
        for by in (sample.made_by for sample in cell.samples)
    }
    return "; ".join(sorted(found)) or "nowhere yet"


def _cell(text: str) -> str:
    """Text that does not end a column of a Markdown table."""
    return text.replace("|", "\\|")
