"""Tracked tensors: no value of the input escapes, and no error of a function is forgotten."""

from __future__ import annotations

import ctypes
import math
import operator
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack

import equilibria as eq


class Function(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Calls(Function):
    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x.flatten(1)[:, :1])


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("clamp", lambda x: x.clamp(min=torch.zeros(4))),  # four copies of one entry
        ("div", lambda x: torch.div(x.reshape(2, -1), 3.0, rounding_mode="floor")),  # jumps
        ("softplus", lambda x: F.softplus(x, threshold=0.1)),  # jumps by log(1 + e^{-0.1})
    ],
)
def test_options_that_break_a_constant_are_seen(name: str, fn: Any, norm: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(Calls(fn), nn.LazyLinear(3)).eval()
    model(x)
    certificate = eq.certify(model, x, norm=norm)
    assert (certificate.radius == 0).all()
    assert any(name in note for note in certificate.notes)


MEAN, STD = torch.tensor([[[0.5]], [[0.4]], [[0.3]]]), torch.tensor([[[0.2]], [[0.3]], [[0.5]]])
DEPTHWISE = torch.randn(6, 1, 3, 3, generator=torch.Generator().manual_seed(0)).double()


def added(x: Tensor) -> Tensor:
    h = 2.0 * x
    h += x
    return h


@pytest.mark.parametrize(
    ("fn", "entries"),
    [
        (lambda x: (x - MEAN) / STD, True),
        (lambda x: STD * x, True),
        (lambda x: x * STD.double() - 3.0, True),
        (added, True),
        (lambda x: (x + x).to(torch.float64), False),
        (lambda x: F.conv2d(x, DEPTHWISE, padding=1, groups=3), False),
        (lambda x: x.sum((2, 3)), False),
        (lambda x: x.amax((2, 3)), False),
        (lambda x: x.mean(3, keepdim=True).squeeze(3), False),
    ],
)
def test_the_constants_of_usual_functions(fn: Any, entries: bool) -> None:
    """Beside dense algebra; in l-inf a function of each entry has the exact radius."""
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    head = nn.Linear(fn(x)[0].numel(), 4).double()
    network = nn.Sequential(Function(fn), nn.Flatten(), head)
    inner, outer = (
        torch.autograd.functional.jacobian(f, x[:1]).reshape(-1, 192) for f in (fn, network)
    )
    steepest, weight = torch.linalg.matrix_norm(inner, 2), torch.linalg.matrix_norm(head.weight, 2)
    found = eq.certify(network, x)
    assert torch.linalg.matrix_norm(outer, 2) <= found.lipschitz * (1 + 1e-9)
    assert found.lipschitz <= steepest * weight * 1.05
    assert (found.radius > 0).all()
    assert not found.notes
    if entries:
        logits = network(x)
        label = logits.argmax(1, keepdim=True)
        apart = (outer[label] - outer).abs().sum(2)
        radii = ((logits.gather(1, label) - logits) / apart).scatter(1, label, math.inf)
        exact = radii.amin(1).detach()
        torch.testing.assert_close(
            eq.certify(network, x, norm="inf").radius, exact, rtol=1e-6, atol=0.0
        )


def test_a_compiled_network_is_followed_as_it_is() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    x = torch.rand(2, 12)
    compiled: Any = torch.compile(network, backend="eager")
    assert torch.equal(eq.certify(compiled, x).radius, eq.certify(network, x).radius)


def changed(change: Any) -> Any:
    """The logits x₀ … x₃ after an in-place change of them by (h, x)."""

    def logits(x: Tensor) -> Tensor:
        h = x[:, :4] * 1.0
        change(h, x)
        return h

    return logits


def buffered(write: Any) -> Any:
    """x₀ … x₃ and 99 times a plain tensor into which (buffer, x) writes."""

    def logits(x: Tensor) -> Tensor:
        buffer = torch.zeros(len(x), 4, dtype=x.dtype)
        write(buffer, x)
        return x[:, :4] + 99 * buffer

    return logits


def with_array(x: Tensor) -> Tensor:
    return x[:, :4] + 99 * torch.from_numpy(x.numpy())[:, 4:]


def handed(give: Any) -> Any:
    """x₀ … x₃ and 99 times numbers that ``give(x₄ … x₇)`` lists outside of torch."""

    def logits(x: Tensor) -> Tensor:
        found = torch.tensor(give(x[:, 4:] * 1.0), dtype=torch.float64)
        return x[:, :4] + 99 * found.view(4, 4)

    return logits


def one_by_one(method: Any) -> Any:
    """The numbers, gathered by a function that torch calls with each of them."""

    def give(h: Tensor) -> list[float]:
        found: list[float] = []
        method(h, lambda *values: found.append(values[-1]) or 0.0)
        return found

    return give


def by_address(h: Tensor) -> list[float]:
    return list((ctypes.c_double * h.numel()).from_address(h.data_ptr()))


def ninetynine(x: Tensor) -> Tensor:
    return 99.0 * x


@torch.library.custom_op("equilibria_tests::silu", mutates_args=())
def _silu(x: Tensor) -> Tensor:
    return 99.0 * x


def above(x: Tensor) -> Tensor:
    """No entry of the test's x, and of one that is moved up one."""
    return x > START + 1e-7


# What a network may do with its numbers beside taking functions of them. [B, 8] → [B, 4].
WAYS: dict[str, Any] = {
    "another type": lambda x: x[:, :4] + (x[:, :4] > 0).to(x.dtype),  # jumps
    "the mean of a batch": lambda x: x[:, :4] - x[:, :4].mean(0),
    "samples as features": lambda x: x[:, :4].transpose(0, 1),
    "samples as channels": lambda x: F.conv2d(x.view(4, 2, 4), MIXING).flatten(1)[:, :4],
    "samples moved": lambda x: F.pad(x[:, :4], [0, 0, 1, -1]),
    "a branch": lambda x: x[:, :4] if bool(x.sum() > 0) else -x[:, :4],
    "a branch by nonzero": lambda x: x[:, :4] if torch.is_nonzero(x[0, 0] > 0) else -x[:, :4],
    "a branch by allclose": lambda x: -x[:, :4] if torch.allclose(x, x.abs()) else x[:, :4],
    "an array": with_array,
    "a call for each number": handed(one_by_one(lambda h, take: h.apply_(take))),
    "a call for each pair": handed(
        one_by_one(lambda h, take: torch.zeros(4, 4).double().map_(h, take))
    ),
    "an address": handed(by_address),
    "a capsule": lambda x: x[:, :4] + 99 * torch.from_dlpack(to_dlpack(x[:, 4:] * 1.0)),
    "another mode": torch.inference_mode()(lambda x: 9 * x[:, :4]),
    "a buffer written": buffered(lambda b, x: b.__setitem__((slice(None), 0), x[:, 5])),
    "a buffer copied to": buffered(lambda b, x: b.copy_(x[:, 4:])),
    "a part of a buffer": buffered(lambda b, x: b[:, 1:].copy_(x[:, 5:])),
    "a buffer as output": buffered(lambda b, x: torch.mul(x[:, 4:], 9, out=b)),
    "a buffer added to": buffered(lambda b, x: operator.iadd(b, x[:, 4:])),
    "a copy by torch.tensor": lambda x: x[:, :4] + 99 * torch.tensor(x[:, 4:]),
    "a transform": lambda x: x[:, :4] + torch.vmap(lambda row: 99 * row)(x[:, 4:]),
    "parts": lambda x: x[:, :4] + 99 * x.chunk(2, 1)[1],
    "a maximum with its place": lambda x: x[:, :4] + 99 * x.max(1, keepdim=True)[0] * ONE,
    "rows": lambda x: x[:, :4] + 99 * torch.stack(list(x))[:, 4:],
    "another class": lambda x: x[:, :4] + 99 * x.as_subclass(Tensor)[:, 4:],
    "a factor of the second": lambda x: torch.add(x[:, :4], 99, x[:, 4:]),
    "an entry written": changed(lambda h, x: h.__setitem__((slice(None), 0), 99 * x[:, 5])),
    "a product in place": changed(lambda h, x: h.mul_(99 * ONE)),
    "a function in place": changed(lambda h, x: F.leaky_relu(h, 99.0, inplace=True)),
    "an output": changed(lambda h, x: torch.mul(x[:, 4:], 99, out=h)),
    "a view in place": changed(lambda h, x: h[:, 0].mul_(99)),
    "data in place": changed(lambda h, x: h.data.mul_(99)),
    "a resize by a fraction": lambda x: F.interpolate(
        x.view(-1, 1, 1, 8), scale_factor=(1.0, 1.7), mode="bilinear"
    ).flatten(1),
    "a resize of both kinds": lambda x: F.interpolate(
        x.view(-1, 1, 2, 4), (2, 2), None, "bilinear", True, antialias=True
    ).flatten(1),
    "no padding": lambda x: F.conv2d(x.view(-1, 1, 2, 4), KERNEL, padding="valid").flatten(1),
    "uneven padding": lambda x: F.conv2d(x.view(-1, 1, 2, 4), KERNEL, padding="same").flatten(1),
    "a scripted function": lambda x: x[:, :4] + torch.jit.script(ninetynine)(x[:, 4:]),
    "another library's silu": lambda x: torch.ops.equilibria_tests.silu(x[:, :4]),
    "batch norm in another order": lambda x: torch.batch_norm(
        x[:, :4], 9 * ONE, 0 * ONE, running_mean=ONE, running_var=ONE + 1e-3, **NORM
    ),
    "a count": lambda x: x[:, :4] + 99 * len(torch.nonzero(above(x))),
    "a number of rows": lambda x: x[:, :4] + 99 * len(x[above(x)]),
    "a number of places": lambda x: x[:, :4] + 99 * len(torch.where(above(x))[0]),
    "data assigned": changed(lambda h, x: setattr(h, "data", 99 * h)),
    "a pool of one number": lambda x: F.max_pool2d(x.view(-1, 1, 2, 4), (2,), (1,), 1).flatten(1),
    "named arguments": lambda x: torch.cat(tensors=[x[:, :4]], dim=1),
    "an adaptive pool of matrices": lambda x: F.adaptive_avg_pool2d(x[:, None], (9, 8)).flatten(1),
}
START = torch.linspace(-1.0, 1.5, 32).view(4, 8).sin().double()
ONE = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
MIXING = torch.ones(4, 4, 1, 1, dtype=torch.float64)
NORM = {"training": False, "momentum": 0.1, "eps": 0.0, "cudnn_enabled": False}
KERNEL = torch.linspace(-1.0, 3.0, 8, dtype=torch.float64).view(2, 1, 2, 2)


class Way(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.name](x)


@pytest.mark.filterwarnings("ignore:This overload of add is deprecated")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", WAYS)
def test_nothing_that_depends_on_the_input_escapes(name: str) -> None:
    """It is refused, or the constant is at least the slope that differences show."""
    x, network = START.clone(), Way(name)
    try:
        certificate = eq.certify(network, x.float())
    except TypeError as error:
        assert "cannot follow" in str(error)  # noqa: PT017
        return
    if certificate.logits.isnan().all():
        assert (certificate.radius == 0).all()
        return
    for b in range(4):
        moved = x.repeat(8, 1, 1)
        moved[:, b] += 1e-6 * torch.eye(8, dtype=torch.float64)
        slopes = torch.stack([network(each) - network(x.clone()) for each in moved]) / 1e-6
        own, others = slopes[:, b], slopes[:, [k for k in range(4) if k != b]]
        steepest = float(torch.linalg.matrix_norm(own, 2))
        assert steepest <= certificate.lipschitz * (1 + 1e-6)
        assert math.isinf(certificate.lipschitz) or not others.any()
    if math.isinf(certificate.lipschitz):
        assert (certificate.radius == 0).all()
        assert certificate.notes


def test_weights_of_the_head_may_change_after_their_use() -> None:
    x, weight = START.clone(), START[:, :8].clone()

    def forgotten(x: Tensor) -> Tensor:
        used = weight.clone()
        logits = F.linear(x, used)
        used.zero_()
        return logits

    wanted = eq.certify(Function(lambda x: F.linear(x, weight)), x)
    assert (wanted.radius > 0).any()
    assert torch.equal(eq.certify(Function(forgotten), x).radius, wanted.radius)


BETA, TENTH = 0.3, 0.1  # as floating point has them


@pytest.mark.parametrize(
    ("fn", "value", "exact"),
    [
        # torch has 1 + erf, which cancels; x above its threshold; and rounds βx
        (F.gelu, -6.0, Decimal(-3.0 * math.erfc(6.0 / math.sqrt(2.0)))),
        (F.softplus, 22.0, 22 + (1 + Decimal(-22).exp()).ln()),
        (partial(F.softplus, beta=BETA), -501.0, (Decimal(BETA) * -501).exp() / Decimal(BETA)),
        (lambda x: x.view(1, 3, 1).mean(2, dtype=torch.float32) + x, TENTH, 2 * Decimal(TENTH)),
        (lambda x: x.mul(1e-160).mul(1e-163).mul(1e163).mul(1e160), TENTH, Decimal(TENTH)),
    ],
)
def test_the_error_of_a_function_is_charged(fn: Any, value: float, exact: Decimal) -> None:
    x = torch.full((1, 3), value, dtype=torch.float64)
    found = eq.certify(Function(fn), x)
    off = math.sqrt(3.0) * float(abs(Decimal(float(found.logits[0, 0])) - exact))
    assert 0 < off <= float(found.error)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_scripted_modules_are_refused() -> None:
    network = nn.Sequential(nn.Flatten(), torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)))
    with pytest.raises(TypeError, match="scripted modules"):
        eq.certify(network, torch.zeros(2, 1, 2, 2))


def test_layers_may_use_torch_func_themselves() -> None:
    """Inside a solve all tensors are plain."""
    smooth = torch.vmap(lambda z, x: 0.5 * (z - 0.5 * x).square().sum())
    layer = eq.nn.EquilibriumLayer(
        lambda x: eq.Problem(eq.NonNegative(), smooth=smooth, x=x, bounds=(1.0, 1.0))
    )
    certificate = eq.certify(nn.Sequential(nn.Flatten(), layer, nn.Linear(4, 3)), torch.rand(2, 4))
    assert certificate.label.shape == (2,)
