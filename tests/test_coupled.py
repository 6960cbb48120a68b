"""Maps that couple the samples of a batch: values and gradients against dense joint algebra.

The oracle solves z = T(z) by Newton's method on the whole batch as one vector, and differentiates
by the dense joint Jacobian or by finite differences of such solves. It shares no code with us.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import jacobian

import equilibria as eq

law = settings(max_examples=12, deadline=None, derandomize=True)

TIGHT = {"rtol": 1e-12, "max_steps": 400}
BACKWARD = {
    "GMRES": eq.GMRES(rtol=1e-11, max_steps=300),
    "Anderson": eq.Anderson(**TIGHT),
    "Broyden": eq.Broyden(**TIGHT),
    "Picard": eq.Picard(rtol=1e-12, max_steps=2000),
}


def joint_root(fn: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """z = fn(z) by Newton's method on the whole batch."""
    z = start.clone()
    eye = torch.eye(z.numel(), dtype=z.dtype)
    for _ in range(60):
        residual = (fn(z) - z).detach()
        if float(residual.norm()) <= 1e-14 * (1 + float(z.norm())):
            break
        j = jacobian(fn, z).reshape(z.numel(), -1)
        z = z + torch.linalg.solve(eye - j, residual.flatten()).view_as(z)
    assert float((fn(z) - z).detach().norm()) <= 1e-12 * (1 + float(z.norm()))
    return z.detach()


def joint_gradients(
    fn: Callable[..., Tensor], start: Tensor, deps: list[Tensor], g: Tensor
) -> list[Tensor]:
    """(∂T/∂deps)ᵀ(I − Jᵀ)⁻¹g at the joint root."""
    z = joint_root(lambda x: fn(x, *deps), start)
    j = jacobian(lambda x: fn(x, *deps), z).reshape(z.numel(), -1)
    u = torch.linalg.solve(torch.eye(len(j), dtype=j.dtype) - j.T, g.flatten()).view_as(z)
    leaves = [d.detach().clone().requires_grad_() for d in deps]
    return list(torch.autograd.grad(fn(z, *leaves), leaves, u))


def deep_layer(weight: float, seed: int, **options: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The layer of the report, its input, an incoming gradient and a direction in U."""
    torch.manual_seed(seed)
    layer = eq.nn.DeepOptEq(6, (8, 8), regularizer=eq.Decorrelation(weight), **options)
    layer = layer.double().eval()
    x = torch.randn(4, 6).double()
    g = torch.randn(4, 6).double()
    d = torch.randn_like(layer.blocks[0].U.weight)
    return layer, x, g, d / d.norm()


def finite_difference(layer: Any, x: Tensor, g: Tensor, d: Tensor, eps: float = 1e-5) -> float:
    """The derivative of ⟨g, z*⟩ along d in U, by two joint Newton solves."""
    p = layer.blocks[0].U.weight
    found = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            p.add_(sign * eps * d)
        step, injected = layer.bound_step(), [c.detach() for c in layer.inject(x)]
        found.append(float((joint_root(lambda z: step(z, *injected), x) * g).sum()))
        with torch.no_grad():
            p.sub_(sign * eps * d)
    return (found[0] - found[1]) / (2 * eps)


def derivative(layer: Any, x: Tensor, g: Tensor, d: Tensor) -> float:
    p = layer.blocks[0].U.weight
    (found,) = torch.autograd.grad((layer(x) * g).sum(), p)
    return float((found * d).sum())


ADJOINTS = {
    "default": {},
    "implicit Anderson": {"adjoint": eq.Implicit(solver=eq.Anderson())},
    "unrolled Anderson": {"adjoint": eq.Unrolled(), "solver": eq.Anderson()},
    "unrolled Broyden": {"adjoint": eq.Unrolled(), "solver": eq.Broyden()},
    "unrolled Picard": {"adjoint": eq.Unrolled(), "solver": eq.Picard(max_steps=500)},
    "phantom": {"adjoint": eq.Phantom(steps=80), "solver": eq.Anderson()},
    "neumann": {"adjoint": eq.Phantom(steps=80, form="neumann"), "solver": eq.Anderson()},
}


@pytest.mark.parametrize("name", ADJOINTS)
@pytest.mark.parametrize(("seed", "weight"), [(0, 0.05), (0, 0.1), (1, 0.2)])
def test_decorrelated_layer_has_the_joint_derivative(seed: int, weight: float, name: str) -> None:
    layer, x, g, d = deep_layer(weight, seed, **ADJOINTS[name])
    wanted = finite_difference(layer, x, g, d)
    if seed == 0:
        assert wanted == pytest.approx({0.05: -0.03691, 0.1: -0.0554}[weight], abs=6e-5)
    # Unrolled: the derivative of an iterate that is 1e-8 from the answer.
    assert derivative(layer, x, g, d) == pytest.approx(wanted, rel=1e-4)
