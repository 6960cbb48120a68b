"""The options of a training, from their declarations: python docs/make_option_table.py

Writes results/train_options.md, which docs/training.md shows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from equilibria.training import TrainConfig

OUT = Path(__file__).parent.parent / "results" / "train_options.md"


def table() -> str:
    """One line an option, in the order of the declarations."""
    defaults = TrainConfig()
    lines = ["| option | type | default | what it is |", "|---|---|---|---|"]
    for field in dataclasses.fields(TrainConfig):
        kind = str(field.type).replace("|", "\\|")
        default = repr(getattr(defaults, field.name))
        text = field.metadata["help"].replace("<", "&lt;")
        lines.append(f"| `{field.name}` | `{kind}` | `{default}` | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(table(), encoding="utf-8")
