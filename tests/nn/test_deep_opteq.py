"""DeepOptEq: the layer contract, dense oracles in numpy, regularizers by cvxpy, training ways."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria import (
    HSIC,
    L1,
    Box,
    Decorrelation,
    FeatureIncay,
    LeakyNonNegative,
    NonNegative,
    SquaredNorm,
    Tanh,
)
from equilibria.certify import Guarantee
from equilibria.nn import NormBounded, OptEq, WeightNormalized
from equilibria.nn.deep_opteq import DeepOptEq, training_way
from equilibria.nn.deep_opteq import SeparableConv
from equilibria.solvers import SequentialAveraging
from tests.contracts.layer_contract import EXACT, TIGHT, LayerContract
from tests.optional import optional
from tests.problems.test_operators import conv_matrix, randn

cp = optional("cvxpy")

# ---------------------------------------------------------------------- the contract


class DeepContract(LayerContract):
    """The layer contract. A deep OptEq has no hidden problem of one variable (Theorem 2 has an
    inclusion instead): the three tests that ask for ``problem(x)`` ask the map instead.
    """

    def made(self, seed: int = 0, **options: Any) -> DeepOptEq:
        layer = super().made(seed, **options)
        assert isinstance(layer, DeepOptEq)
        for module in layer.modules():
            if isinstance(module, SeparableConv):
                module.settle()  # its weights moved by hand
        return layer

    def test_the_answer_is_a_stationary_point_of_the_problem(self) -> None:
        """A fixed point of the map, evaluated afresh by ``step``."""
        layer, x = self.precise(), self.drawn().double()
        with torch.no_grad():
            z = layer(x)
            assert float((layer.step(z, *layer.inject(x)) - z).abs().max()) < 1e-10

    def test_the_objective_is_finite_and_no_lower_anywhere_near(self) -> None:
        """In place of an objective: T brings every point nearer to the answer."""
        layer, x = self.precise(), self.drawn().double()
        with torch.no_grad():
            z, c = layer(x), layer.inject(x)
            for seed in range(10):
                away = randn(*z.shape, seed=seed)
                moved = layer.step(z + away, *c) - z
                assert (moved.flatten(1).norm(dim=1) < away.flatten(1).norm(dim=1)).all()

    def test_the_map_compiles(self) -> None:
        torch._dynamo.reset()
        layer, x = self.made().eval(), self.drawn(2)
        with torch.no_grad():
            z, c, plain = layer(x), layer.inject(x), layer.bound_step()
        step = torch.compile(lambda z: plain(z, *c), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(step(z), plain(z, *c), rtol=1e-5, atol=1e-6)

    def test_a_nan_sample_spoils_no_gradient_in_any_way_of_training(self) -> None:
        """Here z₀ may be x, so that NaN has a second way in. (U sees x itself: 0·NaN is NaN.)"""
        x = self.drawn(3)
        bad = x.clone()
        bad[1].view(-1)[0] = float("nan")
        for way in ("implicit", "sam", "unrolled"):
            found = []
            for images in (x[[0, 2]], bad):
                layer = self.made(**training_way(way)).eval()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", eq.ConvergenceWarning)
                    solution = layer.solve(images)
                assert torch.isfinite(solution.value).all()
                kept = solution.value if images is not bad else solution.value[[0, 2]]
                kept.square().sum().backward()
                found.append([p.grad for n, p in layer.named_parameters() if ".U." not in n])
            for one, two in zip(*found, strict=True):
                assert torch.isfinite(two).all(), way
                # Two solves of float32, each to 1e-4.
                torch.testing.assert_close(two, one, rtol=0, atol=5e-3 * float(one.abs().max()))


class TestDense(DeepContract):
    in_channels = 3

    def layer(self, **options: Any) -> DeepOptEq:
        return DeepOptEq(4, (5, 3, 6), **{"in_channels": 3, **options})

    def inputs(self, batch: int = 3) -> Tensor:
        return torch.randn(batch, 3)


class ConvolutionalContract(DeepContract):
    """The dense layer's test of the compiler is enough for every day."""

    convolutional = True

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("adjoint", "training"), [(eq.Phantom(steps=2), True), (eq.Unrolled(), False)]
    )
    def test_a_fixed_step_layer_compiles_whole(self, adjoint: Any, training: bool) -> None:
        super().test_a_fixed_step_layer_compiles_whole(adjoint, training)


