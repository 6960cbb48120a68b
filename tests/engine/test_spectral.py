"""Jacobian norm and spectral radius against dense Jacobians and numpy's eigenvalues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from tests.contracts import problems
from tests.contracts.problems import randn

law = settings(max_examples=20, deadline=None, derandomize=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense_jacobians(fn: Any, z: Tensor, *args: Tensor) -> np.ndarray:
    out = []
    for i in range(len(z)):
        row = [a[i : i + 1] for a in args]
        f = lambda v, row=row: fn(v[None], *row)[0]
        out.append(torch.autograd.functional.jacobian(f, z[i]).numpy())
    return np.stack(out)


def radii(matrices: np.ndarray) -> np.ndarray:
    return np.abs(np.linalg.eigvals(matrices)).max(1)


def apply(z: Tensor, matrix: Tensor) -> Tensor:
    return (matrix @ z.unsqueeze(-1)).squeeze(-1)


def radius_of(matrix: Tensor, **options: Any) -> Tensor:
    """Of the map z ↦ Mz, a matrix a sample."""
    z = matrix.new_zeros(matrix.shape[:2])
    return eq.spectral_radius(apply, z, matrix, generator=generator(), **options)


# ---------------------------------------------------------------------- spectral radius


@law
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), size=st.integers(1, 9))
def test_radius_is_exact_once_the_space_is_full(seed: int, batch: int, size: int) -> None:
    """Random nonsymmetric matrices: mostly complex pairs."""
    matrix = randn(batch, size, size, seed=seed)
    found = radius_of(matrix, steps=50)
    # Eigenvalues of a nonnormal 9 × 9 matrix: backward error 1e-15, condition up to 1e6.
    np.testing.assert_allclose(found, radii(matrix.numpy()), rtol=1e-8)


def test_radius_at_the_solution_of_a_tanh_map() -> None:
    problem = problems.tanh(batch=3)
    solution = eq.fixed_point(problem.fn, problem.z0, problem.args, solver=eq.Anderson(rtol=1e-10))
    jacobians = dense_jacobians(problem.fn, solution.value.detach(), *problem.args)
    found = eq.spectral_radius(problem.fn, solution.value, problem.args, generator=generator())
    assert found.shape == (3,)
    np.testing.assert_allclose(found, radii(jacobians), rtol=1e-9)


def test_radius_from_fewer_products_than_dimensions() -> None:
    """A separated dominant eigenvalue is found by 30 of 200 products."""
    values = torch.cat([torch.tensor([2.0]), torch.linspace(-1, 1, 199)]).double()
    matrix = problems.symmetric(values.expand(1, 200)).args[0]
    np.testing.assert_allclose(radius_of(matrix), [2.0], rtol=1e-9)


def test_radius_of_a_tree_and_of_an_image() -> None:
    flat = problems.linear(3, 8, 0.9)
    problem = problems.trees(flat)["nested"]
    found = eq.spectral_radius(problem.fn, problem.z0, problem.args, generator=generator())
    np.testing.assert_allclose(found, radii(flat.args[0].numpy()), rtol=1e-9)
    image = problems.convolution(batch=2, channels=2, size=3)
    weights = dense_jacobians(
        lambda v, x: image.fn(v.view(-1, 2, 3, 3), x).flatten(1),
        image.z0.flatten(1),
        image.args[0],
    )
    found = eq.spectral_radius(image.fn, image.z0, image.args, generator=generator())
    np.testing.assert_allclose(found, radii(weights), rtol=1e-9)


def test_invariant_space_of_one_sample_does_not_disturb_another() -> None:
    """J = 0.3·I is used up after one product, its mate needs all six."""
    matrix = torch.stack([0.3 * torch.eye(6).double(), randn(6, 6, seed=2)])
    np.testing.assert_allclose(radius_of(matrix), radii(matrix.numpy()), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_radius_in_lower_precision(dtype: torch.dtype) -> None:
    matrix = problems.symmetric(torch.tensor([[0.9, 0.4, -0.3, 0.1]])).args[0]
    found = radius_of(matrix.to(dtype))
    assert found.dtype == torch.float32
    # Symmetric: an eigenvalue moves by at most the norm of the rounding, a few eps.
    assert abs(float(found) - 0.9) < 8 * torch.finfo(dtype).eps


def test_radius_contains_a_nan_sample() -> None:
    matrix = randn(3, 4, 4, seed=0)
    matrix[1] = float("nan")
    found = radius_of(matrix)
    np.testing.assert_allclose(found[[0, 2]], radii(matrix[[0, 2]].numpy()), rtol=1e-9)
    assert not torch.isfinite(found[1])


# ---------------------------------------------------------------------- Jacobian penalty


def test_penalty_of_one_draw_is_that_draw() -> None:
    matrix = randn(2, 4, 4, seed=0)
    z = torch.zeros(2, 4).double()
    found = eq.jacobian_penalty(apply, z, matrix, generator=generator(5))
    v = torch.randn(2, 4, dtype=torch.float64, generator=generator(5))
    expected = ((matrix.mT @ v.unsqueeze(-1)) ** 2).sum((1, 2)) / 4
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_penalty_of_a_tree_counts_all_leaves() -> None:
    """J = diag(2 on 3 numbers, 1 on 5): ‖J‖²_F/n = (4·3 + 5)/8."""
    z = {"a": torch.zeros(2, 3).double(), "b": torch.zeros(2, 5).double()}
    fn = lambda z: {"a": 2 * z["a"], "b": z["b"]}
    found = eq.jacobian_penalty(fn, z, samples=1000, generator=generator())
    # Var = 2Σσ⁴ = 2(16·3 + 5): deviation √(106/1000)/8 = 0.04; five of them.
    torch.testing.assert_close(found, torch.full((2,), 17 / 8).double(), rtol=0, atol=0.2)


def test_penalty_is_differentiable_in_what_the_map_uses() -> None:
    weight = 0.3 * randn(3, 3, seed=0)
    x = randn(2, 3, seed=1)
    z = randn(2, 3, seed=2)

    def penalty(w: Tensor, x: Tensor) -> Tensor:
        return eq.jacobian_penalty(
            lambda z, x: torch.tanh(z @ w.T + x), z, x, samples=2, generator=generator()
        )

    inputs = (weight.requires_grad_(), x.requires_grad_())
    assert torch.autograd.gradcheck(penalty, inputs)
    z.requires_grad_()  # a constant to the penalty
    penalty(*inputs).sum().backward()
    assert z.grad is None
    with torch.no_grad():
        assert not penalty(*inputs).requires_grad


# ---------------------------------------------------------------------- both

BOTH = [eq.spectral_radius, eq.jacobian_penalty]


@pytest.mark.parametrize("measure", BOTH)
def test_constant_map_has_the_zero_jacobian(measure: Any) -> None:
    x = randn(2, 3, seed=0)
    assert measure(lambda z: x, torch.zeros(2, 3).double()).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("measure", BOTH)
def test_constant_leaf_of_a_tree(measure: Any) -> None:
    """z = (a, b), T = (0.5a, constant): the second leaf adds nothing."""
    z = (torch.zeros(2, 1).double(), torch.zeros(2, 3).double())
    found = measure(lambda z: (0.5 * z[0], torch.ones_like(z[1])), z, generator=generator())
    assert found.shape == (2,)
    if measure is eq.spectral_radius:
        np.testing.assert_allclose(found, 0.5, rtol=1e-9)


@pytest.mark.parametrize("measure", BOTH)
def test_bad_input(measure: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype torch\.int64"):
        measure(lambda z: z, torch.zeros(2, 3).long())
    with pytest.raises(ValueError, match="batch size zero"):
        measure(lambda z: z, torch.zeros(0, 3))
    with pytest.raises(ValueError, match="shape"):
        measure(lambda z: z[:, :1], torch.zeros(2, 3))
    name = "steps" if measure is eq.spectral_radius else "samples"
    with pytest.raises(ValueError, match=rf"{name}=0\).*at least 1"):
        measure(lambda z: z, torch.zeros(2, 3), **{name: 0})
