"""Networks for certified radii: their layers are 1-Lipschitz, and pooling keeps the norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equilibria as eq
from equilibria.models.certified import ConvexPotential, Haar


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
def test_pooling_keeps_the_norm(channels: int, pixels: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(2, channels, 2 * pixels, 2 * pixels, generator=source, dtype=torch.float64)
    y = Haar()(x)
    assert y.shape == (2, 4 * channels, pixels, pixels)
    torch.testing.assert_close(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1))
    torch.testing.assert_close(y[:, :channels], 2.0 * torch.nn.functional.avg_pool2d(x, 2))


@pytest.mark.parametrize("seed", range(3))
def test_the_convex_potential_layer_is_as_steep_as_it_says(seed: int) -> None:
    torch.manual_seed(seed)
    layer = ConvexPotential(3).double().eval()
    with torch.no_grad():
        layer.conv.weight = layer.conv.weight * 10.0  # onto the bound
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    found = layer.enclose(x)
    jacobian = torch.autograd.functional.jacobian(
        lambda v: layer(v.view_as(x)).flatten(), x.flatten()
    )
    largest = float(torch.linalg.svdvals(jacobian)[0])
    assert 0.5 < largest <= found.lipschitz <= 1.0 + 1e-12
    off = (layer(x) - found.value).detach().norm()
    assert float(off) <= float(found.error) < 1e-9


@pytest.mark.parametrize("kind", ["geq", "opteq", "potential", "bounded"])
def test_no_label_changes_within_its_radius(kind: str) -> None:
    """Gradient descent on the margin, from points on the sphere of the proven radius."""
    torch.manual_seed(0)
    model = eq.models.create(f"{kind}_certified_digits", widths=(8, 16), depth=1).double().eval()
    with torch.no_grad():
        model.head.bias.zero_()
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    found = eq.certify(model, x)
    assert bool((found.radius > 0).all())
    assert found.lipschitz <= 1.001 * float(torch.linalg.matrix_norm(model.head.weight.detach(), 2))
    assert not found.notes
    radius = found.radius.view(-1, 1, 1, 1)
    moved = torch.randn_like(x)
    for _ in range(10):
        moved = (radius * moved / moved.flatten(1).norm(dim=1).view_as(radius)).requires_grad_()
        logits = model(x + moved)
        label = found.label.view(-1, 1)
        margin = logits.gather(1, label) - logits.gather(1, found.nearest.view(-1, 1))
        assert bool((logits.argmax(1) == found.label).all())
        moved = (moved - 10.0 * torch.autograd.grad(margin.sum(), moved)[0]).detach()


def test_a_file_of_another_pooling_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights would load, into a network with other answers."""
    model = eq.models.create("potential_certified_digits")
    eq.models.save(model, tmp_path / "now.safetensors")
    eq.models.load(tmp_path / "now.safetensors")
    monkeypatch.setattr("equilibria.models.weights.__version__", "0.2.0")
    eq.models.save(model, tmp_path / "old.safetensors")
    with pytest.raises(eq.models.ModelFileError, match=r"version 0\.2\.0.*train it again"):
        eq.models.load(tmp_path / "old.safetensors")
