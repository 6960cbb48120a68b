"""Hostile numbers in every layer and every kind of network.

Whatever comes in, each sample is answered with finite numbers, or its result code says that it
was not solved; its batch mates get the answer that they get without it, nothing hangs, and a step
of training leaves every parameter finite.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.engine.result import ConvergenceWarning, Result
from tests.models.small import KINDS, images
from tests.models.small import make as make_model

PATCH = eq.Patches(channels=2, size=2)
BOUND: dict[str, Any] = {"constraint": eq.nn.NormBounded(bound=0.9), "gamma": 0.7}


def _deq() -> nn.Module:
    return eq.nn.DEQ(eq.nn.ResidualBlock(4, 8, groups=2))


# Each with the shape of one input.
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "GEQ": (lambda **o: eq.nn.GEQ(4, 5, in_channels=3, hidden=6, **o), (3,)),
    "GEQ, patches": (lambda **o: eq.nn.GEQ(4, 4, in_channels=2, patch=PATCH, **o), (2, 4, 4)),
    "KerDEQ": (lambda **o: eq.nn.KerDEQ(3, 4, hidden=8, **o), (3, 4, 4)),
    "OptEq": (lambda: eq.nn.OptEq(4, 5, in_channels=3), (3,)),
    "OptEq, images": (lambda: eq.nn.OptEq(3, 4, kernel_size=3), (3, 4, 4)),
    "PolynomialEq": (lambda: eq.nn.PolynomialEq(4, 5, in_channels=3), (3,)),
    "SigmoidEq": (lambda: eq.nn.SigmoidEq(4, 5, in_channels=3), (3,)),
    "DeepOptEq": (lambda: eq.nn.DeepOptEq(4, (5, 3), in_channels=3), (3,)),
    "MonotoneDEQ": (lambda: eq.nn.MonotoneDEQ(4, in_channels=3), (3,)),
    "DEQ": (_deq, (4, 6, 6)),
    "MDEQ": (lambda: eq.nn.MDEQ((4, 4), groups=2), (4, 8, 8)),
    "Envelope": (lambda: eq.nn.Envelope(eq.nn.GEQ(6, 7, in_channels=5, hidden=7, **BOUND)), (5,)),
    "MultiBranch": (
        lambda: eq.nn.MultiBranch([eq.nn.OptEq(3, 4, kernel_size=3) for _ in range(2)], [4, 2]),
        (3, 4, 4),
    ),
}


def _scaled(factor: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def weights(module: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(factor)
        return x

    return weights


def _first(value: float | None) -> Callable[[nn.Module, Tensor], Tensor]:
    def sample(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        if value is None:
            x[0] = 0.5  # a constant image
        else:
            x[0, ..., 0] = value
        return x

    return sample


def _as(dtype: torch.dtype, factor: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def cast(module: nn.Module, x: Tensor) -> Tensor:
        module.to(dtype)
        return torch.cat([x[:1] * factor, x[1:]]).to(dtype)

    return cast


FAULTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "NaN": _first(float("nan")),
    "infinity": _first(float("inf")),
    "1e30": _first(1e30),
    "constant": _first(None),
    "denormal": lambda module, x: x * 1e-42,
    "no sample": lambda module, x: x[:0],
    "one sample": lambda module, x: x[:1],
    "weights 1e6": _scaled(1e6),
    "weights 1e-6": _scaled(1e-6),
    "half overflow": _as(torch.float16, 6e4),
    "bfloat16": _as(torch.bfloat16, 1e20),
}
WHOLE_BATCH = ("denormal", "no sample", "one sample", "weights 1e6", "weights 1e-6")


def joined(out: Any) -> Tensor:
    """The scales of an MDEQ side by side."""
    if isinstance(out, Tensor):
        return out
    return torch.cat([part.flatten(1) for part in out], 1)


def check_survives(module: nn.Module, x: Tensor, expected: Tensor | None = None) -> None:
    """Solve, check the reports, train one step, check the parameters."""
    network = isinstance(module, eq.models.Network)
    with eq.nn.observe(module) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        out = joined(module(x))
        rows = out.flatten(1)
        finite = torch.isfinite(rows).all(1)
        solved = torch.ones(len(x), dtype=torch.bool)
        for solution in (s for each in seen.solutions.values() for s in each):
            assert solution.result.shape == (len(x),)
            solved &= (solution.result != Result.nonfinite) & (solution.result != Result.diverged)
            passed = solution.converged
            assert torch.isfinite(solution.stats.residual[passed]).all()
        if not network:
            assert bool((finite | ~solved).all()), (finite, solved)
            clean = torch.isfinite(x.flatten(1)).all(1)
            assert not (solved & ~clean).any(), "not finite, and called solved"
        if expected is not None:
            torch.testing.assert_close(out[1:], expected[1:], rtol=1e-3, atol=1e-4)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        rows[finite & solved].double().abs().log1p().sum().backward()
    # As in a training, where a gradient that overflows is reported and moves nothing.
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if not network:  # its convolutions are torch's, whose weights get 0·NaN of a bad image
        assert not any(torch.isnan(g).any() for g in grads), "a gradient is NaN"
    if all(torch.isfinite(g).all() for g in grads):
        optimizer.step()
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter).all(), name


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, fault: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(3, *shape)
    expected = None
    if fault not in WHOLE_BATCH and "float16" not in fault and "half" not in fault:
        with torch.no_grad():
            expected = joined(copy.deepcopy(layer)(x))
    given = FAULTS[fault](layer, x)
    if fault == "no sample":
        with pytest.raises(ValueError, match=r"batch size zero|has no samples"):
            layer(given)
        return
    check_survives(layer, given, expected)


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
@pytest.mark.parametrize("name", ["GEQ", "GEQ, patches", "KerDEQ"])
def test_gamma(name: str, gamma: float) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    check_survives(make(gamma=eq.FixedGamma(gamma)), torch.randn(3, *shape))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "no sample"])
@pytest.mark.parametrize("name", KINDS)
def test_networks(name: str, fault: str) -> None:
    model = make_model(name).eval()  # batch statistics couple the samples of a training batch
    x = images(model)
    expected = None
    if fault not in WHOLE_BATCH and "float16" not in fault and "half" not in fault:
        with torch.no_grad():
            expected = copy.deepcopy(model)(x)
    given = FAULTS[fault](model, x)
    check_survives(model, given, expected)
    if model.task == "classification":
        for answer in model.predict_normalized(given):
            assert answer.converged is False or 0.0 <= answer.confidence <= 1.0
