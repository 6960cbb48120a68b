"""The stacks: equal to their formula, twins that differ in the layer alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equilibria as eq
from equilibria import models
from equilibria.models.stacks import Block, ExplicitPair
from tests.models.small import laid_out


def test_a_stack_of_geq_layers_is_its_formula() -> None:
    # z ← relu((1 − τ)z + τWᵀ unpatch(exp(−γ‖rᵢW_h‖²) rᵢW_hW_hᵀ)), r = c − Wz, from z = 0.
    torch.manual_seed(5)
    options: Any = {"widths": (8, 16), "depth": 1, "hidden": 12, "image_size": 8}
    model: Any = models.create("geq_stack_cifar_3m", **options).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def message(r: Tensor, W_h: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
        b, c, h, w = r.shape
        cut = r.view(b, c // 8, 8, h // 2, 2, w // 2, 2)
        rows = cut.permute(0, 1, 3, 5, 2, 4, 6).reshape(b, -1, 32)
        energy = (rows @ W_h).square().sum(-1, keepdim=True)
        gamma = 0.2 / energy.mean(1, keepdim=True) if gamma is None else gamma
        out = (-gamma * energy).exp() * (rows @ W_h @ W_h.mT)
        out = out.view(b, c // 8, h // 2, w // 2, 8, 2, 2).permute(0, 1, 4, 2, 5, 3, 6)
        return out.reshape(r.shape), gamma

    y = F.conv2d(x, model.stem.weight, padding=1)
    for block in model.stages:
        if not isinstance(block, Block):
            y = F.avg_pool2d(y, 2)
            continue
        layer: Any = block.layer
        W, W_h = layer.W.weight, layer.W_h.weight
        c = F.conv2d(y / (1.0 + block.norm.eps) ** 0.5, layer.U.weight, padding=1)
        z, gamma = torch.zeros_like(c), message(c, W_h, None)[1]
        for _ in range(3):
            r = c - F.conv2d(z, W, padding=1)
            pulled = F.conv_transpose2d(message(r, W_h, gamma)[0], W, padding=1)
            z = (0.2 * z + 0.8 * pulled).clamp_min(0)
        y = (y if isinstance(block.skip, nn.Identity) else block.skip(y)) + z
    expected = F.relu(y / (1.0 + model.head[0].eps) ** 0.5).mean((2, 3)) @ model.head[4].weight.mT
    torch.testing.assert_close(model.logits(x), expected + model.head[4].bias)


def test_explicit_pair_sees_its_input_through_relu() -> None:
    torch.manual_seed(0)
    pair = ExplicitPair(3, 4, 5).eval()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(pair(x), pair(x.clamp_min(0)))
    assert (pair(x) - pair(-x)).abs().max() > 1e-3
    assert pair.first.weight.shape == (5, 3, 3, 3)
    assert pair.second.weight.shape == (4, 5, 3, 3)


@pytest.mark.parametrize("kind", ["geq", "opteq", "explicit"])
def test_twins_share_everything_but_the_layer(kind: str) -> None:
    model, geq = laid_out(f"{kind}_digits"), laid_out("geq_digits")
    found = [type(m.layer).__name__ for m in model.modules() if isinstance(m, Block)]
    assert found == [{"geq": "GEQ", "opteq": "OptEq", "explicit": "ExplicitPair"}[kind]] * 2
    shapes = {
        key: tuple(value.shape) for key, value in model.state_dict().items() if ".layer." not in key
    }
    other = geq.state_dict()
    assert shapes == {k: tuple(v.shape) for k, v in other.items() if ".layer." not in k}


@pytest.mark.parametrize("size", ["digits", "stack_digits", "stack_mnist", "stack_cifar_3m"])
def test_bounds_lie_where_the_equilibrium_is_unique(size: str) -> None:
    for kind, largest in (("geq", 1.4969), ("opteq", 1.0)):
        for layer in eq.nn.equilibrium_layers(laid_out(f"{kind}_{size}")).values():
            assert layer.constraint.bound < largest


def test_the_small_geq_and_opteq_are_certified() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 8, 8)
    for name in ("geq_digits", "opteq_digits"):
        model = models.create(name).eval()
        layer = model.stages[0].layer  # type: ignore[index, union-attr]
        inside = model.stages[0].norm(model.stem(x)).detach()  # type: ignore[index, union-attr]
        certificate = eq.certify(layer, inside)
        assert certificate.unique
        assert certificate.kind == "contraction"
        assert float(certificate.error_bound.max()) < 1e-2


@pytest.mark.parametrize("name", ["geq_stack_cifar_3m", "opteq_stack_cifar_3m"])
def test_the_few_steps_of_a_stack_come_near_the_equilibrium(name: str) -> None:
    """Of the linear twin too: with the certificate's step, 2/(m + L), the last had moved 0.4."""
    torch.manual_seed(0)
    model = models.create(name, widths=(16, 32), depth=1, image_size=8).train()
    x = torch.randn(8, 3, 8, 8)
    with torch.no_grad():
        for _ in range(4):  # the norms' power iterations settle
            model(x)
        with eq.nn.observe(model.eval()) as seen:
            model(x)
    for (solution,) in seen.solutions.values():
        assert float(solution.stats.relative.median()) < 0.1


