"""The solvers of a model's equilibrium layers: what they did over a data set, or others instead."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.adjoints.graph import blown_up
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import Result, Solution
from equilibria.engine.solver import SolverOptions
from equilibria.nn.observing import Observed, equilibrium_layers
from equilibria.solvers import Auto
from equilibria.solvers.forward_backward import SplittingSolver

from .rich_output import make_table, number, percent

SETTLED = 1e-3
"""A relative residual at which a fixed-step solve may be called settled."""


def layer_label(name: str) -> str:
    """The name of a layer in tables; a model that is a layer itself has none."""
    return name or "(the model)"


def with_solver(model: nn.Module, solver: SolverOptions | None) -> nn.Module:
    """A deep copy in which ``solver`` solves every equilibrium layer; for None the model itself.

    A solver with tolerances, ``eq.Auto(rtol=1e-5)``, shows what a network gives at its equilibria,
    where it was trained with a few fixed steps.
    """
    return model if solver is None else replaced(model, solver=solver)


def replaced(
    model: nn.Module, *, solver: SolverOptions | None = None, adjoint: Adjoint | None = None
) -> nn.Module:
    """A deep copy in which every layer has this solver, this adjoint, or both; None keeps its own.

    Layers inside layers (the branches of a MultiBranch) are changed too. ``Auto`` leaves a layer
    that is solved by operator splitting its splitting (Anderson may fail there) and gives it its
    tolerances.
    """
    for name, given, kind in (("solver", solver, SolverOptions), ("adjoint", adjoint, Adjoint)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{name}={given!r}: expected a {name} object of this library, or None.")
    made = copy.deepcopy(model)
    for module in made.modules():
        if solver is not None and isinstance(getattr(module, "solver", None), SolverOptions):
            module.solver = _suited(solver, module.solver)  # type: ignore[assignment]
        if adjoint is not None and isinstance(getattr(module, "adjoint", None), Adjoint):
            module.adjoint = adjoint  # type: ignore[assignment]
    return made


def _suited(solver: SolverOptions, own: object) -> SolverOptions:
    """``solver``, or ``own`` with its tolerances where that is a splitting and Auto may choose."""
    if not (isinstance(solver, Auto) and isinstance(own, SplittingSolver)):
        return solver
    steps = max(own.max_steps, solver.max_steps)
    return dataclasses.replace(own, rtol=solver.rtol, atol=solver.atol, max_steps=steps)


@dataclass(frozen=True, eq=False)
class SolverStatistics:
    """The solves of one layer, one for each sample and pass."""

    solver: str
    """Empty for a network that onnxruntime runs: its file does not say."""
    chosen: str
    """What the solver chose to run where it chooses (``Auto``), else empty."""
    solves: int
    results: dict[str, int]
    """How many solves ended in which way."""
    fixed_steps: bool
    """Whether the solver runs a fixed number of steps and tests nothing."""
    histogram: Tensor
    """Long: entry s counts the solves of s steps."""
    residual: Tensor
    """Relative residual ‖T(z) − z‖/‖T(z)‖ at the quantiles 0, 5, 25, 50, 75, 95, 100%, [7]. Of a
    fixed-step solve it is that of the last iterate but one. Solves that ended as NaN are left out.
    """
    settled: float
    """Share of solves with a relative residual of at most 1e-3; NaN where nobody looked at it."""

    QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

    @property
    def converged(self) -> float:
        """Share of solves that passed their tolerance; 0 with fixed steps, which test none."""
        return self.results.get(Result.converged.name, 0) / self.solves

    @property
    def mean_steps(self) -> float:
        steps = torch.arange(len(self.histogram), dtype=torch.float64)
        return float((steps * self.histogram).sum() / self.solves)

    @property
    def max_steps(self) -> int:
        return int(self.histogram.nonzero().max())

    def to_dict(self) -> dict[str, Any]:
        names = ("min", "p5", "p25", "median", "p75", "p95", "max")
        found = dict(vars(self))
        steps, residual = found.pop("histogram"), found.pop("residual").tolist()
        return {
            **found,
            "converged": self.converged,
            "mean_steps": self.mean_steps,
            "max_steps": self.max_steps,
            "steps_histogram": steps,
            "relative_residual": dict(zip(names, residual, strict=True)),
        }


def solver_table(*sets: Mapping[str, SolverStatistics]) -> Any:
    """Steps per sample, residuals and shares of every layer, a section for each set."""
    names = ("layer", "solver", "steps", "residual", "at 95%", "converged", "≤ 1e-3")
    table = make_table("solves", names, [], left=2)
    for statistics in sets:
        for name, part in statistics.items():
            most = "" if part.fixed_steps else f" (max {part.max_steps})"
            table.add_row(
                layer_label(name),
                (part.solver.split("(")[0] or "–") + (f"\n→ {part.chosen}" if part.chosen else ""),
                f"{part.mean_steps:.4g}{most}",
                number(float(part.residual[3]), 2),
                number(float(part.residual[5]), 2),
                "fixed steps" if part.fixed_steps else percent(part.converged),
                percent(part.settled),
            )
        table.add_section()
    return table


class SolverRecorder:
    """Keeps [B] vectors of every solve on the device; reads them at the end."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: dict[str, Any] = dict(equilibrium_layers(model))
        self._kept: dict[str, list[tuple[Tensor, Tensor, Tensor, str]]] = {}

    def add(self, seen: Observed) -> None:
        """Take what was seen, and let go of the states."""
        for name, solutions in seen.solutions.items():
            for found in solutions:
                self._keep(name, found)
        seen.clear()

    def _keep(self, name: str, found: Solution[Any]) -> None:
        # A MultiBranch solves its branches one by one and says how each of them did.
        parts = getattr(found, "parts", ())
        if parts:
            for number, (branch, part) in enumerate(
                zip(self._layers[name].branches, parts, strict=True)
            ):
                inner = f"{name}.branches.{number}" if name else f"branches.{number}"
                self._layers.setdefault(inner, branch)
                self._keep(inner, part)
            return
        stats, choice = found.stats, found.choice.split(":")[0]
        self._kept.setdefault(name, []).append((found.result, stats.steps, stats.relative, choice))

    def compute(self) -> dict[str, SolverStatistics]:
        """By layer, in the order of the model; here the host waits."""
        order = sorted(self._kept, key=list(self._layers).index)
        return {name: self._layer(name) for name in order}

    def _layer(self, name: str) -> SolverStatistics:
        solver = getattr(self._layers[name], "solver", None)
        *tensors, choices = zip(*self._kept[name], strict=True)
        result, steps, relative = (torch.cat([t.flatten() for t in ts]).cpu() for ts in tensors)
        counts = torch.bincount(result.long(), minlength=len(Result)).tolist()
        residual = relative.double()
        looked = residual[residual.isfinite() | blown_up(result)]
        known = residual[residual.isfinite()].sort().values
        at = torch.tensor(SolverStatistics.QUANTILES, dtype=torch.float64)
        quantiles = torch.full_like(at, float("nan"))
        if known.numel():
            quantiles = known[(at * (known.numel() - 1)).round().long()]
        return SolverStatistics(
            solver="" if solver is None else repr(solver),
            chosen=", ".join(sorted(set(choices))) if isinstance(solver, Auto) else "",
            solves=len(result),
            results={code.name: counts[code] for code in Result if counts[code]},
            fixed_steps=counts[Result.fixed_steps] > 0 or getattr(solver, "fixed_steps", False),
            histogram=torch.bincount(steps.long()),
            residual=quantiles,
            settled=float((looked <= SETTLED).double().mean()),
        )
