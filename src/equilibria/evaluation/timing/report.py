"""Where the time of a model goes, in numbers: passes, layers, parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from equilibria.evaluation.plain import plain, write_json
from equilibria.evaluation.solver_statistics import SolverStatistics, layer_label

from .measuring import Memory, Spread
from .timeline import ADJOINT_MAP, ADJOINT_SOLVER, MAP, PARTS, SOLVER

__all__ = ["LayerProfile", "PassProfile", "Profile", "Suggestion"]

GROUPS = {
    "map": (MAP,),
    "solver": (SOLVER,),
    "adjoint": (ADJOINT_MAP, ADJOINT_SOLVER),
    "rest": tuple(p for p in PARTS if p not in (MAP, SOLVER, ADJOINT_MAP, ADJOINT_SOLVER)),
}
"""The four questions, and the parts that answer each."""


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """One equilibrium layer in one pass."""

    name: str
    seconds: Mapping[str, float]
    """By part: map, solver, adjoint_map, adjoint_solver."""
    evaluations: int
    """Of T in the solve."""
    graph_evaluations: int
    """Of T with a graph, for the adjoint."""
    products: int
    """With the transposed Jacobian of T, in the backward pass."""
    statistics: SolverStatistics | None
    """Steps per sample as a histogram, residuals, result codes."""
    backward_steps: Tensor | None
    """Long: entry s counts the samples whose backward solve took s steps; None: no such solve."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": layer_label(self.name),
            "seconds": dict(self.seconds),
            "evaluations": self.evaluations,
            "graph_evaluations": self.graph_evaluations,
            "products": self.products,
            "solves": None if self.statistics is None else self.statistics.to_dict(),
            "backward_steps_histogram": self.backward_steps,
        }


@dataclass(frozen=True, eq=False)
class PassProfile:
    """A training step or an inference: how long as it runs, and where the time goes."""

    kind: str
    """"train" or "inference"."""
    batch: int
    seconds: Spread
    """As it runs, without any mark."""
    eager: Spread
    """Without marks and not compiled, which is what the parts are of; else the same."""
    marked: Spread
    """With marks, run in turn with ``eager``."""
    overhead: float
    """What the marks cost, as a share: the median over rounds of marked/eager, less 1."""
    parts: Mapping[str, float]
    """Seconds by part (see ``PARTS``) of a marked pass: the mean over the middle half of them."""
    layers: tuple[LayerProfile, ...]
    memory: Memory
    waits: int | None
    """Times that the host waited for the GPU; None where there is none."""

    @property
    def images_per_second(self) -> float:
        return self.batch / self.seconds.median

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def group(self, name: str) -> float:
        """Seconds of "map", "solver", "adjoint" or "rest"."""
        return sum(self.parts.get(part, 0.0) for part in GROUPS[name])

    def share(self, *parts: str) -> float:
        """Of the marked pass, 0 to 1."""
        return sum(self.parts.get(part, 0.0) for part in parts) / self.total

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "batch": self.batch,
            "seconds": asdict(self.seconds),
            "images_per_second": self.images_per_second,
            "eager_seconds": asdict(self.eager),
            "marked_seconds": asdict(self.marked),
            "overhead_of_marks": self.overhead,
            "groups": {name: self.group(name) for name in GROUPS},
            "parts": {part: self.parts.get(part, 0.0) for part in PARTS},
            "layers": [layer.to_dict() for layer in self.layers],
            "memory": asdict(self.memory),
            "host_waits": self.waits,
        }


@dataclass(frozen=True)
class Suggestion:
    """What would help, why, and by how much."""

    name: str
    reason: str
    """From measured numbers."""
    do: str
    """What to write."""
    predicted: float | None
    """Times as fast, at best, by what was measured; None: only a trial can tell."""
    measured: float | None = None
    """Times as fast, tried side by side in this run."""
    change: float | None = None
    """How much the tried model's answer differs: ‖a − b‖/‖b‖."""
    note: str = ""
    """Why a trial failed, or what it leaves open."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Where the time goes, and what would help."""

    model: str
    parameters: int
    shape: tuple[int, ...]
    device: str
    machine: str
    threads: int
    precision: str
    compiled: bool
    train: PassProfile | None
    inference: PassProfile
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]

    @property
    def main(self) -> PassProfile:
        """The training step where it was measured."""
        return self.inference if self.train is None else self.train

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON knows."""
        found = {
            "model": self.model,
            "parameters": self.parameters,
            "shape": self.shape,
            "device": self.device,
            "machine": self.machine,
            "threads": self.threads,
            "precision": self.precision,
            "compiled": self.compiled,
            "train": None if self.train is None else self.train.to_dict(),
            "inference": self.inference.to_dict(),
            "suggestions": [asdict(s) for s in self.suggestions],
            "notes": self.notes,
        }
        return plain(found)  # type: ignore[no-any-return]

    def tables(self) -> list[Any]:
        """For ``rich.print``: times, layers, histograms, suggestions."""
        from .tables import profile_tables

        return profile_tables(self)

    def __str__(self) -> str:
        from .tables import as_text

        return as_text(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write bench.json and bench.png; the paths."""
        from .picture import save_profile

        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        partial = write_json(self.to_dict(), where / "bench.json.part")
        return [partial.replace(where / "bench.json"), save_profile(self, where / "bench.png")]
