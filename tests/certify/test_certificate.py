"""certify: what it says about layers and problems, and what it does with bad samples and calls."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equilibria.certify import Guarantee, certify
from equilibria.engine.result import Solution
from equilibria.nn import (
    DEQ,
    GEQ,
    DeepOptEq,
    MonotoneDEQ,
    NormBounded,
    OptEq,
    PolynomialEq,
    SigmoidEq,
)
from equilibria.problems.gamma import GammaPolicy, MeanPatchEnergy, MinPatchEnergy
from equilibria.problems.gaussian import Gaussian
from equilibria.problems.kernels import Curvature, Linear, Sigmoidal
from equilibria.problems.operators import ModuleOperator
from equilibria.problems.patches import Patches
from equilibria.problems.priors import Free, NonNegative, Tanh
from equilibria.problems.problem import Problem
from equilibria.problems.regularizers import Decorrelation, Regularizer, SquaredNorm
from equilibria.problems.solving import minimize
from equilibria.solvers import Picard
from tests.certify.test_map_certificate import BoundedBlock
from tests.problems.test_operators import randn

CONCAVITY = 2 * math.exp(-1.5)


class TinyLayer(nn.Module):
    """A Gaussian layer of vectors in float32, with nothing but what certify asks for."""

    def __init__(self, mu: float = 0.9, gamma: float | GammaPolicy = 0.5, steps: int = 200) -> None:
        super().__init__()
        w = randn(7, 5, seed=1)
        self.W = nn.Parameter((w * (mu / torch.linalg.matrix_norm(w, 2))).float())
        self.U = nn.Linear(3, 7)
        with torch.no_grad():
            self.U.weight.copy_(randn(7, 3, seed=2))
            self.U.bias.copy_(randn(7, seed=3))
        self.gamma = gamma
        self.steps = steps

    def problem(self, x: Tensor) -> Problem:
        return Problem(NonNegative(), Gaussian(self.W, self.U(x), self.gamma))

    def solve(self, x: Tensor) -> Solution[Tensor]:
        return minimize(self.problem(x), solver=Picard(max_steps=self.steps))

    def input_norm_upper(self) -> float:
        return float(np.linalg.norm(self.U.weight.detach().double().numpy(), 2)) * (1 + 1e-14)


def equilibrium(w: Tensor, c: Tensor, gamma: float) -> np.ndarray:
    """T_{1/2} to the end in numpy float64, on the numbers as given."""
    wn, cn = w.detach().double().numpy(), c.detach().double().numpy()
    z = np.zeros((len(cn), wn.shape[1]))
    for _ in range(4000):
        r = cn - z @ wn.T
        last = z
        force = (np.exp(-gamma * np.square(r).sum(1, keepdims=True)) * r) @ wn
        z = np.maximum(0.5 * z + 0.5 * force, 0)
        if np.abs(z - last).max() <= 1e-16 * np.abs(z).max():
            break
    return z


def errors(z: Tensor, exact: np.ndarray) -> np.ndarray:
    return np.linalg.norm(z.detach().double().flatten(1).numpy() - exact, axis=1)


# A layer


def test_a_layer_in_float32_is_certified_as_the_function_it_computes() -> None:
    """z* of the float32 weights and features, in float64: within the bound, and not by much."""
    layer, x = TinyLayer(), randn(64, 3, dtype=torch.float32)
    found = certify(layer, x)
    z = layer.solve(x).value
    true = errors(z, equilibrium(layer.W, layer.U(x), 0.5))
    bound = found.error_bound.numpy()
    assert (true <= bound).all()
    assert (bound <= 6 * true + 1e-9).all()
    assert found.kind is Guarantee.contraction
    assert found.unique
    assert found.rigorous
    mu = float(np.linalg.norm(layer.W.detach().double().numpy(), 2))
    assert found.contraction == pytest.approx(mu**2, rel=1e-12)
    assert found.modulus == pytest.approx(1 - CONCAVITY * mu**2, rel=1e-12)
    assert found.smoothness == pytest.approx(1 + mu**2, rel=1e-12)
    assert found.numbers.mu is not None
    assert found.numbers.mu.upper == pytest.approx(mu, rel=1e-12)
    assert found.lipschitz_in == "x"
    for values in (found.objective, found.stationarity, found.residual, found.rounding):
        assert values.shape == (64,)
        assert values.dtype == torch.float64
    assert (found.rounding < 1e-13).all()
    assert "converged" in found.solver


def test_objective_stationarity_and_residual_are_those_of_the_formulas() -> None:
    layer, x = TinyLayer(), randn(5, 3, dtype=torch.float32)
    z = torch.relu(randn(5, 5, seed=9, dtype=torch.float32))
    found = certify(layer, x, z)
    w, c, s = (t.detach().double().numpy() for t in (layer.W, layer.U(x), z))
    r = c - s @ w.T
    e = np.exp(-0.5 * np.square(r).sum(1))
    force = (e[:, None] * r) @ w
    np.testing.assert_allclose(found.objective, 0.5 * np.square(s).sum(1) - e, rtol=1e-12)
    gap = np.linalg.norm(s - np.maximum(force, 0), axis=1)
    np.testing.assert_allclose(found.residual, gap, rtol=1e-12)
    g = s - force
    least = np.where(s > 0, g, np.minimum(g, 0))
    np.testing.assert_allclose(found.stationarity, np.linalg.norm(least, axis=1), rtol=1e-12)
    assert found.solver == "z was given"


def test_an_unconverged_answer_gets_an_honest_bound_and_no_warning() -> None:
    layer, x = TinyLayer(steps=2), randn(32, 3, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = certify(layer, x)
    with pytest.warns(UserWarning, match="max_steps"):
        true = errors(layer.solve(x).value, equilibrium(layer.W, layer.U(x), 0.5))
    assert (found.error_bound.numpy() > 1e-3).any()
    assert (true <= found.error_bound.numpy()).all()
    assert "max_steps" in found.solver


KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tiny": (TinyLayer, (3,)),
    "geq": (lambda: GEQ(5, 7, in_channels=3, hidden=4), (3,)),
    "deq": (lambda: DEQ(BoundedBlock(), start=(5,)), (4,)),
    "deep": (lambda: DeepOptEq(4, (5, 3), in_channels=3, learn_alpha=True), (3,)),
    "separable": (lambda: DeepOptEq(3, (2,), kernel_size=3, separable=True), (3, 4, 4)),
    "monotone": (lambda: MonotoneDEQ(3, in_channels=2, kernel_size=3), (2, 4, 5)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_sample_is_not_certified_and_the_layer_is_left_as_it_is(kind: str) -> None:
    """A norm constraint moves its power iteration in training mode: not here."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    layer, x = make().train(), randn(3, *shape, dtype=torch.float32)
    x[1].view(-1)[0] = math.nan
    before, drawn = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    found = certify(layer, x.requires_grad_())
    assert found.certified.tolist() == [True, False, True]
    assert found.error_bound.isinf().tolist() == [False, True, False]
    assert layer.training
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert value.dtype == before[name].dtype
    assert all(p.grad is None and p.requires_grad for p in layer.parameters())


