"""Reports: what they print and hand on, and how refusals are kept."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import equilibria as eq
from equilibria_papers.theory.bounds import AssumptionError
from equilibria_papers.theory.bounds.report import (
    check_positive,
    kerdeq_remark1,
    measure_layer,
    refusing,
    remark1,
    remark1_ratios,
    remark3,
)
from papers.tests.theory.bounds.layers import drawn, geq, iterate_geq, iterate_opteq, opteq


def test_refusing_keeps_the_reason_of_an_assumption_only() -> None:
    kept: dict[str, str] = {}

    def refuse(x: float) -> float:
        raise AssumptionError(f"not for {x}")

    assert refusing(kept, "Eq 1", refuse, 3.0) is None
    assert kept == {"Eq 1": "not for 3.0"}
    assert refusing(kept, "Eq 2", lambda x: 2 * x, 3.0) == 6.0

    def wrong(x: float) -> float:
        raise ValueError("a mistake, not a premise")

    with pytest.raises(ValueError, match="mistake"):
        refusing(kept, "Eq 3", wrong, 1.0)


def test_positive_numbers_only() -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gamma="):
            check_positive(gamma=value)
    with pytest.raises(TypeError, match="gamma="):
        check_positive(gamma=True)


def test_the_remarks() -> None:
    """Their printed numbers are those of the claims; here their premises, and what is refused."""
    assert remark1(0.79, 0.95, 0.91)[0]
    assert not remark1(0.9, 0.95, 0.91)[0]
    # At the limit the second ratio is exactly 1.
    assert max(remark1_ratios(kerdeq_remark1(0.9), math.sqrt(0.9), 0.9)) == pytest.approx(1.0)
    assert remark3(3.61, 0.2, 0.0) == math.inf
    for formula in (lambda: remark1_ratios(0.5, 1.0, 1.0), lambda: kerdeq_remark1(1.0)):
        with pytest.raises(AssumptionError, match="m < 1"):
            formula()
    with pytest.raises(ValueError, match="log_d"):
        remark3(-1.0, 0.2, 1.0)


def test_geq_numbers() -> None:
    w, u, b = drawn(0, 5, 3, 0.8), drawn(1, 5, 4, 0.6), 0.3 * drawn(2, 5, 1, 1.0)[:, 0]
    x = drawn(3, 6, 4, 2.0)
    n = measure_layer(geq(w, u, 0.7, b), x)
    c = (x @ u.mT + b).numpy()
    z = iterate_geq(w.numpy(), c, 0.7)
    np.testing.assert_allclose(n.z.numpy(), z, atol=1e-11)
    r = c - z @ w.numpy().T
    energies = (r**2).sum(1)
    assert n.w_norm == pytest.approx(0.8, rel=1e-12)
    assert n.u_norm == pytest.approx(0.6, rel=1e-12)
    assert n.bias_norm == pytest.approx(0.3, rel=1e-12)
    assert n.beta_max == pytest.approx(math.exp(-0.7 * energies.min()), rel=1e-9)
    assert n.reach == pytest.approx(math.sqrt(energies.max()), rel=1e-9)
    assert n.bound == pytest.approx(max(x.norm(dim=1).max(), np.linalg.norm(z, axis=1).max()))
    assert n.mu == pytest.approx(0.8)
    assert (n.kind, n.patches, n.plain, n.relu, n.gamma_fixed) == ("GEQ", 1, True, True, True)
    assert n.gamma == (0.7, 0.7)


@pytest.mark.parametrize("form", ["state", "hidden"])
def test_opteq_is_taken_in_the_form_of_eq_4(form: str) -> None:
    w, u = drawn(4, 3, 5, 0.7), drawn(5, 5, 2, 0.9)
    layer = opteq(w, u)
    layer.form = form  # type: ignore[assignment]
    x = drawn(6, 4, 2, 1.5)
    n = measure_layer(layer, x)
    np.testing.assert_allclose(
        n.z.numpy(), iterate_opteq(w.numpy(), (x @ u.mT).numpy()), atol=1e-10
    )
    assert n.w_norm == pytest.approx(0.7, rel=1e-12)
    assert n.beta_max is None
    assert layer.form == form  # left as it was


def test_nu_divides_the_norm() -> None:
    n = measure_layer(opteq(drawn(0, 3, 3, 0.9), drawn(1, 3, 2, 0.5), nu=4.0), drawn(2, 2, 2, 1.0))
    assert n.w_norm == pytest.approx(0.45, rel=1e-12)
    assert not n.plain


def test_a_convolution_with_patches() -> None:
    torch.manual_seed(0)
    layer = eq.nn.GEQ(4, 8, in_channels=3, patch=eq.Patches(channels=4, size=2))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(2, 3, 4, 4)
    n = measure_layer(layer, x)
    assert n.patches == 2 * 4
    assert not n.plain
    assert not n.gamma_fixed
    bias = layer.U.bias
    assert n.bias_norm == pytest.approx(4.0 * float(bias.detach().double().norm()), rel=1e-6)
    # Power iteration from below, on maps of this size, against the proven bound.
    below = copy.deepcopy(layer).double().problem(x.double()).coupling.mu((4, 4, 4)).estimate
    assert 0.9 * below <= n.w_norm
    assert n.w_norm >= below * (1 - 1e-9)
    for k, v in layer.state_dict().items():
        assert torch.equal(v, before[k]), k


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="GEQ and OptEq layers, got Linear"):
        measure_layer(torch.nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no samples"):
        measure_layer(geq(drawn(0, 2, 2, 0.5), drawn(1, 2, 2, 0.5), 1.0), torch.ones(0, 2))
    free = opteq(1.5 * torch.eye(2).double(), torch.eye(2).double())
    with pytest.raises(ValueError, match="did not reach its equilibrium"):
        measure_layer(free, torch.ones(1, 2))
