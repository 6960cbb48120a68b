"""The gradient passes γ: against finite differences in float64, on every path, by every adjoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.problems import solving
from equilibria.problems.fused import serves
from tests.contracts.layer_contract import check_gradients
from tests.ops import run_interpreted

POLICIES = {
    "mean": eq.MeanPatchEnergy(0.2),
    "min": eq.MinPatchEnergy(0.2),
    "fixed": eq.FixedGamma(0.3),
    "learned": eq.LearnedGamma(0.3),
}
TIGHT = eq.Picard(rtol=1e-14, atol=0.0, max_steps=3000)
STEPS = eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=150, accelerate=False)
FIXED = eq.Picard(rtol=0.0, atol=0.0, max_steps=80)
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}

# Every adjoint that is exact, or tends to the exact one with its steps.
PATHS: dict[str, tuple[eq.Solver, eq.Adjoint, bool]] = {
    "implicit": (TIGHT, eq.Implicit(solver=eq.GMRES(rtol=1e-12)), False),
    "implicit by steps": (TIGHT, eq.Implicit(solver=eq.Picard(rtol=1e-13, max_steps=900)), False),
    "unrolled": (FIXED, eq.Unrolled(), False),
    "phantom": (TIGHT, eq.Phantom(steps=120), False),
    "phantom, series": (TIGHT, eq.Phantom(steps=200, form="neumann"), False),
    "fused": (STEPS, eq.Phantom(steps=150, damping=1.0, form="neumann"), True),
}


def made(gamma: Any, path: str, *, patch: bool = True) -> eq.nn.GEQ:
    torch.manual_seed(0)
    solver, adjoint, _ = PATHS[path]
    options: dict[str, Any] = {"gamma": gamma, "solver": solver, "adjoint": adjoint}
    bound = eq.nn.NormBounded(bound=0.8)
    cut = eq.Patches(channels=4, size=2) if patch else None
    layer = eq.nn.GEQ(
        6, 8, in_channels=5, patch=cut, hidden=20, constraint=bound, **options
    ).double()
    with torch.no_grad():  # a W_h that no symmetry singles out
        layer.W_h.weight = 0.9 * torch.randn_like(layer.W_h.weight) / 6  # type: ignore[union-attr, operator]
    return layer.eval()


def drawn(patch: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, *((4, 6) if patch else ()), dtype=dtype)


def gradients(layer: eq.nn.GEQ, x: Tensor, weight: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    return list(torch.autograd.grad((layer(given) * weight).sum(), [given, *layer.parameters()]))


@pytest.mark.parametrize("gamma", POLICIES)
@pytest.mark.parametrize("path", PATHS)
def test_the_gradient_is_that_of_the_function(
    path: str, gamma: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, seen = made(POLICIES[gamma], path), []
    monkeypatch.setattr(solving, "serves", lambda *a: seen.append(serves(*a)) or seen[-1])
    gradients(layer, drawn(), torch.tensor(1.0))
    assert seen == [PATHS[path][2]]
    check_gradients(layer, drawn(), **CLOSE)


@pytest.mark.parametrize("gamma", POLICIES)
def test_without_patches(gamma: str) -> None:
    check_gradients(made(POLICIES[gamma], "implicit", patch=False), drawn(patch=False), **CLOSE)


@pytest.mark.parametrize("path", ["implicit", "fused"])
def test_channels_last(path: str) -> None:
    layer = made(POLICIES["mean"], path).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_gradients(layer, drawn().to(memory_format=torch.channels_last), **CLOSE)


@pytest.mark.parametrize("path", ["implicit", "fused"])
@pytest.mark.parametrize("rule", [eq.MeanPatchEnergy, eq.MinPatchEnergy])
def test_detached_it_is_that_of_the_layer_with_its_gamma_held(rule: Any, path: str) -> None:
    """The papers' form: the same answer, another gradient."""
    x, weight = drawn()[:1], torch.randn(1, 6, 4, 6, dtype=torch.float64)
    free, held = made(rule(0.2), path), made(rule(0.2, detach=True), path)
    assert torch.equal(free(x), held(x))
    found = gradients(held, x, weight)
    held.gamma = eq.FixedGamma(float(free.problem(x).coupling.gamma.detach()))  # type: ignore[attr-defined]
    for g, right in zip(found, gradients(held, x, weight), strict=True):
        torch.testing.assert_close(g, right)
    assert float((gradients(free, x, weight)[0] - found[0]).norm() / found[0].norm()) > 0.01


