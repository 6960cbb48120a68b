"""MultiBranch(chain=True): a branch sees the branches before it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import equilibria as eq
from equilibria.nn import DEQ, GEQ, MultiBranch, OptEq, ResidualBlock
from tests.contracts.layer_contract import TIGHT

PATCH = eq.Patches(channels=2, size=2)
SCALES = (8, 4, 4, 2)


def chain(**options: Any) -> MultiBranch:
    """Four branches of four channels in float64, with norms that have seen some data."""
    torch.manual_seed(0)
    layers = [
        GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
        OptEq(4, 6, kernel_size=3, form="state", **options),
        GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
        GEQ(4, 6, patch=PATCH, hidden=4, gamma=0.3, **options),
    ]
    model = MultiBranch(layers, SCALES, output=4, chain=True).double()
    for norm in model.norms:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    for _ in range(3):
        model(torch.randn(5, 4, 8, 8, dtype=torch.float64))
    return model.eval()


def by_hand(model: MultiBranch, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """y and the inputs of the branches, written out with torch's own pooling and norms."""
    seen: list[Tensor] = []
    outputs: list[Tensor] = []
    for i, size in enumerate(SCALES):
        own = F.adaptive_avg_pool2d(x, size)
        for earlier in outputs:
            own = own + F.adaptive_avg_pool2d(earlier, size)
        seen.append(own)
        norm = model.norms[i]
        z = model.branches[i](own)
        outputs.append(
            F.batch_norm(z, norm.running_mean, norm.running_var, norm.weight, norm.bias, False)
        )
    moved = [
        F.interpolate(y, size=4) if y.shape[2] < 4 else F.adaptive_avg_pool2d(y, 4) for y in outputs
    ]
    return torch.stack(moved).mean(0), seen


def test_output_and_gradient_against_the_formula() -> None:
    model = chain(solver=TIGHT)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    expected, seen = by_hand(model, x)
    torch.testing.assert_close(model(x), expected)
    whole = torch.autograd.grad(model(x).square().sum(), x)[0]
    torch.testing.assert_close(whole, torch.autograd.grad(expected.square().sum(), x)[0])
    found = model.certify(x.detach())
    for i, own in enumerate(seen):
        alone = eq.certify(model.branches[i], own.detach())  # type: ignore[arg-type]
        torch.testing.assert_close(
            found[f"branch {i}"].error_bound,  # type: ignore[attr-defined]
            alone.error_bound,
            rtol=0.1,
            atol=1e-12,
        )


def test_the_error_of_the_output_is_bounded() -> None:
    model = chain(solver=eq.Picard(rtol=1e-2))
    tight = copy.deepcopy(model)
    for branch in tight.branches:
        branch.solver = TIGHT  # type: ignore[assignment]
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    found = model.certify(x)
    assert found.unique
    bound = model.output_error(found)
    error = (model(x) - tight(x)).flatten(1).norm(dim=1).detach()
    assert (error > 1e-6).all()
    assert (error <= bound).all()
    # Errors of early branches pass the later ones: without that the bound would be too small.
    alone = MultiBranch(list(model.branches), SCALES, output=4).double()
    assert (bound > alone.output_error(found)).all()


def test_norms_see_a_batch_once() -> None:
    model = chain().train()
    before = [int(norm.num_batches_tracked) for norm in model.norms]
    model(torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert [int(norm.num_batches_tracked) for norm in model.norms] == [n + 1 for n in before]


def test_a_chain_compiles_whole() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fixed: dict[str, Any] = {
        "solver": eq.Picard(rtol=0.0, max_steps=3),
        "adjoint": eq.Phantom(steps=1),
    }
    layers = [OptEq(4, 4, kernel_size=3, **fixed), OptEq(4, 4, kernel_size=3, **fixed)]
    model = MultiBranch(layers, (4, 2), chain=True).eval()
    x = torch.randn(2, 4, 4, 4)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    layers = [OptEq(4, 4, kernel_size=3), OptEq(4, 4, kernel_size=3)]
    with pytest.raises(ValueError, match="chain=True, joint=True"):
        MultiBranch(layers, (4, 2), chain=True, joint=True)
    with pytest.raises(TypeError, match="a DEQ does not say the channels of its state"):
        MultiBranch([DEQ(ResidualBlock(8, 8))], (4,), chain=True)


@pytest.mark.parametrize("name", ["geq_cifar_5m", "mopteq_cifar_5m", "mopteq_sigmoid_cifar_5m"])
def test_networks_by_name(name: str) -> None:
    """A network in both readings: a chain has one batch norm a branch more, and trains."""
    options: dict[str, Any] = {"channels": 16, "mids": (8, 8, 16), "scales": (1, 2, 2)}
    if name.startswith("geq"):
        options["hidden"] = 8
    torch.manual_seed(0)
    model = eq.models.create(name, image_size=8, reading="chain", **options)
    parallel = eq.models.create(name, image_size=8, reading="parallel", **options)
    count = [sum(p.numel() for p in m.parameters()) for m in (model, parallel)]
    assert count[0] - count[1] == 3 * 2 * 16
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
