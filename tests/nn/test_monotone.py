"""MonotoneDEQ against numpy: Newton for the equilibrium, the implicit formula for gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

import equilibria as eq
from equilibria.nn import MonotoneDEQ, TransposedSplitting
from equilibria.solvers import ForwardBackward, PeacemanRachford
from tests.contracts.layer_contract import EXACT
from tests.nn.checks import (
    MapContract,
    SlowCompile,
    check_autocast,
    check_compiles,
    check_copies,
    check_gradients,
)
from tests.oracles import PROXES
from tests.problems.test_monotone_operator import modulus, numpy_w
from tests.problems.test_monotone_tiers import conv_matrix, tier_matrix

Array = NDArray[np.float64]

# A fall by 1e-12 of what is left: splittings converge linearly, and float64 resolves 1e-16.
PR = PeacemanRachford(rtol=1e-12)
FB = ForwardBackward(rtol=1e-13, max_steps=5000)
ANDERSON = eq.Anderson(rtol=1e-13, max_steps=400)


# ---------------------------------------------------------------------- the layer contract


class MonotoneContract(MapContract):
    laps = PeacemanRachford(rtol=0.0, atol=0.0, max_steps=3)
    tight = PR
    wrong_options: ClassVar = [
        ("prior", "relu", TypeError, "expected a prior"),
        ("m", 0.0, ValueError, r"MonotoneDEQ\(m=0.0\)"),
    ]


class TestDense(MonotoneContract, SlowCompile):
    shape = (4,)

    def layer(self, **options: Any) -> MonotoneDEQ:
        return MonotoneDEQ(5, in_channels=4, **{"m": 0.4, **options})


class TestConvolutional(MonotoneContract):
    shape = (2, 5, 4)

    def layer(self, **options: Any) -> MonotoneDEQ:
        return MonotoneDEQ(3, in_channels=2, kernel_size=3, **{"m": 0.5, **options})


class TestCircularForwardBackward(MonotoneContract, SlowCompile):
    shape = (2, 4, 5)
    laps = ForwardBackward(rtol=0.0, atol=0.0, max_steps=3)
    tight = FB

    def layer(self, **options: Any) -> MonotoneDEQ:
        options = {"solver": ForwardBackward(), **options}
        return MonotoneDEQ(2, in_channels=2, kernel_size=3, padding="circular", **options)


# ---------------------------------------------------------------------- oracles


def newton(
    w: Array, c: Array, sigma: Callable[[Array], Array], slope: Callable[[Array], Array]
) -> Array:
    """z = σ(Wz + c), sample by sample, by semi-smooth Newton with a line search."""
    found = []
    for row in c:
        z = sigma(row)
        for _ in range(200):
            v = w @ z + row
            miss = z - sigma(v)
            size = np.linalg.norm(miss)
            if size < 1e-14 * (1 + np.linalg.norm(z)):
                break
            move = -np.linalg.solve(np.eye(len(z)) - slope(v)[:, None] * w, miss)
            t = 1.0
            while t > 1e-6:
                trial = z + t * move
                if np.linalg.norm(trial - sigma(w @ trial + row)) < (1 - 1e-4 * t) * size:
                    break
                t /= 2
            z = z + t * move
        assert np.linalg.norm(z - sigma(w @ z + row)) < 1e-12 * (1 + np.linalg.norm(z))
        found.append(z)
    return np.stack(found)


RELU = (lambda v: np.maximum(v, 0.0), lambda v: (v > 0).astype(float))


def array(t: Tensor) -> Array:
    return t.detach().double().numpy()


def matrix_w(layer: MonotoneDEQ, x: Tensor) -> Array:
    """W from the layer's parameters, pixel by pixel in numpy."""
    weights: Any = layer.W
    if layer.kernel_size is None:
        return numpy_w(array(weights.A), array(weights.B), layer.m)

    def scaled(kernels: Any, lengths: Tensor | None) -> list[Array]:
        return [
            float(array(lengths)[i]) * array(k) / np.sqrt((array(k) ** 2).sum())  # type: ignore[arg-type]
            for i, k in enumerate(kernels)
        ]

    sizes = [(x.shape[2] >> i, x.shape[3] >> i) for i in range(layer.tiers)]
    parts = [
        scaled(weights.A, weights.g),
        scaled(weights.B, weights.h),
        scaled(weights.N, weights.g_down),
    ]
    return tier_matrix(*parts, layer.m, sizes, layer.padding)


