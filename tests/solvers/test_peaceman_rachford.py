"""PeacemanRachford: its step, its warm start, its transposed Jacobian, its cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria.problems import Prior
from equilibria.solvers import ForwardBackward, PeacemanRachford
from tests.solvers.test_forward_backward import PRIORS, drawn, states


def reflected(w: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """V and 2V − I."""
    eye = np.eye(len(w))
    inverse = np.linalg.inv(eye + alpha * (eye - w))
    return inverse, 2 * inverse - eye


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_the_step_is_the_formula(prior: Prior, alpha: float) -> None:
    """u ← (2V − I)(2prox − I)u + 2αVc and z = prox(u), with numpy's V."""
    inclusion, w = drawn(0, prior=prior)
    u, c = states(1), states(2)
    splitting = PeacemanRachford(alpha=alpha).split(inclusion, u, c)
    inverse, turn = reflected(w, alpha)
    prox = prior.prox(u, alpha).numpy()
    expected = (2 * prox - u.numpy()) @ turn.T + 2 * alpha * c.numpy() @ inverse.T
    np.testing.assert_allclose(splitting.step(u, *splitting.inputs), expected, atol=1e-12)
    np.testing.assert_allclose(splitting.read(u), prox, atol=0)


def test_the_default_step_does_not_see_the_scale_of_the_problem() -> None:
    """α‖I − W‖ is the same for W and for a stretched one."""
    for size in (0.1, 1.0, 10.0):
        inclusion, w = drawn(3, m=size**2, size=size)
        alpha = float(PeacemanRachford().step_size(inclusion))
        assert alpha * np.linalg.norm(np.eye(6) - w) == pytest.approx(math.sqrt(6))


def test_a_warm_start_at_the_solution_stands_still() -> None:
    """u = z − α((I − W)z − c) is the fixed point where z is the solution."""
    inclusion, _ = drawn(4)
    c = states(1)
    cold = PeacemanRachford(alpha=0.7).split(inclusion, torch.zeros_like(c), c)
    u = cold.start
    for _ in range(400):
        u = cold.step(u, *cold.inputs)
    z = cold.read(u)
    torch.testing.assert_close(z, inclusion.step(z, c), rtol=0, atol=1e-13)
    warm = PeacemanRachford(alpha=0.7).split(inclusion, z, c)
    torch.testing.assert_close(warm.start, u, rtol=0, atol=1e-12)
    torch.testing.assert_close(warm.step(warm.start, *warm.inputs), warm.start, rtol=0, atol=1e-12)


def test_the_transposed_jacobian_is_the_transposed_splitting() -> None:
    """Jᵀ = (2D − I)(2Vᵀ − I) at u."""
    inclusion, w = drawn(7)
    splitting = PeacemanRachford(alpha=0.5).split(inclusion, states(0), states(1))
    u, c = states(2, 1)[0], states(3, 1)
    jacobian = torch.autograd.functional.jacobian(lambda u: splitting.step(u[None], c)[0], u)
    signs = np.diag(np.sign(u.numpy()))  # 2D − I
    np.testing.assert_allclose(jacobian.T, signs @ reflected(w, 0.5)[1].T, atol=1e-13)


def test_far_fewer_steps_than_forward_backward() -> None:
    torch.manual_seed(0)
    layer = eq.nn.MonotoneDEQ(20, in_channels=4, m=0.1).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    steps = {}
    for solver in (PeacemanRachford(block=1), ForwardBackward(block=1)):
        solution = layer.solve(x, solver=solver)
        assert solution.converged.all()
        steps[type(solver)] = int(solution.stats.steps.max())
    assert steps[PeacemanRachford] * 10 < steps[ForwardBackward]


def test_the_inverse_is_computed_once_for_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = torch.linalg.inv_ex

    def counted(*args: object, **options: object) -> object:
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(torch.linalg, "inv_ex", counted)
    layer = eq.nn.MonotoneDEQ(5, in_channels=3)
    solution = layer.solve(torch.randn(4, 3))
    solution.value.square().sum().backward()
    assert len(calls) == 1
    assert int(solution.stats.steps.max()) > 1
    assert int(solution.stats.backward.steps.max()) > 1
