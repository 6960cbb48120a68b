"""Operator-norm bounds: against dense SVDs of materialized matrices and convolutions."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from equilibria.nn import NormBounded, OperatorNorm, WeightNormalized, constrain
from equilibria.nn.constraints import leading_vector
from equilibria.problems import ConvOperator, DenseOperator
from tests.problems.test_operators import conv_matrix, randn

SIZE = 6


def linear(seed: int = 0, scale: float = 1.0) -> nn.Linear:
    module = nn.Linear(5, 7, bias=False).double()
    module.weight.data = scale * randn(7, 5, seed=seed)
    return module


def conv(seed: int = 0, scale: float = 1.0, **options: Any) -> nn.Conv2d:
    module = nn.Conv2d(4, 6, 3, **{"padding": 1, "bias": False, **options}).double()
    module.weight.data = scale * randn(*module.weight.shape, seed=seed)
    return module


def norm_of(module: nn.Module) -> float:
    """‖W‖₂ from the definition: the convolution written out as a matrix on SIZE × SIZE pixels."""
    weight = module.weight.detach()
    if isinstance(module, nn.Conv2d):
        matrix = conv_matrix(
            weight,
            SIZE,
            SIZE,
            stride=module.stride[0],
            padding=module.padding[0],
            groups=module.groups,
        )
    else:
        matrix = weight.numpy()
    return float(np.linalg.norm(matrix, 2))


MODULES = {
    "dense": linear,
    "conv": conv,
    "strided": lambda **o: conv(stride=2, **o),
    "grouped": lambda **o: conv(groups=2, **o),
    "valid": lambda **o: conv(padding=0, **o),
}


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_a_weight_whose_squares_leave_the_dtype_is_bounded(kind: str) -> None:
    module = MODULES[kind](scale=1e12).float()
    constrain(module, "weight", NormBounded(bound=0.9, size=SIZE))
    for mode in (False, True):
        assert norm_of(module.train(mode)) == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize("kind", list(MODULES))
@pytest.mark.parametrize("bound", [0.5, 1.3])
def test_a_large_weight_lands_on_the_bound(kind: str, bound: float) -> None:
    module = MODULES[kind](scale=2.0)
    free = module.weight.detach().clone()
    constrain(module, "weight", NormBounded(bound=bound, size=SIZE))
    assert norm_of(module) == pytest.approx(bound, rel=1e-8)
    ratio = module.weight.detach() / free  # only scaled
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))


@pytest.mark.parametrize("kind", list(MODULES))
def test_a_small_weight_is_left_alone(kind: str) -> None:
    module = MODULES[kind](scale=0.01)
    free = module.weight.detach().clone()
    constrain(module, "weight", NormBounded(bound=0.95, size=SIZE))
    assert torch.equal(module.weight, free)


def test_the_norm_on_larger_maps_exceeds_the_bound_by_little_and_is_reported() -> None:
    module = nn.Conv2d(8, 12, 3, padding=1, bias=False).double()
    module.weight.data = randn(12, 8, 3, 3)
    constrain(module, "weight", NormBounded(bound=0.95))
    estimate = ConvOperator(module.weight).norm((8, 40, 40)).estimate
    upper = ConvOperator(module.weight).norm_upper()
    assert 0.95 < estimate < 0.95 * 1.02
    assert estimate <= upper < 0.95 * 1.03


def test_construction_under_a_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`with torch.device(...)` hands its device to every factory call that names none."""
    seen: list[object] = []
    randn = torch.randn
    monkeypatch.setattr(
        torch, "randn", lambda *a, **o: (seen.append(o.get("device")), randn(*a, **o))[1]
    )
    leading_vector(DenseOperator(torch.eye(3)), (1, 3))
    assert seen == ["cpu"]


def test_construction_uses_no_random_numbers() -> None:
    module = linear()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    constrain(module, "weight", NormBounded())
    assert torch.equal(torch.rand(1), expected)


# ---------------------------------------------------------------------- training


def test_power_iteration_follows_a_moving_weight() -> None:
    module = constrain(conv(scale=2.0), "weight", NormBounded(bound=0.9, size=SIZE)).train()
    original = module.parametrizations.weight.original
    drift = 0.05 * randn(*original.shape, seed=9)
    for _ in range(20):
        with torch.no_grad():
            original += drift
        _ = module.weight
        assert norm_of(module.train(False)) <= 0.9 * 1.05
        module.train()
    for _ in range(200):
        _ = module.weight
    # The two largest singular values lie close, so even 200 iterations leave a little.
    assert norm_of(module.eval()) == pytest.approx(0.9, rel=2e-3)


