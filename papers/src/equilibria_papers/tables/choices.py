"""What the user of ``reproduce`` chooses: seeds, rows, folders, device, changes of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from equilibria.engine import check_number, options
from equilibria.training import TrainConfig

MACHINE = frozenset(
    {
        *("out", "data_root", "download", "accelerator", "devices", "nodes", "strategy"),
        *("workers", "log_every", "loggers", "compile", "cuda_graphs", "on_corrupt"),
    }
)
"""Where and on what machine something is run does not change what it is."""

# What belongs to the plan, not to the recipe.
_RESERVED = ("model", "data", "data_root", "out", "seed", "accelerator", "devices", "model_options")


@options
class Choices:
    """Checked when made."""

    seeds: tuple[int, ...] = (0,)
    """One training of every job for each."""
    only: tuple[str, ...] = ()
    """Rows of the table; none: all."""
    smoke: bool = False
    """Tiny networks on the digits, by the same code: a test, not a result."""
    stand_in: bool = False
    """Whether other data may stand in for data that are not at hand."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Options of TrainConfig in place of the recipe's; the table says so."""
    device: str | None = None
    """"cpu", "cuda", "cuda:1"; None: a GPU where there is one."""
    data_root: Path | None = None
    """Where data sets are looked for; None: the places of equilibria.data."""
    out: Path = Path("results/reproduce")
    """Where tables are written."""
    runs: Path = Path("runs/reproduce")
    """Where trainings are kept."""
    minutes: float | None = None
    """Stop training after this long, as by Ctrl-C: the same command goes on from there."""
    parallel: int = 1
    """Trainings at once, in so many processes. Times are measured alone, after the rest."""
    gather: bool = False
    """Train and measure nothing: the tables of what the run folders hold, such as those that
    another machine filled."""
    progress: bool = True
    """Whether to show bars."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={self.seeds}: expected at least one, none of them twice.")
        for seed in self.seeds:
            if type(seed) is not int or not 0 <= seed < 2**32:
                raise ValueError(f"seeds={self.seeds}: expected whole numbers from 0 to 2³² − 1.")
        check_number(self, "minutes", low=0.0, low_open=True, optional=True)
        check_number(self, "parallel", low=1, integer=True)
        if self.gather and (self.minutes is not None or self.parallel > 1):
            raise ValueError(
                f"gather=True, minutes={self.minutes}, parallel={self.parallel}: nothing is "
                "trained, and minutes and parallel are of trainings; leave them out, or gather."
            )
        taken = [name for name in self.overrides if name in _RESERVED]
        if taken:
            raise ValueError(
                f"overrides may not set {taken[0]}: the table decides it. They take other options "
                "of a training, such as epochs, batch_size or lr."
            )
        TrainConfig().with_overrides(_loose(self.overrides))  # unknown names and values are said

    @property
    def change(self) -> str:
        """The overrides in words, ``epochs=2, lr=0.1``; empty where none changes the recipe."""
        made = {name: self.overrides[name] for name in sorted(self.overrides)}
        return ", ".join(f"{n}={_word(value)}" for n, value in made.items() if n not in MACHINE)


def _word(value: Any) -> str:
    """0.0 and 0 are one training, and so one word."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _loose(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides that may be checked alone: what depends on the rest of a recipe is left out."""
    left_out = ("schedule", "milestones", "epochs", "compile", "jacobian_weight", "select", "ema")
    known = {name: value for name, value in overrides.items() if name not in left_out}
    if isinstance(overrides.get("epochs", 1), bool) or not isinstance(
        overrides.get("epochs", 1), int
    ):
        raise TypeError(f"epochs={overrides['epochs']!r}: expected a whole number.")
    if overrides.get("epochs", 1) < 1:
        raise ValueError(f"epochs={overrides['epochs']}: expected at least 1.")
    return known
