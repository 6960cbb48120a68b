"""Parameters of priors that are tensors: the same numbers, and gradients through every solve."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import equilibria as eq
from equilibria.engine.adjoint import Adjoint
from equilibria.problems import Prior, WithL1
from tests.optional import optional
from tests.problems.test_operators import randn

cp = optional("cvxpy")

B, N = 4, 5
MAKERS: dict[str, Callable[[Tensor | float], Prior]] = {
    "soft": lambda t: eq.SoftThreshold(t),
    "shifted": lambda t: eq.ShiftedNonNegative(t),
    "leaky": lambda t: eq.LeakyNonNegative(t),
    "upper": lambda t: eq.Box(-0.2, t),
    "lower": lambda t: eq.Box(t, 1.4),
    "l1": lambda t: WithL1(eq.Tanh(), t),
    "inner": lambda t: WithL1(eq.Box(-1.0, t), 0.1),
}
SHAPES = {"one": (), "sample": (B,), "feature": (1, N), "both": (B, N)}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
shaped = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Numbers in (0.2, 0.8)."""
    return 0.2 + 0.6 * torch.sigmoid(randn(*shape, seed=seed))


def columns(t: Tensor) -> Tensor:
    """[B, N] of the number that belongs to each entry."""
    return t.reshape(*t.shape, *[1] * (2 - t.ndim)).expand(B, N)


@each
@shaped
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_entry_is_as_with_its_number(
    make: Callable[[Tensor | float], Prior], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    t, v = drawn(shape).float().to(torch.float64), 2 * randn(B, N, seed=1).to(dtype)
    prior = make(t if dtype == torch.float64 else t.float())
    tau = torch.linspace(0.5, 2.0, B, dtype=torch.float64)[:, None]
    z = prior.prox(v, tau)
    value, ends = prior.value(z), prior.subdifferential(z)
    eps = 2 * torch.finfo(dtype).eps
    assert z.dtype == dtype
    for i in range(B):
        for j in range(N):
            one, here = make(float(columns(t)[i, j])), z[i, j]
            torch.testing.assert_close(here, one.prox(v[i, j], float(tau[i])), rtol=eps, atol=eps)
            torch.testing.assert_close(value[i, j], one.value(here), rtol=1e-6, atol=1e-7)
            for end, expected in zip(ends, one.subdifferential(here), strict=True):
                torch.testing.assert_close(end[i, j], expected, rtol=1e-6, atol=1e-6)


def test_a_tensor_of_one_number_changes_no_digit() -> None:
    v = randn(B, N, seed=2).float()
    for make in MAKERS.values():
        number = 0.3
        tensor = torch.tensor(number)
        assert torch.equal(make(number).prox(v), make(tensor).prox(v))


@each
@shaped
def test_prox_and_value_have_right_derivatives(
    make: Callable[[Tensor | float], Prior], shape: tuple[int, ...]
) -> None:
    t = drawn(shape, seed=3).requires_grad_()
    v = (2 * randn(B, N, seed=4)).requires_grad_()
    assert gradcheck(lambda t, v: make(t).prox(v, 0.7), (t, v))
    z = make(t.detach()).prox(v.detach()).requires_grad_()
    inside = make(t.detach()).value(z.detach() * 0.99).isfinite()
    assert gradcheck(lambda t: make(t).value(z.detach() * 0.99)[inside], (t,))


# --- through a solve ----------------------------------------------------------------------------

W = 0.5 * randn(N, N, seed=5) / N**0.5
ADJOINTS: dict[str, Adjoint] = {
    "implicit": eq.Implicit(),
    "unrolled": eq.Unrolled(),
    "phantom": eq.Phantom(steps=80),
    "neumann": eq.Phantom(steps=80, form="neumann"),
}
SOLVER = eq.Picard(rtol=1e-13, max_steps=300)
PROBLEMS: dict[str, Callable[[Tensor], Prior]] = {
    **{name: MAKERS[name] for name in ("soft", "upper", "leaky", "inner")},
    "tv": lambda t: eq.TotalVariation(t),
    "ball": lambda t: eq.Ball(t),
    "entropy": lambda t: eq.Entropy(t),
}
JOINT = ("tv", "ball", "entropy")  # one number a sample


PAIRS = [(a, s) for a in ADJOINTS for s in SHAPES.values() if a == "implicit" or s == (B,)]


@pytest.mark.parametrize(
    ("name", "adjoint", "shape"),
    [(n, a, s) for n in PROBLEMS for a, s in PAIRS if n not in JOINT or len(s) < 2],
)
def test_gradients_through_minimize_are_those_of_differences(
    name: str, adjoint: str, shape: tuple[int, ...]
) -> None:
    c = 1.5 * randn(B, N, seed=6)
    t = drawn(shape, seed=7).requires_grad_()

    def solve(t: Tensor, adjoint: Adjoint | None = None) -> Tensor:
        problem = eq.Problem(PROBLEMS[name](t), eq.Linear(W, c))
        return eq.minimize(problem, solver=SOLVER, adjoint=adjoint).value

    weights = randn(B, N, seed=8)
    (got,) = torch.autograd.grad((weights * solve(t, ADJOINTS[adjoint])).sum(), t)
    want, h = torch.zeros_like(t), 1e-6
    for k in range(t[0].numel() if t.ndim else 1):  # of all samples at once
        step = torch.zeros_like(t)
        (step.view(len(t), -1)[:, k] if t.ndim else step).fill_(h)
        moved = (weights * (solve(t.detach() + step) - solve(t.detach() - step))).sum(1) / (2 * h)
        moved = moved if t.ndim and len(t) == B else moved.sum()
        want += step / h * (moved.reshape(-1, *[1] * (t.ndim - 1)) if t.ndim else moved)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_one_step_is_exact_where_the_map_is_constant() -> None:
    c, t = randn(B, N, seed=9), drawn((B,), seed=10).requires_grad_()
    zero = torch.zeros(1, N, dtype=torch.float64)
    problem = eq.Problem(eq.TotalVariation(t), eq.Linear(zero, c))
    value = eq.minimize(problem, adjoint=eq.OneStep()).value
    (got,) = torch.autograd.grad(value.square().sum(), t)
    (want,) = torch.autograd.grad(eq.TotalVariation(t).prox(c).square().sum(), t)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["soft", "inner", "tv"])