@pytest.mark.parametrize("kind", ["dense", "conv"])
@pytest.mark.parametrize("scale", [2.0, 0.01])
def test_gradient_passes_through_the_norm(kind: str, scale: float) -> None:
    module = MODULES[kind](scale=scale)
    bounded = OperatorNorm(0.8, size=SIZE)
    bounded.right_inverse(module.weight)
    bounded.eval()
    weight = module.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(bounded, (weight,))
    assert torch.autograd.gradgradcheck(bounded, (weight,))


def test_the_gradient_is_that_of_the_true_norm() -> None:
    """At a converged v, d(W·bound/‖W‖₂) with the SVD's own derivative."""
    weight = randn(7, 5).requires_grad_()
    bounded = OperatorNorm(0.8)
    bounded.right_inverse(weight)
    bounded.eval()
    cotangent = randn(7, 5, seed=5)
    (ours,) = torch.autograd.grad((bounded(weight) * cotangent).sum(), weight)
    exact = weight * 0.8 / torch.linalg.svdvals(weight)[0]
    (expected,) = torch.autograd.grad((exact * cotangent).sum(), weight)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    # Along W itself nothing can change: the gradient is orthogonal to W.
    assert abs(float((ours * weight).sum().detach())) < 1e-12


def test_a_zero_weight_has_a_gradient() -> None:
    module = constrain(linear(scale=0.0), "weight", NormBounded()).train()
    module.weight.sum().backward()
    expected = torch.ones(7, 5, dtype=torch.float64)
    assert torch.equal(module.parametrizations.weight.original.grad, expected)


def test_assignment() -> None:
    module = constrain(conv(scale=2.0), "weight", NormBounded(bound=0.9, size=SIZE)).eval()
    small = 0.02 * randn(6, 4, 3, 3, seed=8)
    module.weight = small
    torch.testing.assert_close(module.weight, small)
    module.weight = 5.0 * randn(6, 4, 3, 3, seed=8)
    assert norm_of(module) == pytest.approx(0.9, rel=1e-8)
    with pytest.raises(ValueError, match="NaN"):
        module.weight = torch.full((6, 4, 3, 3), float("nan"), dtype=torch.float64)


# ---------------------------------------------------------------------- copies, precisions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions(dtype: torch.dtype) -> None:
    module = constrain(conv(scale=2.0), "weight", NormBounded(bound=0.9, size=SIZE)).to(dtype)
    for training in (True, False):
        weight = module.train(training).weight
        assert weight.dtype == dtype
    sigma = float(np.linalg.norm(conv_matrix(weight, SIZE, SIZE, padding=1), 2))
    assert sigma == pytest.approx(0.9, rel=8 * torch.finfo(dtype).eps)


def test_autocast_leaves_the_norm_in_full_precision() -> None:
    module = constrain(linear(scale=2.0).float(), "weight", NormBounded(bound=0.9)).eval()
    expected = module.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module.weight, expected)


def test_meta_device() -> None:
    with torch.device("meta"):
        module = constrain(nn.Conv2d(4, 6, 3, padding=1, bias=False), "weight", NormBounded())
    assert module.weight.is_meta
    real = module.to_empty(device="cpu")
    state = constrain(conv().float(), "weight", NormBounded())
    real.load_state_dict(state.state_dict())
    assert torch.equal(real.eval().weight, state.eval().weight)


# ---------------------------------------------------------------------- specs, errors


def test_none_and_weight_normalization() -> None:
    free = linear()
    assert constrain(free, "weight", None) is free
    assert not parametrize.is_parametrized(free)
    module = linear(scale=2.0)
    weight = module.weight.detach().clone()
    constrain(module, "weight", WeightNormalized())
    torch.testing.assert_close(module.weight, weight)  # a reparametrization: the same weight
    names = dict(module.named_parameters())
    g, v = (names[f"parametrizations.weight.original{i}"] for i in (0, 1))
    rows = v.detach().norm(dim=1, keepdim=True)
    torch.testing.assert_close(module.weight, g * v / rows)
    torch.testing.assert_close(g.detach(), weight.norm(dim=1, keepdim=True))
    peer = parametrizations.weight_norm(linear(scale=2.0))
    assert list(peer.state_dict()) == list(module.state_dict())
    moved = {k: t + 0.3 for k, t in module.state_dict().items()}
    for one in (peer, module):
        one.load_state_dict(moved)
    torch.testing.assert_close(module.weight, peer.weight)


