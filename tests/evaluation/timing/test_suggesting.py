"""Each rule on a case made for it, with the gain worked out by hand; and trials."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation.solver_statistics import SolverStatistics
from equilibria.evaluation.timing.ideas import Case, Idea
from equilibria.evaluation.timing.machine_rules import (
    fewer_power_iterations,
    looser_adjoint,
    memory_format,
)
from equilibria.evaluation.timing.measuring import Memory, Spread
from equilibria.evaluation.timing.report import LayerProfile, PassProfile, Suggestion
from equilibria.evaluation.timing.solver_rules import (
    compaction,
    fixed_steps,
    looser_tolerance,
    other_solver,
)
from equilibria.evaluation.timing.suggesting import suggest
from equilibria.evaluation.timing.timeline import PARTS
from equilibria.evaluation.timing.trying import try_all
from equilibria.evaluation.timing.workload import Workload


class Linear(eq.nn.MapLayer):
    """z* = a z* + x, a of each sample in the first column: solved to 1e-4 in known steps."""

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def step(self, z: Tensor, *injected: Tensor) -> Tensor:
        x = injected[0]
        return x[:, :1] * z + x

    def start(self, x: Tensor, *injected: Tensor) -> Tensor:
        return torch.zeros_like(x)


def case(
    layer: nn.Module,
    x: Tensor,
    *,
    parts: dict[str, float],
    steps: list[int] | None = None,
    kind: str = "train",
) -> Case:
    """A measured pass made up: ``parts`` in seconds, ``steps`` of the samples."""
    work = Workload.of(layer, x, torch.zeros(len(x), dtype=torch.long))
    whole = dict.fromkeys(PARTS, 0.0) | parts
    histogram = torch.bincount(torch.tensor(steps or [1] * len(x)))
    statistics = SolverStatistics("", "", len(x), {}, False, histogram, torch.zeros(7), 1.0)
    inner = ("map", "solver", "adjoint_map", "adjoint_solver")
    one = LayerProfile("", {p: whole[p] for p in inner}, 1, 1, 1, statistics, None)
    spread = Spread(1.0, 1.0, 1.0, 1)
    memory = Memory(0, 0, "")
    main = PassProfile(kind, len(x), spread, spread, spread, 0.0, whole, (one,), memory, None)
    return Case(work, main)


def samples(*rates: float) -> Tensor:
    x = torch.ones(len(rates), 3)
    x[:, 0] = torch.tensor(rates)
    return x


def predicted(idea: Idea | None) -> float:
    assert idea is not None
    assert idea.said.predicted is not None
    return idea.said.predicted


def test_a_solver_that_costs_more_than_its_share_should_test_less() -> None:
    layer = Linear(solver=eq.Anderson(rtol=1e-4))
    busy = case(layer, samples(0.5, 0.5), parts={"map": 4.0, "solver": 5.0, "forward": 1.0})
    idea = fixed_steps(busy)
    assert predicted(idea) == pytest.approx(10 / 5)
    calm = case(layer, samples(0.5, 0.5), parts={"map": 8.0, "solver": 2.0})
    assert fixed_steps(calm) is None
    fixed = Linear(solver=eq.Picard(rtol=0.0, max_steps=3))
    assert fixed_steps(case(fixed, samples(0.5), parts={"map": 1.0, "solver": 9.0})) is None


def test_fixed_steps_are_those_that_the_slowest_sample_took() -> None:
    layer = Linear(solver=eq.Anderson(rtol=1e-4))
    parts = {"map": 1.0, "solver": 1.0}
    idea = fixed_steps(case(layer, samples(0.5, 0.2), parts=parts, steps=[9, 4]))
    assert idea is not None
    assert idea.edit is not None
    idea.edit(layer)
    assert layer.solver == eq.Anderson(rtol=0.0, atol=0.0, max_steps=9)


def test_compaction_is_worth_what_finished_samples_cost() -> None:
    layer = Linear(solver=eq.Picard(rtol=1e-4))
    x = samples(*[0.1] * 8)
    parts = {"map": 6.0, "solver": 2.0, "forward": 2.0}
    idea = compaction(case(layer, x, parts=parts, steps=[4] * 7 + [40]))
    # Mean 8.5 of 40 steps: 78.75% of 8 seconds are wasted.
    assert predicted(idea) == pytest.approx(10 / (10 - 8 * 0.7875))
    assert compaction(case(layer, x, parts=parts, steps=[36] * 7 + [40])) is None
    layer.solver = eq.Picard(rtol=1e-4, compact=True)
    assert compaction(case(layer, x, parts=parts, steps=[4] * 7 + [40])) is None


def test_anderson_is_suggested_where_plain_iteration_is_slow() -> None:
    layer = Linear(solver=eq.Picard(rtol=1e-4, max_steps=1000, block=1))
    idea = other_solver(case(layer, samples(0.97, 0.97), parts={"map": 9.0, "solver": 1.0}))
    assert idea is not None
    assert "Anderson" in idea.said.name or "Auto" in idea.said.name
    # 0.97ⁿ·(1 − 0.97) ≤ 1e-4 (relative to 1): 303 steps; Anderson is exact after three.
    assert predicted(idea) > 10


def test_picard_is_suggested_where_anderson_gains_nothing() -> None:
    layer = Linear(solver=eq.Anderson(rtol=1e-4, block=1))
    parts = {"map": 2.0, "solver": 8.0}
    idea = other_solver(case(layer, samples(0.0, 0.0), parts=parts))
    assert idea is not None
    assert idea.said.name == "solver Picard"
    assert predicted(idea) == pytest.approx(5.0, rel=0.01)
    assert idea.edit is not None
    idea.edit(layer)
    assert isinstance(layer.solver, eq.Picard)
    assert layer.solver.rtol == 1e-4


def test_a_tighter_tolerance_than_decisions_need_is_found() -> None:
    layer = Linear(solver=eq.Picard(rtol=1e-6, max_steps=100, block=1))
    idea = looser_tolerance(case(layer, samples(0.5, 0.5), parts={"map": 10.0}))
    # With a = ½ the relative residual is 2⁻ⁿ/(2 − 2¹⁻ⁿ): below 1e-6 at n = 19, below 1e-5 at 16.
    assert predicted(idea) == pytest.approx(20 / 17, rel=0.02)


def test_an_adjoint_need_not_go_further_than_the_solve() -> None:
    forward = eq.Picard(rtol=1e-2)
    layer = Linear(solver=forward, adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-8)))
    parts = {"map": 2.0, "adjoint_map": 6.0, "adjoint_solver": 2.0}
    idea = looser_adjoint(case(layer, samples(0.5), parts=parts))
    # 2 digits instead of 8: three quarters of 8 seconds.
    assert predicted(idea) == pytest.approx(10 / 4)
    assert idea is not None
    assert idea.edit is not None
    idea.edit(layer)
    assert layer.adjoint == eq.Implicit(solver=eq.GMRES(rtol=1e-2))
    layer.adjoint = eq.Implicit(solver=eq.GMRES(rtol=1e-2))
    assert looser_adjoint(case(layer, samples(0.5), parts=parts)) is None


def test_power_iterations_are_counted() -> None:
    layer = eq.nn.GEQ(4, 4, hidden=None, constraint=eq.nn.NormBounded(bound=0.9, steps=4))
    x = torch.randn(2, 4)
    idea = fewer_power_iterations(case(layer, x, parts={"map": 6.0, "norm": 4.0}))
    # 9 products become 3: two thirds of 4 seconds.
    assert predicted(idea) == pytest.approx(10 / (10 - 4 * 2 / 3))
    assert fewer_power_iterations(case(layer, x, parts={"map": 9.9, "norm": 0.1})) is None


def test_channels_last_is_suggested_until_it_is_done() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    x = torch.randn(2, 3, 6, 6)
    parts = {"forward": 1.0}
    assert memory_format(case(model, x, parts=parts)) is not None
    done = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert memory_format(case(done, x, parts=parts)) is None


def test_suggestions_come_largest_first() -> None:
    layer = Linear(solver=eq.Picard(rtol=1e-6, max_steps=2000, block=1))
    made = case(layer, samples(*[0.9] * 8), parts={"map": 8.0, "solver": 5.0}, steps=[9] * 8)
    found = suggest(made.work, made.main)
    gains = [idea.said.predicted or 1.0 for idea in found]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) >= 2


# ---------------------------------------------------------------------- trials


class Trained(nn.Module):
    """x ↦ U z*(x): something to train behind the equilibrium."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = Linear(**how)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x))
        return out


