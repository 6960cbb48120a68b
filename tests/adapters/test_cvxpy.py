"""cvxpy's problems solved by us and by cvxpy; gradients against finite differences of cvxpy's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria.adapters import from_cvxpy, to_cvxpy
from equilibria.problems import DifferenceOperator
from tests.optional import optional

cp: Any = optional("cvxpy")
SOLVER = eq.Auto(rtol=1e-10, max_steps=20_000)
Made = tuple[Any, list[Any]]


def by_cvxpy(problem: Any) -> np.ndarray:
    """By the smallest tolerance that CLARABEL reaches; what it gives below that is worse."""
    for tolerance in (1e-11, 1e-10, 1e-9):
        names = ("tol_gap_abs", "tol_gap_rel", "tol_feas")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate")
            warnings.filterwarnings("ignore", "You are solving a parameterized problem")  # 1.5
            problem.solve(solver="CLARABEL", **dict.fromkeys(names, tolerance))
        if problem.status == "optimal":
            break
    return np.asarray(problem.variables()[0].value).reshape(-1)


def ours(problem: Any, **options: Any) -> Tensor:
    return eq.minimize(problem, solver=SOLVER, **options).value


def squares(x: Any, A: np.ndarray, b: np.ndarray) -> Any:
    return cp.sum_squares(A @ x - b)


PROBLEMS: dict[str, tuple[type, str, Callable[[Any, Any, np.ndarray], Made]]] = {
    "lasso": (eq.Problem, "SoftThreshold", lambda x, s, a: (s + 0.7 * cp.norm1(x), [])),
    "weighted l1": (
        eq.Problem,
        "SoftThreshold",
        lambda x, s, a: (s + 3.0 + cp.sum(cp.abs(cp.multiply(np.abs(a[0]), x))) / 2, []),
    ),
    "nonnegative": (eq.Problem, "NonNegative", lambda x, s, a: (s, [x >= 0])),
    "box": (eq.Problem, "Box", lambda x, s, a: (s / 2, [x >= -0.1, x[1:3] <= 0.2])),
    "fixed entry": (eq.Problem, "Box", lambda x, s, a: (s, [x[0] == 0.3, cp.NonNeg(x[1])])),
    "simplex": (eq.Problem, "Simplex", lambda x, s, a: (s, [2 * cp.sum(x) == 3, x >= 0])),
    "tv": (eq.Problem, "TotalVariation", lambda x, s, a: (s + 0.5 * cp.tv(x), [])),
    "groups": (
        eq.Composite,
        "Free",
        lambda x, s, a: (s + 2 * cp.norm(x[:2]) + cp.pnorm(x[[2, 3, 4]], 2), []),
    ),
    "groups along an axis": (
        eq.Composite,
        "Free",
        lambda x, s, a: (s + cp.mixed_norm(cp.reshape(x[:4], (2, 2), order="F"), 2, 1), []),
    ),
    "three": (
        eq.Composite,
        "NonNegative",
        lambda x, s, a: (s + 0.5 * cp.tv(x) + 0.1 * cp.norm1(x), [x >= 0]),
    ),
    "quadratic program": (
        eq.Composite,
        "Box",
        lambda x, s, a: (
            cp.quad_form(x, a.T @ a + np.eye(5)) + a[0] @ x + 1.0,
            [a[:2] @ x <= -0.5, x <= 1],
        ),
    ),
    "semidefinite": (
        eq.Problem,
        "Box",
        lambda x, s, a: (cp.quad_form(x - 1, np.ones((5, 5))) + 0.01 * s, [cp.abs(0) <= x[0]]),
    ),
    "maximize": (
        eq.Problem,
        "Free",
        lambda x, s, a: (-s - cp.norm(x, 2) ** 2 - cp.sum(cp.square(x - 1)), []),
    ),
    "a number in a stack": (
        eq.Problem,
        "Free",
        lambda x, s, a: (s + cp.sum_squares(cp.hstack([x[:2], a[0] @ x])), []),
    ),
    "distance": (
        eq.Problem,
        "Translated",
        lambda x, s, a: (s + 3 * cp.norm1(cp.multiply([2, 1, 0, -1, 3], x) - a[0]), []),
    ),
    "least absolute deviations": (
        eq.Composite,
        "Box",
        lambda x, s, a: (cp.norm1(a @ x - 1) + cp.norm(a[:3] @ x + a[:3, 0]), [x <= 0.2]),
    ),
    "norms of affine rows": (
        eq.Composite,
        "Free",
        lambda x, s, a: (
            s + 2 * cp.mixed_norm(cp.vstack([x - a[0], x + a[1]]), 2, 1) + cp.tv(x - a[2]),
            [],
        ),
    ),
    "basis pursuit": (eq.Composite, "SoftThreshold", lambda x, s, a: (cp.norm1(x), [a @ x == 1])),
}


def random(seed: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    return source.normal(size=(7, 5)), source.normal(size=7)


SLOW = ("fixed entry", "groups along an axis", "semidefinite", "maximize")
NAMES = [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PROBLEMS]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_our_solution_is_cvxpys(name: str, seed: int) -> None:
    kind, prior, build = PROBLEMS[name]
    A, b = random(seed)
    x = cp.Variable(5)
    if name == "basis pursuit":
        A = A[:3]
    objective, constraints = build(x, squares(x, A, b[: len(A)]), A)
    goal = cp.Maximize if name == "maximize" else cp.Minimize
    problem = cp.Problem(goal(objective), constraints)
    expected = by_cvxpy(problem)
    t = torch.zeros((), dtype=torch.float64)
    scale = cp.Parameter(value=0.0)
    problem = cp.Problem(goal(objective + scale), constraints)
    made = from_cvxpy(problem, {scale: t})  # float64, as its values
    assert (type(made), type(made.prior).__name__) == (kind, prior)
    np.testing.assert_allclose(ours(made)[0].numpy(), expected, atol=1e-5)
    back = to_cvxpy(made)
    np.testing.assert_allclose(by_cvxpy(back), expected, atol=1e-5)


def test_a_matrix_has_its_rows_one_after_another() -> None:
    x, target = cp.Variable((2, 3), nonneg=True), np.arange(-2.0, 4.0).reshape(2, 3)
    made = from_cvxpy(cp.Problem(cp.Minimize(cp.sum_squares(x.T - target.T))))
    assert torch.equal(ours(made)[0].round(), torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0]))


def test_parts_of_weight_zero_and_a_sum_that_is_zero() -> None:
    x, weight = cp.Variable(3), cp.Parameter(nonneg=True, value=0.0)
    fit, at = cp.sum_squares(x - [1.0, -2.0, 3.0]), [1.0, -2.0, 3.0]
    for cost, constraints, want in [
        (fit + weight * cp.sum_squares(x) + 0 * cp.norm1(x), [], at),
        (cp.norm1(x) + weight * fit + 0 * (2 * fit + cp.norm2(x)), [], [0.0] * 3),
        (fit + weight * cp.norm1(x), [x >= 0, cp.sum(x) == 0], [0.0] * 3),
    ]:
        made = cp.Problem(cp.Minimize(cost), constraints)
        problem = from_cvxpy(made, {weight: torch.zeros(()).double()})
        found = ours(problem)[0]
        np.testing.assert_allclose(found.numpy(), want, atol=1e-6)


def test_large_constants_do_not_round_the_matrix() -> None:
    """In float32, and where K is that of a known prior or no operator at all."""
    x, A = cp.Variable(5), random(0)[0]
    made = from_cvxpy(cp.Problem(cp.Minimize(cp.sum_squares(1e3 * (A @ x) / 1e3 - 1e6))))
    assert isinstance(made, eq.Problem)
    found = made.coupling.operator(torch.eye(5)).mT  # type: ignore[attr-defined]
    np.testing.assert_allclose(found.numpy(), A, rtol=1e-5)
    same = from_cvxpy(cp.Problem(cp.Minimize(cp.sum_squares(x - 0.1)))).coupling  # type: ignore[union-attr]
    assert type(same.operator).__name__ == "IdentityOperator"


# --- parameters ---------------------------------------------------------------------------------


def parametrized(kind: str) -> tuple[Any, dict[Any, np.ndarray], set[Any]]:
    """A problem, the values of its parameters, and those that may differ from sample to sample."""
    A, b = random(3)
    x, w = cp.Variable(5), cp.Parameter(nonneg=True, name="w")
    a, c = cp.Parameter((7, 5), name="a"), cp.Parameter(7, name="c")
    values: dict[Any, np.ndarray] = {a: A, c: b, w: np.asarray(0.6)}
    s = cp.sum_squares(a @ x - c)
    if kind == "lasso":
        return cp.Problem(cp.Minimize(s + w * cp.norm1(x))), values, {c, w}
    if kind == "distance":
        goal = s + w * cp.norm(x) + cp.norm(x[1:] - c[2:6]) + 0.3 * cp.norm1(A @ x - c)
        return cp.Problem(cp.Minimize(goal)), values, {c, w}
    if kind == "composite":
        goal = s + w * cp.tv(x) + 0.2 * cp.norm1(x)
        return cp.Problem(cp.Minimize(goal), [x <= 0.4]), values, {c, w}
    if kind == "box":
        return cp.Problem(cp.Minimize(s), [x >= -w / 5, x <= w / 4]), values, {c, w}
    if kind == "simplex":
        return cp.Problem(cp.Minimize(s), [x >= 0, cp.sum(x) == w]), values, {c, w}
    if kind == "weight":
        return cp.Problem(cp.Minimize(s + w * cp.sum_squares(x) + 0.3 * cp.norm1(x))), values, {c}
    P = cp.Parameter((5, 5), PSD=True, name="P")
    values = {P: A.T @ A + np.eye(5), c: b, w: np.asarray(0.6)}
    return cp.Problem(cp.Minimize(cp.quad_form(x, P) + c[:5] @ x), [x >= -w / 6]), values, {c, w}


KINDS = ["lasso", "distance", "composite", "box", "simplex", "weight", "quadratic"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences_of_cvxpy(kind: str) -> None:
    problem, values, _ = parametrized(kind)
    tensors = {q: torch.tensor(v, requires_grad=True) for q, v in values.items()}
    weights = np.arange(1.0, 6.0)
    (ours(from_cvxpy(problem, tensors)) @ torch.tensor(weights)).sum().backward()
    source, h = np.random.default_rng(0), 1e-4
    for q, v in values.items():
        way = source.normal(size=v.shape)
        way = way + way.T if q.name() == "P" else way

        def at(step: float, q: Any = q, v: np.ndarray = v, way: Any = way) -> float:
            for other, value in values.items():
                other.value = value
            q.value = v + step * way
            return float(by_cvxpy(problem) @ weights)

        slope = tensors[q].grad
        assert slope is not None
        found = float((slope * torch.as_tensor(way)).sum())
        expected = (at(h) - at(-h)) / (2 * h)
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-4), q.name()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_per_sample(kind: str) -> None:
    problem, values, own = parametrized(kind)
    source, tensors = np.random.default_rng(1), {}
    rows = {q: np.stack([v * f for f in source.uniform(0.7, 1.3, 3)]) for q, v in values.items()}
    tensors = {q: torch.tensor(rows[q] if q in own else v) for q, v in values.items()}
    made = from_cvxpy(problem, tensors)
    solution = ours(made)
    for i in range(3):
        for q, v in values.items():
            q.value = rows[q][i] if q in own else v
        np.testing.assert_allclose(solution[i].numpy(), by_cvxpy(problem), atol=1e-5)
        np.testing.assert_allclose(by_cvxpy(to_cvxpy(made, i)), by_cvxpy(problem), atol=1e-5)
    for q in values.keys() - own:
        for wrong in (rows[q], np.stack([values[q]] * 3)):  # also if they are equal now
            with pytest.raises(ValueError, match=r"is given per sample \[B, ...\]; give one value"):
                from_cvxpy(problem, {**tensors, q: torch.tensor(wrong)})


# --- refused ------------------------------------------------------------------------------------

UNKNOWN: dict[str, Callable[[Any], Made]] = {
    "log_sum_exp": lambda x: (cp.sum_squares(x) + cp.log_sum_exp(x), []),
    "norm_inf": lambda x: (cp.norm_inf(x), []),
    "huber": lambda x: (cp.sum(cp.huber(x)), []),
    "Pnorm": lambda x: (cp.sum_squares(x), [cp.norm(x) <= 1]),
    "cumsum": lambda x: (cp.sum_squares(cp.cumsum(x)), []),
    "MulExpression": lambda x: (np.arange(4) @ cp.abs(x), []),
    "SOC": lambda x: (cp.sum_squares(x), [cp.SOC(x[0], x[1:])]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_atom_is_named(name: str) -> None:
    objective, constraints = UNKNOWN[name](cp.Variable(4))
    with pytest.raises(ValueError, match=f"does not know {name}.*Known are sum_squares, quad_form"):
        from_cvxpy(cp.Problem(cp.Minimize(objective), constraints))


def test_what_else_is_refused() -> None:
    x, y = cp.Variable(3), cp.Variable(3)
    a, c = cp.Parameter(3, name="a"), cp.Parameter(3, name="c")
    good = cp.Problem(cp.Minimize(cp.sum_squares(x - a) + cp.sum_squares(x - c)))
    row = torch.zeros(3)
    for problem, values, text in [
        (cp.Problem(cp.Minimize(cp.sum_squares(x - y))), {}, "one variable, got 2"),
        (cp.Problem(cp.Minimize(-cp.sum_squares(x))), {}, "is_dcp"),
        (good, {}, "parameter a has no value"),
        (good, {a: torch.zeros(2), c: row}, r"a got shape \[2\], takes \[3\]"),
        (good, {a: torch.zeros(2, 3), c: torch.zeros(4, 3)}, "different numbers of samples"),
        (good, {a: row, c: row, cp.Parameter(): row}, "not its parameters"),
        (cp.Problem(cp.Minimize(cp.sum(cp.Variable(3, integer=True)))), {}, "write a constraint"),
    ]:
        with pytest.raises(ValueError, match=text):
            from_cvxpy(problem, values)


# --- back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior",
    [
        eq.ShiftedNonNegative(0.2), eq.SoftThreshold(torch.tensor([[0.1], [0.4]])),
        eq.Box(torch.tensor([[-0.1, 0.0, -torch.inf, 0.1]]), 0.3), eq.Ball(0.4), eq.Isotonic(),
        eq.HalfSpace(torch.tensor([[1.0, 2.0, -1.0, 0.5]]), -0.3), eq.TotalVariation(0.3),
        eq.GroupSoftThreshold(0.3), eq.Simplex(2.0),
    ],
    ids=lambda f: type(f).__name__,
)  # fmt: skip
def test_our_problems_written_for_cvxpy(prior: Any) -> None:
    torch.manual_seed(0)
    W, c = 0.3 * torch.randn(3, 4).double(), torch.randn(2, 4).double()
    problems: list[Any] = [
        eq.Problem(prior, eq.Linear(W, c), eq.SquaredNorm(0.5)),
        eq.Problem(prior, smooth=eq.LeastSquares(None, c) + eq.LeastSquares(W, c[:, :3]).compose(
            torch.eye(4).double() + 0.1)),
    ]  # fmt: skip
    if prior.separable:
        problems.append(eq.Problem(prior, eq.Linear(W, c), eq.L1(0.2)))
    for problem in problems:
        found = ours(problem)
        for i in range(2):
            expected = by_cvxpy(to_cvxpy(problem, i))
            np.testing.assert_allclose(found[i].numpy(), expected, atol=1e-5)


@pytest.mark.slow
def test_images_written_for_cvxpy() -> None:
    torch.manual_seed(0)
    noisy = torch.randn(2, 1, 3, 4).double()
    terms = [(eq.GroupSoftThreshold(0.5, dim=1), DifferenceOperator())]
    problem = eq.Composite(eq.TotalVariation(0.2, dim=-2), terms, eq.LeastSquares(None, noisy))
    expected = by_cvxpy(to_cvxpy(problem, 1))
    np.testing.assert_allclose(ours(problem)[1].flatten().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("prior", [eq.TotalVariation(0.3), eq.Isotonic()], ids=type)
def test_lines_of_one_entry_written_for_cvxpy(prior: Any) -> None:
    c = torch.randn(1, 1).double()
    found = by_cvxpy(to_cvxpy(eq.Problem(prior, smooth=eq.LeastSquares(None, c))))
    np.testing.assert_allclose(found, c[0].numpy(), atol=1e-6)


def test_what_cvxpy_cannot_write() -> None:
    c = torch.randn(1, 4)
    for problem, text in [
        (eq.Problem(eq.Tanh(), smooth=eq.LeastSquares(None, c)), "does not know Tanh"),
        (eq.Problem(eq.Free(), eq.Gaussian(torch.eye(4), c, gamma=0.5)), "not know Gaussian"),
        (eq.Problem(eq.Free(), smooth=lambda z, x: (z - x).square().sum(1), x=c), "know Smooth"),
        (eq.Problem(eq.Free(), smooth=eq.LeastSquares(None, c), regularizer=eq.HSIC()), "HSIC"),
        (eq.Problem(eq.Free(), eq.Linear(torch.eye(4), c), eq.L1(0.1), "prox"), "know L1"),
        (
            eq.Problem(
                eq.GroupSoftThreshold(torch.ones(1, 4, 1), 2),
                smooth=eq.LeastSquares(None, torch.ones(1, 4, 2)),
            ),
            "weight of GroupSoftThreshold must be one number",
        ),
    ]:
        with pytest.raises(TypeError, match=text):
            to_cvxpy(problem)
    with pytest.raises(IndexError):
        to_cvxpy(eq.Problem(eq.Free(), smooth=eq.LeastSquares(None, c)), 1)
    with pytest.raises(ValueError, match="not convex"):
        to_cvxpy(eq.Problem(eq.Free(), eq.Linear(2.0 * torch.eye(4), c)))
