"""certify of a whole network: its Lipschitz constant, and radii that no attack gets under."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equilibria as eq
from equilibria.certify import Enclosed
from equilibria.certify.monotone_layer import entrywise

IMAGE = (3, 8, 8)


class Skip(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Upsample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


class Sides(nn.Module):
    """Two paths side by side, a slice of one and padding around it."""

    def forward(self, x: Tensor) -> Tensor:
        inner = F.pad(x[:, :, 1:-1, 1:-1], [1, 1, 1, 1])
        return torch.cat([0.5 * x, inner / 3.0], 1)


def normalized(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for t in (norm.weight, norm.bias, norm.running_mean):
            t.copy_(torch.randn(channels))
        norm.running_var.copy_(torch.rand(channels) + 0.1)
    return norm


def head(features: int, classes: int = 4) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(features, classes)]


def geq(bound: float = 0.9) -> nn.Module:
    layer: nn.Module = eq.nn.GEQ(
        4,
        8,
        in_channels=3,
        patch=eq.Patches(channels=4, size=2),
        hidden=8,
        gamma=0.5,
        constraint=eq.nn.NormBounded(bound=bound),
    )
    return layer


class Louder(eq.nn.OptEq):
    """A layer whose output is more than its equilibrium."""

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        return 3.0 * super().forward(x, z0)


class Last(nn.Module):
    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        return z[-1]


NETWORKS: dict[str, Any] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        normalized(6),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Dropout2d(0.5),
        *head(32),
    ),
    "skips": lambda: nn.Sequential(
        Skip(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh())),
        Sides(),
        nn.AvgPool2d(3, 1),
        Upsample(),
        nn.PixelUnshuffle(2),
        *head(96),
    ),
    "GEQ": lambda: nn.Sequential(geq(), normalized(4), nn.ReLU(), *head(16)),
    "GEQ beyond contraction": lambda: nn.Sequential(geq(1.3), *head(16)),
    "OptEq": lambda: nn.Sequential(eq.nn.OptEq(5, 6, in_channels=3, kernel_size=3), *head(20)),
    "monotone": lambda: nn.Sequential(
        nn.Flatten(), eq.nn.MonotoneDEQ(10, in_channels=192, m=2.0), nn.Linear(10, 4)
    ),
    "tiers": lambda: nn.Sequential(
        eq.nn.MonotoneDEQ((3, 4), in_channels=3, kernel_size=3), Last(), *head(16)
    ),
    "deep OptEq": lambda: nn.Sequential(
        nn.Flatten(),
        eq.nn.DeepOptEq(192, (8,), alpha=0.8, constraint=eq.nn.NormBounded(bound=0.8)),
        nn.Linear(192, 4),
    ),
    "louder": lambda: nn.Sequential(
        nn.Flatten(), Louder(10, 12, in_channels=192), nn.Linear(10, 4)
    ),
    "envelope": lambda: nn.Sequential(eq.nn.Envelope(geq()), *head(12)),
    "branches": lambda: nn.Sequential(eq.nn.MultiBranch([geq(), geq()], scales=(8, 4)), *head(16)),
    "chain": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1),
        eq.nn.MultiBranch(
            [
                eq.nn.GEQ(4, 8, patch=eq.Patches(channels=4, size=2), gamma=0.5, hidden=8)
                for _ in range(2)
            ],
            scales=(8, 4),
            chain=True,
        ),
        *head(16),
    ),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(len(name))
    model = NETWORKS[name]().eval()
    return model, torch.randn(4, *IMAGE)


def converged(model: nn.Module) -> nn.Module:
    """The network in float64 with every layer solved tightly."""
    network = copy.deepcopy(model).double()
    for module in network.modules():
        if hasattr(module, "solver") and not hasattr(module, "branches"):
            module.solver = eq.Anderson(rtol=1e-10, atol=0.0, max_steps=2000)
            if isinstance(module, eq.nn.MonotoneDEQ):
                module.solver = eq.PeacemanRachford(rtol=1e-10, atol=0.0, max_steps=5000)
    return network


@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, "2") for name in NETWORKS]
    + [
        (name, "inf")
        for name in ("linear", "convolutions", "skips", "GEQ", "monotone", "tiers", "envelope")
    ],
)
def test_no_attack_within_the_radius_changes_the_label(name: str, norm: str) -> None:
    """Gradient descent on every margin, on the sphere of the radius; and no slope exceeds L."""
    model, x = made(name)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    certificate = eq.certify(model.train(), x, norm=norm)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    model.eval()
    assert (certificate.radius > 0).all()
    assert not certificate.notes
    network = converged(model)
    wide = x.double()
    logits = network(wide)
    torch.testing.assert_close(logits.detach(), certificate.logits, rtol=1e-6, atol=1e-6)
    assert torch.equal(certificate.label, logits.argmax(1))
    jacobian = torch.autograd.functional.jacobian(network, wide[:1]).flatten(2)[0, :, :]
    steepest = float(torch.linalg.matrix_norm(jacobian.flatten(1), 2))
    if norm == "inf":  # at corners of the cube, those of the largest rows among them
        corners = torch.cat([jacobian.flatten(1), torch.randn(64, 192, dtype=torch.float64)]).sign()
        steepest = float((jacobian.flatten(1) @ corners.T).norm(dim=0).max())
    assert steepest <= certificate.lipschitz * (1 + 1e-6)
    assert certificate.lipschitz < 1e4 * max(steepest, 1e-3)  # it says something
    own = F.one_hot(certificate.label, 4).bool()
    step = torch.randn_like(wide)
    for _ in range(6):
        length = torch.linalg.vector_norm(step.flatten(1), float(norm), 1).clamp_min(1e-12)
        step = step * (certificate.radius / length).view(-1, 1, 1, 1)
        moved = (wide + step).requires_grad_()
        out = network(moved)
        margin = out[own] - out.masked_fill(own, -math.inf).amax(1)
        assert (margin > -1e-9).all()
        (slope,) = torch.autograd.grad(margin.sum(), moved)
        way = slope.sign() if norm == "inf" else F.normalize(slope.flatten(1)).view_as(step)
        step = step - 10 * certificate.radius.view(-1, 1, 1, 1) * way


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::equilibria.ConvergenceWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_on_the_gpu(name: str) -> None:
    model, x = made(name)
    here = eq.certify(model, x)
    there = eq.certify(model.cuda(), x.cuda())
    assert torch.equal(there.label.cpu(), here.label)
    for found, wanted in ((there.radius, here.radius), (there.logits, here.logits)):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-6)
    assert there.lipschitz == pytest.approx(here.lipschitz, rel=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: eq.nn.GEQ(6, 7, in_channels=8),
        lambda: eq.nn.GEQ(6, 7, in_channels=8, gamma=0.3),
        lambda: eq.nn.OptEq(6, 7, in_channels=8),
        lambda: eq.nn.MonotoneDEQ(6, in_channels=8, m=1.0),
        lambda: eq.nn.DeepOptEq(
            6, (5, 7), in_channels=8, constraint=eq.nn.NormBounded(bound=0.8), alpha=0.9
        ),
    ],
)
def test_the_rounding_of_the_features_is_counted(layer: Any) -> None:
    """Two inputs with the same Ux: of the large one float64 loses most digits."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Linear(6, 3)).double()
    for name, weight in model.named_parameters():
        if "U.weight" in name:
            weight.data[:, 4:] = weight.data[:, :4]
    small = torch.randint(-8, 9, (5, 4), dtype=torch.float64) / 8
    large = 2.0**40 * torch.randint(-8, 9, (5, 4), dtype=torch.float64)
    first = eq.certify(model, torch.cat([small, 0 * small], 1))
    second = eq.certify(model, torch.cat([small + large, -large], 1))
    apart = (first.logits - second.logits).norm(dim=1)
    assert (apart > 1e-9).any()
    assert (apart <= first.error + second.error).all()
    assert second.error.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 2.0**-560, 2.0**500])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_a_linear_network_has_the_exact_radius(norm: str, scale: float) -> None:
    """min_j (l_y − l_j)/‖V_y − V_j‖ in the dual norm; just outside it j is reached.

    So at every scale of the logits, also where squares of weights underflow.
    """
    model, x = made("linear")
    model = model.double()
    weight, bias = (p.detach().clone() for p in model.parameters())
    for p in model.parameters():
        p.data.mul_(scale)
    certificate = eq.certify(model, x, norm=norm)
    logits = x.flatten(1).double() @ weight.T + bias
    for b, (y, nearest) in enumerate(zip(certificate.label, certificate.nearest, strict=True)):
        ways = weight - weight[y]
        sizes = ways.norm(dim=1) if norm == "2" else ways.abs().sum(1)
        radii = (logits[b, y] - logits[b]) / sizes  # NaN at y itself
        radius = float(radii[~radii.isnan()].min())
        assert float(certificate.radius[b]) == pytest.approx(radius, rel=1e-8)
        assert float(radii[nearest]) == radius
        way = ways[nearest] / sizes[nearest] if norm == "2" else ways[nearest].sign()
        outside = x[b].flatten().double() + 1.001 * radius * way
        assert int((outside @ weight.T + bias).argmax()) == int(nearest)


