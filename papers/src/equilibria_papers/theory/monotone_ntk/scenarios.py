"""Runs in which the theorems of paper 004 can be seen to hold, to say nothing, and to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .conditions import ConditionReport, Radii, check_condition, ingredients
from .kernel import closed_form_kernel
from .model import ThesisModel
from .radii import search_radii
from .runs import Progress, Run, gradient_descent, gradient_flow

__all__ = ["SCENARIOS", "Outcome", "Scenario", "run_scenario"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An initialization, data, the condition that is asked for, and how the run goes.

    ``radii`` None: searched for. ``step`` None: what the condition allows (descent), or the largest
    at which the linearized descent still falls, 1/λ_max(K(0)), where no condition holds.
    """

    name: str
    text: str
    build: Callable[[int], tuple[ThesisModel, Tensor, Tensor]]
    condition: str
    kind: str
    radii: Radii | None = None
    steps: int = 1000
    method: str = "DOP853"
    horizon: float = 20.0  # in units of 1/λ₀²


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A scenario that was run. ``kept``: the guaranteed curve was above the loss at every point."""

    scenario: Scenario
    report: ConditionReport
    run: Run
    seed: int

    @property
    def kept(self) -> bool:
        """Whether loss ≤ guaranteed loss at every recorded point, up to 1e-6."""
        return self.run.worst <= 1.0 + 1e-6

    @property
    def verdict(self) -> str:
        """What the run says about the theorem."""
        if self.report.holds:
            said = "keeps the rate" if self.kept else "BREAKS the rate: the theorem is false"
            return f"{self.report.condition} holds; the run {said}"
        said = "keeps the rate all the same" if self.kept else "does not keep the rate"
        return f"{self.report.condition} does not hold, nothing is guaranteed; the run {said}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "scenario": self.scenario.name,
            "text": self.scenario.text,
            "seed": self.seed,
            "verdict": self.verdict,
            "condition_holds": self.report.holds,
            "rate_kept": self.kept,
            "report": self.report.to_dict(),
            "run": self.run.to_dict(),
        }


def _diagonal(scale: float, m: float, tilt: float = 0.0) -> tuple[ThesisModel, Tensor, Tensor]:
    """n = N = d = 2, A = B = 0, X = I, u = 0, ‖y‖ = 1, U = scale·I, less ``tilt`` off the diagonal.

    With a tilt the arguments of the inactive units are −tilt and no longer at ReLU's kink; Z is the
    same.
    """
    eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    U = scale * eye - tilt * (1.0 - eye)
    model = ThesisModel(A=zero, B=zero, U=U, u=zero[0], m=m)
    return model, eye, torch.tensor([0.6, 0.8], dtype=torch.float64)


def _lazy(seed: int) -> tuple[ThesisModel, Tensor, Tensor]:
    """A usual A and B, u = 0, and a U so large that Condition 1 holds with a slack of about 1.1.

    λ₀ grows with U while ŷ = 0 does not; the best slack is all but linear in the size of U.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = ThesisModel.usual(8, 8, m=0.5, generator=generator)
    X = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    y = torch.randn(3, dtype=torch.float64, generator=generator)
    scale = 1e4
    for _ in range(3):
        U, u = scale * drawn.U, torch.zeros_like(drawn.u)
        model = ThesisModel(A=drawn.A, B=drawn.B, U=U, u=u, m=drawn.m)
        scale *= 1.1 / search_radii("1", ingredients(model, X, y)).slack
    return model, X, y


def _usual(seed: int) -> tuple[ThesisModel, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(16, 8, m=0.5, generator=generator)
    X = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return model, X, torch.randn(4, dtype=torch.float64, generator=generator)


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        each.name: each
        for each in (
            Scenario(
                name="guaranteed-flow",
                text="gradient flow where Condition 1 holds: U = 20I less 1/2 off the diagonal",
                build=lambda seed: _diagonal(20.0, 1.0, tilt=0.5),
                condition="1",
                kind="flow",
            ),
            Scenario(
                name="guaranteed-descent",
                text="gradient descent where the repaired Condition 2′ holds: U = 160I less 1 off "
                "the diagonal",
                build=lambda seed: _diagonal(160.0, 1.0, tilt=1.0),
                condition="2'",
                kind="descent",
                steps=1200,
            ),
            Scenario(
                name="guaranteed-random",
                text="gradient flow where Condition 1 holds: random A, B, X, y, n = 8, N = 3, u = "
                "0, and U scaled up until it does",
                build=_lazy,
                condition="1",
                kind="flow",
            ),
            Scenario(
                name="usual-flow",
                text="gradient flow from a usual initialization, n = 16, N = 4",
                build=_usual,
                condition="1",
                kind="flow",
                method="fixed",  # it slides along kinks of the ReLU
                horizon=3.0,
            ),
            Scenario(
                name="usual-descent",
                text="gradient descent from a usual initialization, n = 16, N = 4",
                build=_usual,
                condition="2'",
                kind="descent",
                steps=400,
            ),
            Scenario(
                name="counterexample",
                text="the printed Theorem 3.3.5 broken: Condition 2 as printed holds, η = 4/λ₀² is "
                "allowed, and the loss grows ninefold a step",
                build=lambda seed: _diagonal(10.0, 0.05),
                condition="2",
                kind="descent",
                radii=Radii(A=1.0, B=1.0, U=5.0, u=0.1),
                steps=6,
            ),
        )
    }
)


def run_scenario(name: str, *, seed: int = 0, progress: Progress | None = None) -> Outcome:
    """Check the scenario's condition (radii searched for unless it gives them) and run it."""
    if name not in SCENARIOS:
        raise ValueError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}.")
    scenario = SCENARIOS[name]
    model, X, y = scenario.build(seed)
    given = ingredients(model, X, y)
    if scenario.radii is None:
        report = search_radii(scenario.condition, given)
    else:
        report = check_condition(scenario.condition, given, scenario.radii)
    if scenario.kind == "flow":
        horizon = scenario.horizon / given.lambda0**2
        run = gradient_flow(model, X, y, method=scenario.method, horizon=horizon, progress=progress)
    else:
        step = report.step if report.holds else None
        if step is None:
            step = 1.0 / float(torch.linalg.eigvalsh(closed_form_kernel(model, X).total)[-1])
        run = gradient_descent(model, X, y, step=step, steps=scenario.steps, progress=progress)
    return Outcome(scenario=scenario, report=report, run=run, seed=seed)