class TestConvolutional(ConvolutionalContract):
    """With learned α, and the start z₀ = x."""

    in_channels = 3

    def layer(self, **options: Any) -> DeepOptEq:
        parts = {"prior": Tanh(), "alpha": (0.6, 0.9), "learn_alpha": True, **options}
        return DeepOptEq(3, (4, 2), kernel_size=3, **parts)

    def inputs(self, batch: int = 3) -> Tensor:
        return torch.randn(batch, 3, 4, 4)


class TestSeparable(ConvolutionalContract):
    in_channels = 2

    def layer(self, **options: Any) -> DeepOptEq:
        parts = {"prior": LeakyNonNegative(0.2), "in_channels": 2, **options}
        return DeepOptEq(3, (4, 2), kernel_size=3, separable=True, **parts)

    def inputs(self, batch: int = 3) -> Tensor:
        return torch.randn(batch, 2, 4, 4)


# ---------------------------------------------------------------------- oracles in numpy


ACTIVATIONS: dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]] = {
    "relu": (NonNegative(), lambda v: np.maximum(v, 0)),
    "tanh": (Tanh(), np.tanh),
    "box": (Box(-0.2, 0.4), lambda v: np.clip(v, -0.2, 0.4)),
}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "convolution": {"kernel_size": 3},
    # A small map for its norm: the matrix of the oracle is small then, too.
    "separable": {
        "kernel_size": 3,
        "separable": True,
        "constraint": NormBounded(bound=0.95, size=5),
    },
}
ALPHAS: dict[str, dict[str, Any]] = {
    "fixed": {"alpha": 0.8},
    "one": {"alpha": 1.0},
    "a block": {"alpha": (0.3, 1.0, 0.7)},
    "learned": {"alpha": (0.3, 0.9, 0.7), "learn_alpha": True},
}


def made(
    form: str = "dense", mids: Any = (5, 3, 6), channels: int = 4, **options: Any
) -> DeepOptEq:
    torch.manual_seed(2)
    parts = {"in_channels": 3, "solver": TIGHT, "adjoint": EXACT, **FORMS[form], **options}
    layer = DeepOptEq(channels, mids, **parts).double().eval()
    with torch.no_grad():
        for block in layer.blocks:  # ReLU would answer zero for most inputs
            block.U.bias.add_(0.5)
    return layer


def drawn(form: str = "dense", batch: int = 2, channels: int = 3, seed: int = 5) -> Tensor:
    return randn(batch, channels, *(() if form == "dense" else (4, 3)), seed=seed)


def matrix_of(module: nn.Module, scale: float, height: int, width: int) -> np.ndarray:
    """W or U as one matrix; a separable kernel is put together here, entry by entry."""
    if isinstance(module, SeparableConv):
        depth = module.depthwise.weight.detach().numpy()[:, 0]
        point = module.pointwise.weight.detach().numpy()[:, :, 0, 0] * scale
        kernel = np.einsum("oc,cab->ocab", point, depth)
        return conv_matrix(torch.from_numpy(kernel), height, width, padding=1)
    weight = module.weight.detach()
    return weight.numpy() if weight.ndim == 2 else conv_matrix(weight, height, width, padding=1)


