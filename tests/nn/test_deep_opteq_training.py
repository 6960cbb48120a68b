"""The three ways of Algorithm 1 on DeepOptEq and on OptEq: gradients, and what they compute."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import equilibria as eq
from equilibria import FeatureIncay, NonNegative, SquaredNorm, Tanh
from equilibria.nn import OptEq
from equilibria.nn.deep_opteq import DeepOptEq, training_way
from equilibria.solvers import SequentialAveraging
from tests.contracts.layer_contract import EXACT, TIGHT
from tests.problems.test_operators import randn

WAYS: dict[str, dict[str, Any]] = {
    "implicit": {"solver": TIGHT, "adjoint": EXACT},
    "sam": dict(training_way("sam", steps=5)),
    "unrolled": dict(training_way("unrolled", steps=5)),
}
ALPHAS: dict[str, dict[str, Any]] = {
    "fixed": {"alpha": 0.8},
    "a block": {"alpha": (0.3, 1.0)},
    "learned": {"alpha": (0.3, 0.9), "learn_alpha": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "convolution": {"kernel_size": 3},
    "separable": {"kernel_size": 3, "separable": True},
}


def settled(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, p in layer.named_parameters():  # away from the kinks of ReLU and of the bound
            p.add_(0.3 * torch.rand(p.shape) if name.endswith("bias") else 0.0)
    return layer.double().eval()


def check(layer: nn.Module, x: Tensor, *, fast: bool) -> None:
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = [t.detach().clone().requires_grad_() for t in (x, *values)]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-5, rtol=1e-4, fast_mode=fast)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("alpha", list(ALPHAS))
def test_gradients_of_every_way_and_every_alpha(way: str, alpha: str) -> None:
    torch.manual_seed(1)
    layer = settled(DeepOptEq(3, (4, 2), **ALPHAS[alpha], **WAYS[way]))
    check(layer, randn(2, 3, seed=3), fast=False)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("form", ["convolution", "separable"])
def test_gradients_of_convolutions(way: str, form: str) -> None:
    torch.manual_seed(1)
    layer = DeepOptEq(2, (3, 2), prior=Tanh(), learn_alpha=True, **FORMS[form], **WAYS[way])
    check(settled(layer), randn(2, 2, 3, 3, seed=3), fast=True)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("regularizer", "form"),
    [(SquaredNorm(0.3), "gradient"), (eq.L1(0.05), "prox"), (FeatureIncay(0.1), "gradient")],
    ids=["squared", "l1", "incay"],
)
def test_gradients_with_a_regularizer_in_the_map(way: str, regularizer: Any, form: str) -> None:
    torch.manual_seed(1)
    layer = DeepOptEq(3, (4, 2), regularizer=regularizer, regularize=form, **WAYS[way])
    check(settled(layer), randn(2, 3, seed=3), fast=True)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("form", ["state", "hidden"])
@pytest.mark.parametrize("kernel_size", [None, 3])
def test_every_way_trains_opteq(way: str, form: Any, kernel_size: int | None) -> None:
    torch.manual_seed(1)
    layer = OptEq(3, 4, form=form, kernel_size=kernel_size, prior=Tanh(), **WAYS[way])
    x = randn(2, 3, seed=3) if kernel_size is None else randn(2, 3, 3, 3, seed=3)
    check(settled(layer), x, fast=True)


def test_function_transforms_and_second_derivatives() -> None:
    torch.manual_seed(1)
    layer = settled(DeepOptEq(3, (4, 2), prior=Tanh(), learn_alpha=True, **WAYS["implicit"]))
    x = randn(2, 3, seed=3)
    expected = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), expected, rtol=0, atol=1e-10)
    alone = torch.func.vmap(lambda v: layer(v[None])[0])(x)
    torch.testing.assert_close(alone, layer(x), rtol=0, atol=1e-10)
    assert torch.autograd.gradgradcheck(
        layer, [x[:1].requires_grad_()], eps=1e-6, atol=1e-5, rtol=1e-4, fast_mode=True
    )


def numpy_steps(layer: DeepOptEq, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    for block, alpha in zip(layer.blocks, layer.alphas().tolist(), strict=True):
        w, u = block.W.weight.detach().numpy(), block.U.weight.detach().numpy()
        inside = z @ w.T + x @ u.T + block.U.bias.detach().numpy()
        z = alpha * np.maximum(inside, 0) @ w + (1 - alpha) * z
    return z


def test_what_each_way_computes() -> None:
    """Lines 3–16 of Algorithm 1 in numpy, from z₀ = x."""
    torch.manual_seed(1)
    layer = settled(DeepOptEq(3, (4, 2), prior=NonNegative()))
    assert isinstance(layer, DeepOptEq)
    x = randn(2, 3, seed=3)
    z = x.numpy()
    for _ in range(5):
        z = numpy_steps(layer, x.numpy(), z)
    np.testing.assert_allclose(layer.solve(x, **WAYS["unrolled"]).value.detach(), z, atol=1e-14)
    z = x.numpy()
    for k in range(1, 6):
        beta = decay = 0.5 * k**-0.3
        pulled = (1 - 0.5 * decay) * z - 0.5 * z
        z = beta * pulled + (1 - beta) * numpy_steps(layer, x.numpy(), z)
    np.testing.assert_allclose(layer.solve(x, **WAYS["sam"]).value.detach(), z, atol=1e-14)
    for _ in range(400):
        z = numpy_steps(layer, x.numpy(), z)
    np.testing.assert_allclose(layer.solve(x, **WAYS["implicit"]).value.detach(), z, atol=1e-10)


def test_many_raw_steps_have_the_implicit_gradient() -> None:
    found = []
    for way in (WAYS["implicit"], training_way("unrolled", steps=300)):
        torch.manual_seed(1)
        layer = settled(DeepOptEq(3, (4, 2), learn_alpha=True, **way))
        layer(randn(2, 3, seed=3)).square().sum().backward()
        found.append([p.grad for p in layer.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("way", ["implicit", "sam", "unrolled"])
@pytest.mark.parametrize("kind", [DeepOptEq, OptEq])
def test_a_network_learns_in_every_way(way: Any, kind: Any) -> None:
    """Two classes by a threshold on the product of two inputs: no linear map can do it."""
    torch.manual_seed(0)
    x = torch.randn(128, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    mids = (16, 16) if kind is DeepOptEq else 32
    model = nn.Sequential(
        nn.Linear(2, 12), kind(12, mids, **training_way(way, steps=8)), nn.Linear(12, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with warnings.catch_warnings():
        # Of 128 samples one may stop short of 1e-4 now and then, forward or backward.
        warnings.simplefilter("ignore", eq.ConvergenceWarning)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    accuracy = float((model.eval()(x).argmax(1) == y).float().mean())
    assert accuracy > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sam", "unrolled"])
@pytest.mark.parametrize("form", list(FORMS))
def test_unrolled_ways_compile_whole(way: Any, form: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    layer = DeepOptEq(3, (4, 2), learn_alpha=True, **FORMS[form], **training_way(way, steps=3))
    x = torch.randn(2, 3, *(() if form == "dense" else (4, 4)))
    layer.eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-6)
    compiled(x).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_what_a_way_is_made_of() -> None:
    assert training_way("implicit") == {"solver": None, "adjoint": eq.Implicit()}
    plain = eq.Picard(rtol=0.0, atol=0.0, max_steps=7)
    assert training_way("unrolled", steps=7) == {"solver": plain, "adjoint": eq.Unrolled()}
    averaging = SequentialAveraging(
        regularizer=SquaredNorm(0.2), rtol=0.0, atol=0.0, max_steps=7, rho=0.2
    )
    way = training_way("sam", steps=7, regularizer=SquaredNorm(0.2), rho=0.2)
    assert way == {"solver": averaging, "adjoint": eq.Unrolled()}


def test_bad_ways() -> None:
    with pytest.raises(ValueError, match="'implicit', 'sam' or 'unrolled'"):
        training_way("bptt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes no regularizer: those belong to 'sam'"):
        training_way("unrolled", regularizer=SquaredNorm())
    with pytest.raises(TypeError, match="takes no rho"):
        training_way("implicit", rho=0.2)
    with pytest.raises(ValueError, match="max_steps=0"):
        training_way("sam", steps=0)
