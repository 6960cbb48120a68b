"""The split against a clock that the model itself moves: every part is known exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.engine.options import options
from equilibria.evaluation.solve_marks import Marks, marked, solving_layers
from equilibria.evaluation.timing import _Workload

from . import slow_clock as fakes
from .slow_clock import Clock, SlowLayer, SlowPicard, SlowSGD, clock, slow_loss, slow_model

__all__ = ["clock"]

STEPS = 6
FIXED = SlowPicard(rtol=0.0, atol=0.0, max_steps=STEPS)


def run(model: nn.Module, kind: str = "train") -> Marks:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    settings = {
        "loss": slow_loss,
        "optimizer": lambda parameters: SlowSGD(parameters, lr=0.0),
        "precision": "32-true",
        "channels_last": False,
        "compiled": False,
    }
    work = _Workload(model, x, torch.tensor([0, 1, 0, 1, 1]), settings)
    marks = Marks(torch.device("cpu"))
    with work.mode(kind), marked(work.model, marks):
        work.run(kind, marks)
    return marks


def by_part(marks: Marks) -> dict[str, float]:
    found: dict[str, float] = {}
    for (_, part), seconds in marks.seconds().items():
        found[part] = found.get(part, 0.0) + seconds
    return found


# What each adjoint evaluates with a graph, and how many products it takes, for these weights.
ADJOINTS: dict[str, tuple[Any, int, int | None]] = {
    "one step": (eq.OneStep(), 1, 1),
    "phantom": (eq.Phantom(steps=3), 3, 3),
    # The series of 4 terms has 3 products; one more goes to the weights.
    "neumann": (eq.Phantom(steps=4, form="neumann"), 1, 4),
    "implicit": (eq.Implicit(), 1, None),
    "implicit, fixed point": (
        eq.Implicit(solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=7)),
        1,
        # Seven steps, one product for the residual and one to the weights.
        9,
    ),
}


@pytest.mark.parametrize("name", ADJOINTS)
def test_every_part_of_a_training_step_is_found(clock: Clock, name: str) -> None:
    adjoint, graphs, products = ADJOINTS[name]
    marks = run(slow_model(SlowLayer(solver=FIXED, adjoint=adjoint)))
    found, layer = by_part(marks), "1"
    counted = marks.counts[layer, "products"]
    assert marks.counts[layer, "evaluations"] == STEPS
    assert marks.counts[layer, "graph_evaluations"] == graphs
    assert products is None or counted == products
    assert counted > 0
    assert found["map"] == STEPS * fakes.MAP
    assert found["solver"] == STEPS * fakes.STEP
    assert found["adjoint_map"] == graphs * fakes.MAP + counted * fakes.MAP_BACK
    assert found.get("adjoint_solver", 0.0) == 0.0
    assert found["prepare"] == fakes.INJECT
    assert found["forward"] == 2 * fakes.OUTER
    assert found["loss"] == fakes.LOSS
    assert found["backward"] == 2 * fakes.OUTER_BACK + fakes.LOSS_BACK + fakes.INJECT_BACK
    assert found["optimizer"] == fakes.OPTIMIZER
    assert sum(found.values()) == clock.now


@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_unrolled_solve_is_the_solves_own(clock: Clock, checkpoint: bool) -> None:
    marks = run(slow_model(SlowLayer(solver=FIXED, adjoint=eq.Unrolled(checkpoint=checkpoint))))
    found = by_part(marks)
    again = STEPS * fakes.MAP if checkpoint else 0.0
    assert found["map"] == STEPS * fakes.MAP
    assert found["solver"] == STEPS * fakes.STEP
    assert found["adjoint_map"] == again + STEPS * fakes.MAP_BACK
    assert found["backward"] == 2 * fakes.OUTER_BACK + fakes.LOSS_BACK + fakes.INJECT_BACK
    assert sum(found.values()) == clock.now


def test_an_adjoint_that_is_a_slow_solver_is_charged_for_it(clock: Clock) -> None:
    back = SlowPicard(rtol=0.0, atol=0.0, max_steps=7)
    marks = run(slow_model(SlowLayer(solver=FIXED, adjoint=eq.Implicit(solver=back))))
    found = by_part(marks)
    assert found["adjoint_solver"] == 7 * fakes.STEP
    assert found["solver"] == STEPS * fakes.STEP
    assert found["adjoint_map"] == fakes.MAP + 9 * fakes.MAP_BACK


@options
class SlowGMRES(eq.GMRES):
    """GMRES that thinks for two seconds before its first product."""

    def solve(self, *given: Any, **options: Any) -> Any:
        fakes.CLOCK.now += 2.0
        return eq.GMRES.solve(self, *given, **options)


@options
class SlowOneStep(eq.OneStep):
    """One step, and a second of thought after its evaluation."""

    def run(self, *given: Any) -> Any:
        done = eq.OneStep.run(self, *given)
        fakes.CLOCK.now += 1.0
        return done


def test_what_an_adjoint_does_beside_the_map_is_its_solvers(clock: Clock) -> None:
    marks = run(slow_model(SlowLayer(solver=FIXED, adjoint=eq.Implicit(solver=SlowGMRES()))))
    assert marks.seconds()["1", "adjoint_solver"] == 2.0
    marks = run(slow_model(SlowLayer(solver=FIXED, adjoint=SlowOneStep())))
    assert marks.seconds()["1", "adjoint_solver"] == 1.0
    assert marks.seconds()["1", "solver"] == STEPS * fakes.STEP


class Pair(SlowLayer):
    """Two states at once: a product with Jᵀ is still one."""

    def step(self, z: Any, *injected: Any) -> Any:
        a = super().step(z["a"], *injected)
        return {"a": a, "b": 0.5 * torch.tanh(z["b"] + a)}

    def start(self, x: Any, *injected: Any) -> Any:
        zero = torch.zeros_like(injected[0])
        return {"a": zero, "b": zero.clone()}

    def forward(self, x: Any, z0: Any = None) -> Any:
        found = super().forward(x, z0)
        return found["a"] + found["b"]


def test_a_state_of_several_tensors_counts_once(clock: Clock) -> None:
    marks = run(slow_model(Pair(solver=FIXED, adjoint=eq.Phantom(steps=3))))
    assert marks.counts["1", "products"] == 3
    assert marks.counts["1", "graph_evaluations"] == 3
    found = by_part(marks)
    assert found["adjoint_map"] + found.get("adjoint_solver", 0.0) == 3 * (
        fakes.MAP + fakes.MAP_BACK
    )
    assert found["backward"] == 2 * fakes.OUTER_BACK + fakes.LOSS_BACK + fakes.INJECT_BACK


def test_an_inference_has_no_adjoint(clock: Clock) -> None:
    found = by_part(run(slow_model(SlowLayer(solver=FIXED)), "inference"))
    assert found == {
        "forward": 2 * fakes.OUTER,
        "prepare": fakes.INJECT,
        "solver": STEPS * fakes.STEP,
        "map": STEPS * fakes.MAP,
    }


def test_layers_are_told_apart(clock: Clock) -> None:
    first = SlowLayer(solver=FIXED, adjoint=eq.Phantom(steps=2))
    second = SlowLayer(
        solver=SlowPicard(rtol=0.0, atol=0.0, max_steps=2), adjoint=eq.Phantom(steps=4)
    )
    seconds = run(slow_model(first, second)).seconds()
    for name, steps, phantom in (("1", STEPS, 2), ("2", 2, 4)):
        assert seconds[name, "map"] == steps * fakes.MAP
        assert seconds[name, "solver"] == steps * fakes.STEP
        assert seconds[name, "adjoint_map"] == phantom * (fakes.MAP + fakes.MAP_BACK)


def test_marks_change_no_gradient_and_leave_nothing_behind() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 4, patch=eq.Patches(channels=2, size=2), hidden=None)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer).double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    own = layer.adjoint
    found = []
    for with_marks in (False, True):
        model.zero_grad()
        marks = Marks(torch.device("cpu"))
        layer.W.parametrizations.weight[0].eval()  # the power iteration stands still
        if with_marks:
            with marked(model, marks):
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) > 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert layer.adjoint is own
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_all_is_as_before_after_an_error() -> None:
    layer = SlowLayer()
    own = layer.adjoint
    with pytest.raises(ZeroDivisionError), marked(layer, Marks(torch.device("cpu"))):
        _ = 1 // 0
    assert layer.adjoint is own
    assert not layer._forward_hooks


def test_branches_count_one_by_one() -> None:
    def branch() -> eq.nn.GEQ:
        return eq.nn.GEQ(4, 4, patch=eq.Patches(channels=2, size=2), hidden=None)

    apart = eq.nn.MultiBranch([branch(), branch()], (4, 2))
    model = nn.ModuleDict({"apart": apart})
    assert list(solving_layers(model)) == ["apart.branches.0", "apart.branches.1"]
    marks = Marks(torch.device("cpu"))
    with marked(apart, marks):
        apart(torch.randn(2, 4, 4, 4)).sum().backward()
    assert marks.counts["branches.0", "evaluations"] > 0
    assert marks.counts["branches.1", "products"] > 0