def test_a_parameter_per_sample_follows_its_sample(name: str) -> None:
    """compact=True drops finished samples; a solver that takes a step per sample, too."""
    c = torch.stack([randn(N, seed=k) * 10.0 ** (k - 2) for k in range(B)])
    t = drawn((B,), seed=11)
    regularizer = None if name != "soft" else eq.L1(0.05)
    problem = eq.Problem(PROBLEMS[name](t), eq.Linear(W, c), regularizer)
    solver = eq.Picard(rtol=1e-12, max_steps=300, compact=True, block=2)
    sol = eq.minimize(problem, solver=solver)
    assert len(set(sol.stats.steps.tolist())) > 1
    for k in range(B):
        alone = eq.Problem(PROBLEMS[name](t[k : k + 1]), eq.Linear(W, c[k : k + 1]), regularizer)
        torch.testing.assert_close(
            sol.value[k : k + 1], eq.minimize(alone, solver=solver).value, atol=1e-10, rtol=1e-10
        )


def test_a_sample_with_nan_spoils_itself_alone() -> None:
    c, t = randn(B, N, seed=12), drawn((B,), seed=13)
    whole = eq.minimize(eq.Problem(eq.SoftThreshold(t), eq.Linear(W, c)), solver=SOLVER).value
    t[1] = math.nan
    t.requires_grad_()
    with pytest.warns(eq.ConvergenceWarning):
        sol = eq.minimize(eq.Problem(eq.SoftThreshold(t), eq.Linear(W, c)), solver=SOLVER)
    rest = [0, 2, 3]
    torch.testing.assert_close(sol.value[rest], whole[rest])
    assert sol.result[1] == eq.Result.nonfinite
    (slope,) = torch.autograd.grad(sol.value[rest].sum(), t)
    assert bool(slope[rest].isfinite().all())


def test_a_learned_weight_trains_moves_and_certifies() -> None:
    layer = eq.nn.EquilibriumLayer(
        lambda x, W, p: eq.Problem(eq.SoftThreshold(p.exp()), eq.Linear(W, x)),
        W=nn.Linear(6, 4, bias=False),
        p=nn.Parameter(torch.full((1, 6), -1.0)),
    ).double()
    nn.init.orthogonal_(layer.W.weight)
    layer.W.weight.data *= 0.6
    x = randn(3, 6, seed=14)
    layer(x).square().sum().backward()
    assert layer.p.grad is not None
    assert float(layer.p.grad.abs().max()) > 0
    found = eq.certify(layer, x)
    assert found.rigorous
    z = layer(x).detach()
    numbers = [
        eq.certify(eq.Problem(eq.SoftThreshold(math.exp(-1.0)), eq.Linear(layer.W, x)), z=z),
        eq.certify(layer, x, z),
    ]
    torch.testing.assert_close(numbers[0].error_bound, numbers[1].error_bound)
    torch.testing.assert_close(numbers[0].stationarity, numbers[1].stationarity)