@pytest.mark.parametrize(
    ("size", "constrained"), [(0.0, False), (0.0, True), (0.15, False), (1.0, False)]
)
def test_entries_of_a_monotone_layer_move_less_than_their_bounds(
    size: float, constrained: bool
) -> None:
    """Against steps of ascent in float64, for a W that is diagonal, dominated by it, and not so;
    the magnitudes of U are those of the weight that a constraint makes."""
    torch.manual_seed(0)
    layer = eq.nn.MonotoneDEQ(12, in_channels=9, m=1.0, bias=False).double().eval()
    with torch.no_grad():
        layer.W.A.mul_(size)
        layer.W.B.mul_(size)
    if constrained:
        nn.utils.parametrizations.weight_norm(layer.U)
        layer.U.parametrizations.weight.original0.data.mul_(2.0)
    bound = torch.rand(1, 9, dtype=torch.float64)
    total, entries = entrywise(layer, torch.zeros(1, 9, dtype=torch.float64), bound)
    assert (entries is None) == (size == 1.0)
    x = torch.randn(256, 9, dtype=torch.float64)
    step = bound * torch.randn(256, 9, dtype=torch.float64).sign()
    for _ in range(6):
        step.requires_grad_()
        moved = layer(x + step) - layer(x)
        assert (moved.norm(dim=1) <= total).all()
        if entries is not None:
            assert (moved.abs() <= entries + 1e-9).all()
        (slope,) = torch.autograd.grad(moved.square().sum(), step)
        step = bound * slope.sign()
    if size == 0.0:  # W = 0: |Δz| ≤ |U||Δx|
        assert entries is not None
        torch.testing.assert_close(entries, bound @ layer.U.weight.detach().abs().T)