def test_a_residual_of_zero_still_pays_for_rounding() -> None:
    """z with fl(T(z)) = z exactly, away from the exact z* = c/(1 − w²) of rational arithmetic."""
    tested = 0
    for k in range(1, 60):
        w, c = torch.tensor([[k / 61.0]]).double(), torch.tensor([[0.1 * k]]).double()
        problem = Problem(Free(), Linear(w, c))
        z = c.clone()
        for _ in range(20000):
            z, last = problem.step(z), z
            if bool(z == last):
                break
        found = certify(problem, z=z)
        if float(found.residual) == 0.0:
            exact = Fraction(float(c)) / (1 - Fraction(float(w)) ** 2)
            true = abs(Fraction(float(z)) - exact)
            tested += true > 0
            assert true <= Fraction(float(found.error_bound))
            assert float(found.error_bound) < 1e-10
    assert tested > 20


@pytest.mark.parametrize("where", ["x", "z"])
@pytest.mark.parametrize("gamma", [0.5, MeanPatchEnergy(), MinPatchEnergy()], ids=repr)
def test_a_nan_sample_loses_its_guarantee_and_no_other_does(
    where: str, gamma: float | GammaPolicy
) -> None:
    layer, x = TinyLayer(gamma=gamma), randn(6, 3, dtype=torch.float32)
    z = layer.solve(x).value.detach()
    clean = certify(layer, x, z)
    (x if where == "x" else z)[2, 1] = math.nan
    found = certify(layer, x, z)
    others = [0, 1, 3, 4, 5]
    assert found.kinds[2] is Guarantee.none
    assert found.error_bound[2] == math.inf
    assert not found.certified[2]
    assert not found.unique
    for name in ("residual", "error_bound", "objective", "stationarity", "rounding"):
        a, b = getattr(found, name)[others], getattr(clean, name)[others]
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert all(found.kinds[i] is Guarantee.contraction for i in others)
    assert found.lipschitz == clean.lipschitz
    assert "1 of 6 samples" in str(found)


