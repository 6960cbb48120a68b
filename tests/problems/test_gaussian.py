"""The Gaussian coupling, dense and over patches, against loops, differences and dense SVDs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.problems import (
    ConvOperator,
    Coupling,
    DenseOperator,
    LinearOperator,
    ModuleOperator,
    SeparableConvOperator,
    gaussian,
    truncated_gaussian_coupling,
    truncation_error_bound,
)
from tests.contracts.problems import HostReads
from tests.problems.test_kernels import central_gradient
from tests.problems.test_operators import conv_matrix, randn
from tests.problems.test_patches import rows_by_loops

B = 2 * math.exp(-1.5)


@dataclass
class Case:
    """A Gaussian coupling and, apart from it, the dense A and c̃ of its formula."""

    operator: LinearOperator
    c: Tensor
    gamma: Tensor
    patches: eq.Patches | None
    hidden: Tensor | None
    state: tuple[int, ...]
    rows: Callable[[np.ndarray], np.ndarray]  # one sample's Wz, flat → [P, k]
    matrix: np.ndarray  # W

    @property
    def hidden_matrix(self) -> np.ndarray:
        width = self.rows(np.zeros(self.matrix.shape[0])).shape[1]
        return np.eye(width) if self.hidden is None else self.hidden.numpy()

    @property
    def blocks(self) -> np.ndarray:
        """A as [P, hidden, n]: column by column."""
        columns = [self.rows(column) @ self.hidden_matrix for column in self.matrix.T]
        return np.stack(columns, -1)

    def coupling(self, **options: object) -> eq.Gaussian:
        return eq.Gaussian(
            self.operator, self.c, self.gamma, patches=self.patches, hidden=self.hidden, **options
        )  # type: ignore[arg-type]

    def objective(self, b: int) -> Callable[[np.ndarray], float]:
        """−(1/2γ)Σ exp(−γ‖rᵢW_h‖²), as printed."""
        gamma, c = float(self.gamma[b]), self.c[b].flatten().numpy()

        def q(z: np.ndarray) -> float:
            h = self.rows(c - self.matrix @ z) @ self.hidden_matrix
            return -float(np.exp(-gamma * np.square(h).sum(1)).sum()) / (2 * gamma)

        return q

    def hessian(self, b: int, z: np.ndarray) -> np.ndarray:
        """ΣAᵢᵀe^{−sᵢ}(I − 2γhᵢhᵢᵀ)Aᵢ, dense."""
        gamma, c = float(self.gamma[b]), self.c[b].flatten().numpy()
        h = self.rows(c - self.matrix @ z) @ self.hidden_matrix
        total = np.zeros((z.size, z.size))
        for a_i, h_i in zip(self.blocks, h, strict=True):
            block = np.eye(h_i.size) - 2 * gamma * np.outer(h_i, h_i)
            total += math.exp(-gamma * float(h_i @ h_i)) * a_i.T @ block @ a_i
        return total


def gammas(gamma: float, batch: int) -> Tensor:
    return gamma * torch.linspace(1.0, 1.5, batch, dtype=torch.float64)


def dense_case(
    seed: int, *, hid: int | None = None, scale: float = 1.0, gamma: float = 0.5, batch: int = 2
) -> Case:
    weight = scale * randn(4, 3, seed=seed)
    hidden = None if hid is None else randn(4, hid, seed=seed + 1)
    c = randn(batch, 4, seed=seed + 2)
    rows = lambda r: r[None]
    values = gammas(gamma, batch)
    return Case(DenseOperator(weight), c, values, None, hidden, (3,), rows, weight.numpy())


def operator_of(
    kind: str, weight: Tensor, stride: int, n: int
) -> tuple[LinearOperator, np.ndarray]:
    """A convolution of two maps of n × n pixels to four, and its matrix."""
    if kind == "grouped":
        kernel = weight[:, :1]
        return ConvOperator(kernel, groups=2), conv_matrix(kernel, n, n, padding=1, groups=2)
    if kind == "separable":
        kernel, mixing = weight[:2, :1], randn(4, 2, 1, 1, seed=1)
        depthwise = conv_matrix(kernel, n, n, padding=1, groups=2)
        return SeparableConvOperator(kernel, mixing), conv_matrix(mixing, n, n) @ depthwise
    conv = ConvOperator(weight, stride)
    matrix = conv_matrix(weight, n, n, stride=stride, padding=1)
    if kind == "module":
        return ModuleOperator(conv, conv.adjoint, (2, n, n), dtype=torch.float64), matrix
    return conv, matrix


def conv_case(
    seed: int,
    *,
    kind: str = "plain",
    stride: int = 1,
    size: int = 2,
    hid: int | None = 5,
    scale: float = 1.0,
    gamma: float = 0.5,
    n: int = 4,
    batch: int = 2,
) -> Case:
    operator, matrix = operator_of(kind, 0.4 * scale * randn(4, 2, 3, 3, seed=seed), stride, n)
    patches = eq.Patches(channels=2, size=size)
    hidden = None if hid is None else 0.4 * randn(patches.width, hid, seed=seed + 1)
    m = (n - 1) // stride + 1
    c = randn(batch, 4, m, m, seed=seed + 2)
    rows = lambda r: rows_by_loops(r.reshape(1, 4, m, m), 2, size)[0]
    return Case(operator, c, gammas(gamma, batch), patches, hidden, (2, n, n), rows, matrix)


def norm(case: Case) -> float:
    a = case.blocks
    return float(np.linalg.svd(a.reshape(-1, a.shape[-1]), compute_uv=False)[0])


def with_norm(make: Callable[..., Case], mu: float, seed: int, **options: Any) -> Case:
    """The case with ‖A‖ = mu."""
    return make(seed, scale=mu / norm(make(seed, **options)), **options)


CASES: dict[str, Callable[..., Case]] = {
    "dense": dense_case,
    "dense-hidden": partial(dense_case, hid=6),
    "dense-narrow": partial(dense_case, hid=1),
    "conv": conv_case,
    "conv-stride": partial(conv_case, stride=2, n=8),
    "conv-pixels": partial(conv_case, size=1, hid=None),
    **{kind: partial(conv_case, kind=kind) for kind in ("grouped", "separable", "module")},
}


def states(case: Case, seed: int = 77) -> Tensor:
    return 0.5 * randn(case.c.shape[0], *case.state, seed=seed)


@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_hvp(name: str) -> None:
    case = CASES[name](5)
    coupling, z = case.coupling(), states(case)
    v = randn(*z.shape, seed=3)
    value, grad, hvp = coupling.value(z), coupling.grad(z), coupling.hvp(z, v)
    for b in range(2):
        q, at = case.objective(b), z[b].flatten().numpy()
        assert float(value[b]) == pytest.approx(q(at), rel=1e-12)
        found = grad[b].flatten().numpy()
        np.testing.assert_allclose(found, central_gradient(q, at, 1e-3), rtol=1e-7, atol=1e-9)
        product = case.hessian(b, at) @ v[b].flatten().numpy()
        np.testing.assert_allclose(hvp[b].flatten().numpy(), product, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["dense-hidden", "conv-stride"])
def test_autograd_agrees_in_state_and_parameters(name: str) -> None:
    case = CASES[name](2)
    z = states(case).requires_grad_()
    coupling = case.coupling()
    (grad,) = torch.autograd.grad(coupling.value(z).sum(), z)
    torch.testing.assert_close(grad, coupling.grad(z), rtol=1e-11, atol=1e-13)
    v = randn(*z.shape, seed=9)
    (hv,) = torch.autograd.grad((coupling.grad(z) * v).sum(), z)
    torch.testing.assert_close(hv, coupling.hvp(z, v), rtol=1e-11, atol=1e-13)
    if name == "dense-hidden":
        run = lambda w, c, g, h, z: eq.Gaussian(w, c, g, hidden=h).grad(z)
        assert isinstance(case.operator, DenseOperator)
        assert case.hidden is not None
        leaves = [case.operator.weight, case.c, case.gamma, case.hidden, z.detach()]
        args = tuple(t.clone().requires_grad_() for t in leaves)
        assert torch.autograd.gradcheck(run, args)
        assert torch.autograd.gradgradcheck(run, args)


def test_metric_in_place_of_hidden() -> None:
    case = conv_case(3)
    assert case.hidden is not None
    z = states(case)
    by_metric = eq.Gaussian(
        case.operator, case.c, case.gamma, patches=case.patches, metric=case.hidden @ case.hidden.T
    )
    torch.testing.assert_close(by_metric.grad(z), case.coupling().grad(z), rtol=1e-11, atol=1e-14)
    assert by_metric.mu_upper() == pytest.approx(case.coupling().mu_upper(), rel=1e-10)


# docs/facts.md, fact 1: the spectrum of ∇²q


def _hvp_matrix(coupling: Coupling, z: Tensor, b: int) -> np.ndarray:
    """∇²q(z_b) from Hessian-vector products with every unit vector."""
    n = z[b].numel()
    columns = []
    for i in range(n):
        e = torch.zeros_like(z)
        e[b].view(-1)[i] = 1.0
        columns.append(coupling.hvp(z, e)[b].flatten().numpy())
    return np.stack(columns, -1)


@given(
    name=st.sampled_from(sorted(CASES)),
    seed=st.integers(0, 10**6),
    log_gamma=st.floats(-3, 3),
    mu=st.floats(0.1, 3.0),
    energy=st.floats(0.0, 4.0),
)
@settings(max_examples=100, deadline=None)
def test_fact_1_spectrum_within_its_bounds(
    name: str, seed: int, log_gamma: float, mu: float, energy: float
) -> None:
    gamma = 10.0**log_gamma
    case = with_norm(CASES[name], mu, seed, gamma=gamma, batch=1)
    # Residuals of every size around s = 1.5, the dangerous one, whatever γ.
    case.c = case.c * math.sqrt(energy / gamma)
    z = states(case, seed) * (0.1 / math.sqrt(gamma))
    hessian = case.hessian(0, z[0].flatten().numpy())
    spectrum = np.linalg.eigvalsh(hessian)
    true_mu = norm(case)
    assert true_mu == pytest.approx(mu, rel=1e-9)
    assert spectrum[0] >= -B * mu**2 * (1 + 1e-9)
    assert spectrum[-1] <= mu**2 * (1 + 1e-9)
    coupling = case.coupling()
    tight = not isinstance(case.operator, DenseOperator)
    for curvature in (
        coupling.curvature(),
        coupling.curvature(tight=tight),
        coupling.local_curvature(z),
        coupling.local_curvature(z, tight=tight),
    ):
        assert curvature.rigorous
        rounding = 1e-13 * mu**2  # of the oracle's eigenvalues: a lower bound may be exactly 0
        assert float(curvature.lower) <= spectrum[0] + rounding
        assert spectrum[-1] <= float(curvature.upper) + rounding


@pytest.mark.parametrize("gamma", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("mu", [0.1, 1.0, 1.49, 3.0])
@pytest.mark.parametrize("name", ["dense", "dense-hidden", "conv", "conv-stride"])
def test_fact_1_is_attained(name: str, mu: float, gamma: float) -> None:
    """hᵢ along the blocks of A's top left singular vector with s = 1.5, and hᵢ = 0: both ends.

    Both are inputs c that someone could meet, so neither side of the bound can be improved.
    """
    case = with_norm(CASES[name], mu, 1, gamma=gamma, batch=1)
    a = case.blocks
    left, _, _ = np.linalg.svd(a.reshape(-1, a.shape[-1]), full_matrices=False)
    top = left[:, 0].reshape(a.shape[:2])
    z = states(case) * 0.0
    h = top / np.linalg.norm(top, axis=1, keepdims=True) * math.sqrt(1.5 / gamma)
    rows = torch.from_numpy(h @ np.linalg.pinv(case.hidden_matrix))
    reached = rows.numpy() @ case.hidden_matrix
    np.testing.assert_allclose(reached, h, atol=1e-9 * float(np.abs(h).max()))
    shape = case.c.shape
    flat = rows if case.patches is None else case.patches.merge(rows[None], shape)
    for c, ratio_of in (
        (flat.reshape(shape), lambda w: w[0] / (-B * mu**2)),
        (torch.zeros(shape, dtype=torch.float64), lambda w: w[-1] / mu**2),
    ):
        case.c = c
        hessian = _hvp_matrix(case.coupling(), z, 0)
        np.testing.assert_allclose(hessian, hessian.T, atol=1e-10 * mu**2)
        ratio = ratio_of(np.linalg.eigvalsh(hessian))
        assert ratio == pytest.approx(1.0, abs=1e-6)
        assert ratio <= 1 + 1e-9


def test_local_curvature_where_it_must_bite() -> None:
    weight = torch.eye(2, dtype=torch.float64)
    z = torch.zeros(3, 2, dtype=torch.float64)
    c = torch.tensor([[0.0, 0.0], [math.sqrt(0.25), 0.0], [3.0, 0.0]], dtype=torch.float64)
    local = eq.Gaussian(weight, c, 1.0).local_curvature(z)
    narrow = eq.Gaussian(weight[:1], c[:, :1], 1.0).local_curvature(z)
    for found, expected in (
        (local.lower, [0.0, 0.0, math.exp(-9) * -17]),
        (local.upper, [1.0, math.exp(-0.25), math.exp(-9)]),
        (narrow.upper, [1.0, 0.5 * math.exp(-0.25), 0.0]),
    ):
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-10)


# μ


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_mu_bounds_the_dense_norm(name: str, seed: int) -> None:
    case = CASES[name](seed)
    sigma, coupling = norm(case), case.coupling()
    loose, tight = coupling.mu(case.state), coupling.mu(case.state, tight=True)
    for bound in (loose, tight):
        assert sigma <= bound.upper
        assert bound.estimate <= sigma * (1 + 1e-12)
        assert bound.estimate >= 0.98 * sigma
    assert tight.upper <= loose.upper
    if isinstance(case.operator, DenseOperator):
        assert loose.upper <= sigma * (1 + 1e-9)


def test_tight_mu_is_near_the_norm_on_a_large_map() -> None:
    case = conv_case(0, n=12, batch=1)
    sigma, coupling = norm(case), case.coupling()
    assert sigma <= coupling.mu_upper(tight=True) <= 1.06 * sigma
    assert coupling.mu_upper() > 1.1 * sigma


def test_an_unknown_norm_gives_an_empty_certificate_and_a_bound_a_full_one() -> None:
    scale = lambda t: 0.5 * t
    c = randn(1, 3000)
    unknown = eq.Gaussian(ModuleOperator(scale, scale, (3000,)), c, 1e-4)
    for curvature in (unknown.curvature(), unknown.local_curvature(c)):
        assert (curvature.lower, curvature.upper) == (-math.inf, math.inf)
        assert "norm_bound" in curvature.note
    known = eq.Gaussian(ModuleOperator(scale, scale, (3000,), norm_bound=0.5), c, 1e-4)
    assert known.curvature().upper == 0.25
    local = known.local_curvature(c)
    assert not local.rigorous, "its energies are those of a float32 module"
    assert 0 < float(local.upper) < 0.25


def test_norms_are_never_computed_on_the_hot_path(monkeypatch: pytest.MonkeyPatch) -> None:
    case = conv_case(0)
    coupling, z = case.coupling(), states(case)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a norm inside the hot path")

    for name in ("svdvals", "eigvalsh", "eigh", "matrix_norm"):
        monkeypatch.setattr(torch.linalg, name, refuse)
    coupling.value(z), coupling.grad(z), coupling.hvp(z, z), coupling.energies(z)
    with pytest.raises(AssertionError, match="hot path"):
        coupling.curvature()
    monkeypatch.undo()
    upper = coupling.mu_upper()
    monkeypatch.setattr(torch.linalg, "eigvalsh", refuse)
    assert coupling.mu_upper() == upper


# γ


def test_policy_sees_each_sample_alone_at_zero() -> None:
    case = conv_case(6)
    options = {"patches": case.patches, "hidden": case.hidden}
    for policy, reduce in ((eq.MeanPatchEnergy(0.2), np.mean), (eq.MinPatchEnergy(0.2), np.min)):
        both = eq.Gaussian(case.operator, case.c, policy, **options)  # type: ignore[arg-type]
        assert both.policy is policy
        for b in range(2):
            rows = case.rows(case.c[b].flatten().numpy()) @ case.hidden_matrix
            expected = 0.2 / reduce(np.square(rows).sum(1))
            assert float(both.gamma[b]) == pytest.approx(expected, rel=1e-11)
            alone = eq.Gaussian(case.operator, case.c[b : b + 1], policy, **options)  # type: ignore[arg-type]
            assert float(alone.gamma[0]) == float(both.gamma[b])
    leaf = case.c.clone().requires_grad_()
    for detach in (False, True):
        made = eq.Gaussian(case.operator, leaf, eq.MeanPatchEnergy(detach=detach), **options)  # type: ignore[arg-type]
        assert made.gamma.requires_grad is not detach


# Formats, dtypes, transforms


@pytest.mark.parametrize("name", ["dense-hidden", "conv"])
def test_compile_vmap_and_copies(name: str) -> None:
    case = CASES[name](7)
    coupling, z = case.coupling(), states(case)
    run_of = lambda q: lambda t: (q.value(t), q.grad(t), q.hvp(t, t))
    run = run_of(coupling)
    expected = run(z)
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")(z)
    stacked = torch.func.vmap(run)(torch.stack([z, 2 * z]))
    copied = copy.deepcopy(coupling)
    for a, b, d, e in zip(expected, compiled, stacked, run_of(copied)(z), strict=True):
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(d[0], a)
        assert torch.equal(e, a)

    metric = 2.0 * torch.eye(coupling.width, dtype=torch.float64)
    by_metric = lambda c, g, t: eq.Gaussian(
        case.operator, c, g, patches=case.patches, metric=metric
    ).grad(t)
    args = (case.c, case.gamma, z)
    for whole, inputs in (
        (by_metric, args),
        (lambda c, t: by_metric(c, eq.MeanPatchEnergy(), t), (case.c, z)),
    ):
        built = torch.compile(whole, fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(built(*inputs), whole(*inputs))
    mapped = torch.func.vmap(by_metric)(*(torch.stack([t, 2 * t]) for t in args))
    torch.testing.assert_close(mapped[0], by_metric(*args))


_W, _C, _M = torch.zeros(4, 3), torch.ones(2, 4), torch.eye(4)
_K, _R = torch.zeros(4, 2, 3, 3), torch.ones(2, 4, 4, 4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: eq.Gaussian(_W, _C[:, :3]), ValueError, r"shape of Wz.*\[B, 4\].*\[B, 3\]"),
        (lambda: eq.Gaussian(_W, _C, 0.0), ValueError, r"gamma=0\.0"),
        (lambda: eq.Gaussian(_W, _C, -1), ValueError, r"gamma=-1"),
        (lambda: eq.Gaussian(_W, _C, torch.tensor([1.0, 0.0])), ValueError, "positive"),
        (lambda: eq.Gaussian(_W, _C, torch.tensor([1.0, math.nan])), ValueError, "positive"),
        (lambda: eq.Gaussian(_W, _C, torch.ones(3)), ValueError, r"\[B\] = \[2\]"),
        (lambda: eq.Gaussian(_W, _C, "mean"), TypeError, "'mean'"),
        (lambda: eq.Gaussian(_W, _C, eq.LearnedGamma()), ValueError, "bind"),
        (lambda: eq.Gaussian(_W, _C, hidden=torch.ones(3, 5)), ValueError, r"\[4, c_hid\]"),
        (lambda: eq.Gaussian(_W, _C, metric=torch.ones(3, 3)), ValueError, r"\[4, 4\]"),
        (lambda: eq.Gaussian(_W, _C, metric=torch.ones(4, 4).triu()), ValueError, "symmetric"),
        (lambda: eq.Gaussian(_W, _C, metric=_M, hidden=_M), ValueError, "not both"),
        (lambda: eq.Gaussian(_W, _C, metric=-_M).curvature(), ValueError, "semidefinite"),
        (
            lambda: eq.Gaussian(_W, _C, patches=eq.Patches(channels=2, size=1)),
            ValueError,
            "feature map",
        ),
        (
            lambda: eq.Gaussian(_K, _R, patches=eq.Patches(channels=3, size=1)),
            ValueError,
            "channels=3",
        ),
        (lambda: eq.Gaussian(_K, _R, patches=eq.Patches(channels=2, size=3)), ValueError, "size=3"),
        (lambda: eq.Gaussian(_K, _R[:, :3]), ValueError, r"\[B, 3, 4, 4\]"),
        (lambda: eq.Gaussian(_K, _R).grad(torch.zeros(2, 2, 5, 4)), ValueError, r"\(2, 4, 5, 4\)"),
        (lambda: eq.Gaussian(_K, _R).grad(torch.zeros(1, 2, 4, 4)), ValueError, r"\(1, 2, 4, 4\)"),
        (lambda: eq.Gaussian(_W, _C).grad(torch.zeros(2, 5)), ValueError, r"\[B, 3\]"),
        (lambda: eq.Gaussian(_K, _R).default_start((2, 2, 3, 4)), ValueError, r"\(2, 2, 3, 4\)"),
        (lambda: eq.Gaussian(_K, _R).mu(), ValueError, "in_shape"),
    ],
)
def test_bad_input_is_named(make, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=words):
        make()


def test_channels_last_maps_give_the_same_force() -> None:
    weight, c = randn(8, 6, 3, 3, seed=1), randn(2, 8, 4, 6, seed=2)
    hidden, z = randn(8, 5, seed=3), randn(2, 6, 4, 6, seed=4).requires_grad_()
    options = {"patches": eq.Patches(channels=2, size=2), "hidden": hidden}
    for layout in (torch.contiguous_format, torch.channels_last):
        laid = c.to(memory_format=layout)
        q = eq.Gaussian(weight, laid, eq.MeanPatchEnergy(0.3), **options)  # type: ignore[arg-type]
        moved = z.to(memory_format=layout)
        (slope,) = torch.autograd.grad(q.value(moved).sum(), z)
        torch.testing.assert_close(q.grad(moved), slope, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(q.descent(moved), -slope, rtol=1e-10, atol=1e-12)
        message = q._merge(q._rows(laid), laid)
        assert message.is_contiguous(memory_format=layout)


def test_nothing_is_read_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read would break the capture; elsewhere gamma and the metric are checked."""
    given = {"gamma": torch.tensor([0.5, 0.2]), "metric": torch.eye(3)}
    with HostReads() as reads:
        eq.Gaussian(torch.eye(3), torch.ones(2, 3), **given)
    assert reads.count == 2
    monkeypatch.setattr(gaussian, "is_captured", lambda t: True)
    with HostReads() as reads:
        eq.Gaussian(torch.eye(3), torch.ones(2, 3), **given)
    assert reads.count == 0


