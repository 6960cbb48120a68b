"""A MkDocs hook. `<!-- audit: GEQ -->` in a page becomes that paper's part of results/audit.md, and
W_l, e^{−s} outside of formulas and code become W with a small l, e with a raised −s."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROWS = 16  # of a table that is shown without a click
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
        section = _folded(section.replace("\n### ", "\n## "))
        found[paper] = f"{count[0].upper()}{count[1:]}\n\n{table}\n{section}"
    return found


def _reordered(row: str) -> str:
    """Without the paper; the verdict beside the reading, where a phone shows it."""
    _, _, claim, reading, *trials, verdict, _ = re.split(r"(?<!\\)\|", row)
    return "|".join(["", claim, reading, verdict, *reversed(trials), ""])


def _folded(text: str) -> str:
    """Of each claim statement and verdict in the open, the trials behind a line to click."""
    claims = []
    for claim in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        shown, verdict, rest = re.match(  # type: ignore[union-attr]
            r"(.*?)(\*\*Verdict:[^\n]*\n|\Z)(.*)", claim, re.DOTALL
        ).groups()
        inner = re.sub(r"^(?=.)", "    ", rest.strip("\n"), flags=re.MULTILINE)
        title = "Trials and a counterexample" if "Counterexample" in rest else "Trials"
        claims += [shown, verdict, f'\n??? quote "{title}"\n\n{inner}\n\n' if inner else ""]
    return "".join(claims)


# What is left as it is: code, formulas, comments and tags.
_KEPT = re.compile(
    r"(<(pre|code|style|script)\b.*?</\2>|<(span|div) class=\"arithmatex\">.*?</\3>"
    r"|<!--.*?-->|<[^>]+>)",
    re.DOTALL,
)
# A subscript has braces, or is one letter or digit, min or max; not a part of a name like fog_blur.
_LOW = re.compile(
    r"(?<=[^\W\d_]|[‖)²\u0302-\u0304])_(?:\{([^{}]*)\}|(min|max|[^\W_])(?![a-z0-9_]))"
)


def raised(html: str) -> str:
    """Subscripts and exponents in the words of a page as they look: W_l, e^{−s}."""
    found, at = [], 0
    for kept in [*_KEPT.finditer(html), None]:
        end = len(html) if kept is None else kept.start()
        high = re.sub(r"\^(?:\{([^{}]*)\}|([\w.]+))", r"<sup>\1\2</sup>", html[at:end])
        found += [_LOW.sub(r"<sub>\1\2</sub>", high), "" if kept is None else kept[0]]
        at = end if kept is None else kept.end()
    return "".join(found)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(
        r"<!-- audit: ?(.*?) -->",
        lambda asked: parts(AUDIT.read_text("utf-8"))[asked[1]],
        markdown,
    )


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Subscripts as they look; on some pages long tables are behind a line to click."""
    html = raised(html)
    if not page.file.src_uri.startswith(("solvers-", "training", "models")):
        return html

    def fold(table: re.Match[str]) -> str:
        rows = table[0].count("<tr>") - 1
        if rows <= _ROWS:
            return table[0]
        return f"<details><summary>Table of {rows} rows</summary>{table[0]}</details>"

    return re.sub(r"<table>.*?</table>", fold, html, flags=re.DOTALL)
