"""A MkDocs hook: `<!-- audit: GEQ -->` in a page becomes that paper's part of results/audit.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

AUDIT = Path(__file__).parents[1] / "results" / "audit.md"


def parts(text: str) -> dict[str, str]:
    """By paper its line of counts, its rows of the table and its sections; "" is what is before."""
    head, *sections = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    intro, columns, rows = re.split(r"(^\| paper .*\n\| ---.*\n)", head, flags=re.MULTILINE)
    found = {"": intro}
    for paper, section in zip(sections[::2], sections[1::2], strict=True):
        (count,) = re.findall(rf"^- \*\*{re.escape(paper)}\*\*, (.*)$", intro, re.MULTILINE)
        # A row without a paper is a further reading of the claim above it.
        mine = re.findall(rf"^\| {re.escape(paper)} \|.*\n(?:\|  \|.*\n)*", rows, re.MULTILINE)
        table = "\n".join(map(_reordered, (columns + "".join(mine)).splitlines()))
        section = _raised(section.replace("\n### ", "\n## "))
        found[paper] = f"{count[0].upper()}{count[1:]}\n\n{table}\n{section}"
    return found


def _reordered(row: str) -> str:
    """Without the paper; the verdict beside the reading, where a phone shows it."""
    _, _, claim, reading, *trials, verdict, _ = re.split(r"(?<!\\)\|", row)
    return "|".join(["", claim, reading, verdict, *reversed(trials), ""])


def _raised(text: str) -> str:
    """Exponents outside of formulas and code, e^{−s}, as they look."""
    pieces = re.split(r"(\$[^$]+\$|`[^`]+`)", text)
    pieces[::2] = [re.sub(r"\^\{([^{}]*)\}", r"<sup>\1</sup>", piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(
        r"<!-- audit: ?(.*?) -->",
        lambda asked: parts(AUDIT.read_text("utf-8"))[asked[1]],
        markdown,
    )
