"""Lemmas 1 and 2: converted networks give the outputs of the networks, computed by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equilibria_papers.theory import to_deep_opteq, to_hidden_units

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[np.ndarray], np.ndarray]]] = {
    "relu": (nn.ReLU, lambda v: np.maximum(v, 0)),
    "tanh": (nn.Tanh, np.tanh),
    "sigmoid": (nn.Sigmoid, lambda v: 1 / (1 + np.exp(-v))),
    "softplus": (nn.Softplus, lambda v: np.logaddexp(0, v)),
    "leaky": (lambda: nn.LeakyReLU(0.2), lambda v: np.where(v > 0, v, 0.2 * v)),
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 2.0), lambda v: np.clip(v, -0.5, 2.0)),
    "relu6": (nn.ReLU6, lambda v: np.clip(v, 0, 6)),
    "softshrink": (
        lambda: nn.Softshrink(0.3),
        lambda v: np.sign(v) * np.maximum(np.abs(v) - 0.3, 0),
    ),
}


def network(sizes: list[int], name: str, *, head: bool = True, scale: float = 2.0) -> nn.Sequential:
    """Linear(3, n_1), σ, Linear(n_1, n_2), σ, …, Linear(n_K, 2), larger weights than usual."""
    modules: list[nn.Module] = []
    before = 3
    for size in sizes:
        modules += [nn.Linear(before, size), ACTIVATIONS[name][0]()]
        before = size
    made = nn.Sequential(*modules, *([nn.Linear(before, 2)] if head else [])).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale)
    return made


def by_hand(net: nn.Sequential, skips: list[nn.Linear | None], name: str, x: Tensor) -> np.ndarray:
    sigma = ACTIVATIONS[name][1]
    z = given = x.double().numpy()
    linears = [m for m in net if isinstance(m, nn.Linear)]
    activated = sum(not isinstance(m, nn.Linear) for m in net)
    for k, linear in enumerate(linears):
        z = z @ linear.weight.detach().double().numpy().T + linear.bias.detach().double().numpy()
        if 0 < k < activated and skips and (skip := skips[k - 1]) is not None:
            z = z + given @ skip.weight.detach().double().numpy().T
            z = z + skip.bias.detach().double().numpy()
        if k < activated:
            z = sigma(z)
    return z


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    head=st.booleans(),
)
def test_outputs_are_equal(seed: int, sizes: list[int], name: str, head: bool) -> None:
    torch.manual_seed(seed)
    net = network(sizes, name, head=head)
    skips = [nn.Linear(3, n).double() if k % 2 == 0 else None for k, n in enumerate(sizes[1:])]
    x = torch.randn(4, 3).double()
    expected = by_hand(net, skips, name, x)
    scale = 1.0 + np.abs(expected).max()
    units = to_hidden_units(net, skips)
    np.testing.assert_allclose(units(x).detach(), expected, atol=1e-9 * scale)
    deep = to_deep_opteq(net, skips)
    np.testing.assert_allclose(deep(x).detach(), expected, atol=1e-9 * scale)
    # It is an equilibrium, not only the end of three steps.
    layer = deep[0]
    z = layer(x)
    torch.testing.assert_close(layer.step(z, *layer.inject(x)), z, atol=1e-9 * scale, rtol=0)


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_float32_to_1e6(name: str) -> None:
    torch.manual_seed(0)
    net = network([16, 12, 8], name, scale=1.0).float()
    x = torch.randn(32, 3)
    for made in (to_hidden_units(net), to_deep_opteq(net)):
        assert next(made.parameters()).dtype == torch.float32
        torch.testing.assert_close(made(x), net(x), atol=1e-6, rtol=0)


def test_products_of_the_weights() -> None:
    """Lemma 1: W̄_{k+1}W̄_kᵀ = W_{k+1}; Lemma 2: the same, and W_1W_Lᵀ = 0."""
    torch.manual_seed(1)
    net = network([4, 6, 3, 5], "relu")
    linears = [m.weight for m in net if isinstance(m, nn.Linear)]
    units = to_hidden_units(net)
    assert units.head.in_features == max(4 + 6, 6 + 3, 3 + 5)
    deep = to_deep_opteq(net)
    for blocks, head in ((units.units, units.head), (deep[0].blocks, deep[1])):
        weights = [block.W.weight for block in blocks] + [head.weight]
        for k in range(1, 5):
            torch.testing.assert_close(weights[k] @ weights[k - 1].mT, linears[k])
    first, last = deep[0].blocks[0].W.weight, deep[0].blocks[-1].W.weight
    assert float((first @ last.mT).detach().abs().max()) < 1e-12


def test_norms_are_reported() -> None:
    torch.manual_seed(1)
    units = to_hidden_units(network([4, 6, 3], "sigmoid"))
    expected = [np.linalg.norm(u.W.weight.detach().numpy(), 2) ** 2 / 4 for u in units.units]
    assert units.nu_needed() == pytest.approx(expected)
    relu = to_hidden_units(network([4, 6, 3], "relu"))
    assert max(relu.nu_needed()) > 1.0  # as the audit says: Theorem 1 with ν = 1 does not follow


def test_gradients_pass_the_equilibrium() -> None:
    torch.manual_seed(1)
    net = network([4, 6, 3], "tanh")
    x = torch.randn(5, 3).double()
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    to_deep_opteq(net)(ours).sum().backward()
    net(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_two_linear_in_a_row_and_matrix_skips() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(6, 3)
    torch.testing.assert_close(to_hidden_units(net)(x), net(x), atol=1e-6, rtol=0)
    skip = torch.randn(5, 3)
    expected = net[3](torch.relu(net[1](net[0](x)) + x @ skip.mT))
    torch.testing.assert_close(to_hidden_units(net, [skip])(x), expected, atol=1e-6, rtol=0)


class TestBadInput:
    def test_unknown_modules(self) -> None:
        with pytest.raises(TypeError, match=r"expected an nn\.Sequential, got Linear"):
            to_hidden_units(nn.Linear(2, 2))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"GELU.*Known: ReLU"):
            to_hidden_units(nn.Sequential(nn.Linear(2, 2), nn.GELU()))
        with pytest.raises(TypeError, match="LeakyReLU"):
            to_hidden_units(nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(1.5)))
        with pytest.raises(TypeError, match="first module is ReLU"):
            to_hidden_units(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
        with pytest.raises(TypeError, match="second activation"):
            to_hidden_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()))
        with pytest.raises(ValueError, match="at least one Linear"):
            to_hidden_units(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match="takes 5 inputs and gets 2"):
            to_hidden_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(5, 2)))

    def test_skips(self) -> None:
        net = network([4, 6], "relu")
        with pytest.raises(ValueError, match="skips has 2 entries"):
            to_hidden_units(net, [None, None])
        with pytest.raises(ValueError, match=r"stage 2 has the shape \(6, 2\).*\[6, 3\]"):
            to_hidden_units(net, [torch.zeros(6, 2)])

    def test_lemma_2(self) -> None:
        mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh())
        with pytest.raises(ValueError, match="one activation"):
            to_deep_opteq(mixed)
