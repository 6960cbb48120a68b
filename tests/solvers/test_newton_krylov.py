"""NewtonKrylov through ``eq.root``: roots against closed forms, scipy and the published ones."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

import equilibria as eq
from equilibria import Result
from tests.contracts.problems import quietly, randn

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "nonlinear_suite.py"


suite = SimpleNamespace(**runpy.run_path(str(SUITE)))
ROUGH = {"Powell singular": 1e-3, "sample problem 19": 1e-2, "Powell badly scaled": 1e-5}
"""Singular at the root, or published with few digits."""


def other_roots(case: Any) -> list[list[float]]:
    """Known beside the published one: the saddle of Wood's function, whose gradient f is; minus a
    square root; nodes of a quadrature in another order."""
    if case.name == "Wood":
        return [[-0.967974, 0.947139, -0.969516, 0.951248]]
    if "Hammarling" in case.name or case.name == "Chebyquad":
        return [[-x for x in case.root]]
    return []


def quiet(*args: Any, **options: Any) -> eq.Solution[Any]:
    with quietly():
        return eq.root(*args, **options)


def cubic(z: Tensor, a: Tensor) -> Tensor:
    """Increasing: one root for every a."""
    return z**3 + z - a


# The public suite ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
def test_the_suite_is_solved(case: Any) -> None:
    """All 23, judged by f itself and by the published root where there is one."""
    solver = eq.NewtonKrylov(rtol=0.0, atol=1e-9)
    found = eq.root(case.f, case.z0, solver=solver)
    assert found.converged.all()
    norm = case.f(found.value).norm()
    assert norm <= 1e-9
    torch.testing.assert_close(found.stats.residual, norm[None], rtol=1e-3, atol=1e-15)
    if case.root is None:
        return
    published = [torch.tensor([z], dtype=torch.float64) for z in (case.root, *other_roots(case))]
    gap = min(float((found.value - z).abs().max() / z.abs().max().clamp_min(1)) for z in published)
    assert gap <= ROUGH.get(case.name, 1e-6)


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
def test_the_systems_are_differentiated_as_scipy_does(case: Any) -> None:
    """Both kinds of product with the Jacobian, against finite differences."""
    from equilibria.engine.maps import Map
    from equilibria.engine.tree import flatten_state
    from equilibria.solvers.newton_krylov import Linearized

    z = case.z0 + 0.1 * randn(1, len(case.start), seed=1)
    leaves, spec = flatten_state(z)
    at = Linearized(Map(case.f, (), spec, leaves), leaves)

    def f(x: np.ndarray) -> np.ndarray:
        return case.f(torch.from_numpy(x)[None])[0].numpy()

    dense = optimize.approx_fprime(z[0].numpy(), f, 1e-7).reshape(len(case.start), -1)
    v = randn(1, len(case.start), seed=2)
    scale = np.abs(dense).max()
    assert np.abs(at.push([v])[0][0].numpy() - dense @ v[0].numpy()).max() <= 1e-4 * scale
    assert np.abs(at.pull([v])[0][0].numpy() - dense.T @ v[0].numpy()).max() <= 1e-4 * scale


def test_suite_of_many_starts_in_one_batch_equals_each_alone() -> None:
    """Also where some take full steps, some the dogleg, and one meets NaN."""
    starts = torch.tensor([[0.5, -2.0], [6.0, 3.0], [-50.0, 20.0], [float("nan"), 0.0], [5.0, 4.0]])
    starts = starts.double()
    together = quiet(suite.freudenstein_roth, starts)
    for i, start in enumerate(starts):
        alone = quiet(suite.freudenstein_roth, start[None])
        assert int(alone.result) == int(together.result[i])
        assert int(alone.stats.steps) == int(together.stats.steps[i])
        torch.testing.assert_close(
            alone.value[0], together.value[i], rtol=1e-9, atol=1e-12, equal_nan=True
        )
    assert int(together.result[3]) == Result.nonfinite
    assert int(together.stats.steps[4]) == 1  # a start that is a root


# The test of convergence -------------------------------------------------------------------------


@settings(max_examples=10, deadline=None, derandomize=True)
@given(f_scale=st.floats(-200, 200), z_scale=st.floats(-100, 100), seed=st.integers(0, 99))
def test_scale_does_not_matter(f_scale: float, z_scale: float, seed: int) -> None:
    """f and z in other units: the same steps, the same digits, the same gradient."""
    a = randn(3, 4, seed=seed).requires_grad_()
    up, unit = 2.0 ** round(f_scale), 2.0 ** round(z_scale)
    one = eq.root(cubic, torch.ones_like(a), a)
    other = eq.root(lambda z, a: up * cubic(z / unit, a), unit * torch.ones_like(a), a)
    assert one.stats.steps.tolist() == other.stats.steps.tolist()
    torch.testing.assert_close(other.value / unit, one.value, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(s.value.sum(), a)[0] for s in (one, other)]
    torch.testing.assert_close(gradients[1] / unit, gradients[0], rtol=1e-8, atol=1e-12)


def test_the_gradient_at_a_root_of_zero() -> None:
    """Where z and its start are 0, they say nothing of the size of J."""
    a, g = randn(4, 4, seed=1).float() + 4 * torch.eye(4), randn(3, 4, seed=2).float()
    c = torch.tensor([[0.0], [1.0], [0.0]]).expand(3, 4).clone().requires_grad_()
    sizes = torch.tensor([[1.0], [1e-6], [1e-20]])
    found = eq.root(lambda z: sizes * (z @ a.T + z * z * z - c), torch.zeros(3, 4))
    assert found.converged.all()
    assert not found.value[[0, 2]].any()
    ours = torch.autograd.grad((found.value * g).sum(), c)[0]
    z = found.value.detach().double()
    jacobian = a.double() + torch.diag_embed(3 * z * z)
    wanted = torch.linalg.solve(jacobian.mT, g.double().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-4)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(start=st.floats(-30, 100))
def test_a_start_far_away_does_not_loosen_the_test(start: float) -> None:
    """‖f(z0)‖ may be 1e130: what is called converged is at the root all the same."""
    z0 = torch.tensor([[start]], dtype=torch.float64)
    found = quiet(lambda z: torch.exp(z) - 1.0, z0)
    if bool(found.converged):
        assert abs(float(found.value)) <= 1e-9 * (1 + abs(start))


def test_no_root_is_never_called_converged() -> None:
    systems = {
        "local minimum": lambda z: z * z + 1.0,
        "tail": lambda z: torch.exp(z),
        "constant": lambda z: torch.ones_like(z) + 0.0 * z,
        "nan": lambda z: z * float("nan"),
        "inf": lambda z: z + float("inf"),
        "jump": lambda z: torch.where(z > 0, 1.0, -1.0) + 0.0 * z,
    }
    for name, f in systems.items():
        starts = torch.tensor([[0.0], [1.0], [-1e3], [1e-8]], dtype=torch.float64).expand(4, 3)
        found = quiet(f, starts, solver=eq.NewtonKrylov(max_steps=80))
        small = found.stats.residual <= 1e-9  # exp(z) may really become small
        assert not (found.converged & ~small).any(), name


def test_warm_start_takes_one_evaluation() -> None:
    a = randn(4, 3, seed=0)
    first = eq.root(cubic, torch.zeros_like(a), a)
    again = eq.root(cubic, first.value, a)
    assert again.stats.steps.tolist() == [1] * 4
    assert torch.equal(again.value, first.value)


def test_residual_of_the_value_and_reports() -> None:
    a = randn(4, 3, seed=0)
    with pytest.warns(eq.ConvergenceWarning, match="root .*raise max_steps") as caught:
        found = eq.root(cubic, 50 * torch.ones_like(a), a, solver=eq.NewtonKrylov(max_steps=3))
    assert caught[0].filename == __file__
    torch.testing.assert_close(found.stats.residual, cubic(found.value, a).norm(dim=1))
    with pytest.warns(eq.ConvergenceWarning, match="multistart"):
        eq.root(lambda z: z * z + 1.0, torch.ones(2, 1).double())
    with pytest.raises(eq.NotConvergedError, match="root"):
        eq.root(lambda z: z * z + 1.0, torch.ones(2, 1).double(), throw=True)


# States and gradients ----------------------------------------------------------------------------


def test_large_system_agrees_with_scipy() -> None:
    """Bratu's equation on 40 points: −u″ = exp(u)."""
    n = 40
    h = 1.0 / (n + 1)

    def f(u: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(u, (1, 1))
        return (2 * u - padded[:, :-2] - padded[:, 2:]) / h**2 - torch.exp(u)

    found = eq.root(f, torch.zeros(1, n, dtype=torch.float64))
    wanted = optimize.root(lambda u: f(torch.from_numpy(u)[None])[0].numpy(), np.zeros(n)).x
    assert found.converged.all()
    np.testing.assert_allclose(found.value[0].numpy(), wanted, rtol=1e-8)


def test_the_default_gradient_solves_what_the_steps_solve() -> None:
    """A Laplacian of 32 unknowns takes 32 products: two cycles of 20 never end."""
    n = 32
    lap = (2 * torch.eye(n, dtype=torch.float64)).diagonal_scatter(-torch.ones(n - 1), 1)
    lap = lap.diagonal_scatter(-torch.ones(n - 1), -1) * (n + 1) ** 2
    b = torch.rand(3, n, dtype=torch.float64).requires_grad_()
    weights = torch.rand(3, n, dtype=torch.float64)
    sol = eq.root(lambda u, b: u @ lap - b, torch.zeros(3, n, dtype=torch.float64), b)
    (grad,) = torch.autograd.grad(sol.value, b, weights)
    torch.testing.assert_close(grad, weights @ torch.linalg.inv(lap), rtol=1e-8, atol=1e-12)


def test_trees_and_gradients() -> None:
    a = randn(3, 2, seed=0).requires_grad_()
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def f(z: dict[str, Tensor], a: Tensor) -> dict[str, Tensor]:
        u, v = z["u"], z["v"]
        return {"u": cubic(u, a) + weight * v[:, None], "v": v - torch.sin(u).sum(1)}

    def run(a: Tensor, w: Tensor) -> Tensor:
        start = {"u": torch.zeros(3, 2).double(), "v": torch.zeros(3).double()}
        value = eq.root(f, start, a).value
        return torch.cat([value["u"], value["v"][:, None]], 1)

    assert torch.autograd.gradcheck(run, (a, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (a, weight), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("coupled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_coupled_samples_are_one_system(coupled: bool) -> None:
    a = randn(4, 2, seed=0).requires_grad_()
    f = lambda z, a: cubic(z, a) + 2.0 * z.mean(0)
    found = eq.root(f, torch.zeros_like(a), a, coupled=coupled)
    assert found.converged.all()
    assert float(f(found.value, a).detach().norm()) < 1e-8
    run = lambda a: eq.root(f, torch.zeros_like(a), a, coupled=coupled).value
    assert torch.autograd.gradcheck(run, a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    a = randn(5, 6, seed=0).to(dtype)
    found = eq.root(cubic, torch.zeros_like(a), a)
    exact = eq.root(cubic, torch.zeros_like(a).double(), a.double())
    assert found.converged.all()
    assert found.value.dtype == dtype
    tolerance = 20 * eq.NewtonKrylov().relative_tolerance(dtype)
    assert float((found.value.double() - exact.value).abs().max()) <= tolerance


def test_a_failed_sample_gives_no_gradient_to_shared_weights() -> None:
    a = randn(3, 2, seed=0)
    a[1] = float("nan")
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    f = lambda z, a: weight * z**3 + z - a
    (found,) = torch.autograd.grad(quiet(f, torch.zeros_like(a), a).value[[0, 2]].sum(), weight)
    good = eq.root(f, torch.zeros(2, 2).double(), a[[0, 2]]).value.sum()
    torch.testing.assert_close(found, torch.autograd.grad(good, weight)[0])


def test_options_are_checked() -> None:
    z0 = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="fixed_point"):
        eq.root(torch.sin, z0, solver=eq.Anderson())
    with pytest.raises(TypeError, match="adjoint must be Implicit"):
        eq.root(torch.sin, z0, adjoint=eq.Unrolled())
    with pytest.raises(TypeError, match="linear"):
        eq.NewtonKrylov(linear="gmres")
    with pytest.raises(ValueError, match="undamped"):
        eq.NewtonKrylov(undamped=-1)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda z: eq.root(torch.sin, z))(z0[None])
    with pytest.raises(ValueError, match="shape"):
        eq.root(lambda z: z[:, :1], z0)