def test_an_infinite_or_huge_state_is_no_error() -> None:
    layer, x = TinyLayer(), randn(3, 3, dtype=torch.float32)
    z = torch.ones(3, 5)
    z[0, 0], z[1] = math.inf, 1e30
    found = certify(layer, x, z)
    assert found.kinds[0] is Guarantee.none
    assert found.error_bound[0] == math.inf
    assert found.error_bound[1] > 1e29
    assert found.error_bound[2] < 100


def test_a_sample_is_judged_alone() -> None:
    layer, x = TinyLayer(gamma=MeanPatchEnergy()), randn(6, 3, dtype=torch.float32)
    z = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    together = certify(layer, x, z)
    for i in range(6):
        alone = certify(layer, x[i : i + 1], z[i : i + 1])
        assert float(alone.error_bound) == pytest.approx(float(together.error_bound[i]), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    layer, x = TinyLayer().to(dtype), randn(4, 3).to(dtype)
    z = torch.relu(randn(4, 5)).to(dtype)
    found = certify(layer, x, z)
    exact = equilibrium(layer.W, layer.U(x), 0.5)
    assert (errors(z, exact) <= found.error_bound.numpy()).all()


# The layers of the library


LAYERS = {
    "geq": lambda: (GEQ(6, 8, in_channels=5, hidden=4), randn(5, 5, dtype=torch.float32)),
    "geq_conv": lambda: (
        GEQ(4, 8, patch=Patches(channels=4, size=2), hidden=8, in_channels=3),
        randn(3, 3, 4, 4, dtype=torch.float32),
    ),
    "geq_convex": lambda: (
        GEQ(6, 8, in_channels=5, hidden=4, constraint=NormBounded(bound=1.4)),
        randn(5, 5, dtype=torch.float32),
    ),
    "opteq": lambda: (OptEq(6, 9, in_channels=5), randn(5, 5, dtype=torch.float32)),
    "opteq_hidden": lambda: (
        OptEq(4, 6, form="hidden", kernel_size=3, nu=1.3),
        randn(3, 4, 5, 5, dtype=torch.float32),
    ),
    "sigmoid": lambda: (
        SigmoidEq(6, 8, constraint=NormBounded(bound=0.5)),
        0.2 * randn(5, 6, dtype=torch.float32),
    ),
    "polynomial": lambda: (
        PolynomialEq(6, 8, constraint=NormBounded(bound=0.5)),
        0.1 * randn(5, 6, dtype=torch.float32),
    ),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_layers_of_the_library_are_certified(name: str) -> None:
    """z* by 1,000 short steps of the problem in float64; the layer's answer is within the bound."""
    torch.manual_seed(0)
    layer, x = LAYERS[name]()
    layer.eval()
    with torch.no_grad():
        found = certify(layer, x)
        z = layer.solve(x).value
        problem = layer.problem(x).in_double()
        exact = z.double()
        tau = 1.0 / torch.as_tensor(problem.curvature().upper, dtype=torch.float64)
        for _ in range(1000):
            exact = problem.step(exact, tau)
    assert found.rigorous
    proven = torch.isfinite(found.error_bound)
    if name in ("geq", "geq_conv", "geq_convex", "opteq", "opteq_hidden"):
        assert found.unique
        assert found.lipschitz is not None
        assert proven.all()
    true = (z.double() - exact).flatten(1).norm(dim=1)
    assert (true <= found.error_bound).all()
    assert found.lipschitz_in == "x"
    assert "Certificate" in str(found)


# Problems of other kinds


def test_a_regularizer_enters_the_modulus() -> None:
    c = randn(3, 7)
    w = TinyLayer(mu=1.6).W.detach().double()
    z = torch.zeros(3, 5, dtype=torch.float64)
    assert not certify(Problem(Free(), Gaussian(w, c, 0.5)), z=z).unique
    found = certify(Problem(Free(), Gaussian(w, c, 0.5), SquaredNorm(0.4)), z=z)
    assert found.unique
    assert found.modulus == pytest.approx(1.4 - CONCAVITY * 2.56, rel=1e-6)


def test_a_regularizer_without_bounds_proves_nothing() -> None:
    c, w = randn(3, 7), randn(7, 5) * 0.1
    found = certify(Problem(Free(), Gaussian(w, c, 0.5), Decorrelation(0.1)), z=randn(3, 5))
    assert found.kind is Guarantee.none
    assert found.error_bound.isinf().all()
    assert found.lipschitz is None


@dataclasses.dataclass(frozen=True)
class Mean(Regularizer):
    """R(Z) = ½‖Σ_b z_b‖²/B: couples the batch, Hessian between 0 and 1."""

    convex: ClassVar[bool] = True
    couples_batch: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        return 0.5 * z.sum(0).square().sum() / z.shape[0]

    def grad(self, z: Tensor) -> Tensor:
        return (z.sum(0) / z.shape[0]).expand_as(z)

    def curvature(self) -> Curvature:
        return Curvature(0.0, 1.0, True, "mean")


def test_samples_that_a_regularizer_couples_share_their_error() -> None:
    """One sample is at its equilibrium to all appearances; what moves it is another's error."""
    w, c = randn(7, 5) * 0.05, randn(4, 7)
    problem = Problem(Free(), Gaussian(w, c, 0.5), Mean())
    exact = torch.zeros(4, 5, dtype=torch.float64)
    for _ in range(2000):
        exact = problem.step(exact, 0.5)
    assert float((problem.step(exact) - exact).abs().max()) < 1e-15
    z = exact.clone()
    z[0] += 1.0
    found = certify(problem, z=z)
    true = (z - exact).norm(dim=1)
    assert (true <= found.error_bound).all()
    assert (found.error_bound == found.error_bound[0]).all()
    assert "couples the batch" in str(found)
    # A modulus for each sample becomes that of the worst: their error is one.
    c = torch.tensor([[0.1, 0.0], [0.9, 0.0]], dtype=torch.float64)
    w = torch.zeros(2, 2, dtype=torch.float64)
    mixed = certify(Problem(Free(), Sigmoidal(w, c), Mean()), z=torch.zeros_like(c))
    assert mixed.modulus == pytest.approx(1 - 4 / (3 * math.sqrt(3)) * 0.81, rel=1e-12)


def test_a_metric_that_rounding_made_indefinite_is_certified_as_the_nearest_one() -> None:
    hidden = randn(6, 2, dtype=torch.float32)
    w, c = randn(6, 4, dtype=torch.float32) * 0.1, randn(3, 6, dtype=torch.float32)
    problem = Problem(NonNegative(), Gaussian(w, c, 0.5, hidden=hidden))
    metric = problem.coupling.metric.double()
    assert float(torch.linalg.eigvalsh(metric)[0]) < -1e-10
    found = problem.in_double().coupling.metric
    assert float(torch.linalg.eigvalsh(found)[0]) > -1e-14
    assert float((found - metric).abs().max()) < 1e-6
    assert certify(problem, z=torch.zeros(3, 4)).rigorous


# The face


def test_a_state_outside_the_domain_is_told() -> None:
    layer, x = TinyLayer(), randn(3, 3, dtype=torch.float32)
    z = layer.solve(x).value.detach().clone()
    z[1, 0] = -1e-6
    found = certify(layer, x, z)
    assert found.objective[1] == math.inf
    assert found.error_bound[1] < 1e-3
    assert "1 of 3 states lie outside the domain" in str(found)


def test_a_certificate_can_be_read() -> None:
    """Every number has its name."""
    layer = TinyLayer()
    text = str(certify(layer, randn(4, 3, dtype=torch.float32)))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "Certificate for 4 samples: proven, in float64"
    names = ["guarantee", "unique", "contraction ρ", "modulus m", "smoothness L", "objective"]
    names += ["stationarity", "residual", "‖z − z*‖ ≤", "rounding", "Lipschitz in x", "μ", "γ"]
    for name in names:
        assert any(line.startswith(name) for line in lines), name
    assert "1 sample:" in str(certify(layer, randn(1, 3, dtype=torch.float32)))


X = randn(4, 3, dtype=torch.float32)
NARROW = ModuleOperator(lambda z: z @ torch.ones(5, 7), lambda y: y @ torch.ones(7, 5), (5,))


@pytest.mark.parametrize(
    ("what", "given", "error", "message"),
    [
        (TinyLayer().problem(X), {"x": X}, TypeError, r"certify\(problem, z=z\)"),
        (TinyLayer(), {}, TypeError, "needs the input x"),
        (object(), {"x": X}, TypeError, "got object"),
        (TinyLayer(), {"x": X, "z": torch.zeros(4, 6)}, ValueError, "takes states"),
        (TinyLayer(), {"x": X, "z": torch.zeros(3, 5)}, ValueError, "c is"),
        (
            Problem(Tanh(), Gaussian(NARROW, randn(4, 7).float(), 0.5)),
            {"z": torch.zeros(4, 5)},
            TypeError,
            "float64",
        ),
        (
            Problem(Free(), Linear(torch.full((5, 5), math.nan), torch.zeros(4, 5))),
            {"z": torch.zeros(4, 5)},
            ValueError,
            "NaN",
        ),
    ],
)
def test_calls_that_cannot_be_meant(
    what: Any, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        certify(what, **given)
