"""torch.compile(fullgraph=True) around problems and layers: the oracle is the same code, eager.

Each is compiled twice in one process, with other numbers: a float that differs is a symbol then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from tests.problems.test_operators import randn

STEPS: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "max_steps": 3}
BLIND = eq.Implicit(solver=eq.GMRES(rtol=0.0, atol=0.0, restart=8, max_steps=8))
NEUMANN = eq.Phantom(steps=2, damping=0.7, form="neumann")
A, K = randn(6, 4, seed=1), randn(3, 4, seed=2)

Made = Callable[[float], Callable[[Tensor], Tensor]]


def _objective(adjoint: Any) -> Made:
    def fn(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (z - x[:, :4]).square().sum(1) + torch.logsumexp(z, 1)

    def made(number: float) -> Callable[[Tensor], Tensor]:
        solver = eq.ProximalGradient(**STEPS)

        def run(x: Tensor) -> Tensor:
            smooth = eq.Smooth(fn, x, bounds=(number, 2.0), state=(4,))
            problem = eq.Problem(eq.Box(-number, number), smooth)
            return eq.minimize(problem, solver=solver, adjoint=adjoint).value

        return run

    return made


def _sum(solver: Callable[[float], Any], adjoint: Any, *, terms: bool) -> Made:
    def made(number: float) -> Callable[[Tensor], Tensor]:
        way = solver(number)

        def run(x: Tensor) -> Tensor:
            held = [(eq.SoftThreshold(number), K)] if terms else []
            problem = eq.Composite(eq.NonNegative(), held, eq.LeastSquares(A, x))
            return eq.minimize(problem, solver=way, adjoint=adjoint).value

        return run

    return made


def _layer(make: Callable[[float], torch.nn.Module]) -> Made:
    def made(number: float) -> torch.nn.Module:
        torch.manual_seed(0)
        return make(number).double()

    return made


def _monotone(solver: Any) -> Made:
    return _layer(
        lambda a: eq.nn.MonotoneDEQ(6, m=0.5, solver=solver(alpha=a, **STEPS), adjoint=NEUMANN)
    )


CASES: dict[str, Made] = {
    "smooth-neumann": _objective(NEUMANN),
    "smooth-implicit": _objective(BLIND),
    "smooth-unrolled": _objective(eq.Unrolled()),
    "admm": _sum(lambda rho: eq.ADMM(rho=rho, **STEPS), eq.Unrolled(), terms=True),
    "admm-implicit": _sum(lambda rho: eq.ADMM(rho=rho, **STEPS), BLIND, terms=True),
    "splitting": _sum(
        lambda gamma: eq.DouglasRachford(gamma=gamma, **STEPS), eq.Unrolled(), terms=False
    ),
    "opteq": _layer(
        lambda nu: eq.nn.OptEq(6, 4, nu=nu, solver=eq.Picard(**STEPS), adjoint=NEUMANN)
    ),
    "peaceman-rachford": _monotone(eq.PeacemanRachford),
    "forward-backward": _monotone(eq.ForwardBackward),
}
DAILY = ("smooth-neumann", "splitting", "opteq", "peaceman-rachford")


@pytest.mark.parametrize(
    "name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
@pytest.mark.filterwarnings("ignore:the backward solve missed its tolerance")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_graph_with_the_numbers_of_eager_code(name: str) -> None:
    torch.compiler.reset()
    for number in (0.1, 0.2):
        run = CASES[name](number)
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        x = randn(2, 6, seed=3).requires_grad_()
        found, wanted = compiled(x), run(x)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(z.square().sum(), x)[0] for z in (found, wanted)]
        torch.testing.assert_close(*gradients)
        assert bool(gradients[0].any())


@pytest.mark.filterwarnings("ignore:the backward solve missed its tolerance")
def test_a_backward_solve_evaluates_the_map_as_autocast_did() -> None:
    """A backward pass runs outside of autocast, where a float32 kernel takes no bfloat16."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = eq.nn.DEQ(eq.nn.ResidualBlock(2, 4, groups=2), solver=eq.Picard(**STEPS), adjoint=BLIND)
    x = torch.randn(2, 2, 4, 4)

    def gradients(run: Callable[[Tensor], Tensor]) -> Tensor:
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = run(x)
        found.float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])

    compiled = gradients(torch.compile(layer, fullgraph=True, backend="eager"))
    wanted = gradients(layer)
    assert float((compiled - wanted).norm() / wanted.norm()) < 0.01