def test_a_trial_measures_gain_and_change() -> None:
    model = Trained(solver=eq.Picard(rtol=1e-7, max_steps=3000, block=1))
    x, y = samples(0.99, 0.99), torch.zeros(2, dtype=torch.long)
    idea = Idea(Suggestion("a", "", "", 2.0), edit=_to_anderson)
    broken = Idea(Suggestion("b", "", "", None), edit=_break)
    untried = Idea(Suggestion("c", "", "", 1.1))
    settings = {"precision": "32-true"}
    found = try_all(model, x, y, settings, [untried, broken, idea], "train", 3, False)
    by_name = {one.said.name: one.said for one in found}
    # Over a thousand steps against a handful.
    assert by_name["a"].measured is not None
    assert by_name["a"].measured > 5
    assert by_name["a"].change is not None
    assert by_name["a"].change < 1e-3
    assert by_name["b"].measured is None
    assert "could not be tried: no such thing" in by_name["b"].note
    assert by_name["c"] == untried.said
    assert found[0].said.name == "a"
    assert isinstance(model.layer.solver, eq.Picard)  # the given model is as it was


def _to_anderson(model: nn.Module) -> None:
    layer: Any = model.get_submodule("layer")
    layer.solver = eq.Anderson(rtol=1e-6)


def _break(model: nn.Module) -> None:
    raise ValueError("no such thing")


def test_suggestions_are_frozen() -> None:
    said = Suggestion("a", "b", "c", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        said.name = "d"  # type: ignore[misc]
