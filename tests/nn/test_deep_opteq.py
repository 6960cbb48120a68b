"""DeepOptEq: the contract, dense oracles in numpy, regularizers by cvxpy, the ways to train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.nn.deep_opteq import SeparableConv, training_way
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.nn.checks import MapContract, SlowCompile, check_gradients
from tests.optional import optional
from tests.oracles import PROXES
from tests.problems.test_operators import conv_matrix, randn

cp = optional("cvxpy")

# ---------------------------------------------------------------------- the contract


class DeepContract(MapContract):
    def made(self, seed: int = 0, **options: Any) -> eq.nn.DeepOptEq:
        layer = super().made(seed, **options)
        for module in layer.modules():
            if isinstance(module, SeparableConv):
                module.settle()  # its weights moved by hand
        return layer


class TestDense(DeepContract):
    shape = (3,)

    def layer(self, **options: Any) -> eq.nn.DeepOptEq:
        return eq.nn.DeepOptEq(4, (5, 3, 6), **{"in_channels": 3, **options})


class TestConvolutional(DeepContract, SlowCompile):
    """With learned α, and the start z₀ = x."""

    shape = (3, 4, 4)

    def layer(self, **options: Any) -> eq.nn.DeepOptEq:
        parts = {"prior": eq.Tanh(), "alpha": (0.6, 0.9), "learn_alpha": True, **options}
        return eq.nn.DeepOptEq(3, (4, 2), kernel_size=3, **parts)


class TestSeparable(DeepContract, SlowCompile):
    shape = (2, 4, 4)

    def layer(self, **options: Any) -> eq.nn.DeepOptEq:
        parts = {"prior": eq.LeakyNonNegative(0.2), "in_channels": 2, **options}
        return eq.nn.DeepOptEq(3, (4, 2), kernel_size=3, separable=True, **parts)


# ---------------------------------------------------------------------- oracles in numpy


FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "convolution": {"kernel_size": 3},
    # A small map for its norm: the matrix of the oracle is small then, too.
    "separable": {
        "kernel_size": 3,
        "separable": True,
        "constraint": eq.nn.NormBounded(bound=0.95, size=5),
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
) -> eq.nn.DeepOptEq:
    torch.manual_seed(2)
    parts = {"in_channels": 3, "solver": TIGHT, "adjoint": EXACT, **FORMS[form], **options}
    layer = eq.nn.DeepOptEq(channels, mids, **parts).double().eval()
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


def matrices(layer: eq.nn.DeepOptEq, x: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
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
            z = alpha * w.T @ sigma(w @ z + c[i], 1.0) + (1 - alpha) * z
        return z

    return t


@pytest.mark.parametrize("activation", ["relu", "tanh", "box"])
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
    """T contracts, so that its fixed point is the only one."""
    prior, sigma = PROXES[activation]
    layer, x = made(form, prior=prior, **ALPHAS[alpha]), drawn(form)
    z = layer(x).detach().flatten(1).numpy()
    blocks = matrices(layer, x)
    values = np.broadcast_to(np.asarray(ALPHAS[alpha]["alpha"], dtype=float), 3)
    if alpha == "learned":  # the logits are float32 numbers
        values = 1 / (1 + np.exp(-layer.alpha_logits.detach().numpy()))
        np.testing.assert_allclose(values, ALPHAS[alpha]["alpha"], rtol=1e-6)
    for i in range(2):
        assert np.abs(z[i]).max() > 0.05
        np.testing.assert_allclose(numpy_map(blocks, values, sigma, i)(z[i]), z[i], atol=1e-10)


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


# ---------------------------------------------------------------------- α


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_learned_alphas_never_leave_their_interval(dtype: torch.dtype) -> None:
    layer = eq.nn.DeepOptEq(3, (4,) * 6, learn_alpha=True).to(dtype)
    with torch.no_grad():
        layer.alpha_logits.copy_(torch.tensor([-3e4, -200.0, -20.0, 20.0, 200.0, 3e4]))
    values = layer.alphas()
    assert values.dtype == dtype
    assert (values > 0).all()
    assert (values <= 1).all()
    with torch.no_grad():
        assert torch.isfinite(layer(torch.randn(2, 3, dtype=dtype))).all()


# ---------------------------------------------------------------------- regularizers (§5.1)


def square(regularizer: Any, form: str, alpha: float) -> tuple[eq.nn.DeepOptEq, Tensor, Any, Any]:
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
        pytest.param(eq.SquaredNorm(0.3), "gradient", lambda z: (SQUARED(z), []), id="gradient"),
        pytest.param(eq.SquaredNorm(0.3), "prox", envelope(SQUARED), id="prox"),
        pytest.param(eq.L1(0.2), "prox", envelope(ABSOLUTE), id="prox of L1"),
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


# ---------------------------------------------------------------------- the ways of Algorithm 1


WAYS: dict[str, dict[str, Any]] = {
    "implicit": {"solver": TIGHT, "adjoint": EXACT},
    "sam": training_way("sam", steps=5),
    "unrolled": training_way("unrolled", steps=5),
}


def settled(layer: Any) -> Any:
    """Away from the kinks of ReLU and of the bound, in float64."""
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.add_(0.3 * torch.rand(p.shape) if name.endswith("bias") else 0.0)
    return layer.double().eval()


SEPARABLE = {"prior": eq.Tanh(), "learn_alpha": True, "kernel_size": 3, "separable": True}


@pytest.mark.parametrize(
    ("way", "options"),
    [
        *((way, {"alpha": (0.3, 1.0)}) for way in WAYS),
        *((way, SEPARABLE) for way in ("sam", "unrolled")),
        ("implicit", {"regularizer": eq.SquaredNorm(0.3)}),
        ("implicit", {"regularizer": eq.L1(0.05), "regularize": "prox"}),
        ("unrolled", {"regularizer": eq.FeatureIncay(0.1)}),
    ],
)
def test_gradients_of_every_way(way: str, options: dict[str, Any]) -> None:
    """Implicit ones of convolutions and learned α are in the contract."""
    torch.manual_seed(1)
    layer = settled(eq.nn.DeepOptEq(3, (4, 2), **options, **WAYS[way]))
    x = randn(2, 3, *((3, 3) if "kernel_size" in options else ()), seed=3)
    check_gradients(layer, x, fast="alpha" not in options)


def test_function_transforms_and_second_derivatives() -> None:
    torch.manual_seed(1)
    layer = settled(
        eq.nn.DeepOptEq(3, (4, 2), prior=eq.Tanh(), learn_alpha=True, **WAYS["implicit"])
    )
    x = randn(2, 3, seed=3)
    expected = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), expected, rtol=0, atol=1e-10)
    alone = torch.func.vmap(lambda v: layer(v[None])[0])(x)
    torch.testing.assert_close(alone, layer(x), rtol=0, atol=1e-10)
    check_gradients(layer, x[:1], second=True)


def test_what_each_way_computes() -> None:
    """Lines 3–16 of Algorithm 1 in numpy, from z₀ = x."""
    layer, x = settled(eq.nn.DeepOptEq(3, (4, 2))), randn(2, 3, seed=3)
    blocks = matrices(layer, x)
    steps = [numpy_map(blocks, (0.8, 0.8), PROXES["relu"][1], i) for i in range(2)]

    def step(z: np.ndarray) -> np.ndarray:
        return np.stack([t(row) for t, row in zip(steps, z, strict=True)])

    plain = averaged = x.numpy()
    for k in range(1, 6):
        plain = step(plain)
        beta = decay = 0.5 * k**-0.3
        pulled = (1 - 0.5 * decay) * averaged - 0.5 * averaged
        averaged = beta * pulled + (1 - beta) * step(averaged)
    end = plain
    for _ in range(400):
        end = step(end)
    for way, expected in (("unrolled", plain), ("sam", averaged), ("implicit", end)):
        found = layer.solve(x, **WAYS[way]).value.detach()
        np.testing.assert_allclose(found, expected, atol=1e-10 if way == "implicit" else 1e-14)


def test_what_a_way_is_made_of() -> None:
    assert training_way("implicit") == {"solver": None, "adjoint": eq.Implicit()}
    plain = eq.Picard(rtol=0.0, atol=0.0, max_steps=7)
    assert training_way("unrolled", steps=7) == {"solver": plain, "adjoint": eq.Unrolled()}
    averaging = eq.SequentialAveraging(
        regularizer=eq.SquaredNorm(0.2), rtol=0.0, atol=0.0, max_steps=7, rho=0.2
    )
    way = training_way("sam", steps=7, regularizer=eq.SquaredNorm(0.2), rho=0.2)
    assert way == {"solver": averaging, "adjoint": eq.Unrolled()}


# ---------------------------------------------------------------------- separable convolutions


def separable(
    inputs: int = 3, outputs: int = 4, scale: float = 3.0, **options: Any
) -> SeparableConv:
    torch.manual_seed(0)
    conv = SeparableConv(inputs, outputs, 3, **options).double()
    with torch.no_grad():
        for p in conv.parameters():
            p.mul_(scale)
    conv.settle()
    return conv.eval()


def composed(conv: SeparableConv, size: int, divisor: float = 1.0) -> np.ndarray:
    """The matrix P·D of both maps, each by its own definition."""
    depth = conv_matrix(
        conv.depthwise.weight, size, size, padding=1, groups=conv.depthwise.in_channels
    )
    point = conv_matrix(conv.pointwise.weight, size, size)
    return point @ depth / divisor


@pytest.mark.parametrize("bound", [0.3, 0.95, 50.0])
def test_the_composed_map_is_bounded_and_not_more(bound: float) -> None:
    """‖P∘D‖ = min(‖·‖, bound) on the map that was asked for: no slack of a product of norms."""
    conv = separable(constraint=eq.nn.NormBounded(bound=bound, size=6))
    free = np.linalg.norm(composed(conv, 6), 2)
    expected = composed(conv, 6, max(1.0, free / bound))
    z = randn(2, 3, 6, 6, seed=1)
    got = conv(z).flatten(1).detach().numpy()
    # σ comes from Lanczos to 1e-6 in float64, and its error is the square of that.
    np.testing.assert_allclose(got, z.flatten(1).numpy() @ expected.T, rtol=0, atol=1e-10)
    back = conv.operator().adjoint(randn(2, 4, 6, 6, seed=2)).flatten(1).detach().numpy()
    np.testing.assert_allclose(
        back, randn(2, 4, 6, 6, seed=2).flatten(1).numpy() @ expected, rtol=0, atol=1e-10
    )


def test_the_bound_holds_on_every_map_size_by_the_proven_norm() -> None:
    conv = separable(constraint=eq.nn.NormBounded(bound=0.9, size=16))
    upper = conv.operator().norm_upper()
    for size in (3, 8, 12):
        free = np.linalg.norm(composed(conv, 16), 2)
        assert np.linalg.norm(composed(conv, size, free / 0.9), 2) <= upper
    assert upper < 0.9 * 1.03


def test_without_a_bound_it_is_two_convolutions() -> None:
    for constraint in (None, eq.nn.WeightNormalized()):
        conv = separable(constraint=constraint, bias=True)
        z = randn(2, 3, 5, 5, seed=1)
        torch.testing.assert_close(conv(z), conv.pointwise(conv.depthwise(z)))
    assert conv.bias is conv.pointwise.bias
    assert conv.norm is None
    conv.settle()  # nothing to do, and no error


# ---------------------------------------------------------------------- the rest


def test_weights_are_evaluated_once_a_solve() -> None:
    """In training the power iteration moves once a forward, not once a step."""
    layer, calls = made().train(), []
    norm = layer.blocks[0].W.parametrizations.weight[0]
    norm.register_forward_hook(lambda *args: calls.append(1))
    assert layer.solve(drawn()).stats.evaluations > 5
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, r"alpha=0.0.*\(0, 1\]"),
        ({"alpha": 1.2}, r"alpha=1.2.*\(0, 1\]"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": (0.5, 0.0)}, r"alpha=\(0.5, 0.0\)"),
        ({"alpha": (0.5, 0.5, 0.5)}, "3 numbers for the 2 blocks"),
        ({"alpha": 1.0, "learn_alpha": True}, r"\(0, 1\), which a sigmoid can reach"),
        ({"kernel_size": 2}, "odd kernel"),
        ({"separable": True}, "give kernel_size"),
        ({"mids": ()}, r"mids=\(\)"),
        ({"mids": 5}, "mids=5"),
        ({"mids": (3, 0)}, r"mids\[1\]=0"),
        ({"channels": 0}, "channels=0"),
        ({"in_channels": -1}, "in_channels=-1"),
        ({"regularize": "both"}, "regularize='both'"),
        ({"regularizer": eq.L1(0.1)}, "kink.*regularize='prox'"),
        ({"regularizer": eq.FeatureIncay(), "regularize": "prox"}, "closed prox.*FeatureIncay"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.nn.DeepOptEq(**{"channels": 3, "mids": (4, 5), **options})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: training_way("bptt"), ValueError, "'implicit', 'sam' or 'unrolled'"),
        (
            lambda: training_way("unrolled", regularizer=eq.SquaredNorm()),
            TypeError,
            "takes no regularizer: those belong to 'sam'",
        ),
        (lambda: training_way("implicit", rho=0.2), TypeError, "takes no rho"),
        (lambda: training_way("sam", steps=0), ValueError, "max_steps=0"),
        (lambda: tiny(regularizer="l2"), TypeError, r"regularizer='l2'.*expected a regularizer"),
        (lambda: tiny(kernel_size=3, separable=True, constraint=0.9), TypeError, "NormBounded"),
        (
            lambda: tiny()(torch.zeros(2, 3), torch.zeros(3, 3)),
            ValueError,
            r"is \(2, 3\), got z0 \(3",
        ),
        (lambda: tiny()(torch.zeros(2, 3), [0.0]), ValueError, "state of DeepOptEq .*got z0 list"),
    ],
)
def test_bad_calls(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def tiny(**options: Any) -> eq.nn.DeepOptEq:
    return eq.nn.DeepOptEq(3, (4,), **options)