# GEQ Prop 1: the truncated series


@pytest.mark.parametrize("gamma", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_series_converges_to_the_gaussian_coupling(gamma: float, n: int) -> None:
    c, y = randn(20, n), randn(20, n, seed=1)
    target = -np.exp(-gamma * np.square(c.numpy() - y.numpy()).sum(-1)) / (2 * gamma)
    errors = []
    for terms in range(1, 61):
        made = truncated_gaussian_coupling(c, y, gamma, terms).numpy()
        error = np.abs(made - target)
        bound = truncation_error_bound(c, y, gamma, terms).numpy()
        assert (error <= bound * (1 + 1e-9) + 1e-14 / gamma).all()
        errors.append(error.max())
    assert errors[0] > 1e-3, "one term alone must not do"
    assert errors[-1] < 1e-13 / gamma
    assert min(errors[:8]) > errors[-1]


def test_is_the_gaussian_coupling_of_a_layer_with_its_gradient() -> None:
    weight, c, z = randn(3, 4), randn(5, 3, seed=1).requires_grad_(), randn(5, 4, seed=2)
    q = eq.Gaussian(weight, c, gamma=0.3).value(z)
    made = truncated_gaussian_coupling(c, z @ weight.T, 0.3, 120)
    torch.testing.assert_close(made, q, rtol=1e-11, atol=1e-14)
    assert torch.autograd.gradcheck(lambda c: truncated_gaussian_coupling(c, c.flip(0), 0.5, 6), c)


def test_bad_input_of_the_series_is_named() -> None:
    x = torch.zeros(1, 2)
    for y, gamma, terms, words in (
        (x, 0, 3, "gamma=0"),
        (x, 1.0, 0, "terms=0"),
        (x, 1.0, 1.5, r"terms=1\.5"),
        (torch.zeros(1, 3), 1.0, 3, r"\(1, 2\), \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=words):
            truncated_gaussian_coupling(x, y, gamma, terms)  # type: ignore[arg-type]
