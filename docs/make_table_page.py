"""Every table of the papers beside ours: python docs/make_table_page.py

Writes results/tables.md, which docs/tables.md shows, from results/reproduce/*.json. For each number
that a paper prints, the run of most epochs counts. Verdicts are in the tables' papers.toml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equilibria_papers.tables import Cell, Choices, describe, names, plan

ROOT = Path(__file__).parent.parent / "results"
OUT = ROOT / "tables.md"
PAPERS = {
    "GEQ": "GEQ (Li et al. 2023)",
    "KerDEQ": "KerDEQ (Li et al. 2022)",
    "OptEq": "OptEq (Xie et al. 2021)",
    "NTK thesis": "NTK thesis (Nguyen 2022)",
    "ours": "Ours",
}


def page() -> str:
    """A table of verdicts, then for each table the printed numbers beside ours."""
    every = [describe(name) for name in names()]
    lines = ["| table or figure | what the paper concludes | does it hold here? |", "|---|---|---|"]
    for one in every:
        if one.paper == "ours":
            continue
        link = f"[{one.id}](#{re.sub(r'[^a-z0-9-]', '', one.id)})"
        lines.append(f"| {link} | {one.claim} | **{one.verdict}** |")
    paper = ""
    for one in every:
        if one.paper != paper:
            paper = one.paper
            lines += ["", f"## {PAPERS[paper]}"]
        lines += ["", f"### {one.id}", "", f"{one.title[0].upper()}{one.title[1:]}. {one.source}."]
        if one.paper != "ours":
            lines += ["", f"*{one.claim}* Does it hold here? **{one.verdict.capitalize()}.**"]
        lines += ["", one.why]
        rows = list(numbers(one.id))
        if rows:
            lines += ["", "| | paper | ours | epochs | seeds |", "|---|---:|---:|---:|---:|", *rows]
        command = f"`equilibria reproduce {one.id} --data-root FOLDER`"
        lines += ["", f"{command}, about {cost(one.minutes)} on one H200."]
    return "\n".join(lines) + "\n"


def cost(minutes: int) -> str:
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:,.0f} hours"


def numbers(name: str) -> Iterator[str]:
    """A line for each number that the paper prints and that we have measured."""
    best: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
    for path in (ROOT / "reproduce").glob(f"{name}*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["id"] != name:
            continue
        for cell in kept["cells"]:
            if cell["published"] is None or not cell["n"] or "size" in cell["column"]:
                continue
            place = cell["row"], cell["column"]
            declared = next((c for c in describe(name).cells if (c.row, c.column) == place), None)
            if declared is None:
                continue
            recipe = {} if declared.job is None else dict(declared.job.recipe)
            if declared.job is not None and cell["status"] == "stand-in data":
                recipe |= declared.job.stand_in
            epochs = int(kept["overrides"].get("epochs", recipe.get("epochs", 0)))
            cell["outdated"] = outdated(cell, declared, kept["overrides"])
            if place not in best or epochs > best[place][0]:
                best[place] = epochs, cell
    for cell in describe(name).cells:
        if (cell.row, cell.column) in best:
            epochs, found = best[cell.row, cell.column]
            spread = "" if found["std"] is None else f" ± {found['std']:.2f}"
            ours = f"{found['mean']:.4g}" if abs(found["mean"]) < 0.1 else f"{found['mean']:.2f}"
            ours += spread + (" (other data)" if found["status"] == "stand-in data" else "")
            ours += " (earlier recipe)" if found["outdated"] else ""
            where = cell.column.removesuffix(" in %").removesuffix(", accuracy")
            yield (
                f"| {cell.row}, {where} | {found['published']['text']} | {ours} "
                f"| {epochs or '–'} | {found['n']} |"
            )


def outdated(found: dict[str, Any], declared: Cell, overrides: dict[str, Any]) -> bool:
    """Whether a number on the paper's data was made by other settings than those of today."""
    if declared.job is None or found["status"] == "stand-in data":
        return False
    (today,) = plan([declared], Choices(overrides=overrides, gather=True))
    return any(sample["group"] != today.group for sample in found["samples"])


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