def matrices(layer: DeepOptEq, x: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """(W_l, c_l with one row a sample) of each block."""
    height, width = x.shape[2:] if x.ndim == 4 else (1, 1)
    found = []
    for block in layer.blocks:
        scale = 1.0
        if isinstance(block.W, SeparableConv) and block.W.norm is not None:
            size = layer.constraint.size
            free = np.linalg.norm(matrix_of(block.W, 1.0, size, size), 2)
            scale = min(1.0, layer.constraint.bound / free)
        w, u = matrix_of(block.W, scale, height, width), matrix_of(block.U, 1.0, height, width)
        bias = np.repeat(block.U.bias.detach().numpy(), height * width)
        found.append((w, x.flatten(1).numpy() @ u.T + bias))
    return found


def numpy_map(
    blocks: list[tuple[np.ndarray, np.ndarray]], alphas: Any, sigma: Any, i: int
) -> Callable[[np.ndarray], np.ndarray]:
    """T for sample i."""

    def t(z: np.ndarray) -> np.ndarray:
        for (w, c), alpha in zip(blocks, alphas, strict=True):
            z = alpha * w.T @ sigma(w @ z + c[i]) + (1 - alpha) * z
        return z

    return t


def numbers(alpha: Any) -> Any:
    return np.broadcast_to(np.asarray(alpha, dtype=float), 3)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(
    ("form", "alpha"),
    [
        *(("dense", alpha) for alpha in ALPHAS),
        ("convolution", "a block"),
        ("convolution", "learned"),
        ("separable", "a block"),
        ("separable", "learned"),
    ],
)
def test_the_fixed_point_of_equations_5_and_6(activation: str, form: str, alpha: str) -> None:
    """By scipy's root finder where σ is smooth, by a long iteration in numpy where it is not."""
    prior, sigma = ACTIVATIONS[activation]
    layer, x = made(form, prior=prior, **ALPHAS[alpha]), drawn(form)
    z = layer(x).detach().flatten(1).numpy()
    blocks = matrices(layer, x)
    values = numbers(ALPHAS[alpha]["alpha"])
    if alpha == "learned":  # the logits are float32 numbers
        values = 1 / (1 + np.exp(-layer.alpha_logits.detach().numpy()))
        np.testing.assert_allclose(values, ALPHAS[alpha]["alpha"], rtol=1e-6)
    for i in range(2):
        t = numpy_map(blocks, values, sigma, i)
        if activation == "tanh":
            answer = scipy.optimize.root(lambda v, t=t: t(v) - v, np.zeros_like(z[i]), tol=1e-14).x
        else:
            answer = np.zeros_like(z[i])
            for _ in range(600):  # each turn contracts with 0.93 or better
                answer = t(answer)
        assert np.abs(t(answer) - answer).max() < 1e-12
        assert np.abs(answer).max() > 0.05
        np.testing.assert_allclose(z[i], answer, atol=2e-10)


def test_a_step_is_the_composition_of_its_blocks() -> None:
    layer, x = made(alpha=(0.3, 1.0, 0.7)), drawn()
    c = layer.inject(x)
    z = through = randn(2, 4, seed=9)
    for l in range(3):
        through = layer.block_step(l, through, c[l])
    torch.testing.assert_close(layer.step(z, *c), through, rtol=0, atol=1e-15)
    blocks = matrices(layer, x)
    for i in range(2):
        t = numpy_map(blocks, (0.3, 1.0, 0.7), ACTIVATIONS["relu"][1], i)
        np.testing.assert_allclose(through[i].detach().numpy(), t(z[i].numpy()), atol=1e-14)


@pytest.mark.parametrize("form", ["dense", "convolution"])
@pytest.mark.parametrize("alpha", [1.0, 0.8, 0.1])
def test_one_block_is_opteq_whatever_alpha(form: str, alpha: float) -> None:
    """The Moreau envelope keeps the minimizer (Table 1)."""
    deep = made(form, (5,), alpha=alpha)
    twin = OptEq(4, 5, in_channels=3, solver=TIGHT, **FORMS[form]).double().eval()
    twin.W.load_state_dict(deep.blocks[0].W.state_dict())
    twin.U.load_state_dict(deep.blocks[0].U.state_dict())
    x = drawn(form)
    torch.testing.assert_close(deep(x), twin(x), rtol=0, atol=1e-10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    alpha=st.floats(0.01, 1.0),
    norm=st.floats(0.05, 1.0),
    activation=st.sampled_from(list(ACTIVATIONS)),
    form=st.sampled_from(list(FORMS)),
)
def test_each_block_is_a_prox_and_contracts(
    seed: int, alpha: float, norm: float, activation: str, form: str
) -> None:
    """Firmly nonexpansive for ‖W‖ ≤ 1, ‖Δf‖² ≤ ⟨Δf, Δz⟩; and ‖Δf‖ ≤ (α‖W‖² + 1 − α)‖Δz‖."""
    layer = made(form, (5,), alpha=alpha, prior=ACTIVATIONS[activation][0],
                 constraint=NormBounded(bound=norm))  # fmt: skip
    x = drawn(form, 1)
    c = layer.inject(x)
    shape = (1, 4, *x.shape[2:])
    a, b = 3 * randn(*shape, seed=seed), 3 * randn(*shape, seed=seed + 1)
    with torch.no_grad():
        moved = (layer.block_step(0, a, c[0]) - layer.block_step(0, b, c[0])).flatten()
    apart = (a - b).flatten()
    assert float(moved.square().sum()) <= float(moved @ apart) + 1e-12
    assert float(moved.norm()) <= (alpha * norm**2 + 1 - alpha) * float(apart.norm()) + 1e-12


@pytest.mark.parametrize("form", list(FORMS))
def test_the_start(form: str) -> None:
    """z₀ = x where the channels allow (Algorithm 1), zero elsewhere."""
    steps = eq.Picard(rtol=0.0, max_steps=1)
    seen: list[Tensor] = []
    for channels in (3, 4):
        layer, x = made(form, channels=channels), drawn(form)
        layer.solve(x, solver=steps, callback=lambda step, z, r: seen.append(z.clone()))
    assert torch.equal(seen[0], x)
    assert torch.equal(seen[1], torch.zeros(2, 4, *x.shape[2:], dtype=torch.float64))
    bad = x.clone()
    bad[0].view(-1)[0] = float("inf")
    start = made(form, channels=3).start(bad, bad)
    assert torch.isfinite(start).all()
    assert torch.equal(start[1], x[1])


def test_the_unrolled_gradient_reaches_the_start() -> None:
    """z_K depends on x through z₀ too; the implicit gradient, at the fixed point, does not."""
    layer = made(channels=3, **training_way("unrolled", steps=1), alpha=0.5)
    x = drawn().requires_grad_()
    layer(x).sum().backward()
    fixed = drawn().requires_grad_()
    layer(fixed, x.detach()).sum().backward()
    assert x.grad is not None
    assert fixed.grad is not None
    assert float((x.grad - fixed.grad).abs().max()) > 1e-3


# ---------------------------------------------------------------------- α


def test_alphas_are_what_was_asked_for() -> None:
    layer = DeepOptEq(3, (4, 5), alpha=(0.25, 1))
    assert layer.alphas().tolist() == [0.25, 1.0]
    assert layer.double().alphas().dtype == torch.float64
    assert not [n for n, _ in layer.named_parameters() if "alpha" in n]
    learned = DeepOptEq(3, (4, 5), learn_alpha=True)
    torch.testing.assert_close(learned.alphas(), torch.tensor([0.8, 0.8]), rtol=1e-6, atol=0)
    assert learned.alphas().requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_learned_alphas_never_leave_their_interval(dtype: torch.dtype) -> None:
    layer = DeepOptEq(3, (4,) * 6, learn_alpha=True).to(dtype)
    with torch.no_grad():
        layer.alpha_logits.copy_(torch.tensor([-3e4, -200.0, -20.0, 20.0, 200.0, 3e4]))
    values = layer.alphas()
    assert values.dtype == dtype
    assert (values > 0).all()
    assert (values <= 1).all()
    with torch.no_grad():
        assert torch.isfinite(layer(torch.randn(2, 3, dtype=dtype))).all()


def test_learned_alpha_is_trained() -> None:
    """The fixed point of two blocks depends on their α; fit it to that of another α."""
    target, layer = made(mids=(5, 3), alpha=(0.3, 0.9)), made(mids=(5, 3), learn_alpha=True)
    missing = layer.load_state_dict(target.state_dict(), strict=False)
    assert missing.missing_keys == ["alpha_logits"]
    x = drawn(batch=16)
    with torch.no_grad():
        wanted = target(x)
    optimizer = torch.optim.Adam([layer.alpha_logits], lr=0.1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - wanted).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1e-3 * losses[0]
    assert float(layer.alphas()[0].detach()) < 0.7


# ---------------------------------------------------------------------- regularizers (§5.1)


def square(regularizer: Any, form: str, alpha: float) -> tuple[DeepOptEq, Tensor, Any, Any]:
    """One block with an invertible W, where φ is closed (Eq 4)."""
    layer = made(mids=(4,), alpha=alpha, regularizer=regularizer, regularize=form)
    layer.blocks[0].W.weight = 0.7 * torch.eye(4, dtype=torch.float64) + 0.1 * randn(4, 4, seed=6)
    x = drawn(batch=4)
    return layer, x, *matrices(layer, x)[0]


def minimizer(w: np.ndarray, c: np.ndarray, alpha: float, penalty: Any) -> np.ndarray:
    """argmin_z αM_φ^{1−α}(z) + penalty(z), φ(u) = ½‖a‖² − ⟨c, a⟩ − ½‖u‖², u = Wᵀa, a ≥ 0 (Eq 4).

    The envelope is a minimum over u, taken together with z; jointly convex.
    """
    a = cp.Variable(4)
    phi = 0.5 * cp.quad_form(a, cp.psd_wrap(np.eye(4) - w @ w.T)) - c @ a
    if alpha == 1.0:
        z, goal = w.T @ a, phi
    else:
        z = cp.Variable(4)
        goal = alpha * (phi + cp.sum_squares(w.T @ a - z) / (2 * (1 - alpha)))
    cost, limits = penalty(z)
    cp.Problem(cp.Minimize(goal + cost), [a >= 0, *limits]).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-11
    )
    return z.value


