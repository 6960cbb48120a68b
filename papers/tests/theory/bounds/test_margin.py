"""Proposition 2: the formulas by hand, and the perturbation bounds against moved weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import equilibria as eq
from equilibria_papers.theory.bounds import AssumptionError, margin_report
from equilibria_papers.theory.bounds.margin import (
    PacBayes,
    Sizes,
    bracket_geq,
    bracket_opteq,
    covered_scale,
    excess,
    geq_change,
    margin_loss,
    opteq_change,
)
from papers.tests.theory.bounds.layers import drawn, geq, iterate_geq, opteq


def test_margin_loss_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 2.9], [1.0, 1.0, 0.0], [5.0, 0.0, 4.0]])
    labels = torch.tensor([0, 1, 0, 2])
    # margins 1, 0.1, 0, −1
    found = [margin_loss(logits, labels, eta) for eta in (1e-9, 0.5, 1.0, 2.0)]
    assert found == [0.5, 0.75, 1.0, 1.0]
    for bad, wrong in (
        (torch.ones(2, 1), [0, 0]),
        (torch.ones(2, 3), [0, 0, 0]),
        (torch.ones(2, 3), [0, 3]),
        (torch.ones(2, 3), [0, -1]),
    ):
        with pytest.raises(ValueError, match=r"expected|classes"):
            margin_loss(bad, torch.tensor(wrong), 0.1)


def test_the_printed_and_the_derived_right_side() -> None:
    """Numerators over denominators as the papers write them; Eq 31, Eq 37 and Lemma 2."""
    mu, m, b, beta = 0.9, 0.81, 2.0, 0.6
    frame = PacBayes(samples=1000, delta=0.1, margin=0.5, width=32, size=7.0)

    def spread(top: float, bottom: float) -> float:
        return 16 * 32 * math.log(24 * 32) * top**2 * 7.0 / (0.5**2 * bottom**4)

    def printed(top: float, bottom: float) -> float:
        kl = spread(top, bottom) / 1000
        return math.sqrt(kl + math.log(1000 * math.sqrt(1000) / 0.1) / 1000)

    def derived(top: float, bottom: float) -> float:
        kl = spread(top, bottom)
        return 4 * math.sqrt((kl + math.log(6 * 1000 * math.sqrt(1000) / 0.1)) / 999)

    rest = 1 - beta * m
    top = mu**3 * b + (1 - m) * mu * b + (1 - m) ** 2
    found = frame.printed(bracket_opteq(mu, m, b, derived=False))
    assert found == pytest.approx(printed(top, 1 - m))
    top = beta * mu**4 * b + (2 * mu * beta + 1) * rest * mu * b + rest**2
    found = frame.printed(bracket_geq(mu, m, beta, b, derived=False))
    assert found == pytest.approx(printed(top, rest))
    top = 2 * mu**3 * (b + 1) + 2 * (1 - m) * mu * (b + 1) + (1 - m) ** 2
    found = frame.derived(bracket_opteq(mu, m, b, derived=True))
    assert found == pytest.approx(derived(top, 1 - m))
    top = 2 * beta * mu**4 * (b + 1) + 2 * (2 * mu * beta + 1) * rest * mu * (b + 1) + rest**2
    found = frame.derived(bracket_geq(mu, m, beta, b, derived=True))
    assert found == pytest.approx(derived(top, rest))


def test_numbers_out_of_range() -> None:
    fine = {"samples": 10, "delta": 0.1, "margin": 1.0, "width": 2, "size": 1.0}
    for bad in ({"delta": 1.0}, {"samples": 1}, {"margin": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PacBayes(**{**fine, **bad})  # type: ignore[arg-type]
    with pytest.raises(AssumptionError, match="m = "):
        bracket_opteq(0.9, 1.0, 1.0, derived=True)
    with pytest.raises(AssumptionError, match="m = "):
        bracket_geq(0.9, 1.1, 0.5, 1.0, derived=False)


def test_the_cover() -> None:
    scale, entry = covered_scale(lambda omega: 3.0 * omega, 1.0, 2.0)
    # 6σ ≤ 1/4 first at σ = 2^{−19/4}.
    assert (scale, entry) == (2.0 ** (-19 / 4), 19)
    with pytest.raises(AssumptionError, match="unique"):
        covered_scale(lambda omega: math.inf, 1.0, 2.0)
    spent = 0.1 / (4 * 5)
    wanted = 4 * math.sqrt((5.0 / (2 * 0.25) + math.log(600 / spent)) / 99)
    assert excess(5.0, 0.5, 3, 100, 0.1) == pytest.approx(wanted)
    total = sum(1 / ((j + 1) * (j + 2)) for j in range(100_000))
    assert total <= 1.0


@given(st.integers(0, 10**6), st.floats(0.2, 1.2), st.floats(1e-4, 0.1), st.floats(0.05, 5.0))
@settings(max_examples=25, deadline=None)
def test_moved_weights_move_the_logits_less(
    seed: int, mu: float, omega: float, gamma: float
) -> None:
    """With W_h; the claims try layers without it, and OptEq."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, norm: float) -> np.ndarray:
        made = rng.standard_normal((rows, columns))
        return made * norm / np.linalg.norm(made, 2)

    old = [matrix(*s, mu) for s in ((4, 3), (4, 2), (4, 1), (2, 3), (2, 1), (4, 3))]
    new = [t + matrix(*t.shape, omega) for t in old]
    x = rng.standard_normal((6, 2))
    x *= 2.0 / np.linalg.norm(x, axis=1, keepdims=True)

    def logits(t: list[np.ndarray]) -> np.ndarray:
        z = iterate_geq(t[5].T @ t[0], (x @ t[1].T + t[2].T) @ t[5], gamma, 1500)
        return z @ t[3].T + t[4].T

    change = float(np.linalg.norm(logits(new) - logits(old), axis=1).max())
    sizes = Sizes(w=mu, u=mu, b=mu, head=mu, bound=2.0, hidden=mu, has_hidden=True)
    assert change <= geq_change(sizes, omega, gamma) * (1 + 1e-6)