def matrix_u(layer: MonotoneDEQ, x: Tensor) -> Array:
    """U as a matrix from flat x to the flat state; zero below the first tier."""
    u: Any = layer.U
    if layer.kernel_size is None:
        return array(u.weight)
    first = conv_matrix(array(u.weight), tuple(x.shape[2:]), layer.padding)
    rest = sum(c * (x.shape[2] >> i) * (x.shape[3] >> i) for i, c in enumerate(layer.channels))
    return np.concatenate([first, np.zeros((rest - len(first), first.shape[1]))])


def flat(z: Any) -> Array:
    return np.concatenate([array(t).reshape(len(t), -1) for t in pytree.tree_leaves(z)], 1)


FORMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dense": ({"channels": 6, "in_channels": 4}, (3, 4)),
    "conv": ({"channels": 3, "in_channels": 2, "kernel_size": 3}, (2, 2, 4, 5)),
    "circular": (
        {"channels": 3, "in_channels": 2, "kernel_size": 3, "padding": "circular"},
        (2, 2, 4, 5),
    ),
    "tiers": ({"channels": (2, 3, 2), "in_channels": 2, "kernel_size": 3}, (2, 2, 8, 4)),
    "circular tiers": (
        {"channels": (2, 3), "in_channels": 2, "kernel_size": 3, "padding": "circular"},
        (2, 2, 4, 6),
    ),
}
each_form = pytest.mark.parametrize("form", list(FORMS))


def drawn(
    form: str, *, stretch: float = 2.0, seed: int = 0, **options: Any
) -> tuple[MonotoneDEQ, Tensor]:
    """A layer of this form in float64 with ‖W‖ above 1, and an input."""
    sizes, shape = FORMS[form]
    torch.manual_seed(seed)
    layer = MonotoneDEQ(**{"m": 0.4, **sizes, **options}).double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.startswith("W."):
                p.mul_(stretch)
    return layer, torch.randn(shape, dtype=torch.float64)


# ---------------------------------------------------------------------- answers


@each_form
@pytest.mark.parametrize(("solver", "m"), [(PR, 0.4), (FB, 2.0)], ids=["pr", "fb"])
def test_the_equilibrium_is_newtons(form: str, solver: Any, m: float) -> None:
    """With a larger m for forward-backward, whose steps go with (L/m)²."""
    layer, x = drawn(form, m=m, solver=solver)
    w, u = matrix_w(layer, x), matrix_u(layer, x)
    assert np.linalg.norm(w, 2) > 1.2  # where plain iteration has no right to converge
    solution = layer.solve(x)
    assert solution.converged.all()
    assert isinstance(solution.value, Tensor if layer.tiers == 1 else tuple)
    c = flat(x) @ u.T + flat(_bias(layer, x))
    np.testing.assert_allclose(flat(solution.value), newton(w, c, *RELU), atol=1e-9)


def _bias(layer: MonotoneDEQ, x: Tensor) -> tuple[Tensor, ...]:
    """b as a state: one number a channel of the first tier."""
    bias: Any = layer.U.bias
    parts = [torch.zeros_like(t) for t in pytree.tree_leaves(layer.start(x, layer.U(x)))]
    parts[0] = parts[0] + bias.detach().reshape(1, -1, *[1] * (parts[0].ndim - 2))
    return tuple(parts)


