"""Parameter counts of every named network and of its paper: python docs/make_model_table.py

Writes results/models.md, which docs/models.md shows. Nothing is allocated: the networks are laid
out on torch's meta device.
"""

from __future__ import annotations

from pathlib import Path

import torch

from equilibria import models

OUT = Path(__file__).parent.parent / "results" / "models.md"
HEAD = (
    "| name | parameters | the paper's | difference | classes | input | what it is | from |\n"
    "|---|---:|---:|---:|---:|---|---|---|\n"
)


def row(name: str) -> str:
    """One line of the table, counted with as many classes as the paper counts with."""
    card = models.describe(name)
    with torch.device("meta"):
        count = models.count_parameters(models.create(name, card.paper_classes))
    paper, difference = "–", "–"
    if card.paper_parameters is not None:
        paper = f"{card.paper_parameters:,}"
        difference = f"{100 * (count / card.paper_parameters - 1):+.1f}%"
    size = f"{card.in_channels} × {card.image_size} × {card.image_size}"
    cells = [f"`{name}`", f"{count:,}", paper, difference, str(card.paper_classes), size]
    return f"| {' | '.join([*cells, card.text, card.paper])} |\n"


def table() -> str:
    """Classification first, then segmentation, by name."""
    names = [*models.names(task="classification"), *models.names(task="segmentation")]
    return HEAD + "".join(row(name) for name in names)


def main() -> None:
    OUT.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