def envelope(value: Any) -> Any:
    """min_v R(v) + ½‖v − z‖², for cvxpy."""

    def penalty(z: Any) -> tuple[Any, list[Any]]:
        v = cp.Variable(4)
        return value(v) + 0.5 * cp.sum_squares(v - z), []

    return penalty


SQUARED, ABSOLUTE = (lambda v: 0.15 * cp.sum_squares(v)), (lambda v: 0.2 * cp.norm1(v))


@pytest.mark.parametrize("alpha", [1.0, 0.6])
@pytest.mark.parametrize(
    ("regularizer", "form", "penalty"),
    [
        pytest.param(SquaredNorm(0.3), "gradient", lambda z: (SQUARED(z), []), id="gradient"),
        pytest.param(SquaredNorm(0.3), "prox", envelope(SQUARED), id="prox"),
        pytest.param(L1(0.2), "prox", envelope(ABSOLUTE), id="prox of L1"),
    ],
)
def test_each_form_minimizes_its_own_objective(
    regularizer: Any, form: str, penalty: Any, alpha: float
) -> None:
    """Theorem 4 for the gradient form; the Moreau envelope for the prox form."""
    layer, x, w, c = square(regularizer, form, alpha)
    z = layer(x).detach().numpy()
    for i in range(4):
        np.testing.assert_allclose(z[i], minimizer(w, c[i], alpha, penalty), atol=3e-7)


