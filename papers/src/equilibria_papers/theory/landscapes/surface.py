"""A measured landscape: the grid, what was measured on it, and the file that holds both."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from equilibria.engine import write_bytes

_FORMAT = "equilibria-landscape-1"


class LandscapeFileError(ValueError):
    """A file that is no landscape, is damaged, or belongs to another one."""


@dataclass(frozen=True)
class Surface:
    """Φ(a, b) = L(θ* + a d₁ + b d₂) on a grid; a curve Φ(a) has the one column b = 0.

    ``values[channel]`` is [len(a), len(b)] in float64: "loss", "accuracy", and for networks with
    equilibrium layers "converged" and "failed" (shares of the samples) and "steps" (a sample's, all
    layers together). ``done`` [len(a)] says which rows are measured.
    """

    name: str
    a: Tensor
    b: Tensor
    values: dict[str, Tensor]
    done: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)
    """What was measured: fingerprints of weights, data and directions, and settings."""

    @property
    def is_curve(self) -> bool:
        return len(self.b) == 1

    @property
    def complete(self) -> bool:
        return bool(self.done.all())

    @property
    def loss(self) -> Tensor:
        """[len(a), len(b)], NaN where it is not measured or not finite."""
        found = self.values["loss"]
        return torch.where(torch.isfinite(found) & self.done.unsqueeze(1), found, torch.nan)

    @property
    def holes(self) -> Tensor:
        """[len(a), len(b)]: measured, and the loss was NaN or infinite."""
        return self.done.unsqueeze(1) & ~torch.isfinite(self.values["loss"])

    def _center(self) -> tuple[Tensor, Tensor]:
        """Of the grid point nearest to the origin."""
        return self.a.abs().argmin(), self.b.abs().argmin()

    def center_loss(self) -> float:
        """Φ at the grid point nearest to the origin."""
        return float(self.loss[self._center()])

    def small_loss_share(self, rise: float = 1.0) -> float:
        """The share of the grid with a loss within ``rise`` of the center's.

        The thesis' "small-loss neighborhood" (§4.2.1) as a number. Holes do not count as small.
        """
        small = self.loss <= self.center_loss() + rise
        return float(small.double().sum() / (self.done.sum() * len(self.b)))

    def summary(self) -> dict[str, Any]:
        """The numbers of a line in a table."""
        loss = self.loss[torch.isfinite(self.loss)]
        found: dict[str, Any] = {
            "name": self.name,
            "grid": f"{len(self.a)} × {len(self.b)}",
            "rows_done": int(self.done.sum()),
            "center_loss": self.center_loss(),
            "min_loss": float(loss.min()) if len(loss) else math.nan,
            "max_loss": float(loss.max()) if len(loss) else math.nan,
            "small_loss_share": self.small_loss_share(),
            "holes": int(self.holes.sum()),
        }
        for key in ("converged", "failed", "steps"):
            meant = key != "converged" or not self.about.get("fixed_steps", False)
            if key in self.values and meant:
                found[key] = float(self.values[key][self.done].mean())
        found["center_accuracy"] = float(self.values["accuracy"][self._center()])
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file with a JSON header: whole, or the older one stays."""
        place = Path(path)
        tensors = {f"values.{name}": value.contiguous() for name, value in self.values.items()}
        tensors |= {"a": self.a, "b": self.b, "done": self.done}
        about = json.dumps(dict(self.about), sort_keys=True)
        header = {"format": _FORMAT, "name": self.name, "about": about}
        write_bytes(place, safetensors.torch.save(tensors, header))
        return place

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Surface:
        """Read a file that ``save`` wrote; nothing is unpickled."""
        place = Path(path)
        if not place.is_file():
            raise FileNotFoundError(f"there is no landscape file {place}.")
        try:
            with safetensors.safe_open(place, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise LandscapeFileError(f"{place} cannot be read as a landscape: {error}.") from error
        if header.get("format") != _FORMAT:
            raise LandscapeFileError(
                f"{place} is no landscape of this library: its format is "
                f"{header.get('format')!r}, expected {_FORMAT!r}."
            )
        try:
            values = {
                name.removeprefix("values."): value
                for name, value in tensors.items()
                if name.startswith("values.")
            }
            a, b, done = (tensors[name] for name in ("a", "b", "done"))
            about = json.loads(header["about"])
            made = cls(header["name"], a, b, values, done, about)
            shape = (len(a), len(b))
            if any(v.shape != shape for v in values.values()) or len(done) != shape[0]:
                raise KeyError("values of the grid's shape")
            if not {"loss", "accuracy"} <= set(values):
                raise KeyError("loss and accuracy")
        except (KeyError, json.JSONDecodeError) as error:
            raise LandscapeFileError(f"{place} is damaged: it lacks {error}.") from error
        return made