def test_second_derivatives_and_jacrev() -> None:
    layer = made(POLICIES["mean"], "implicit", patch=False)
    x = drawn(patch=False).requires_grad_()
    assert torch.autograd.gradgradcheck(layer, (x,), fast_mode=True)
    jacobian = torch.func.jacrev(lambda one: layer(one[None])[0])(x[0].detach())
    right = torch.autograd.functional.jacobian(lambda one: layer(one[None])[0], x[0].detach())
    torch.testing.assert_close(jacobian, right)


@pytest.mark.parametrize("path", ["implicit", "fused"])
@pytest.mark.parametrize("gamma", ["mean", "min"])
def test_at_the_floor_gamma_is_constant(gamma: str, path: str) -> None:
    """c = 0: γ is finite and does not move with the input; nor do gradients become NaN."""
    layer = made(POLICIES[gamma], path)
    with torch.no_grad():
        layer.U.bias.zero_()  # type: ignore[operator, union-attr]
    x = drawn()
    x[0] = 0.0
    torch.manual_seed(4)
    weight = torch.randn(2, 6, 4, 6, dtype=torch.float64)
    for g in gradients(layer, x, weight):
        assert bool(g.isfinite().all())


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize("path", ["implicit", "fused"])
def test_a_failed_sample_has_no_gradient_in_gamma(path: str) -> None:
    """Its energies are NaN: 0·NaN must reach neither c nor W_h."""
    layer = made(POLICIES["mean"], path)
    hidden = layer.hidden_weight().detach().requires_grad_()  # type: ignore[union-attr]
    weight = torch.randn(1, 6, 4, 6, dtype=torch.float64)

    def pulled(c: Tensor) -> tuple[Tensor, ...]:
        coupling = eq.Gaussian(
            layer.operator().cast(c.dtype), c, layer.gamma, patches=layer.patch, hidden=hidden
        )
        z0 = torch.zeros(len(c), 6, 4, 6, dtype=torch.float64)
        options: Any = {"solver": layer.solver, "adjoint": layer.adjoint}
        found = eq.minimize(eq.Problem(layer.prior, coupling), z0, **options)
        return torch.autograd.grad((found.value[:1] * weight).sum(), (c, hidden))

    c = layer.features(drawn()).detach()
    right = pulled(c[:1].clone().requires_grad_())
    c[1, 0, 0, 0] = float("nan")
    found = pulled(c.requires_grad_())
    torch.testing.assert_close(found[0][:1], right[0])
    assert float(found[0][1].abs().max()) == 0.0
    torch.testing.assert_close(found[1], right[1])


_SCRIPT = """
import json
import torch
from equilibria.ops import gaussian_patches, gaussian_steps
from tests.nn.test_gamma_gradient import POLICIES, drawn, gradients, made

rows = []
torch.manual_seed(2)
weight = torch.randn(2, 6, 4, 6, dtype=torch.float64)
plain = gaussian_patches.can_fuse
for name in ("mean", "min"):
    for dtype in (torch.float32, torch.float16):
        policy = POLICIES[name]
        gaussian_patches.can_fuse = gaussian_steps.can_fuse = plain
        layer = made(policy, "fused")
        layer.solver = type(layer.solver)(rtol=0.0, atol=0.0, max_steps=4, accelerate=False)
        layer.adjoint = type(layer.adjoint)(steps=3, damping=1.0, form="neumann")
        layer = layer.to(memory_format=torch.channels_last)
        x = drawn().to(memory_format=torch.channels_last)
        right = gradients(layer, x, weight)
        gaussian_patches.can_fuse = gaussian_steps.can_fuse = lambda *_: True
        found = gradients(layer.to(dtype), x.to(dtype), weight.to(dtype))
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right)]
        rows.append({"policy": name, "dtype": str(dtype), "errors": errors})
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    """Against the plain path in float64, whose gradient is that of finite differences (above)."""
    rows = run_interpreted(_SCRIPT)
    assert len(rows) == 4
    for row in rows:
        bound = 1e-4 if row["dtype"] == "torch.float32" else 5e-2
        assert max(row["errors"]) < bound, row
