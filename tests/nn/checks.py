"""What several layers are checked for beside the contract: gradients, copies, precisions."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import equilibria as eq
from tests.contracts.layer_contract import LayerContract, check_gradients

__all__ = ["check_gradients"]


class MapContract(LayerContract):
    """The layer contract for maps: what asks for a hidden problem asks the map instead."""

    def test_the_answer_is_a_stationary_point_of_the_problem(self) -> None:
        layer: Any = self.precise()
        x = self.drawn().double()
        with torch.no_grad():
            z = layer(x)
            assert float((layer.step(z, *layer.inject(x)) - z).abs().max()) < 1e-10

    test_the_objective_is_finite_and_no_lower_anywhere_near = None  # a map minimizes nothing

    def test_the_map_compiles(self) -> None:
        torch._dynamo.reset()
        layer: Any = self.made().eval()
        x = self.drawn(2)
        with torch.no_grad():
            z, c, plain = layer(x), layer.inject(x), layer.bound_step()
        step = torch.compile(lambda z: plain(z, *c), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(step(z), plain(z, *c), rtol=1e-5, atol=1e-6)


class SlowCompile(MapContract):
    """Compiled with the slow tests only: one form of a layer is enough for every day."""

    compiles_daily = False  # read by tests/conftest.py


def leaves(z: Any) -> list[Tensor]:
    return pytree.tree_leaves(z)


def check_copies(made: Callable[..., nn.Module], x: Tensor) -> None:
    """Deep copies, pickles and a fresh layer with the state dict answer alike, independently."""
    layer, fresh = made().eval(), made(seed=4).eval()
    expected = leaves(layer(x))
    assert not torch.equal(leaves(fresh(x))[0], expected[0])
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert all(torch.equal(a, b) for a, b in zip(leaves(twin(x)), expected, strict=True))
        with torch.no_grad():
            next(twin.parameters()).add_(1.0)
    assert torch.equal(leaves(layer(x))[0], expected[0])


def check_autocast(layer: nn.Module, x: Tensor) -> None:
    expected = leaves(layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = leaves(layer(x))
    for z, known in zip(found, expected, strict=True):
        scale = float(known.detach().abs().max())
        torch.testing.assert_close(z.float(), known, rtol=0, atol=0.2 * scale)
    sum(z.float().square().sum() for z in found).backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32, name
        assert torch.isfinite(p.grad).all(), name


def check_compiles(layer: nn.Module, x: Tensor) -> None:
    """As one graph, with the same answer, and with gradients it trains. Solves of fixed steps."""
    torch._dynamo.reset()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for a, b in zip(leaves(compiled(x)), leaves(layer(x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if torch.is_grad_enabled():
        sum(z.square().sum() for z in leaves(compiled(x))).backward()
        assert all(p.grad is not None for p in twin.parameters())


def check_bad_sample(layer: Any, x: Tensor) -> None:
    """A batch of three: each answer is its own, and a NaN in one sample harms no other."""
    together = [z.detach() for z in leaves(layer(x))]
    for a, b in zip(leaves(layer(x[1:2])), together, strict=True):
        torch.testing.assert_close(a[0], b[1], rtol=1e-8, atol=1e-9)
    x[1, 0, 0, 0] = float("nan")
    with pytest.warns(eq.ConvergenceWarning):
        assert layer.solve(x).converged.tolist() == [True, False, True]
    with pytest.warns(eq.ConvergenceWarning):
        found = [z[[0, 2]] for z in leaves(layer(x))]
    for a, b in zip(found, together, strict=True):
        torch.testing.assert_close(a, b[[0, 2]], rtol=1e-8, atol=1e-9)
    weights = list(layer.parameters())
    grads = torch.autograd.grad(sum(z.sum() for z in found), weights)
    wanted = torch.autograd.grad(sum(z.sum() for z in leaves(layer(x[[0, 2]]))), weights)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