def test_overrides_reach_the_layers() -> None:
    options = {
        "hidden": 3,
        "patch": eq.Patches(channels=2, size=1),
        "gamma": eq.FixedGamma(0.7),
        "constraint": eq.nn.WeightNormalized(),
        "solver": eq.Broyden(memory=4),
        "adjoint": eq.OneStep(),
    }
    model = models.create("geq_digits", widths=(8, 8, 16), depth=2, **options)
    layers = list(eq.nn.equilibrium_layers(model).values())
    assert [layer.channels for layer in layers] == [8, 8, 8, 8, 16, 16]
    for layer in layers:
        assert {name: getattr(layer, name) for name in options} == options


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """What a fresh BatchNorm2d does in training mode, written out."""
    mean = x.mean((0, 2, 3), keepdim=True)
    return (x - mean) / (x.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()


def test_norms_stand_where_they_are_asked_for() -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(4, 3, 6, 6) + 1

    def rectified(_: int, __: int) -> nn.Module:
        return nn.ReLU()

    made = {norm: Block(3, 3, rectified, norm=norm)(x) for norm in ("before", "after", "both")}
    torch.testing.assert_close(made["before"], x + _normalized(x).relu())
    torch.testing.assert_close(made["after"], x + _normalized(x.relu()))
    torch.testing.assert_close(made["both"], x + _normalized(_normalized(x).relu()))
    # What a rectified layer adds has one sign, and both behind a norm.
    assert (made["before"] - x).min() >= -1e-6
    assert (made["both"] - x).min() < -0.1
    wider = Block(3, 5, lambda a, b: nn.Conv2d(a, b, 1))
    skip = torch.einsum("oc,bchw->bohw", wider.skip.weight.flatten(1), x)
    torch.testing.assert_close(wider(x), skip + wider.layer(_normalized(x)))


def test_a_shifted_block_is_the_layer_on_a_map_with_a_border_of_zeros() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)

    def patched(r: torch.Tensor) -> torch.Tensor:
        """Each pixel becomes the mean of its 2 × 2 patch."""
        small = r.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5))
        return small.repeat_interleave(2, 2).repeat_interleave(2, 3)

    class Mean(nn.Module):
        def forward(self, r: torch.Tensor) -> torch.Tensor:
            return patched(r)

    found = Block(4, 4, lambda a, b: Mean(), norm="after", shift=1)(x)
    border = torch.zeros(2, 4, 8, 8)
    border[:, :, 1:7, 1:7] = x
    torch.testing.assert_close(found, x + _normalized(patched(border)[:, :, 1:7, 1:7]))
    # A pixel of the middle is in one patch with its neighbors of the other side.
    inner = patched(border)[0, 0, 2, 2]
    torch.testing.assert_close(inner, x[0, 0, 1:3, 1:3].mean())


def test_every_second_layer_of_a_stage_is_shifted_by_half_a_patch() -> None:
    model = models.create("geq_stack_digits", widths=(4, 8), depth=3, shift=True)
    shifts = [m.shift for m in model.modules() if isinstance(m, Block)]
    assert shifts == [0, 1, 0, 0, 1, 0]
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"patches of 1 pixel\(s\) have no whole half"):
        models.create("geq_stack_digits", shift=True, patch=eq.problems.Patches(channels=4, size=1))