@pytest.mark.parametrize("name", ["relu", "tanh", "soft", "box", "leaky"])
@pytest.mark.parametrize("solver", [PR, FB, ANDERSON], ids=lambda s: type(s).__name__)
def test_every_prior_and_solver(name: str, solver: Any) -> None:
    """z = σ(Wz + Ux), which has one solution."""
    prior, prox = PROXES[name]
    layer, x = drawn("dense", stretch=1.3, prior=prior, solver=solver, bias=False)
    solution = layer.solve(x)
    assert solution.converged.all()
    z, w = flat(solution.value), matrix_w(layer, x)
    np.testing.assert_allclose(prox(z @ w.T + flat(x) @ matrix_u(layer, x).T, 1.0), z, atol=1e-10)


def test_plain_iteration_diverges_where_the_splittings_converge() -> None:
    layer, x = drawn("dense", stretch=4.0, prior=eq.Free())
    with pytest.warns(eq.ConvergenceWarning, match="diverged"):
        plain = layer.solve(x, solver=eq.Picard(max_steps=500))
    assert not plain.converged.any()
    assert layer.solve(x).converged.all()
    expected = np.linalg.solve(np.eye(6) - matrix_w(layer, x), array(layer.U(x)).T).T
    np.testing.assert_allclose(flat(layer.solve(x, solver=PR).value), expected, atol=1e-9)


def test_a_solution_says_what_ran() -> None:
    layer, x = drawn("dense")
    assert "PeacemanRachford with the step α = √n" in layer.solve(x).choice
    assert (
        "ForwardBackward with the given step α"
        in layer.solve(x, solver=ForwardBackward(alpha=0.01, max_steps=10**4)).choice
    )
    own = layer.solve(x, solver=eq.Broyden(max_steps=500))
    assert own.choice == "Broyden on the layer's own map"
    seen: list[tuple[int, ...]] = []
    layer.solve(x, callback=lambda step, z, residual: seen.append(tuple(z.shape)))
    assert set(seen) == {(3, 6)}


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [
        *((solver, eq.Unrolled()) for solver in (PR, FB)),
        *((ANDERSON, adjoint) for adjoint in (TransposedSplitting(), EXACT, eq.Unrolled())),
    ],
    ids=lambda made: type(made).__name__,
)
def test_gradients_with_another_solver_or_adjoint(solver: Any, adjoint: Any) -> None:
    """Splittings with their own adjoint are below, those with GMRES in the contract."""
    layer, x = drawn("dense", m=2.0, stretch=1.3, solver=solver, adjoint=adjoint)
    check_gradients(layer, x[:1], rtol=1e-6, atol=1e-6)


@each_form
@pytest.mark.parametrize("kind", [PeacemanRachford, ForwardBackward])
def test_gradcheck(form: str, kind: Any) -> None:
    """To x and every parameter, backward by the transposed splitting."""
    layer, x = drawn(form, m=3.0, stretch=0.7, solver=kind(rtol=1e-13))
    check_gradients(layer, x[:1], atol=1e-6)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("dense", PeacemanRachford),
        ("dense", ForwardBackward),
        pytest.param("conv", PeacemanRachford, marks=pytest.mark.slow),
        pytest.param("conv", ForwardBackward, marks=pytest.mark.slow),
        pytest.param("tiers", PeacemanRachford, marks=pytest.mark.slow),
        pytest.param("circular tiers", ForwardBackward, marks=pytest.mark.slow),
    ],
)
def test_gradgradcheck(form: str, kind: Any) -> None:
    layer, x = drawn(form, m=2.0, stretch=0.7, solver=kind(rtol=1e-13))
    check_gradients(layer, x[:1], second=True, atol=1e-6)