@pytest.mark.parametrize("scale", [1e-38, 1e-25, 1.0, 1e25, 1e37])
def test_weight_normalization_at_any_scale(scale: float) -> None:
    module = linear().float()
    with torch.no_grad():
        module.weight.mul_(scale)
        module.weight[1] = 0.0
    weight = module.weight.detach().double()
    constrain(module, "weight", WeightNormalized())
    torch.testing.assert_close(module.weight.double(), weight, rtol=1e-6, atol=1e-44)
    found = torch.autograd.grad(module.weight.sum(), list(module.parameters()))
    live = [0, *range(2, len(weight))]
    v = weight[live].requires_grad_()
    g = v.detach().norm(dim=1, keepdim=True).requires_grad_()
    wanted = torch.autograd.grad((g * v / v.norm(dim=1, keepdim=True)).sum(), (g, v))
    for a, b in zip(found, wanted, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a[live].double(), b, rtol=1e-5, atol=1e-5)


def test_weight_normalization_of_half_precision() -> None:
    module = linear().half()
    for scale in (1e-3, 1e3):  # squares leave the range of float16
        with torch.no_grad():
            module.weight.copy_(torch.randn_like(module.weight) * scale)
        weight = module.weight.detach().clone()
        normalized = constrain(copy.deepcopy(module), "weight", WeightNormalized())
        torch.testing.assert_close(normalized.weight, weight, rtol=2e-3, atol=1e-6)
    with torch.no_grad():
        module.weight.fill_(6e4)
    with pytest.raises(ValueError, match=r"norm is beyond torch\.float16"):
        constrain(module, "weight", WeightNormalized())


@pytest.mark.parametrize("scale", [0.0, 1e-25])
def test_a_weight_that_starts_at_zero_is_bounded_later(scale: float) -> None:
    module = linear().float()
    with torch.no_grad():
        module.weight.mul_(scale)
    constrain(module, "weight", NormBounded(bound=0.5)).train()
    assert torch.equal(module.weight, module.parametrizations.weight.original)
    with torch.no_grad():  # what an optimizer does
        module.parametrizations.weight.original.copy_(3 * torch.randn(module.weight.shape))
    for _ in range(40):
        weight = module.weight
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) <= 0.51


def test_weights_whose_squares_overflow_are_an_error() -> None:
    module = linear().float()
    with torch.no_grad():
        module.weight.mul_(1e25)
    with pytest.raises(ValueError, match="or some whose squares overflow"):
        constrain(module, "weight", NormBounded())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": 0.0}, r"bound=0.0\) is out of range"),
        ({"bound": -1.0}, "out of range"),
        ({"bound": float("inf")}, "out of range"),
        ({"steps": 0}, r"steps=0\) is out of range"),
        ({"size": 0}, r"size=0\) is out of range"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormBounded(**options)
    with pytest.raises(ValueError, match=message):
        OperatorNorm(**{"bound": 0.9, **options})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NormBounded(0.9), TypeError, "keyword options only"),
        (lambda: NormBounded(bounds=0.9), TypeError, "Did you mean 'bound'"),
        (
            lambda: constrain(linear(), "weight", 0.9),
            TypeError,
            r"expected NormBounded\(bound=...\)",
        ),
        (lambda: bounded(nn.Conv1d(2, 2, 3)), ValueError, r"a matrix .* or a kernel"),
        (lambda: bounded(nn.Conv2d(2, 2, 3, dilation=2)), ValueError, "dilation 1"),
        (lambda: bounded(nn.ConvTranspose2d(2, 2, 3)), ValueError, "nn.Conv2d.*ConvTranspose2d"),
        (lambda: bounded(linear(), "wait"), ValueError, "does not have a parameter"),
        (lambda: bounded(linear(scale=math.nan)), ValueError, "NaN"),
        (lambda: OperatorNorm(0.9)(torch.zeros(2, 2)), RuntimeError, "has not seen a weight yet"),
    ],
)
def test_errors(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def bounded(module: nn.Module, name: str = "weight") -> nn.Module:
    return constrain(module, name, NormBounded())