def test_total_variation_denoising_with_a_learned_weight() -> None:
    """The layer of docs/problems.md against cvxpy, and its gradient against differences."""
    n = 40
    layer = eq.nn.EquilibriumLayer(
        lambda x, p: eq.Problem(eq.TotalVariation(p.exp()), eq.Linear(x.new_zeros(1, n), x)),
        p=nn.Parameter(torch.tensor(-0.5, dtype=torch.float64)),
    )
    clean = (torch.arange(n) // 10 % 2).double().expand(3, n)
    x = clean + 0.3 * randn(3, n, seed=16)
    z = layer(x)
    for row, got in zip(x.numpy(), z.detach().numpy(), strict=True):
        found = cp.Variable(n)
        cost = math.exp(-0.5) * cp.sum(cp.abs(cp.diff(found))) + cp.sum_squares(found - row) / 2
        cp.Problem(cp.Minimize(cost)).solve(solver=cp.CLARABEL)
        assert abs(got - found.value).max() < 1e-5
    assert float(layer.problem(x).stationarity(z).detach().max()) < 1e-12

    def loss(p: float) -> float:
        layer.p.data.fill_(p)
        return float((layer(x) - clean).square().mean().detach())

    ((z - clean).square().mean()).backward()
    slope = (loss(-0.5 + 1e-5) - loss(-0.5 - 1e-5)) / 2e-5
    assert float(layer.p.grad) == pytest.approx(slope, rel=1e-6)


def test_a_weight_that_a_network_makes_of_each_sample() -> None:
    layer = eq.nn.EquilibriumLayer(
        lambda x, net: eq.Problem(
            eq.TotalVariation(net(x).exp().squeeze(1)), eq.Linear(x.new_zeros(1, 8), x)
        ),
        net=nn.Linear(8, 1, dtype=torch.float64),
    )
    x = randn(3, 8, seed=17)
    alone = torch.cat([layer(x[k : k + 1]) for k in range(3)])
    torch.testing.assert_close(layer(x), alone)
    x[1, 2] = math.nan
    with pytest.warns(eq.ConvergenceWarning):
        z = layer(x)
    torch.testing.assert_close(z[[0, 2]], alone[[0, 2]])
    z[[0, 2]].square().sum().backward()
    assert bool(layer.net.weight.grad.isfinite().all())


def test_a_certificate_reads_what_a_problem_did_not() -> None:
    """A parameter may go out of range after the problem was made: then nothing is proven."""
    weight = torch.tensor(0.1, dtype=torch.float64)
    problem = eq.Problem(eq.SoftThreshold(weight), eq.Linear(W, randn(B, N, seed=15)))
    weight.fill_(-0.1)
    with pytest.raises(ValueError, match=r"SoftThreshold.*weight.*-0\.1"):
        eq.certify(problem)


def test_a_lipschitz_constant_in_x_is_not_claimed_for_a_parameter_that_may_depend_on_x() -> None:
    class Layer(eq.nn.EquilibriumLayer):
        def problem(self, x: Tensor) -> eq.Problem:
            return eq.Problem(eq.SoftThreshold(x.square().mean(1)), eq.Linear(W, x))

        def input_norm_upper(self) -> float:
            return 1.0

    x = randn(1, N, seed=18)
    found = eq.certify(Layer(), x)
    assert found.lipschitz is None
    assert found.lipschitz_local is None
    assert "may depend on x" in found.lipschitz_note
    in_c = eq.certify(Layer().problem(x))
    assert in_c.lipschitz_in == "c"
    assert in_c.lipschitz is not None
    assert any("parameters of the prior fixed" in note for note in in_c.notes)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: eq.SoftThreshold(torch.tensor([0.1, -0.5])), ["SoftThreshold", "weight", "-0.5"]),
        (lambda: eq.SoftThreshold(torch.tensor(1)), ["SoftThreshold", "weight", "int64"]),
        (lambda: eq.ShiftedNonNegative(torch.tensor([math.inf])), ["weight", "inf"]),
        (lambda: eq.LeakyNonNegative(torch.tensor([0.5, 0.0])), ["LeakyNonNegative", "slope", "0"]),
        (lambda: eq.Box(torch.tensor([0.0, 2.0]), 1.0), ["Box", "lower", "2", "upper", "1"]),
        (lambda: eq.Box(torch.zeros(B), -torch.ones(1, N)), ["Box", "lower", "upper", "-1"]),
        (lambda: eq.Box(torch.tensor([0]), 1.0), ["Box", "floating point"]),
        (lambda: eq.SoftThreshold(torch.ones(N)).prox(randn(B, N)), ["(5,)", "(4, 5)", "[1, ...]"]),
        (lambda: eq.SoftThreshold(torch.ones(B, N, 1)).prox(randn(B, N)), ["(4, 5, 1)"]),
        (lambda: eq.nn.GEQ(3, 4, prior=eq.SoftThreshold(torch.ones(1, 4))), ["GEQ", "prior"]),
        (
            lambda: eq.nn.GEQ(
                3,
                4,
                prior=WithL1(eq.Box(0.0, torch.ones(1))),
            ),
            ["GEQ", "prior"],
        ),
    ],
)
def test_bad_parameters_are_named(make: Callable[[], object], names: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert all(name in str(error.value) for name in names), str(error.value)
