"""ForwardBackward: its step, Jacobian and refusals; the contraction factors of both splittings."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import equilibria as eq
from equilibria.problems import Prior
from equilibria.problems.monotone_operator import DenseMonotone, MonotoneInclusion
from equilibria.solvers import ForwardBackward, PeacemanRachford, forward_backward
from equilibria.solvers.forward_backward import SplittingSolver, forward_backward_factor
from equilibria.solvers.peaceman_rachford import peaceman_rachford_factor
from tests.contracts.problems import HostReads
from tests.oracles import PROXES
from tests.problems.test_monotone_operator import numpy_w

Array = NDArray[np.float64]

PRIORS = [prior for prior, _ in PROXES.values()]
law = settings(max_examples=20, deadline=None, derandomize=True)


def drawn(
    seed: int, n: int = 6, m: float = 0.4, size: float = 0.6, prior: Prior = PRIORS[0]
) -> tuple[MonotoneInclusion, Array]:
    """A dense inclusion and numpy's W."""
    source = np.random.default_rng(seed)
    a, b = size * source.standard_normal((2, n, n))
    operator = DenseMonotone(torch.from_numpy(a), torch.from_numpy(b), m)
    return MonotoneInclusion(operator, prior, 1), numpy_w(a, b, m)


def states(seed: int, batch: int = 8, n: int = 6) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(batch, n, dtype=torch.float64, generator=source)


def rotation() -> MonotoneInclusion:
    """I − W = [[1, −1], [1, 1]]: m = 1, L = √2, 2m/L² = 1."""
    b = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    return MonotoneInclusion(DenseMonotone(torch.zeros_like(b), b, 1.0), eq.Free(), 1)


# ---------------------------------------------------------------------- the step


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
def test_the_step_is_the_formula(prior: Prior) -> None:
    """z ← prox_{αf}(z − α((I − W)z − c)), W by numpy; the prox has its own tests."""
    inclusion, w = drawn(0, size=0.2, prior=prior)
    z, c, alpha = states(1), states(2), 0.1
    splitting = ForwardBackward(alpha=alpha).split(inclusion, z, c)
    force = z.numpy() @ (np.eye(6) - w).T - c.numpy()
    expected = prior.prox(torch.from_numpy(z.numpy() - alpha * force), alpha)
    torch.testing.assert_close(
        splitting.step(z, *splitting.inputs), expected, rtol=1e-12, atol=1e-13
    )
    assert splitting.start is z
    assert splitting.read(z) is z


def test_the_default_step_is_from_the_bounds() -> None:
    inclusion, w = drawn(3)
    upper = np.linalg.norm(np.eye(6) - w, 2)
    alpha = float(ForwardBackward().step_size(inclusion))
    # L is taken at most n^{1/128} too large, so α at most n^{1/64} too small.
    assert 0.4 / upper**2 * 6 ** (-1 / 64) * 0.999 <= alpha <= 0.4 / upper**2 * (1 + 1e-12)


# ---------------------------------------------------------------------- contraction factors


@settings(law, max_examples=40)
@given(
    kind=st.sampled_from([ForwardBackward, PeacemanRachford]),
    seed=st.integers(0, 10**6),
    m=st.sampled_from([0.05, 0.4, 1.0, 3.0]),
    size=st.sampled_from([0.1, 0.6, 2.0]),
    share=st.floats(0.0, 0.999),
    prior=st.sampled_from(PRIORS),
)
def test_the_step_contracts_by_its_factor(
    kind: type[SplittingSolver], seed: int, m: float, size: float, share: float, prior: Prior
) -> None:
    """Proposition 3 for forward-backward, up to 2m/L²; for Peaceman–Rachford every step."""
    inclusion, w = drawn(seed, m=m, size=size, prior=prior)
    upper = float(np.linalg.norm(np.eye(6) - w, 2))
    if kind is ForwardBackward:
        alpha = max(share, 0.05) * 2.0 * m / upper**2
        factor = forward_backward_factor(m, upper, alpha)
    else:
        alpha = 10.0 ** (4 * share - 2)
        factor = peaceman_rachford_factor(m, upper, alpha)
    splitting = kind(alpha=alpha * (1 - 1e-12)).split(inclusion, states(0), states(1))
    y, z, c = states(seed + 1), states(seed + 2), splitting.inputs[0]
    moved = torch.linalg.vector_norm(splitting.step(y, c) - splitting.step(z, c), dim=1)
    apart = torch.linalg.vector_norm(y - z, dim=1)
    assert factor < 1
    assert (moved <= factor * apart * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("kind", "bound", "alphas"),
    [
        (ForwardBackward, forward_backward_factor, (0.1, 0.5, 0.9)),
        (PeacemanRachford, peaceman_rachford_factor, (0.1, 1 / math.sqrt(2), 3.0)),
    ],
)
def test_the_factor_is_attained(kind: type[SplittingSolver], bound: Any, alphas: Any) -> None:
    """By I − W = [[1, −1], [1, 1]], where every vector has t = m and s = L²."""
    for alpha in alphas:
        step = kind(alpha=alpha).split(rotation(), states(0, n=2), states(1, n=2)).step
        y, z = states(2, n=2), states(3, n=2)
        c = torch.zeros_like(y)
        ratio = (step(y, c) - step(z, c)).norm(dim=1) / (y - z).norm(dim=1)
        np.testing.assert_allclose(ratio, bound(1.0, math.sqrt(2.0), alpha), rtol=1e-12)
    end = forward_backward_factor(1.0, math.sqrt(2.0), 1.0)
    assert end == pytest.approx(1.0, abs=1e-15)