def test_the_constant_of_a_monotone_network() -> None:
    """‖U‖/m times the norms around it (Pabbaraju, Winston and Kolter), m that of these weights."""
    model, x = made("monotone")
    layer: Any = model[1]
    a = layer.W.A.detach().double()
    m = 2.0 + float(torch.linalg.eigvalsh(a.T @ a)[0])
    u = torch.linalg.matrix_norm(layer.U.weight.detach().double(), 2)
    v = torch.linalg.matrix_norm(model[2].weight.detach().double(), 2)
    assert eq.certify(model, x).lipschitz == pytest.approx(float(u * v / m), rel=1e-6)


def test_what_has_no_constant_has_the_radius_zero_and_says_why() -> None:
    _, x = made("linear")
    flat = [nn.Flatten(), nn.Linear(192, 4)]
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)]
    for module, name in (
        (nn.GroupNorm(1, 3), "group_norm"),
        (nn.Softmax(1), "softmax"),
        (nn.AvgPool2d(2, divisor_override=1), "avg_pool2d"),  # a sum
        (nn.MaxPool2d(3, 2, dilation=2), "max_pool2d"),  # an input is seen more often
    ):
        network = nn.Sequential(module, *(pooled if "pool" in name else flat)).eval()
        certificate = eq.certify(network, x)
        assert (certificate.radius == 0).all()
        assert math.isinf(certificate.lipschitz)
        assert any(name in note for note in certificate.notes)
        assert name in str(certificate)
    custom = eq.nn.OptEq(4, 4, in_channels=192, prior=eq.CustomPrior(torch.relu))
    certificate = eq.certify(nn.Sequential(nn.Flatten(), custom, nn.Linear(4, 4)).eval(), x)
    assert (certificate.radius == 0).all()
    assert any("estimates" in note for note in certificate.notes)
    patch = eq.Patches(channels=3, size=2)
    layer = eq.nn.GEQ(4, 6, in_channels=3, patch=patch, gamma=eq.MinPatchEnergy(0.2))
    certificate = eq.certify(nn.Sequential(layer, *head(16)).eval(), x)
    assert (certificate.radius == 0).all()
    assert any("none exists" in note for note in certificate.notes)


class Enclosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x

    def enclose(self, x: Tensor) -> Enclosed:
        return Enclosed(2.0 * x, 2.0, 0.0 * x[:, 0])


class Tripled(Enclosing):
    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


def test_what_a_module_proves_of_its_forward_is_not_that_of_a_subclass() -> None:
    head = nn.Linear(4, 3)
    norm = float(torch.linalg.matrix_norm(head.weight.detach().double(), 2))
    patched = Enclosing()
    patched.forward = lambda x: 6.0 * x  # type: ignore[method-assign]
    for module, factor in ((Enclosing(), 2.0), (Tripled(), 6.0), (patched, 6.0)):
        found = eq.certify(nn.Sequential(module, head), torch.randn(5, 4))
        assert found.lipschitz == pytest.approx(factor * norm, rel=1e-9)


def test_calls_that_are_refused() -> None:
    with pytest.raises(TypeError, match="logits"):
        eq.certify(nn.Conv2d(3, 4, 1), torch.randn(4, *IMAGE))
    with pytest.raises(TypeError, match="needs the input"):
        eq.certify(nn.Linear(3, 4))
    with pytest.raises(ValueError, match="norm='1': expected"):
        eq.certify(nn.Linear(3, 4), torch.zeros(1, 3), norm="1")
    with pytest.raises(ValueError, match="what certify proves of a layer"):
        eq.certify(eq.nn.MonotoneDEQ(4), torch.zeros(1, 4), norm="inf")
