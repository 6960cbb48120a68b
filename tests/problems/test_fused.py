"""The fused path against the general path, autograd and finite differences, on a CPU and a GPU.

The oracle of the solve is a plain loop over ``problem.step``; that of the gradient is the truncated
series written out with autograd, and at many terms the implicit gradient of the general path.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.engine.result import Result
from equilibria.problems import solving
from equilibria.problems.fused import serves
from tests.ops import on_gpu

PATCH = eq.Patches(channels=4, size=2)


def layer(
    steps: int = 30, terms: int = 4, *, gamma: Any = None, bound: float = 1.2, **changes: Any
) -> eq.nn.GEQ:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "patch": PATCH,
        "hidden": 8,
        "gamma": eq.MeanPatchEnergy(0.2) if gamma is None else gamma,
        "constraint": eq.nn.NormBounded(bound=bound),
        "solver": fixed(steps),
        "adjoint": eq.Phantom(steps=terms, damping=1.0, form="neumann"),
        **changes,
    }
    made = eq.nn.GEQ(6, 8, in_channels=5, **options).double()
    return made.eval()


def fixed(steps: int, tau: float | None = None) -> eq.ProximalGradient:
    return eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=steps, accelerate=False, tau=tau)


def images(batch: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 5, 4, 6, dtype=torch.float64)


def watched(monkeypatch: pytest.MonkeyPatch, *, general: bool = False) -> list[bool]:
    """Whether each solve from now on takes the fused path; ``general``: none does."""
    seen: list[bool] = []

    def note(*given: Any) -> bool:
        seen.append(serves(*given) and not general)
        return seen[-1]

    monkeypatch.setattr(solving, "serves", note)
    return seen


def by_hand(module: eq.nn.GEQ, x: Tensor, steps: int) -> Tensor:
    problem = module.problem(x)
    z = torch.zeros(x.shape[0], 6, *x.shape[2:], dtype=x.dtype)
    tau = module.solver.for_problem(lambda: module.nominal_bounds(problem)).tau  # type: ignore[arg-type, return-value]
    with torch.no_grad():
        for _ in range(steps):
            z = problem.step(z, tau)
    return z


def gradients(module: eq.nn.GEQ, x: Tensor, weight: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    value = module(given)
    return list(torch.autograd.grad((value * weight).sum(), [given, *module.parameters()]))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_steps_are_those_of_the_problem(steps: int) -> None:
    made, x = layer(steps), images()
    solution = made.solve(x)
    torch.testing.assert_close(solution.value, by_hand(made, x, steps), rtol=1e-12, atol=1e-13)
    before = by_hand(made, x, steps - 1)
    moved = (solution.value - before).flatten(1).norm(dim=1)
    torch.testing.assert_close(solution.stats.residual, moved.detach(), rtol=1e-8, atol=1e-14)
    assert solution.stats.evaluations == steps
    assert "step from the bounds" in str(solution.choice)


def test_a_warm_start_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(60), images()
    answer = made.solve(x).value.detach()
    made.solver = fixed(1)
    seen = watched(monkeypatch)
    again = made.solve(x, answer)
    assert seen == [True]
    torch.testing.assert_close(again.value, answer, rtol=1e-9, atol=1e-10)
    assert float(again.stats.relative.max()) < 1e-9


@pytest.mark.parametrize(("steps", "terms"), [(1, 1), (2, 2), (4, 3), (80, 5)])
@pytest.mark.parametrize(
    "gamma", [eq.MeanPatchEnergy(0.2), eq.FixedGamma(0.3), eq.LearnedGamma(0.2)]
)
def test_the_gradient_is_the_series_written_out(steps: int, terms: int, gamma: Any) -> None:
    """Of the last step; also far from the equilibrium, where active sets still change."""
    made, x = layer(steps, terms, gamma=gamma), images()
    weight = torch.randn(3, 6, 4, 6, dtype=torch.float64)
    found = gradients(made, x, weight)
    # Oracle: u = Σ (Jᵀ)ᵏ g by autograd at the state before the last step, then (∂T/∂θ)ᵀu.
    given = x.clone().requires_grad_()
    problem = made.problem(given)
    tau = made.solver.for_problem(lambda: made.nominal_bounds(problem)).tau  # type: ignore[arg-type, return-value]
    z = by_hand(made, x, steps - 1).requires_grad_()
    out = problem.step(z, tau)
    u = term = weight
    for _ in range(terms - 1):
        term = torch.autograd.grad(out, z, term, retain_graph=True)[0]
        u = u + term
    right = torch.autograd.grad(out, [given, *made.parameters()], u)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"adjoint": eq.Phantom(steps=3, damping=0.8, form="neumann")},
        {"adjoint": eq.Phantom(steps=3, damping=1.0)},
        {"adjoint": eq.Implicit()},
        {"solver": eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=4)},
        {"solver": eq.Picard(rtol=0.0, atol=0.0, max_steps=4, damping=0.8)},
        {"solver": eq.Picard(max_steps=400)},
        {"prior": eq.SoftThreshold(0.1)},
        {"hidden": None},
        {"patch": None},
    ],
)
def test_what_it_does_not_serve_takes_the_general_path(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layer(40, 3, **changes)
    x = images() if made.patch is not None else torch.randn(3, 5, dtype=torch.float64)
    seen = watched(monkeypatch)
    made(x)
    assert seen == [False]


def test_without_gradients_any_adjoint_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = layer(5, adjoint=eq.Implicit()), watched(monkeypatch)
    with torch.no_grad():
        made(images())
    assert seen == [True]


def test_a_sample_that_fails_returns_its_start_and_harms_nobody() -> None:
    made, x = layer(10, 3), images()
    weight = torch.randn(3, 6, 4, 6, dtype=torch.float64)
    good = made.solve(x[[0, 2]])
    sick = x.clone()
    sick[1, 0, 0, 0] = float("nan")
    solution = made.solve(sick)
    assert solution.result.tolist()[1] == int(Result.nonfinite)
    assert float(solution.value[1].detach().abs().max()) == 0.0
    torch.testing.assert_close(solution.value[[0, 2]], good.value, rtol=1e-12, atol=1e-13)
    grads = torch.autograd.grad((solution.value * weight).sum(), list(made.W.parameters()))
    clean = torch.autograd.grad((good.value * weight[[0, 2]]).sum(), list(made.W.parameters()))
    for a, b in zip(grads, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_at_the_floor_of_gamma(
    dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No energy, so γ = 2e11, a singular M and a given z0: s is rounding, and 2γ‖v‖² was 1e7."""
    made = layer(2, 3, hidden=1, bias=False, patch=eq.Patches(channels=1, size=2)).to(dtype)
    torch.manual_seed(2)
    z0 = (20 * torch.randn(64, 6, 8, 8).abs()).to(dtype)
    x = torch.zeros(64, 5, 8, 8, dtype=dtype, requires_grad=True)
    watched(monkeypatch, general=not fused)
    value = made.solve(x, z0).value.float()
    grads = torch.autograd.grad(value.sum(), [x, *made.parameters()])
    assert all(bool(g.isfinite().all()) for g in grads)


