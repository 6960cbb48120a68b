"""GEQ and KerDEQ: against an objective written down here in numpy, and scipy's minimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import equilibria as eq
from tests.contracts.layer_contract import TIGHT, BoundedLayerContract
from tests.nn.checks import matrices
from tests.oracles import PROXES
from tests.problems.test_operators import conv_matrix, randn
from tests.problems.test_patches import rows_by_loops

PATCH = eq.Patches(channels=2, size=2)


class TestVectorGEQ(BoundedLayerContract):
    """With a learned γ."""

    shape = (3,)

    def layer(self, **options: Any) -> eq.nn.GEQ:
        options = {"hidden": 6, "gamma": eq.LearnedGamma(0.4), **options}
        return eq.nn.GEQ(4, 5, in_channels=3, **options)

    def test_the_layer_owns_the_parameter(self) -> None:
        layer = self.layer()
        assert "log_gamma" in dict(layer.named_parameters())
        torch.testing.assert_close(layer.log_gamma.exp(), torch.tensor(0.4))
        assert layer.problem(self.inputs()).coupling.gamma[0].item() == pytest.approx(0.4)


class TestConvolutionalGEQ(BoundedLayerContract):
    """With γ from the input."""

    shape = (2, 4, 4)

    def layer(self, **options: Any) -> eq.nn.GEQ:
        return eq.nn.GEQ(3, 4, in_channels=2, patch=PATCH, **{"hidden": 5, **options})


def test_kerdeq_is_a_geq_with_other_defaults() -> None:
    torch.manual_seed(0)
    layer = eq.nn.KerDEQ(3, 4).eval()
    twin = eq.nn.GEQ(3, 4, patch=eq.Patches(channels=4, size=4), gamma=0.5).eval()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(layer(x), twin(x))


# ---------------------------------------------------------------------- the oracle


@dataclass
class Objective:
    """½‖z‖² + q(z) of one sample, from dense matrices; nothing of the library but its weights."""

    matrix: np.ndarray  # W, [out, n]
    c: np.ndarray  # [out]
    order: np.ndarray  # the entries of each patch, [P, k]
    hidden: np.ndarray  # [k, h]
    gamma: float

    def smooth(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """Its value and its gradient, with the hidden tensor of Algorithm 1 made in full."""
        h = (self.c - self.matrix @ z)[self.order] @ self.hidden
        e = np.exp(-self.gamma * (h**2).sum(1))
        message = np.empty_like(self.c)
        message[self.order] = (e[:, None] * h) @ self.hidden.T
        return 0.5 * z @ z - e.sum() / (2 * self.gamma), z - self.matrix.T @ message


def gamma_by_hand(rule: str, energies: np.ndarray) -> float:
    return {"fixed": 0.4, "mean": 0.2 / energies.mean(), "min": 0.2 / energies.min()}[rule]


POLICIES = {
    "fixed": eq.FixedGamma(0.4),
    "mean": eq.MeanPatchEnergy(0.2),
    "min": eq.MinPatchEnergy(0.2),
}


def objectives(layer: eq.nn.GEQ, x: Tensor, rule: str) -> list[Objective]:
    """Of every sample; without patches the whole sample is one."""
    w, features = matrices(layer, x)
    order = np.arange(features.shape[1])[None]
    if layer.patch is not None:
        places = order.reshape(1, layer.mid, *x.shape[2:])
        order = rows_by_loops(places, layer.patch.channels, layer.patch.size)[0].astype(int)
    weight = layer.hidden_weight()
    hidden = np.eye(order.shape[1]) if weight is None else weight.detach().numpy()
    gammas = [gamma_by_hand(rule, ((c[order] @ hidden) ** 2).sum(1)) for c in features]
    pairs = zip(features, gammas, strict=True)
    return [Objective(w, c, order, hidden, gamma) for c, gamma in pairs]


@pytest.mark.parametrize("patch", [None, PATCH])
@pytest.mark.parametrize("prior", ["relu", "identity", "box", "soft", "leaky", "tanh"])
@pytest.mark.parametrize("rule", list(POLICIES))
def test_the_answer_is_stationary(patch: Any, prior: str, rule: str) -> None:
    """z = prox_f(z − ∇(½‖z‖² + q)(z)): as G is strongly convex here, its minimizer."""
    torch.manual_seed(3)
    f, prox = PROXES[prior]
    sizes = (5, 7, 4) if patch is None else (3, 4, 2)
    options: dict[str, Any] = {"hidden": 6 if patch is None else 5, "solver": TIGHT, "patch": patch}
    options |= {"gamma": POLICIES[rule], "prior": f, "in_channels": sizes[2]}
    layer = eq.nn.GEQ(*sizes[:2], **options).double().eval()
    x = randn(3, 4, seed=4) if patch is None else randn(2, 2, 6, 4, seed=4)
    answers = layer(x).detach().flatten(1).numpy()
    # The γ of the nearest patch is large, and a threshold of 0.2 may leave nothing then.
    assert rule == "min" or np.abs(answers).max() > 1e-3
    for z, objective in zip(answers, objectives(layer, x, rule), strict=True):
        np.testing.assert_allclose(z, prox(z - objective.smooth(z)[1], 1.0), atol=1e-10)


@pytest.mark.parametrize("bound", [0.5, 1.2, 1.45])
def test_beyond_contraction_the_default_solver_still_finds_it(bound: float) -> None:
    """μ < 1.4969: G is strongly convex; above 1 plain iteration may oscillate."""
    torch.manual_seed(1)
    layer = eq.nn.GEQ(
        6, 8, gamma=0.4, constraint=eq.nn.NormBounded(bound=bound), solver=eq.Auto(rtol=1e-11)
    )
    layer = layer.double()
    layer.W.weight = 3.0 * torch.eye(8, 6, dtype=torch.float64)  # far above: lands on the bound
    layer.eval()
    assert np.linalg.norm(layer.W.weight.detach().numpy(), 2) == pytest.approx(bound, rel=1e-9)
    x = randn(4, 6, seed=2)
    solution = layer.solve(x)
    assert bool(solution.converged.all())
    assert ("ProximalGradient" in solution.choice) is (bound > 1)
    for i, objective in enumerate(objectives(layer, x, "fixed")):
        for seed in range(3):
            found = scipy.optimize.minimize(
                objective.smooth,
                0.1 * randn(6, seed=seed).abs().numpy(),
                jac=True,
                method="L-BFGS-B",
                bounds=[(0, None)] * 6,
                options={"ftol": 1e-16, "gtol": 1e-11},
            )
            np.testing.assert_allclose(solution.value[i].detach().numpy(), found.x, atol=1e-6)


def test_without_hidden_it_is_equation_6() -> None:
    layer = eq.nn.GEQ(4, 5, hidden=None, gamma=0.8).double().eval()
    x, z = randn(2, 4, seed=1), randn(2, 4, seed=2)
    w = layer.W.weight
    r = layer.U(x) - z @ w.mT
    expected = torch.relu(torch.exp(-0.8 * r.square().sum(1, keepdim=True)) * (r @ w))
    torch.testing.assert_close(layer.problem(x).step(z), expected)
    assert layer.hidden_weight() is None


# ---------------------------------------------------------------------- weights and norms


def test_mu_is_within_the_bound() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(3, 4, patch=PATCH, hidden=5).double().eval()
    for size in (4, 8):
        w = conv_matrix(layer.W.weight, size, size, padding=1)
        assert np.linalg.norm(w, 2) <= 0.95 * 1.001
    assert np.linalg.norm(layer.hidden_weight().detach().numpy(), 2) <= 1 + 1e-6
    coupling = layer.problem(randn(1, 3, 4, 4)).coupling
    assert coupling.mu((3, 4, 4)).estimate <= 0.95 * 1.001
    assert coupling.mu_upper() <= 0.95 * 1.04  # the plane is 2% above 16 × 16 pixels, here


@pytest.mark.parametrize("hidden", [6, None])
def test_the_input_norm_of_a_vector_layer_is_exact(hidden: int | None) -> None:
    layer = eq.nn.GEQ(4, 5, in_channels=3, hidden=hidden).double().eval()
    weight = layer.hidden_weight()
    w_h = np.eye(5) if weight is None else weight.detach().numpy()
    expected = np.linalg.norm(w_h.T @ layer.U.weight.detach().numpy(), 2)
    assert layer.input_norm_upper() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_input_norm_is_that_of_the_features_in_low_precision(dtype: torch.dtype) -> None:
    """At z = c = 0 the Jacobian of x ↦ z* is (1 + wMw)⁻¹wMu, which the constant attains for small
    w; M is rounded to the precision of the layer, up as well as down."""
    for seed in range(30):
        torch.manual_seed(seed)
        layer = eq.nn.GEQ(
            1, 1, hidden=1, gamma=1.0, bias=False, prior=eq.problems.Free(), constraint=None
        )
        for module, low, high in ((layer.W, 0.3, 0.55), (layer.W_h, 0.5, 1.0)):
            module.weight.data.uniform_(low, high)
        x = torch.zeros(1, 1, dtype=dtype)
        coupling = layer.to(dtype).problem(x).coupling
        parts = coupling.operator.weight, coupling.metric, layer.U.weight
        w, m, u = (float(t.detach()) for t in parts)
        found = eq.certify(layer, x).lipschitz
        assert found == pytest.approx(abs(w * m * u) / (1.0 + w * m * w), rel=1e-9)
        assert found >= abs(w * m * u) / (1.0 + w * m * w)


@pytest.mark.parametrize("hidden", [2, 5, None])
def test_the_input_norm_of_a_convolution_is_a_close_upper_bound(hidden: int | None) -> None:
    torch.manual_seed(2)
    patch = eq.Patches(channels=2, size=2)
    layer = eq.nn.GEQ(3, 4, in_channels=2, patch=patch, hidden=hidden).double().eval()
    upper = layer.input_norm_upper()
    weight = layer.hidden_weight()
    w_h = np.eye(8) if weight is None else weight.detach().numpy()
    norms = []
    for size in (4, 12):
        u = conv_matrix(layer.U.weight, size, size, padding=1)
        order = rows_by_loops(np.arange(4 * size * size).reshape(1, 4, size, size), 2, 2)[0]
        through = np.concatenate([w_h.T @ u[rows] for rows in order.astype(int)])
        norms.append(np.linalg.norm(through, 2))
    assert norms[0] < norms[1] <= upper
    # 12 pixels are within 4% of the plane, and the bound within 1% of that.
    assert upper <= 1.05 * norms[1]
    product = layer.input_operator().norm_upper() * np.linalg.norm(w_h, 2)
    assert upper <= product * (1 + 1e-9)
    x, y = randn(1, 2, 4, 4, seed=1), randn(1, 4, 4, 4, seed=2)
    op = layer.input_operator()
    torch.testing.assert_close((op(x) * y).sum(), (x * op.adjoint(y)).sum())
    torch.testing.assert_close(op(x) + layer.U.bias[:, None, None], layer.features(x))


def test_the_constraint_is_evaluated_once_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = eq.nn.GEQ(3, 4, patch=PATCH)
    calls: list[int] = []
    forward = eq.nn.OperatorNorm.forward
    monkeypatch.setattr(
        eq.nn.OperatorNorm, "forward", lambda self, w: (calls.append(1), forward(self, w))[1]
    )
    layer(torch.randn(2, 3, 4, 4)).sum().backward()
    assert len(calls) == 2  # W and W_h


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels=0"),
        ({"mid": -1}, "mid=-1"),
        ({"patch": eq.Patches(channels=3, size=2)}, r"mid=4.*do not divide it, 4 % 3 = 1"),
        ({"kernel_size": 4}, "odd kernel"),
        ({"gamma": 0.0}, "γ must be a positive"),
        ({"hidden": 0}, "hidden=0"),
        ({"in_channels": 2.0}, "in_channels=2.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.nn.GEQ(**{"channels": 3, "mid": 4, "patch": PATCH, **options})


def test_options_of_a_wrong_type() -> None:
    with pytest.raises(TypeError, match="expected Patches"):
        eq.nn.GEQ(3, 4, patch=(2, 2))
    with pytest.raises(TypeError, match="gamma takes a positive number"):
        eq.nn.GEQ(3, 4, gamma="mean")
    for kind in (eq.nn.GEQ, eq.nn.KerDEQ):
        with pytest.raises(ValueError, match=r"\(kernel_size=3\) without patches: .* Give patch="):
            kind(4, 4, patch=None, kernel_size=3)


@pytest.mark.parametrize("shape", [(5, 4), (4, 5)])
def test_a_map_that_the_patch_does_not_divide(shape: tuple[int, int]) -> None:
    layer = eq.nn.GEQ(3, 4, patch=PATCH)
    with pytest.raises(ValueError, match=r"5 % 2 = 1"):
        layer(torch.randn(1, 3, *shape))


@pytest.mark.parametrize("hidden", [5, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_hidden_weight_starts_inside_its_bound(hidden: int, dtype: torch.dtype) -> None:
    """On it, rounding would decide whether the gradient passes the norm."""
    torch.manual_seed(3)
    layer: Any = eq.nn.GEQ(4, 8, hidden=hidden).to(dtype).eval()
    weight = layer.W_h.parametrizations.weight.original
    assert float(torch.linalg.matrix_norm(weight.detach().double(), 2)) < 1.0
    assert torch.equal(layer.W_h.weight, weight)
