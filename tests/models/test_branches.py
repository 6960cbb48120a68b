"""The six-branch networks: scales, fusion, and the balance of kernels with a bounded state."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import equilibria as eq
from equilibria import models
from equilibria.models.branches import BalancedBranches, BranchNet
from tests.models.small import images, laid_out, make


def _network(name: str, **more: object) -> BranchNet:
    model = make(name, **more)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "layer", "largest"),
    [
        ("geq_cifar_5m", eq.nn.GEQ, 1.4969),
        ("kerdeq_imagenet_13m", eq.nn.GEQ, 1.4969),
        ("mopteq_cifar_5m", eq.nn.OptEq, 1.0),
        ("mopteq_polynomial_cifar_5m", eq.nn.PolynomialEq, 1.0),
        ("mopteq_sigmoid_cifar_8m", eq.nn.SigmoidEq, 1.0),
    ],
)
def test_the_papers_scales_and_layers(name: str, layer: type, largest: float) -> None:
    model = laid_out(name)
    finest = 64 if "imagenet" in name else 32
    wanted = [finest // k for k in (1, 2, 4, 4, 8, 8)]
    assert [scale[0] for scale in model.branches.scales] == wanted
    assert model.branches.output == (finest // 4, finest // 4)
    assert model.branches.chain
    assert not make(name, reading="parallel").branches.chain
    for branch in model.branches.branches:
        assert type(branch) is layer
        assert branch.solver.fixed_steps
        # Below the largest norm at which the kernel is certified to have one equilibrium.
        assert branch.constraint.bound < largest


@pytest.mark.parametrize("kind", ["geq", "kerdeq", "mopteq", "mopteq_polynomial", "mopteq_sigmoid"])
def test_every_sample_is_certified_unique(kind: str) -> None:
    model = _network(f"{kind}_cifar_5m")
    given = model.stem(images(model)).detach()
    certificate = eq.certify(model.branches, given)
    assert certificate.unique
    # ... and the steps came close to the one equilibrium of each branch. The linear kernel is
    # nearly flat (m = 0.1), so that four steps leave it farther and their bound is loose.
    near, together = (0.5, 4.0) if kind == "mopteq" else (3e-2, 0.1)
    errors = [float(part.error_bound.max()) for part in certificate.values()]
    assert max(errors) < near
    # In a chain an error passes on by the branches' Lipschitz constants, which these two lack.
    whole = float(model.branches.output_error(certificate).max())
    assert math.isinf(whole) if "_" in kind else whole < together


def test_kerdeq_starts_where_messages_live() -> None:
    # γE near ½ at the start: e^{-γE} neither dead nor flat.
    model = _network("kerdeq_cifar_5m", channels=32, mids=(32, 32, 32), hidden=32)
    given = model.stem.train()(images(model, batch=16)).detach()
    layer = model.branches.branches[0]
    with torch.no_grad():
        energy = layer.patch.split(layer.U(given)) @ layer.hidden_weight()
    mean = 0.5 * float(energy.square().sum(-1).mean())
    assert 0.2 < mean < 1.2


def test_the_start_of_kerdeq_does_not_undo_its_gamma() -> None:
    # Behind a norm the network with 4γ and U/2 is the one with γ and U, up to the scale of z.
    weights = []
    for gamma in (0.5, 2.0):
        torch.manual_seed(0)
        model = _network("kerdeq_cifar_5m", gamma=eq.FixedGamma(gamma))
        weights.append(model.branches.branches[0].U.weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=0.0, atol=0.0)


def test_balanced_branches_scale_by_the_root_of_their_entries() -> None:
    torch.manual_seed(0)
    layers = [eq.nn.SigmoidEq(4, 6, kernel_size=3, radius=0.5) for _ in range(2)]
    branches = BalancedBranches(layers, [8, 4], output=4)
    states = [torch.randn(3, 4, 8, 8), torch.randn(3, 4, 4, 4)]
    expected = 0.5 * (
        math.sqrt(4 * 64) * F.avg_pool2d(states[0], 2) + math.sqrt(4 * 16) * states[1]
    )
    torch.testing.assert_close(branches.merge(states), expected)


def test_balanced_output_error_bounds_the_true_error() -> None:
    torch.manual_seed(0)
    layers = [
        eq.nn.SigmoidEq(
            4,
            6,
            kernel_size=3,
            radius=0.75,
            constraint=eq.nn.NormBounded(bound=0.7),
            solver=eq.Picard(rtol=0.0, atol=0.0, max_steps=steps),
        )
        for steps in (2, 4)
    ]
    branches = BalancedBranches(layers, [8, 4], output=4).eval()
    # Weights on their bound, so that two steps are not enough.
    with torch.no_grad():
        for layer in layers:
            layer.W.weight = 5.0 * layer.W.weight
    x = torch.randn(6, 4, 8, 8)
    with torch.no_grad():
        short = branches(x)
        bound = branches.output_error(branches.certify(x))
        for layer in layers:
            layer.solver = eq.ProximalGradient(rtol=1e-7, max_steps=2000)
        exact = branches(x)
    error = (short - exact).flatten(1).norm(dim=1).double()
    assert float(error.min()) > 1e-4
    assert bool((error <= bound).all())
    assert bool((bound < 1e3 * error).all())


def test_the_explicit_twin_by_hand() -> None:
    model = _network("explicit_cifar_5m")
    assert not eq.nn.equilibrium_layers(model)
    chain, x = model.branches, torch.rand(2, model.stem[0].out_channels, *model.branches.scales[0])
    answers: list[torch.Tensor] = []
    for pair, norm, (side, _) in zip(chain.branches, chain.norms, chain.scales, strict=True):
        earlier = [F.interpolate(a, side) if len(a[0, 0]) < side else a for a in answers]
        seen = sum(F.adaptive_avg_pool2d(a, side) for a in [x, *earlier])
        inner = pair.norm(F.conv2d(seen.relu(), pair.first.weight, padding=1)).relu()
        answers.append(norm(F.conv2d(inner, pair.second.weight, padding=1)))
    side = chain.output[0]
    moved = [F.interpolate(a, side) if len(a[0, 0]) < side else a for a in answers]
    expected = sum(F.adaptive_avg_pool2d(a, side) for a in moved) / len(moved)
    torch.testing.assert_close(chain(x), expected)


def test_bad_layouts() -> None:
    with pytest.raises(ValueError, match=r"give 2 and 6 branches"):
        models.create("geq_cifar_5m", mids=(8, 8))
    with pytest.raises(ValueError, match=r"patches of 8 channels do not divide"):
        models.create("geq_cifar_5m", channels=8, mids=(12, 8, 8), scales=(1, 2, 2), image_size=8)