def test_divergence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step far too long on a problem that is not convex: codes, zeros, no NaN."""
    made, x = layer(40, 2, bound=40.0, gamma=eq.FixedGamma(1e-6)), images()
    made.solver = eq.ProximalGradient(
        rtol=0.0, atol=0.0, max_steps=12, accelerate=False, tau=6.0, divergence=10.0
    )
    with torch.no_grad():
        made.W.weight = made.W.weight * 40.0 / made.W.weight.norm()  # type: ignore[union-attr, operator]
    solution = made.solve(x)
    assert set(solution.result.tolist()) == {int(Result.diverged)}
    assert float(solution.value.detach().abs().max()) == 0.0
    for g in torch.autograd.grad(solution.value.sum(), list(made.parameters())):
        assert float(g.abs().max()) == 0.0


def test_second_derivatives_are_refused() -> None:
    made, x = layer(3, 2), images().requires_grad_()
    first = torch.autograd.grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        first(made(x).sum(), x, create_graph=True)


@on_gpu
@pytest.mark.parametrize("cast", [False, True])
def test_on_the_gpu(cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(30, 3, patch=eq.Patches(channels=8, size=2))
    x = images().to(memory_format=torch.channels_last)
    weight = torch.randn(3, 6, 4, 6, dtype=torch.float64)
    right = [made(x).detach(), *gradients(made, x, weight)]
    device = copy.deepcopy(made).float().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast):
        given = x.float().cuda().requires_grad_()
        value = device(given)
    total = (value.float() * weight.float().cuda()).sum()
    found = [value.detach(), *torch.autograd.grad(total, [given, *device.parameters()])]
    for a, b in zip(found, right, strict=True):
        off = float((a.double().cpu() - b).norm() / b.norm())
        assert off < (0.15 if cast else 1e-4), off
