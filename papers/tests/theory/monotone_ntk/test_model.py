"""Equilibria, Jacobians, kernel and gradient against autograd, finite differences and Kronecker."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import equilibria as eq
from equilibria_papers.theory.monotone_ntk import (
    ThesisModel,
    closed_form_gradient,
    closed_form_kernel,
    find_equilibrium,
    square_loss,
)
from equilibria_papers.theory.monotone_ntk import model as equilibrium

from . import oracles

CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def drawn(seed: int, n: int = 5, d: int = 3, N: int = 4) -> tuple[ThesisModel, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(n, d, m=0.6, generator=g)
    X = torch.randn(d, N, dtype=torch.float64, generator=g)
    return model, X, torch.randn(N, dtype=torch.float64, generator=g)


@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 6),
    st.floats(0.02, 3.0),
    st.floats(0.05, 20.0),
)
@settings(max_examples=40, deadline=None)
def test_equilibrium_is_exact(seed: int, n: int, N: int, m: float, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    model = ThesisModel.usual(n, 3, m=m, scale=scale, generator=g)
    X = torch.randn(3, N, dtype=torch.float64, generator=g)
    found = find_equilibrium(model, X)
    argument = model.W @ found.Z + model.U @ X
    size = float((model.W.abs() @ found.Z.abs() + (model.U @ X).abs()).norm()) + 1e-300
    assert float((found.Z - argument.relu()).norm()) <= 1e-12 * size
    assert ((found.D == 1) <= (argument > 0)).all()
    assert ((1e-9 * size < found.Z) <= (found.D == 1)).all()


def test_splitting_takes_over_where_newton_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, _ = drawn(3)
    wanted = find_equilibrium(model, X)
    monkeypatch.setattr(equilibrium, "_NEWTON", 0)
    found = find_equilibrium(model, X)
    torch.testing.assert_close(found.Z, wanted.Z, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.D, wanted.D)


def test_large_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, _ = drawn(4, N=7)
    wanted = closed_form_kernel(model, X).total
    monkeypatch.setattr(equilibrium, "_ENTRIES", 60)  # two systems of 5 × 5 at a time
    torch.testing.assert_close(closed_form_kernel(model, X).total, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("n", "d", "N"), [(5, 3, 4), (3, 2, 6), (1, 1, 1), (4, 4, 1)])
def test_the_kernel_is_autograds(n: int, d: int, N: int) -> None:
    model, X, _ = drawn(7, n, d, N)
    rows = oracles.jacobian(model, X)
    kernel = closed_form_kernel(model, X)
    for name, row in rows.items():
        flat = row.reshape(N, -1)
        torch.testing.assert_close(getattr(kernel, name), flat @ flat.T, **CLOSE, msg=name)
    whole = torch.cat([row.reshape(N, -1) for row in rows.values()], 1)
    torch.testing.assert_close(kernel.total, whole @ whole.T, **CLOSE)
    least = float(torch.linalg.eigvalsh(whole @ whole.T)[0])
    assert kernel.smallest() == pytest.approx(max(0.0, least), rel=1e-6, abs=1e-9)


def test_gradient_is_autograds() -> None:
    model, X, y = drawn(8)
    p = {k: v.requires_grad_() for k, v in oracles.parameters(model).items()}
    loss = 0.5 * (oracles.outputs(p, X, model.m) - y).square().sum()
    wanted = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(p.values()))])
    found = find_equilibrium(model, X)
    value, rest = square_loss(model, found, y)
    assert value == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(closed_form_gradient(model, X, found, rest), wanted, **CLOSE)


def test_layers_come_and_go() -> None:
    torch.manual_seed(0)
    layer = eq.nn.MonotoneDEQ(6, in_channels=4, m=0.3, bias=False).double()
    x, u = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    model = ThesisModel.from_layer(layer, u)
    Z = find_equilibrium(model, x.T).Z
    torch.testing.assert_close(Z.T, layer(x).detach(), rtol=1e-3, atol=1e-4)
    again = ThesisModel.from_layer(model.to_layer(), u)
    torch.testing.assert_close(again.vector(), model.vector())
    torch.testing.assert_close(model.at(model.vector()).vector(), model.vector())


def test_what_does_not_fit_is_an_error() -> None:
    eye = torch.eye(3)
    with pytest.raises(ValueError, match=r"u must be \[3\]"):
        ThesisModel(A=eye, B=eye, U=eye, u=eye, m=1.0)
    with pytest.raises(ValueError, match="m=-1"):
        ThesisModel(A=eye, B=eye, U=eye, u=eye[0], m=-1)
    with pytest.raises(TypeError, match="expected a number"):
        ThesisModel(A=eye, B=eye, U=eye, u=eye[0], m="1")  # type: ignore[arg-type]
    model, X, _y = drawn(0)
    with pytest.raises(ValueError, match="transpose"):
        find_equilibrium(model, X.T)
    with pytest.raises(ValueError, match="not finite"):
        find_equilibrium(model, X * torch.nan)
    with pytest.raises(ValueError, match="width=0"):
        ThesisModel.usual(0, 1)
    with pytest.raises(TypeError, match="dense MonotoneDEQ"):
        ThesisModel.from_layer(eq.nn.MonotoneDEQ(4, kernel_size=3), eye[0])
    with pytest.raises(ValueError, match="no bias"):
        ThesisModel.from_layer(eq.nn.MonotoneDEQ(3), eye[0])
    with pytest.raises(ValueError, match="ReLU"):
        ThesisModel.from_layer(eq.nn.MonotoneDEQ(3, prior=eq.Free()), eye[0])