def test_the_opteq_bound_is_attained_in_one_dimension() -> None:
    mu, omega, x = 0.8, 0.05, 3.0

    def logit(w: float) -> float:
        return w * (w * x + w) / (1 - w * w) + w

    sizes = Sizes(w=mu, u=mu, b=mu, head=mu, bound=x)
    assert opteq_change(sizes, omega) == pytest.approx(logit(mu + omega) - logit(mu), rel=1e-9)


def test_too_large_a_move_has_no_bound() -> None:
    sizes = Sizes(w=0.9, u=0.9, b=0.0, head=0.9, bound=1.0)
    assert opteq_change(sizes, 0.2) == math.inf
    assert geq_change(sizes, 0.7, 1.0) == math.inf
    assert math.isfinite(geq_change(sizes, 0.5, 1.0))


def _network(kind: str, mu: float = 0.6) -> tuple[object, nn.Linear]:
    w, u = drawn(0, 5, 5, mu), drawn(1, 5, 4, mu)
    head = nn.Linear(5, 3).double()
    with torch.no_grad():
        head.weight.copy_(drawn(2, 3, 5, mu))
    return (geq(w, u, 0.5) if kind == "GEQ" else opteq(w, u)), head


@pytest.mark.parametrize("kind", ["GEQ", "OptEq"])
def test_the_report(kind: str) -> None:
    layer, head = _network(kind)
    x, labels = drawn(5, 40, 4, 3.0), torch.arange(40) % 3
    r = margin_report(layer, x, head, labels, margin=0.2, samples=5000)  # type: ignore[arg-type]
    w, u, c = (drawn(0, 5, 5, 0.6), drawn(1, 5, 4, 0.6), drawn(2, 3, 5, 0.6))
    tail = float(u.square().sum() + c.square().sum() + head.bias.detach().square().sum())
    assert r.size == pytest.approx(float((w.mT @ w).square().sum()) + tail, rel=1e-9)
    assert r.squares == pytest.approx(float(w.square().sum()) + tail, rel=1e-9)
    assert r.squares > r.size  # the papers' KL is too small
    assert r.width == 5
    assert r.samples == 5000
    assert r.heuristic == (kind == "GEQ")
    assert r.printed_excess is not None
    assert r.derived_excess is not None
    assert r.derived_excess > 4 * r.printed_excess
    assert r.ours_excess is not None
    assert r.total(r.ours_excess) == pytest.approx(r.empirical + r.ours_excess)
    assert "as printed" in str(r)
    assert any("heuristic" in w for w in r.warnings) == (kind == "GEQ")
    # More samples, a smaller bound.
    more = margin_report(layer, x, head, labels, margin=0.2, samples=50_000)  # type: ignore[arg-type]
    assert more.ours_excess is not None
    assert more.ours_excess < 0.4 * r.ours_excess