def test_the_backward_solve_is_the_transposed_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Krylov space: u ← g + Jᵀu; only a solver that is no splitting takes GMRES."""

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("GMRES")

    monkeypatch.setattr(eq.GMRES, "solve", refused)
    for solver in (PR, ForwardBackward()):
        layer, x = drawn("dense", m=1.0, stretch=1.0, solver=solver)
        solution = layer.solve(x)
        solution.value.square().sum().backward()
        forward, backward = solution.stats.steps.max(), solution.stats.backward.steps
        assert int(backward.max()) <= 2 * int(forward)  # the same contraction factor
    with pytest.raises(AssertionError, match="GMRES"):
        layer.solve(x, solver=eq.Anderson()).value.square().sum().backward()


def test_fixed_steps_forward_converge_backward() -> None:
    """Five steps forward; backward as many as the tolerance of the dtype takes."""
    layer, x = drawn("dense", solver=PeacemanRachford(rtol=0.0, atol=0.0, max_steps=5))
    solution = layer.solve(x)
    solution.value.square().sum().backward()
    told = solution.stats.backward
    assert told.unconverged == 0
    assert int(told.steps.max()) > 5


# ---------------------------------------------------------------------- a module like any other


@each_form
def test_a_solve_leaves_nothing_on_the_module(form: str) -> None:
    """The resolvent is as large as W; it must not be kept, copied or saved."""
    layer, x = drawn(form)
    before = pickle.dumps(layer)
    layer(x)
    assert pickle.dumps(layer) == before
    assert set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}


def test_several_tiers_travel() -> None:
    def tiers(seed: int = 0) -> MonotoneDEQ:
        return drawn("tiers", seed=seed)[0].float()

    layer, x = tiers(), drawn("tiers")[1].float()
    check_copies(tiers, x)
    check_autocast(layer, x)
    last = layer(x.to(memory_format=torch.channels_last))
    half = copy.deepcopy(layer).to(torch.bfloat16)(x.to(torch.bfloat16))
    for expected, a, b in zip(layer(x), last, half, strict=True):
        assert a.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(a, expected, rtol=1e-3, atol=1e-4)
        assert b.dtype == torch.bfloat16
        largest = float(expected.detach().abs().max())
        torch.testing.assert_close(b.float(), expected, rtol=0, atol=0.1 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [PeacemanRachford, ForwardBackward])
def test_several_tiers_compile(solver: Any) -> None:
    with torch.no_grad():
        check_compiles(*drawn("tiers", solver=solver(rtol=0.0, atol=0.0, max_steps=3)))


def test_negative_scales_keep_the_layer_monotone() -> None:
    """monotone_op_net's g multiplies AᵀA: below zero it is lost there, and NaN under a root."""
    layer, x = drawn("tiers")
    weights: Any = layer.W
    with torch.no_grad():
        weights.g.fill_(-2.0)
        weights.g_down.fill_(-1.5)
    w = matrix_w(layer, x)
    assert modulus(w) >= layer.m - 1e-12
    assert layer.solve(x).converged.all()


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, r"channels=0\): expected an integer"),
        ({"channels": 3, "kernel_size": 4}, r"kernel_size=4\): .* needs an odd kernel size"),
        ({"channels": ()}, "at least one tier"),
        ({"channels": (4, 8)}, "several tiers are convolutional; give kernel_size"),
        ({"channels": (4, -1), "kernel_size": 3}, r"channels=-1\)"),
        ({"channels": 4, "kernel_size": 0}, r"kernel_size=0\): expected an integer"),
        ({"channels": 4, "in_channels": 1.5}, r"in_channels=1.5\)"),
        ({"channels": 4, "padding": "reflect"}, r"padding='reflect'\): expected 'zeros'"),
        ({"channels": 4, "m": -0.1}, r"m=-0.1\) is out of range"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MonotoneDEQ(**options)


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"channels": (2,) * 3, "kernel_size": 3}, (8, 6), "multiples of 4, got x of 8 × 6 pixels"),
        ({"channels": (2, 2), "kernel_size": 5, "padding": "circular"}, (6, 8), "last tier, got 3"),
    ],
)
def test_maps_of_a_wrong_size(options: Any, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MonotoneDEQ(in_channels=1, **options)(torch.zeros(1, 1, *shape))


def test_a_start_of_another_shape() -> None:
    layer, x = drawn("tiers")
    z = layer(x)
    for wrong in (z[0], z[:2], (z[0], z[2], z[1]), "zero", 5, 1.0):
        with pytest.raises(ValueError, match="z0 must be shaped as the state"):
            layer.solve(x, wrong)
