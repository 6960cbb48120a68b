"""A sample that holds NaN or infinity harms no other, also where the host cannot look for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import equilibria as eq
from equilibria.engine.result import Result
from equilibria.nn import inputs

_STEPS = eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=5, accelerate=False)
_SERIES = eq.Phantom(steps=3, damping=1.0, form="neumann")
_PATCH = eq.Patches(channels=4, size=2)


def layers() -> dict[str, Any]:
    torch.manual_seed(0)
    fused = {"patch": _PATCH, "hidden": 8, "solver": _STEPS, "adjoint": _SERIES}
    return {
        "geq, fused": eq.nn.GEQ(6, 8, in_channels=5, gamma=eq.MeanPatchEnergy(0.2), **fused),
        "geq, constant γ": eq.nn.GEQ(6, 8, in_channels=5, gamma=0.3, **fused),
        "geq, general": eq.nn.GEQ(6, 8, in_channels=5, patch=_PATCH, hidden=8),
        "opteq": eq.nn.OptEq(6, 8, in_channels=5, kernel_size=3, solver=_STEPS, adjoint=_SERIES),
        "hidden": eq.nn.OptEq(6, 8, in_channels=5, kernel_size=3, form="hidden"),
    }


def solved(layer: Any, x: Tensor, rows: list[int]) -> tuple[Any, list[Tensor]]:
    given = x.clone().requires_grad_()
    found = layer.solve(given)
    loss = found.value[rows].square().sum()
    return found, list(torch.autograd.grad(loss, [given, *layer.parameters()]))


@pytest.mark.filterwarnings("ignore::equilibria.engine.result.ConvergenceWarning")
@pytest.mark.parametrize("name", list(layers()))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [False, True])
def test_a_bad_sample_is_kept_apart(
    name: str, value: float, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layers()[name].double().eval()
    x = torch.randn(3, 5, 4, 6, dtype=torch.float64)
    good = [1, 2] if first else [0, 2]
    right, grads = solved(layer, x[good], [0, 1])
    x[0 if first else 1, 2, 1, 3] = value
    monkeypatch.setattr(inputs, "host_may_read", lambda _: False)  # as on a GPU
    found, seen = solved(layer, x, [0, 1, 2])
    bad = 0 if first else 1
    assert found.result.tolist()[bad] == int(Result.nonfinite)
    torch.testing.assert_close(found.value[good], right.value, rtol=1e-6, atol=1e-8)
    assert float(seen[0][bad].abs().max()) == 0.0
    torch.testing.assert_close(seen[0][good], grads[0], rtol=1e-5, atol=1e-7)
    for mine, true in zip(seen[1:], grads[1:], strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-7)


def test_a_batch_without_a_good_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "host_may_read", lambda _: False)
    layer = layers()["geq, fused"]
    x = torch.full((2, 5, 4, 6), float("nan"))
    found, grads = solved(layer, x, [0, 1])
    assert found.result.tolist() == [int(Result.nonfinite)] * 2
    assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize(
    "adjoint", [eq.Phantom(steps=2), pytest.param(eq.Unrolled(), marks=pytest.mark.slow)]
)
def test_a_bad_sample_is_kept_apart_in_a_compiled_layer(adjoint: Any) -> None:
    torch.manual_seed(0)
    steps = eq.ProximalGradient(rtol=0.0, atol=0.0, max_steps=2, accelerate=False)
    layer = eq.nn.GEQ(6, 8, in_channels=5, solver=steps, adjoint=adjoint).double().eval()
    x = torch.randn(3, 5, dtype=torch.float64)
    right = torch.autograd.grad(layer(x[[0, 2]]).square().sum(), list(layer.parameters()))
    x[1, 2] = float("nan")
    value = torch.compile(layer, backend="eager")(x)
    assert float(value[1].detach().abs().max()) == 0.0
    found = torch.autograd.grad(value.square().sum(), list(layer.parameters()))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_layout_of_the_input_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layout would cost a copy at every convolution of the solve and its gradient."""
    monkeypatch.setattr(inputs, "host_may_read", lambda _: False)  # as on a GPU
    x = torch.randn(3, 5, 4, 6).to(memory_format=torch.channels_last)
    x[1, 2, 1, 3] = torch.nan
    lent, bad = inputs.contained(x.requires_grad_())
    assert bad is not None
    assert bad.tolist() == [False, True, False]
    assert lent.stride() == x.stride()
    assert torch.equal(lent, x[[0, 0, 2]])