def test_the_two_forms_are_two_problems() -> None:
    layer, x, w, c = square(SquaredNorm(0.3), "prox", 1.0)
    z = layer(x).detach().numpy()
    other = [minimizer(w, c[i], 1.0, lambda v: (SQUARED(v), [])) for i in range(4)]
    assert np.abs(z - np.stack(other)).max() > 1e-2


def test_feature_incay_finds_a_stationary_point() -> None:
    """Not convex: L-BFGS-B on φ + R in a ≥ 0, from near the answer, stays there."""
    layer, x, w, c = square(FeatureIncay(0.05, 1.0), "gradient", 1.0)
    z = layer(x).detach().numpy()
    for i in range(4):

        def goal(a: np.ndarray, c: np.ndarray = c[i]) -> float:
            u = w.T @ a
            return float(0.5 * a @ a - c @ a - 0.5 * u @ u + 0.1 / (u @ u + 2.0))

        start = np.maximum(np.linalg.solve(w.T, z[i]), 0) + 1e-3
        found = scipy.optimize.minimize(
            goal, start, bounds=[(0, None)] * 4, options={"ftol": 1e-16, "gtol": 1e-11}
        )
        np.testing.assert_allclose(z[i], w.T @ found.x, atol=2e-5)


@pytest.mark.parametrize(
    ("regularizer", "form", "inside"),
    [
        (SquaredNorm(0.4), "gradient", lambda z: 0.6 * z),
        (SquaredNorm(0.4), "prox", lambda z: z / 1.4),
        (L1(0.1), "prox", lambda z: np.sign(z) * np.maximum(np.abs(z) - 0.1, 0)),
        (FeatureIncay(0.2, 1.0), "gradient", lambda z: z * (1 + 0.8 / (z @ z + 2.0) ** 2)),
    ],
)
def test_the_regularizer_stands_in_front_of_the_blocks(
    regularizer: Any, form: str, inside: Any
) -> None:
    layer = made(regularizer=regularizer, regularize=form)
    x = drawn()
    z = layer(x).detach().numpy()
    blocks = matrices(layer, x)
    for i in range(2):
        t = numpy_map(blocks, numbers(0.8), ACTIVATIONS["relu"][1], i)
        np.testing.assert_allclose(t(inside(z[i])), z[i], atol=1e-11)


