"""When vmap is trusted and when plain autograd takes over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.engine.transforms import functorch_active
from equilibria.nn import NormBounded
from equilibria_papers.theory import empirical_ntk
from equilibria_papers.theory.ntk.jacobian import following


class Odd(nn.Module):
    """Twice as large where ``test`` of the input says so."""

    def __init__(self, test: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.test = test

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return 2 * out if self.test(x) else out


def test_autograd_takes_over_where_vmap_cannot_follow() -> None:
    """It reads a number from the data."""
    model, x = Odd(lambda x: float(x.sum()) < 0), torch.tensor([[1.0, 2, 3], [-1, -2, -3]]).double()
    found = empirical_ntk(model, x)
    assert found.method == "autograd"
    scale = torch.tensor([1.0, 2.0]).double()
    expected = torch.outer(scale, scale) * (x @ x.mT + 1)
    torch.testing.assert_close(found.kernel[:, :, 0, 0], expected)
    with pytest.raises(RuntimeError, match=r"vmap|item"):
        empirical_ntk(model, x, method="vmap")


def test_autograd_takes_over_where_vmap_gives_another_gradient() -> None:
    model, x = Odd(lambda x: functorch_active()), torch.randn(2, 3, dtype=torch.float64)
    found = empirical_ntk(model, x)
    assert found.method == "autograd"
    torch.testing.assert_close(found.kernel[:, :, 1, 1], x @ x.mT + 1)


def test_norm_bounds_follow_moving_weights_only_inside() -> None:
    torch.manual_seed(0)
    layer = eq.nn.OptEq(8, 8, in_channels=3, constraint=NormBounded(bound=0.9))
    model = layer.double().eval()
    with torch.no_grad():
        original = layer.W.parametrizations.weight.original
        original.copy_(torch.randn(8, 8) * 3)
        stale = float(torch.linalg.matrix_norm(layer.W.weight, 2))
        with following(model):
            for _ in range(30):
                weight = layer.W.weight
        assert float(torch.linalg.matrix_norm(weight, 2)) == pytest.approx(0.9, rel=1e-2)
    assert stale > 1.0
    assert not any(m.training for m in model.modules())