def test_refusals_of_the_report() -> None:
    layer, head = _network("GEQ")
    x, labels = drawn(5, 6, 4, 3.0), torch.arange(6) % 3
    with pytest.raises(ValueError, match="flattened state"):
        margin_report(layer, x, nn.Linear(7, 3), labels)  # type: ignore[arg-type]
    with torch.no_grad():
        head.weight.mul_(4.0)
    r = margin_report(layer, x, head, labels)  # type: ignore[arg-type]
    assert r.printed_excess is None
    assert r.derived_excess is None
    assert "NormBounded" in r.refused["as printed"]
    assert r.ours_excess is not None  # needs no norm below 1


def test_a_convolution_and_a_moving_gamma() -> None:
    torch.manual_seed(0)
    patch = eq.Patches(channels=4, size=2)
    x, labels = torch.randn(4, 2, 4, 4), torch.arange(4) % 3
    head = nn.Linear(3 * 16, 3)
    moving = eq.nn.GEQ(3, 4, in_channels=2, patch=patch)
    r = margin_report(moving, x, head, labels)
    assert r.ours_excess is None
    assert "fixed γ" in r.refused["ours"]
    still = eq.nn.GEQ(3, 4, in_channels=2, patch=patch, gamma=0.5)
    found = margin_report(still, x, head, labels)
    assert found.ours_excess is not None
    assert math.isfinite(found.ours_excess)
    assert found.width == 64  # hidden, the widest


def _only_the_weights_move(w: float, h: float, c: float, hidden: bool) -> tuple[float, float]:
    """GEQ in one dimension at a fixed c: the change of w_c z when w, w_h and w_c = 1 grow by ω."""
    omega, gamma = 1e-3, 1.0

    def state(weight: float, root: float) -> float:
        z = iterate_geq(np.array([[root * weight]]), np.array([[root * c]]), gamma)
        return float(z[0, 0])

    moved = (1 + omega) * state(w + omega, h + (omega if hidden else 0.0))
    sizes = Sizes(
        w=w, u=0.0, b=c, head=1.0, bound=0.0, hidden=h,
        has_hidden=hidden, has_bias=False, has_head_bias=False,
    )  # fmt: skip
    return abs(moved - state(w, h)), geq_change(sizes, omega, gamma)


@pytest.mark.parametrize(
    ("w", "h", "c", "hidden"),
    [(0.01, 1.0, 0.7, False), (0.3, 0.5, 0.1, True), (0.2, 1.0, 0.1, True), (0.1, 1.0, 0.2, True)],
)
def test_the_geq_bound_is_close_in_one_dimension(
    w: float, h: float, c: float, hidden: bool
) -> None:
    change, bound = _only_the_weights_move(w, h, c, hidden)
    assert change <= bound * (1 + 1e-9)
    assert bound <= 1.25 * change