@pytest.mark.parametrize("regularizer", [Decorrelation(0.05), HSIC(0.05)])
def test_regularizers_across_the_batch(regularizer: Any) -> None:
    """z = T(z − ∂R(z)) with ∂R by autograd of its value; the answer depends on batch mates."""
    layer = made(
        regularizer=regularizer,
        solver=eq.Anderson(rtol=1e-11, max_steps=400),
        adjoint=eq.Implicit(solver=eq.Anderson(rtol=1e-11, max_steps=400)),
    )
    x = drawn(batch=5)
    solution = layer.solve(x)
    z = solution.value.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(regularizer.value(z), z)
    plain = copy.deepcopy(layer)
    plain.regularizer = None
    again = plain.step(z - gradient, *plain.inject(x))
    assert float((again - z).detach().abs().max()) < 1e-9
    assert float((layer(x[:2]) - solution.value[:2]).detach().abs().max()) > 1e-6
    # The gradient by a dense solve of the coupled system, all samples in one vector.
    c = [t.detach() for t in layer.inject(x)]
    start, step = z.detach(), layer.bound_step()
    jacobian = torch.autograd.functional.jacobian(
        lambda v: step(v.view_as(start), *c).flatten(), start.flatten()
    )
    u = torch.linalg.solve(torch.eye(20).double() - jacobian.mT, 2 * start.flatten())
    weights = list(layer.parameters())
    pulled = layer.step(start, *layer.inject(x)).flatten() @ u
    expected = torch.autograd.grad(pulled, weights)
    solution.value.square().sum().backward()
    for p, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------- §5.2 on the layer itself


