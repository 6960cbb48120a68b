"""fixed_point(aux=True), and warm starts over a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.adjoint_contract import contraction, draw

SOLVER = eq.Anderson(rtol=1e-12, max_steps=200)


def with_gates(z: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    gate = torch.sigmoid(z @ w.mT + x)
    return 0.5 * gate * z + x, {"gate": gate, "name": "gates"}


@pytest.mark.parametrize("adjoint", [eq.Implicit(), eq.Unrolled()], ids=["implicit", "unrolled"])
def test_aux_is_that_of_the_value_with_its_gradient(adjoint: Any) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        start = torch.zeros(3, 4, dtype=torch.float64)
        sol = eq.fixed_point(with_gates, start, (w, x), solver=SOLVER, adjoint=adjoint, aux=True)
        assert sol.aux["name"] == "gates"
        torch.testing.assert_close(sol.aux["gate"], torch.sigmoid(sol.value @ w.mT + x))
        assert not sol.detach().aux["gate"].requires_grad
        return (sol.aux["gate"] * draw(9, 3, 4)).sum()

    w, x = contraction(0, 4, 4).requires_grad_(), draw(1, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(loss, (w, x), atol=1e-6)


def test_aux_of_complex_states_and_of_a_map_without_it() -> None:
    b = torch.complex(draw(0, 2, 3), draw(1, 2, 3))
    sol = eq.fixed_point(lambda z: (0.5 * z + b, z.abs()), torch.zeros_like(b), aux=True)
    torch.testing.assert_close(sol.aux, sol.value.abs())
    assert eq.fixed_point(lambda z: 0.5 * z + b, torch.zeros_like(b)).aux is None
    with pytest.raises(TypeError, match=r"aux=True.*\(T\(z\), aux\), got Tensor"):
        eq.fixed_point(lambda z: 0.5 * z, torch.zeros(2, 3), aux=True)


def test_warm_starts_over_a_sequence_take_fewer_steps() -> None:
    """Frames that change little: from the last answer, and from the line through the last two."""
    w = contraction(0, 16, 16, 0.9)
    frames = [draw(1, 8, 16) + 0.01 * k * draw(2, 8, 16) for k in range(6)]

    def solve(x: Tensor, start: Tensor) -> eq.Solution[Tensor]:
        solver = eq.Anderson(rtol=1e-6, block=1)
        with torch.no_grad():
            return eq.fixed_point(lambda z: torch.tanh(z @ w.mT + x), start, solver=solver)

    cold = warm = line = 0
    last = before = solve(frames[0], torch.zeros_like(frames[0])).value
    for x in frames[1:]:
        cold += int(solve(x, torch.zeros_like(x)).stats.steps.sum())
        sol = solve(x, last)
        warm += int(sol.stats.steps.sum())
        line += int(solve(x, 2 * last - before).stats.steps.sum())
        before, last = last, sol.value
    assert line < warm < 0.8 * cold


@pytest.mark.parametrize("adjoint", [eq.Implicit(), eq.Unrolled()], ids=["implicit", "unrolled"])
def test_a_bad_sample_does_not_spoil_the_gradient_of_aux(adjoint: Any) -> None:
    def found(x: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
        w, start = contraction(0, 4, 4).requires_grad_(), torch.zeros(len(x), 4).double()
        sol = eq.fixed_point(with_gates, start, (w, x), solver=SOLVER, adjoint=adjoint, aux=True)
        loss = sol.aux["gate"][rows].sum() + sol.value[rows].sum()
        return (sol.aux["gate"].detach(), *torch.autograd.grad(loss, w))

    x = draw(1, 3, 4)
    bad = x.clone()
    bad[1, 2] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        gate, slope = found(bad, [0, 2])
    wanted = found(x[[0, 2]], [0, 1])
    assert bool(gate[1].isnan().any())
    torch.testing.assert_close(gate[[0, 2]], wanted[0])
    torch.testing.assert_close(slope, wanted[1], rtol=1e-8, atol=1e-10)