# ---------------------------------------------------------------------- the step is checked


def test_the_interval_is_open_at_its_end() -> None:
    z = c = torch.zeros(1, 2, dtype=torch.float64)
    for alpha in (1.0, 1.5, 100.0):
        with pytest.raises(
            ValueError, match=rf"alpha={alpha:g}\) is outside \(0, 2m/L²\) = \(0, 1\)"
        ):
            ForwardBackward(alpha=alpha).split(rotation(), z, c)
    ForwardBackward(alpha=0.9999).split(rotation(), z, c)


def test_a_step_that_only_the_close_bound_admits() -> None:
    """I − W = 0.4 I: the cheap bound on L is 6^{1/128} too large; the check must not end there."""
    nothing = torch.zeros(6, 6, dtype=torch.float64)
    inclusion = MonotoneInclusion(DenseMonotone(nothing, nothing, 0.4), eq.NonNegative(), 1)
    assert 2 * 0.4 / float(inclusion.norm_bound()) ** 2 < 0.99 * 5.0
    ForwardBackward(alpha=0.9999 * 5.0).split(inclusion, states(0), states(1))
    with pytest.raises(ValueError, match="outside"):
        ForwardBackward(alpha=1.0001 * 5.0).split(inclusion, states(0), states(1))


# ---------------------------------------------------------------------- the transposed splitting


def test_the_transposed_jacobian_is_the_transposed_splitting() -> None:
    """Jᵀ = (I − α(I − Wᵀ))D at z, which is what Implicit iterates backward."""
    inclusion, w = drawn(7, size=0.2)
    alpha = 0.1
    splitting = ForwardBackward(alpha=alpha).split(inclusion, states(0), states(1))
    z, c = states(2, 1)[0], states(3, 1)
    jacobian = torch.autograd.functional.jacobian(lambda z: splitting.step(z[None], c)[0], z)
    shrunk = np.eye(6) - alpha * (np.eye(6) - w)
    kinks = np.diag((z.numpy() @ shrunk.T + alpha * c[0].numpy() > 0).astype(float))
    np.testing.assert_allclose(jacobian.T, shrunk.T @ kinks, atol=1e-13)


# ---------------------------------------------------------------------- as a solver object


@pytest.mark.parametrize("kind", [ForwardBackward, PeacemanRachford])
def test_a_plain_map_is_refused(kind: type[SplittingSolver]) -> None:
    name = kind.__name__
    with pytest.raises(TypeError, match=rf"{name} needs a monotone layer .*given a plain map"):
        eq.fixed_point(lambda z: 0.5 * z, torch.zeros(1, 2), solver=kind())
    problem = eq.Problem(eq.NonNegative(), eq.Linear(0.1 * torch.eye(2), torch.ones(1, 2)))
    with pytest.raises(TypeError, match=rf"{name} needs a monotone layer .*given a hidden problem"):
        eq.minimize(problem, solver=kind())


@pytest.mark.parametrize("kind", [ForwardBackward, PeacemanRachford])
def test_options_are_handed_to_the_iteration(kind: type[SplittingSolver]) -> None:
    made = kind(rtol=1e-3, atol=1e-9, max_steps=7, block=2, compact=True, patience=5)
    for copied in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert copied == made
        for name in ("rtol", "atol", "max_steps", "block", "compact", "divergence", "patience"):
            assert getattr(copied.iteration, name) == getattr(made, name)
    assert "iteration" not in repr(made)
    assert kind(alpha=0.5) != kind()


def test_a_given_step_is_not_checked_while_a_cuda_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read would break the capture; a solve outside of it, before, has checked the step."""
    solver = ForwardBackward(alpha=0.5)
    with HostReads() as reads:
        assert solver.step_size(rotation()) == 0.5
    assert reads.count == 1
    monkeypatch.setattr(forward_backward, "is_captured", lambda t: True)
    with HostReads() as reads:
        assert solver.step_size(rotation()) == 0.5
    assert reads.count == 0
