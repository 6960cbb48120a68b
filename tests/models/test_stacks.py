"""The stacks: equal to the measured benchmark network, twins that differ in the layer alone."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria import models
from equilibria.models.stacks import Block, ExplicitPair
from tests.models.small import laid_out

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "geq_cifar.py"


@pytest.mark.slow
def test_cifar_3m_is_the_benchmarks_network_to_the_bit() -> None:
    # Same seed, same order of construction: the weights are the same numbers, not just shapes.
    torch.manual_seed(5)
    model = models.create(
        "geq_stack_cifar_3m",
        bias=True,  # as it was measured, with the first recipe's steps
        solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=4, damping=0.8),
        adjoint=eq.Phantom(steps=3, damping=0.8),
    )
    network = runpy.run_path(str(BENCHMARK))["network"]
    torch.manual_seed(5)
    measured = network(bound=1.2, steps=4, phantom=3)
    pairs = zip(model.state_dict().items(), measured.state_dict().items(), strict=True)
    for (name, mine), (other, theirs) in pairs:
        assert name.split(".")[-1] == other.split(".")[-1]
        assert torch.equal(mine, theirs), name
    assert models.count_parameters(model) == 2_788_298
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), measured(x))


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
