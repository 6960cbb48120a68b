"""What solvers did, against the Solutions themselves; other solvers in a copy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation import replaced, with_solver
from equilibria.evaluation.layer_solvers import SolverRecorder
from equilibria.nn import observe
from equilibria.nn.layer import MapLayer
from equilibria.nn.monotone import MonotoneDEQ
from equilibria.nn.multi_branch import MultiBranch
from equilibria.solvers.peaceman_rachford import PeacemanRachford
from tests.evaluation.standins import tiny_geq


class Scaled(MapLayer):
    """z = a z + x with a factor a for each sample, its first entry: slow, fast or divergent."""

    def inject(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return x[:, :1] * z + x

    def start(self, x: Tensor, *injected: Tensor) -> Tensor:
        return torch.zeros_like(x)


def test_numbers_of_every_solve() -> None:
    layer = Scaled(eq.Picard(rtol=1e-6, max_steps=64, block=1))
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(40, 3, generator=draw).double() * 0.9
    x[7, 0], x[8, 0] = 3.0, float("nan")
    recorder = SolverRecorder(layer)
    steps, relative, codes = [], [], []
    with observe(layer) as seen:
        for part in x.split(15):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eq.ConvergenceWarning)
                layer(part)
            found = seen.solutions[""][-1]
            steps += found.stats.steps.tolist()
            relative += found.stats.relative.tolist()
            codes += found.result.tolist()
            recorder.add(seen)
            assert len(seen) == 0
    stats = recorder.compute()[""]
    assert stats.solves == 40
    assert stats.histogram.tolist() == np.bincount(steps).tolist()
    assert stats.mean_steps == pytest.approx(np.mean(steps))
    assert stats.max_steps == max(steps)
    assert stats.results["converged"] == codes.count(0)
    assert stats.results["nonfinite"] == 1
    assert sum(stats.results.values()) == 40
    assert stats.converged == codes.count(0) / 40
    known = np.array(relative)[np.isfinite(relative)]
    assert float(stats.residual[0]) == known.min()
    assert float(stats.residual[-1]) == known.max()
    expected = np.quantile(known, stats.QUANTILES, method="nearest")
    np.testing.assert_allclose(stats.residual.numpy(), expected, rtol=0.5)
    assert stats.settled == pytest.approx(np.mean(np.array(relative) <= 1e-3))
    assert not stats.fixed_steps


def test_fixed_steps_and_choices_are_told() -> None:
    x = torch.randn(2, 1, 8, 8)
    for solver, fixed, chosen in (
        (eq.Picard(max_steps=4, rtol=0.0), True, ""),
        (eq.Auto(rtol=1e-3), False, "Anderson"),
    ):
        model = tiny_geq(solver=solver)
        recorder = SolverRecorder(model)
        with torch.no_grad(), observe(model) as seen:
            model(x)
        recorder.add(seen)
        stats = recorder.compute()["1"]
        assert stats.fixed_steps is fixed
        assert stats.chosen == chosen
        assert stats.to_dict()["solver"] == repr(solver)


def test_branches_are_told_one_by_one() -> None:
    layers = [eq.nn.GEQ(2, 2, hidden=None, patch=eq.Patches(channels=1, size=2)) for _ in range(2)]
    model = nn.Sequential(MultiBranch(layers, [4, 2]))
    recorder = SolverRecorder(model)
    with torch.no_grad(), observe(model) as seen:
        model(torch.randn(3, 2, 4, 4))
    recorder.add(seen)
    found = recorder.compute()
    assert list(found) == ["0.branches.0", "0.branches.1"]
    assert all(part.solves == 3 for part in found.values())


def test_every_layer_of_a_copy_is_changed_and_the_model_is_not() -> None:
    branches = MultiBranch(
        [eq.nn.GEQ(2, 2, hidden=None, patch=eq.Patches(channels=1, size=2))], [4]
    )
    model = nn.ModuleList([tiny_geq(), branches])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tight = eq.Auto(rtol=1e-6)
    made = replaced(model, solver=tight, adjoint=eq.OneStep())
    layers = [made[0][1], made[1].branches[0]]
    assert all(layer.solver is tight for layer in layers)
    assert all(layer.adjoint == eq.OneStep() for layer in layers)
    assert isinstance(model[0][1].solver, eq.Picard)
    assert isinstance(replaced(model, adjoint=eq.OneStep())[0][1].solver, eq.Picard)
    assert with_solver(model, None) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_copy_gives_the_equilibrium() -> None:
    model = tiny_geq().double()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    made = with_solver(model, eq.Auto(rtol=1e-12, max_steps=500))
    with torch.no_grad():
        z = made[:2](x)  # type: ignore[index]
        problem = model[1].problem(model[0](x))
        torch.testing.assert_close(problem.step(z), z, rtol=0, atol=1e-10)
        assert float((model[:2](x) - z).abs().max()) > 1e-4


def test_auto_leaves_a_splitting_its_kind_and_gives_it_tolerances() -> None:
    layer = MonotoneDEQ(4)
    made = with_solver(layer, eq.Auto(rtol=1e-7, max_steps=1000))
    assert isinstance(made.solver, PeacemanRachford)
    assert made.solver.rtol == 1e-7
    assert made.solver.max_steps == 1000
    assert isinstance(with_solver(layer, eq.Anderson()).solver, eq.Anderson)


def test_wrong_objects() -> None:
    with pytest.raises(TypeError, match="solver='auto': expected a solver object"):
        replaced(tiny_geq(), solver="auto")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="adjoint="):
        replaced(tiny_geq(), adjoint=eq.Anderson())  # type: ignore[arg-type]
