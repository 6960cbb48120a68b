"""The training loop: batches, rates, plateaus, and one step against AdamW by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equilibria.sklearn.fitting import Fitting, Plateau, Rows, cosine
from equilibria.sklearn.network import Network


def linear_network() -> Network:
    torch.manual_seed(0)
    return Network(nn.Identity(), 3, 2).double()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1)


def rows(count: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator).double()
    y = torch.randn(count, 2, generator=generator).double()
    return Rows(x, y, torch.rand(count, generator=generator).double())


def fitting(network: Network, batch_size: int = 100, lr: float = 0.1) -> Fitting:
    return Fitting(network, squared, lr, 0.3, batch_size, torch.Generator().manual_seed(0))


def test_one_step_by_hand() -> None:
    """First step of AdamW: w ← w(1 − lr·decay) − lr·g/(|g| + ε), g of the weighted mean loss."""
    network, data = linear_network(), rows(7)
    weight, bias = (p.detach().numpy().copy() for p in (network.head.weight, network.head.bias))
    x, y, w = data.x.numpy(), data.y.numpy(), data.weight.numpy()
    error = x @ weight.T + bias - y
    gradient = 2.0 * (w[:, None] * error).T @ x / 7
    expected = weight * (1 - 0.1 * 0.3) - 0.1 * gradient / (np.abs(gradient) + 1e-8)
    loss = fitting(network).epoch(data)
    np.testing.assert_allclose(network.head.weight.detach(), expected, atol=1e-12)
    assert loss == pytest.approx(float((w * (error**2).sum(1)).mean()))
    assert not network.training


def test_every_row_once_in_equal_batches() -> None:
    seen: list[int] = []
    sizes: list[int] = []

    def watch(output: Tensor, target: Tensor) -> Tensor:
        sizes.append(len(target))
        seen.extend(target[:, 0].long().tolist())
        return squared(output, target)

    data = rows(101)
    data = Rows(data.x, torch.arange(101.0).double()[:, None].expand(-1, 2), data.weight)
    one = Fitting(linear_network(), watch, 0.1, 0.0, 50, torch.Generator().manual_seed(0))
    one.epoch(data)
    assert sorted(seen) == list(range(101))
    assert seen != sorted(seen)
    assert sorted(sizes) == [33, 34, 34]
    first = list(seen)
    seen.clear()
    one.epoch(data)
    assert seen != first  # another order in the next epoch


def test_rates_scale_the_step() -> None:
    network, other = linear_network(), linear_network()
    before = network.head.bias.detach().clone()
    fitting(network, lr=0.1).epoch(rows(7), lambda share: 0.5)
    fitting(other, lr=0.05).epoch(rows(7))
    torch.testing.assert_close(network.head.bias, other.head.bias)
    assert not torch.equal(network.head.bias.detach(), before)
    assert cosine(0.0) == 1.0
    assert cosine(0.5) == pytest.approx(0.5)
    assert cosine(1.0) == pytest.approx(0.0, abs=1e-15)


def test_resume_keeps_the_moments() -> None:
    network, other = linear_network(), linear_network()
    through = fitting(network)
    through.epoch(rows(7))
    through.epoch(rows(7))
    first = fitting(other)
    first.epoch(rows(7))
    second = fitting(other)
    second.resume(first.optimizer.state_dict())
    second.epoch(rows(7))
    torch.testing.assert_close(network.head.weight, other.head.weight, rtol=0, atol=0)


def test_plateau() -> None:
    plateau = Plateau(tol=0.1, patience=2)
    assert plateau.update(1.0)
    assert plateau.update(0.95)  # better, but not by tol
    assert not plateau.over
    assert not plateau.update(0.96)
    assert plateau.over
    assert plateau.update(0.5)
    assert not plateau.over
    assert not plateau.update(math.inf)
