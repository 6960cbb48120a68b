"""Comments cite facts by number, and pages by name: both exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for top in ("src", "papers/src") for path in (ROOT / top).rglob("*.py"))


def test_every_cited_fact_has_its_heading() -> None:
    page = (ROOT / "docs" / "facts.md").read_text("utf-8")
    headings = set(re.findall(r"^## Fact (\d+):", page, re.MULTILINE))
    cited = set()
    for path in SOURCES:
        text = re.sub(r"\s+", " ", path.read_text("utf-8"))
        for first, last in re.findall(r"docs/facts\.md, facts? (\d+)(?:–(\d+))?", text):
            cited |= {str(n) for n in range(int(first), int(last or first) + 1)}
    assert cited, "nothing cites a fact: the pattern is out of date"
    assert cited <= headings


def test_every_cited_page_exists() -> None:
    pattern = re.compile(r"\b(docs/[\w-]+\.md|results/[\w./-]+\.(?:md|json))")
    cited = {(path, page) for path in SOURCES for page in pattern.findall(path.read_text("utf-8"))}
    assert len(cited) > 10, "hardly anything is cited: the pattern is out of date"
    assert not [f"{path}: {page}" for path, page in sorted(cited) if not (ROOT / page).exists()]
