"""A kernel, an operator, a prior, a regularizer written here are certified by what they state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.certify import Guarantee, certify
from equilibria.problems import (
    Activated,
    Curvature,
    DenseOperator,
    Linear,
    LinearOperator,
    ModuleOperator,
    Prior,
    Regularizer,
)
from equilibria.problems.kernels import ImageCoupling
from equilibria.problems.norms import UNIT, sum_error
from tests.problems.test_operators import randn
from tests.problems.test_problem import Quadratic


class Diagonal(LinearOperator):
    """Wz = dz, entry by entry."""

    def __init__(self, d: Tensor) -> None:
        self.d = d

    def __call__(self, z: Tensor) -> Tensor:
        return self.d * z

    def adjoint(self, y: Tensor, in_shape: Sequence[int] | None = None) -> Tensor:
        return self.d * y

    def output_shape(self, in_shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(in_shape)

    def check_output(self, out_shape: Sequence[int]) -> None: ...

    def cast(self, dtype: torch.dtype) -> Diagonal:
        return type(self)(self.d.detach().to(dtype))

    def norm_upper(self) -> float:
        return float(self.d.abs().max())

    def magnitude(self) -> tuple[LinearOperator, int] | None:
        return Diagonal(self.d.abs()), 1

    @property
    def dtype(self) -> torch.dtype:
        return self.d.dtype

    @property
    def device(self) -> torch.device:
        return self.d.device


class Silent(Diagonal):
    def magnitude(self) -> None:
        return None


class Stated(Quadratic):
    """½⟨z, dz⟩ − ⟨c, z⟩ with all of its bounds; the minimizer over z ≥ 0 is max(c/(1 + d), 0)."""

    def rounding_error(self, z: Tensor) -> Tensor | None:
        magnitude = self.operator.magnitude()
        if magnitude is None:
            return None
        size, terms = magnitude
        return sum_error(terms + 1) * (size(z.abs()) + self.c.abs())

    def hessian_lipschitz(self) -> float:
        return 0.0

    def lipschitz(
        self, modulus: float, rest: Tensor, reach: float, *, in_x: bool
    ) -> tuple[float | None, str]:
        return reach / modulus, "every input"

    def local_lipschitz(
        self, z: Tensor, error: Tensor, modulus: Tensor, local: Tensor, rest: Tensor
    ) -> tuple[Tensor | None, str]:
        return (1.0 / local).expand_as(error), "at this input"


@dataclass(frozen=True)
class AtLeast(Prior):
    """f = 0 for z ≥ low, else +inf."""

    low: float

    @property
    def piecewise_linear(self) -> bool:
        return True

    @property
    def shift(self) -> float:
        return abs(self.low)

    def value(self, z: Tensor) -> Tensor:
        return torch.where(z >= self.low, 0.0, torch.inf)

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return v.clamp_min(self.low)

    def subdifferential(self, z: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(z)
        inside = z >= self.low
        lower = torch.where(z == self.low, -torch.inf, zero)
        return torch.where(inside, lower, torch.inf), torch.where(inside, zero, -torch.inf)


@dataclass(frozen=True)
class Pull(Regularizer):
    """R(z) = Σz."""

    convex: ClassVar[bool] = True

    def value(self, z: Tensor) -> Tensor:
        return z.sum(1)

    def grad(self, z: Tensor) -> Tensor:
        return torch.ones_like(z)

    def curvature(self) -> Curvature:
        return Curvature(0.0, 0.0, True, "linear")

    def rounding_error(self, z: Tensor, form: str) -> Tensor | float | None:
        return UNIT


D = torch.tensor([-0.5, 0.2, 1.5, 3.0], dtype=torch.float64)


def certified(problem: eq.Problem, exact: Tensor) -> Any:
    """The certificate of a z nearby, its error bound checked against the exact minimizer."""
    near = exact + 1e-4 * randn(*exact.shape)
    found = eq.certify(problem, z=problem.into_domain(near))
    gap = (problem.into_domain(near) - exact).norm(dim=1)
    assert bool((gap <= found.error_bound).all())
    return found


def test_a_kernel_with_all_its_bounds_is_certified() -> None:
    c = randn(5, 4)
    found = certified(
        eq.Problem(eq.NonNegative(), Stated(Diagonal(D), c)), (c / (1 + D)).clamp_min(0.0)
    )
    assert found.rigorous
    assert found.kind is Guarantee.strong_convexity
    assert found.unique
    assert found.modulus == pytest.approx(0.5)
    assert found.smoothness == pytest.approx(4.0)
    # Attained by the first entry: ∂z*/∂c = 1/(1 + d).
    assert found.lipschitz == pytest.approx(2.0)
    assert torch.allclose(found.lipschitz_local, torch.full((5,), 2.0, dtype=torch.float64))
    assert bool((found.error_bound < 1e-2).all())
    # Where no equilibrium is proven to be the only one, its constant is not asked for.
    steep = eq.certify(eq.Problem(eq.NonNegative(), Stated(Diagonal(D - 3.0), c)), z=c)
    assert steep.lipschitz is None
    assert steep.lipschitz_local is not None
    assert bool(torch.isinf(steep.lipschitz_local).all())  # its formula gives a negative number


def test_what_a_kernel_does_not_state_is_not_claimed() -> None:
    c = randn(5, 4).float().double()
    exact = (c / (1 + D.float().double())).clamp_min(0.0)
    # The numbers of a float32 problem are certified as they are.
    single = eq.certify(
        eq.Problem(eq.NonNegative(), Quadratic(Diagonal(D.float()), c.float())), z=exact
    )
    assert float(single.residual.max()) < 1e-15
    found = certified(eq.Problem(eq.NonNegative(), Quadratic(Diagonal(D), c)), exact)
    assert not found.rigorous
    assert "estimate" in str(found)
    assert found.lipschitz is None
    assert found.lipschitz_local is None
    assert "Quadratic" in found.lipschitz_note
    # Not convex and with an unknown change of the Hessian: nothing is proven near z either.
    bent = eq.Problem(eq.NonNegative(), Quadratic(Diagonal(D - 1.0), c))
    assert eq.certify(bent, z=torch.zeros_like(c)).kind is Guarantee.none


class Misfit(ImageCoupling):
    """q(z) = ½‖Wz − c‖², stated without its rounding."""

    def value(self, z: Tensor) -> Tensor:
        return 0.5 * (self.operator(z) - self.c).square().sum(1)

    def grad(self, z: Tensor) -> Tensor:
        return self.operator.adjoint(self.operator(z) - self.c)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return self.operator.adjoint(self.operator(v))

    def curvature(self) -> Curvature:
        return Curvature(0.0, self.norm_upper() ** 2, True, "every z")


def test_a_kernel_of_images_need_not_state_its_rounding() -> None:
    c = randn(5, 4)
    found = certified(eq.Problem(eq.Free(), Misfit(Diagonal(D), c)), D * c / (1 + D**2))
    assert found.unique
    assert not found.rigorous


@pytest.mark.parametrize("kind", [Diagonal, Silent])
def test_an_operator_states_its_magnitude(kind: type[Diagonal]) -> None:
    c = randn(5, 4)
    half = 0.5 * D / D.abs().max()
    found = certified(eq.Problem(eq.Free(), eq.Linear(kind(half), c)), c / (1 - half**2))
    assert found.rigorous is (kind is Diagonal)
    assert found.unique


class Unstated(AtLeast):
    @property
    def shift(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("prior", [AtLeast, Unstated])
def test_a_prior_and_a_regularizer_state_theirs(prior: type[AtLeast]) -> None:
    c = randn(5, 4)
    exact = ((c - 1.0) / (1 + D)).clamp_min(-0.25)
    found = certified(eq.Problem(prior(-0.25), Stated(Diagonal(D), c), Pull()), exact)
    assert found.rigorous is (prior is AtLeast)
    assert found.unique
    layer = eq.nn.MonotoneDEQ(4, prior=prior(-0.25), solver=eq.Picard(max_steps=3))
    assert layer.certify(torch.zeros(2, 4)).rigorous is (prior is AtLeast)


class Doubling(eq.NonNegative):
    """Its prox is none."""

    def prox(self, v: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return 2.0 * v


@pytest.mark.parametrize("regularizer", [None, eq.L1(0.1)])
def test_a_wrong_prox_is_refuted_under_a_regularizer_too(regularizer: Any) -> None:
    problem = eq.Problem(Doubling(), eq.LeastSquares(None, randn(2, 3), 0.1), regularizer)
    proof = eq.certify(problem, z=randn(2, 3, seed=1).abs())
    assert proof.kind is Guarantee.none
    assert "REFUTED" in str(proof)


class Steeper(AtLeast):
    """Its slope is 1."""

    expansion = 0.25


class Downhill(Pull):
    """R(z) = −2‖z‖², said to be linear."""

    has_prox = True

    def grad(self, z: Tensor) -> Tensor:
        return -4.0 * z

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return -3.0 * z


class Short(DenseOperator):
    """It states too small a norm."""

    def norm_upper(self) -> float:
        return 0.1

    def cast(self, dtype: torch.dtype) -> Short:
        return Short(self.weight.detach().to(dtype))


class Unbounded(Downhill):
    """R(z) = −‖z‖², which has no Moreau envelope: h/(1 + h) is 2 for its Hessian h = −2."""

    def prox(self, z: Tensor, tau: float | Tensor = 1.0) -> Tensor:
        return z / (1.0 - 2.0 * tau)

    def curvature(self) -> Curvature:
        return Curvature(-2.0, -2.0, True, "concave")


def _wrong(kind: str) -> tuple[Any, Any, Any]:
    """A layer or problem with a part that claims what is wrong, an input and a state."""
    w, c, x = 0.6 * torch.eye(4, dtype=torch.float64), randn(2, 4), torch.randn(2, 4)
    way = "prox" if "prox" in kind else "gradient"
    module = ModuleOperator(
        lambda z: z @ (2.5 * w), lambda z: z @ (2.5 * w), (4,), norm_bound=0.1, dtype=torch.float64
    )
    made = {
        "monotone": lambda: (eq.nn.MonotoneDEQ(4, prior=Doubling()), x),
        "chain": lambda: (eq.nn.DeepOptEq(4, (5,), prior=Steeper(0.0)), x),
        "layer": lambda: (eq.nn.OptEq(4, 4, prior=Steeper(0.0)), x),
        "activation": lambda: (
            eq.Problem(eq.Free(), Activated(2.5 * w, c, Steeper(0.0))),
            None,
        ),
        "regularizer": lambda: (
            eq.Problem(eq.NonNegative(), Linear(w, c), Downhill(), way),
            None,
        ),
        "concave": lambda: (
            eq.Problem(eq.NonNegative(), Linear(w, c), Unbounded(), way),
            None,
        ),
        "operator": lambda: (
            eq.Problem(eq.Free(), Linear(Short(2.5 * w), c)),
            None,
        ),
        "norm": lambda: (eq.Problem(eq.Free(), Linear(module, c)), None),
    }[kind.partition(" ")[0]]
    return *made(), torch.randn(2, 4)


@pytest.mark.parametrize(
    "kind",
    [
        "monotone", "chain", "layer", "activation", "regularizer", "regularizer prox",
        "concave prox", "operator", "norm",
    ],
)  # fmt: skip
def test_nothing_follows_from_a_part_with_a_wrong_claim(kind: str) -> None:
    layer, x, z = _wrong(kind)
    proof = eq.certify(layer, x, z) if x is not None else eq.certify(layer, z=z.double())
    assert proof.kind is Guarantee.none
    assert proof.error_bound.isinf().all()
    assert proof.lipschitz is None
    if x is not None:
        network = torch.nn.Sequential(layer, torch.nn.Linear(4, 3))
        assert (eq.certify(network, x).radius == 0).all()
    if kind != "concave prox":  # of which the bounds are right, and say nothing
        assert "REFUTED" in str(proof)


def test_a_function_that_mixes_samples_is_refuted() -> None:
    """z₀ has no residual of its own and is 0.005 off, because of z₁."""
    x = randn(3, 4)
    ring = torch.eye(3).roll(1, 0).double()
    joint = torch.eye(3).double() + 0.3 * (ring + ring.T)
    problem = eq.Problem(
        eq.Free(),
        smooth=lambda z, x: 0.5 * (z - x).square().sum(1) + 0.3 * (z * z.roll(1, 0)).sum(1),
        x=x,
        bounds=(0.3, 1.7),
    )
    right = x + torch.tensor([[0.0], [1e-2], [0.0]]).double()
    proof = eq.certify(problem, z=torch.linalg.solve(joint, right))
    assert proof.kind is Guarantee.none
    assert "depend on each other" in str(proof)


class Encoded(eq.nn.OptEq):
    """The layer of its problem at another input."""

    def problem(self, x: Tensor) -> eq.Problem:
        return super().problem(10.0 * x)


LAYERS: dict[str, Any] = {
    "problem": lambda: eq.nn.OptEq(4, 5, in_channels=3),
    "problem by a subclass": lambda: Encoded(4, 5, in_channels=3),
    "monotone": lambda: eq.nn.MonotoneDEQ(4, in_channels=3),
    "blocks": lambda: eq.nn.DeepOptEq(4, (5, 6), in_channels=3),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_norm_of_u_counts_only_where_u_makes_c(name: str, hooked: bool) -> None:
    """Where a hook or a subclass makes it, x ↦ c may be steeper; a hook may look at it."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    last = layer.blocks[1].U if name == "blocks" else layer.U
    x, seen = torch.randn(4, 3, dtype=torch.float64), list[Any]()
    last.register_forward_hook(lambda _m, _x, c: 10.0 * c if hooked else seen.append(c))
    for found in (certify(layer, x), certify(nn.Sequential(layer, nn.Linear(4, 3).double()), x)):
        assert (found.lipschitz in (None, math.inf)) == (hooked or name == "problem by a subclass")