def test_sam_finds_the_fixed_point_of_least_norm() -> None:
    """Orthogonal W_l and a box: f_l projects to a rotated box, T has many fixed points; cvxpy."""
    layer = made(mids=(3, 3), channels=3, alpha=1.0, prior=Box(0.2, 1.0),
                 constraint=NormBounded(bound=1.0))  # fmt: skip
    turn = torch.linalg.qr(randn(3, 3, seed=11)).Q
    turn = turn * torch.sign(turn.sum(1, keepdim=True))  # so that the boxes meet
    layer.blocks[0].W.weight = torch.eye(3, dtype=torch.float64)
    layer.blocks[1].W.weight = turn
    with torch.no_grad():
        for block in layer.blocks:
            block.U.weight.zero_()
            block.U.bias.zero_()
    rows = layer.blocks[1].W.weight.detach().numpy()
    z = cp.Variable(3)
    limits = [z >= 0.2, z <= 1.0, rows @ z >= 0.2, rows @ z <= 1.0]
    cp.Problem(cp.Minimize(cp.sum_squares(z)), limits).solve(solver=cp.CLARABEL)
    assert z.value is not None
    x = torch.tensor([[0.9, 0.8, 0.95]], dtype=torch.float64)
    plain = layer.solve(x, solver=eq.Picard(rtol=1e-12, max_steps=2000))
    errors = []
    for steps in (30, 3000):
        solver = SequentialAveraging(max_steps=steps, rho=0.6, c=0.15)
        found = layer.solve(x, solver=solver).value.detach().numpy()
        errors.append(np.linalg.norm(found[0] - z.value))
    assert np.linalg.norm(plain.value.detach().numpy()[0] - z.value) > 0.1
    assert errors[1] < 0.1 * errors[0]
    assert errors[1] < 5e-3
    kinds = layer.certify(x).kinds
    assert kinds == (Guarantee.none,)


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("channels", "mids", "paper"),
    [
        pytest.param(30, (16, 32, 64, 128, 128), 199_000, id="199k"),
        pytest.param(30, (16, 32, 64, 64, 128), 162_000, id="162k"),
        pytest.param(64, (64, 128, 256, 256, 512), 1_400_000, id="1.4M"),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_parameter_counts(channels: int, mids: tuple[int, ...], paper: int, bias: bool) -> None:
    """One convolution as the extractor, W_l and U_l both 3 × 3, a linear head (docs/models.md)."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=bias),
            DeepOptEq(channels, mids, kernel_size=3, bias=bias),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, 10),
        )
    count = sum(p.numel() for p in model.parameters())
    assert abs(count - paper) <= 0.03 * paper
    if not bias:  # as counted in the audit
        assert count == {199_000: 199_840, 162_000: 165_280, 1_400_000: 1_403_210}[paper]


# ---------------------------------------------------------------------- the rest


def test_weights_are_evaluated_once_a_solve() -> None:
    """In training the power iteration moves once a forward, not once a step."""
    layer = made("dense").train()
    calls = []
    norm = layer.blocks[0].W.parametrizations.weight[0]
    norm.register_forward_hook(lambda *args: calls.append(1))
    solution = layer.solve(drawn())
    assert solution.stats.evaluations > 5
    assert len(calls) == 1


@pytest.mark.parametrize("form", list(FORMS))
def test_finished_samples_can_be_dropped(form: str) -> None:
    layer, x = made(form), drawn(form, 6)
    x[:3] *= 1e-6
    plain = layer.solve(x, solver=eq.Anderson(rtol=1e-11, block=1))
    compact = layer.solve(x, solver=eq.Anderson(rtol=1e-11, block=1, compact=True))
    torch.testing.assert_close(compact.value, plain.value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("constraint", [None, WeightNormalized(), NormBounded(bound=0.4)])
def test_every_constraint(form: str, constraint: Any) -> None:
    layer = made(form, constraint=constraint)
    with torch.no_grad():
        for block in layer.blocks:
            for p in block.W.parameters():
                p.mul_(0.4)
    z = layer(drawn(form))
    z.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(drawn(form)), z)


def test_an_observer_sees_its_solves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), DeepOptEq(4, (3, 5), kernel_size=3))
    with eq.nn.observe(model) as seen:
        model(torch.randn(2, 3, 5, 5))
    assert list(seen.solutions) == ["1"]
    assert seen.solutions["1"][0].stats.steps.shape == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, r"alpha=0.0.*\(0, 1\]"),
        ({"alpha": 1.2}, r"alpha=1.2.*\(0, 1\]"),
        ({"alpha": -0.5}, "alpha=-0.5"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": (0.5, 0.0)}, r"alpha=\(0.5, 0.0\)"),
        ({"alpha": (0.5, 0.5, 0.5)}, "3 numbers for the 2 blocks"),
        ({"alpha": ()}, "0 numbers for the 2 blocks"),
        ({"alpha": 1.0, "learn_alpha": True}, r"\(0, 1\), which a sigmoid can reach"),
        ({"kernel_size": 2}, "odd kernel"),
        ({"kernel_size": 0}, "kernel_size=0"),
        ({"separable": True}, "give kernel_size"),
        ({"mids": ()}, r"mids=\(\)"),
        ({"mids": 5}, "mids=5"),
        ({"mids": (3, 0)}, r"mids\[1\]=0"),
        ({"mids": (3, 2.0)}, r"mids\[1\]=2.0"),
        ({"channels": 0}, "channels=0"),
        ({"in_channels": -1}, "in_channels=-1"),
        ({"regularize": "both"}, "regularize='both'"),
        ({"regularizer": L1(0.1)}, "kink.*regularize='prox'"),
        ({"regularizer": FeatureIncay(), "regularize": "prox"}, "closed prox.*FeatureIncay"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepOptEq(**{"channels": 3, "mids": (4, 5), **options})


def test_options_of_a_wrong_kind() -> None:
    with pytest.raises(TypeError, match=r"regularizer='l2'.*expected a regularizer"):
        DeepOptEq(3, (4,), regularizer="l2")
    with pytest.raises(TypeError, match="NormBounded"):
        DeepOptEq(3, (4,), kernel_size=3, separable=True, constraint=0.9)
    layer = DeepOptEq(3, (4,))
    with pytest.raises(ValueError, match=r"state of DeepOptEq .* is \(2, 3\), got z0 \(3, 3\)"):
        layer(torch.randn(2, 3), torch.randn(3, 3))
    with pytest.raises(ValueError, match="got z0 list"):
        layer(torch.randn(2, 3), [0.0])


def test_repr_says_what_it_is() -> None:
    text = repr(DeepOptEq(3, (4, 5), kernel_size=3, separable=True, learn_alpha=True,
                          regularizer=L1(0.1), regularize="prox"))  # fmt: skip
    for part in ("3, (4, 5)", "separable=True", "alpha=learned", "L1(weight=0.1)", "'prox'"):
        assert part in text
