"""Feature regularizers against the formulas in numpy, finite differences and minimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.autograd import gradcheck

import equilibria as eq
from equilibria.problems import Regularizer
from tests.problems.test_operators import randn

Array = np.ndarray


def incay(z: Array) -> Array:
    return 0.7 * 2 / (np.sum(z.reshape(len(z), -1) ** 2, 1) + 2 * 0.3)


def decorrelation(z: Array, channels: bool = False) -> Array:
    """Eq 13 with its matrices."""
    big_z = np.moveaxis(z, 1, 0).reshape(z.shape[1], -1) if channels else z.reshape(len(z), -1).T
    d = np.diag(1 / np.linalg.norm(big_z, axis=1))
    return np.asarray(
        0.7 * 0.5 * np.linalg.norm(d @ big_z @ big_z.T @ d - np.eye(len(d)), "fro") ** 2
    )


def hsic(z: Array, channels: bool = False, bandwidth: float = 0.8) -> Array:
    """The double loop over pairs of features, with explicit kernel and centering matrices."""
    count = len(z)
    rows = np.moveaxis(z, 1, 0).reshape(z.shape[1], count, -1) if channels else None
    if rows is None:
        rows = z.reshape(count, -1).T[:, :, None]
    h = np.eye(count) - np.ones((count, count)) / count
    kernels = [
        np.exp(-((r[:, None, :] - r[None, :, :]) ** 2).sum(2) / (2 * bandwidth**2)) for r in rows
    ]
    total = sum(np.trace(a @ h @ b @ h) for a, b in itertools.combinations(kernels, 2))
    return np.asarray(0.7 * total / (count - 1) ** 2)


CASES: dict[str, tuple[Regularizer, Callable[[Array], Array]]] = {
    "squared": (eq.SquaredNorm(0.7), lambda z: 0.35 * (z.reshape(len(z), -1) ** 2).sum(1)),
    "l1": (eq.L1(0.7), lambda z: 0.7 * np.abs(z.reshape(len(z), -1)).sum(1)),
    "incay": (eq.FeatureIncay(0.7, 0.3), incay),
    "decorrelation": (eq.Decorrelation(0.7), decorrelation),
    "decorrelation channels": (
        eq.Decorrelation(0.7, features="channels"),
        lambda z: decorrelation(z, True),
    ),
    "hsic": (eq.HSIC(0.7, bandwidth=0.8), hsic),
    "hsic channels": (eq.HSIC(0.7, bandwidth=0.8, features="channels"), lambda z: hsic(z, True)),
}
SHAPES = [(5, 3, 2, 2), (3, 4, 2, 3), (6, 4)]
each = pytest.mark.parametrize("name", CASES)


@each
@pytest.mark.parametrize("shape", SHAPES)
def test_value_is_the_formula(name: str, shape: tuple[int, ...]) -> None:
    """Batches larger and smaller than the number of features take different paths."""
    regularizer, formula = CASES[name]
    z = randn(*shape)
    got = regularizer.value(z)
    assert got.shape == (() if regularizer.couples_batch else (shape[0],))
    np.testing.assert_allclose(got.numpy(), formula(z.numpy()), rtol=1e-12, atol=1e-13)


@each
@pytest.mark.parametrize("shape", SHAPES)
def test_grad_is_the_derivative_of_the_formula(name: str, shape: tuple[int, ...]) -> None:
    regularizer, formula = CASES[name]
    z = randn(*shape, seed=1)
    got = regularizer.grad(z).numpy()
    step = 1e-6
    noise = 1e-8 + 1e-15 / step * float(np.sum(formula(z.numpy())))  # rounding of R over the step
    for index in itertools.islice(np.ndindex(*shape), 0, None, 2):
        bump = np.zeros(shape)
        bump[index] = step
        rise = formula(z.numpy() + bump).sum() - formula(z.numpy() - bump).sum()
        assert got[index] == pytest.approx(rise / (2 * step), abs=noise)
    live = z.clone().requires_grad_()
    (auto,) = torch.autograd.grad(regularizer.value(live).sum(), live)
    np.testing.assert_allclose(got, auto.numpy(), rtol=1e-10, atol=1e-12)
    assert gradcheck(regularizer.grad, live)  # the Hessian, for adjoints


@pytest.mark.parametrize("regularizer", [eq.SquaredNorm(0.7), eq.L1(0.7)], ids=["squared", "l1"])
@pytest.mark.parametrize("tau", [0.2, 1.0, 4.0])
def test_prox_minimizes(regularizer: Regularizer, tau: float) -> None:
    z = randn(3, 4)
    got = regularizer.prox(z, tau)

    def objective(flat: Array) -> float:
        u = torch.tensor(flat.reshape(3, 4))
        norm = 0.5 * float((u**2).sum()) if regularizer.smooth else float(u.abs().sum())
        return 0.7 * norm + float(((u - z) ** 2).sum()) / (2 * tau)

    best = minimize(objective, z.numpy().ravel(), method="Powell", options={"xtol": 1e-9}).x
    np.testing.assert_allclose(got.numpy().ravel(), best, atol=1e-5)
    per_entry = torch.full_like(z, tau)
    torch.testing.assert_close(regularizer.prox(z, per_entry), got)


def test_incay_curvature_holds_and_is_attained() -> None:
    regularizer = eq.FeatureIncay(0.7, 0.3)
    bounds = regularizer.curvature()
    assert bounds.rigorous
    directions = torch.nn.functional.normalize(randn(400, 3), dim=1)
    radii = torch.linspace(0, 3, 400, dtype=torch.float64)
    radii[1] = math.sqrt(2 * 0.3)
    hessian = torch.func.hessian(lambda u: regularizer.value(u[None])[0])
    values = torch.linalg.eigvalsh(torch.func.vmap(hessian)(directions * radii[:, None]))
    assert float(values.min()) == pytest.approx(bounds.lower, rel=1e-9)
    assert float(values.max()) == pytest.approx(bounds.upper, rel=1e-9)


def test_decorrelation_of_dead_features() -> None:
    """Rows of zeros (dead ReLUs) have no direction: no NaN, no gradient, no effect on others."""
    z = randn(5, 4)
    dead = z.clone()
    dead[:, 1] = 0.0
    regularizer = eq.Decorrelation(0.7)
    alive = dead[:, [0, 2, 3]]
    torch.testing.assert_close(regularizer.value(dead), regularizer.value(alive))
    torch.testing.assert_close(regularizer.grad(dead)[:, [0, 2, 3]], regularizer.grad(alive))
    assert bool((regularizer.grad(dead)[:, 1] == 0).all())
    wide = torch.zeros(2, 9, dtype=torch.float64)
    wide[:, :3] = randn(2, 3)
    torch.testing.assert_close(regularizer.value(wide), regularizer.value(wide[:, :3]))
    live = dead.clone().requires_grad_()
    (auto,) = torch.autograd.grad(regularizer.value(live), live)
    assert bool(auto.isfinite().all())
    torch.testing.assert_close(regularizer.value(1e-200 * z), regularizer.value(z))
    torch.testing.assert_close(regularizer.value(1e200 * z), regularizer.value(z))


def test_hsic_of_a_batch_of_one_is_zero() -> None:
    assert float(eq.HSIC().value(randn(1, 6))) == 0.0
    assert bool((eq.HSIC().grad(randn(1, 6)) == 0).all())


def test_compile_fullgraph() -> None:
    z = randn(3, 2, 2, 2)
    torch.compiler.reset()

    def both(t: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(r.value(t), r.grad(t)) for r, _ in CASES.values()]

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(z), both(z))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: eq.SquaredNorm(-1.0), ["SquaredNorm", "weight", "-1.0"]),
        (lambda: eq.L1(math.nan), ["L1", "weight", "nan"]),
        (lambda: eq.FeatureIncay(1.0, 0.0), ["FeatureIncay", "eps", "0.0"]),
        (lambda: eq.Decorrelation(1.0, features="rows"), ["Decorrelation", "features", "'rows'"]),  # type: ignore[arg-type]
        (lambda: eq.HSIC(1.0, bandwidth=0.0), ["HSIC", "bandwidth", "0.0"]),
        (lambda: eq.Decorrelation().value(randn(3)), ["[B, *state]", "(3,)"]),
    ],
)
def test_bad_options_are_named(make: Callable[[], object], names: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
        make()
    assert all(name in str(error.value) for name in names)
