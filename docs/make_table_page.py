"""Every table of the papers beside ours: python docs/make_table_page.py

Writes results/tables.md, which docs/tables.md shows, from results/reproduce/*.json. For each number
that a paper prints, the longest training counts. Verdicts are in the tables' papers.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from equilibria_papers.tables import listing

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
    every = listing(ROOT / "reproduce", None)
    lines = ["| table or figure | what the paper concludes | does it hold here? |", "|---|---|---|"]
    for one in (listed.experiment for listed in every):
        if one.verdict == "–":  # it claims nothing
            continue
        link = f"[{one.id}](#{re.sub(r'[^a-z0-9-]', '', one.id)})"
        lines.append(f"| {link} | {one.claim} | **{one.verdict}** |")
    paper = ""
    for listed in every:
        one = listed.experiment
        if one.paper != paper:
            paper = one.paper
            lines += ["", f"## {PAPERS[paper]}"]
        lines += ["", f"### {one.id}", "", f"{one.title[0].upper()}{one.title[1:]}. {one.source}."]
        if one.verdict != "–":
            lines += ["", f"*{one.claim}* Does it hold here? **{one.verdict.capitalize()}.**"]
        lines += ["", one.why]
        printed = [number for number in listed.numbers if number.found.cell.published]
        if printed:
            lines += ["", "| | paper | ours | epochs | seeds |", "|---|---:|---:|---:|---:|"]
            lines += [f"| {' | '.join(number.texts)} |" for number in printed]
        command = f"`equilibria reproduce {one.id} --data-root FOLDER`"
        lines += ["", f"{command}, about {cost(one.minutes)} on one H200."]
    return "\n".join(lines) + "\n"


def cost(minutes: int) -> str:
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:,.0f} hours"


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
