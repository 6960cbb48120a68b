"""Certified accuracy beside an attack: no image is lost inside its radius, or it is an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import equilibria as eq
from equilibria.data import ImageData
from equilibria.evaluation import (
    CertifiedAccuracy,
    attacked_accuracy,
    certified_accuracy,
    figures,
)


@pytest.fixture(scope="module")
def data() -> ImageData:
    return eq.data.load("digits", "test").subset(torch.arange(60))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    train = eq.data.load("digits", "train")
    layer = eq.nn.MonotoneDEQ(20, in_channels=64, m=5.0)
    network = nn.Sequential(nn.Flatten(), layer, nn.Linear(20, 10))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    x = train.normalize(train.images[:])
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(network(x), train.targets).backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="module", params=["2", "inf"])
def found(request: pytest.FixtureRequest, model: nn.Module, data: ImageData) -> CertifiedAccuracy:
    return certified_accuracy(model, data, norm=request.param)


def test_the_attack_stays_above_what_is_proven(
    found: CertifiedAccuracy, model: nn.Module, data: ImageData
) -> None:
    radius = 0.25 if found.norm == "2" else 0.03
    how: dict[str, Any] = {"norm": found.norm, "steps": 10, "batch_size": 25}
    held = attacked_accuracy(model, data, radius, certified=found, **how)
    assert found.accuracy > held >= found.at(radius) > 0.0
    assert held == attacked_accuracy(model, data, radius, **how)


def test_the_curve_names_its_norm(
    found: CertifiedAccuracy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: drawn.append(figure))
    found.save(tmp_path / "curve.png")
    label = drawn[0].axes[0].get_xlabel()
    assert label == f"radius ({'ℓ2' if found.norm == '2' else 'ℓ∞'}, pixels from 0 to 1)"


def test_without_a_certificate_no_attacked_image_is_kept(
    model: nn.Module, data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large data set would fill the device; here there is no image to keep."""

    def lost(model: Any, data: Any, pixels: Any, y: torch.Tensor, *_: Any) -> Any:
        return None, torch.zeros_like(y, dtype=torch.bool)

    monkeypatch.setitem(attacked_accuracy.__globals__, "_attack", lost)
    assert attacked_accuracy(model, data, 0.1) == 0.0


def test_an_image_lost_inside_its_radius_is_an_error(
    found: CertifiedAccuracy, model: nn.Module, data: ImageData
) -> None:
    """A certificate that claims too much is refuted, image by image."""
    forged = dataclasses.replace(found, radius=found.radius * 100)
    radius = 0.5 if found.norm == "2" else 0.08
    how: dict[str, Any] = {"norm": found.norm, "steps": 5, "batch_size": 25}
    with pytest.raises(RuntimeError, match=r"is wrong: inside the proven radius .* of 60 images"):
        attacked_accuracy(model, data, radius, certified=forged, **how)


def test_a_label_lost_by_an_early_stop_is_no_error_of_the_certificate(
    model: nn.Module, data: ImageData
) -> None:
    """The certificate is of the equilibrium; one step of the solver may have another label."""
    stopped = nn.Sequential(*model)
    layer: eq.nn.MonotoneDEQ = stopped[1]  # type: ignore[assignment]
    solver = layer.solver
    try:
        layer.solver = eq.ForwardBackward(alpha=0.01, rtol=0.0, atol=0.0, max_steps=1)
        found = certified_accuracy(stopped, data)
        with pytest.warns(UserWarning, match="solves of the model stop early"):
            attacked_accuracy(stopped, data, 0.001, steps=1, restarts=1, certified=found)
    finally:
        layer.solver = solver


def test_a_norm_that_is_none_is_refused(model: nn.Module, data: ImageData) -> None:
    for call in (
        lambda: certified_accuracy(model, data, norm="1"),
        lambda: attacked_accuracy(model, data, 0.1, norm="l2"),
    ):
        with pytest.raises(ValueError, match='expected "2" or "inf"'):
            call()


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_radius_is_around_the_image_and_not_its_rounding(
    data: ImageData, dtype: torch.dtype, norm: str
) -> None:
    """Against the exact radius of a linear network; its bias puts images next to the boundary."""
    images = data.images[:].double() / 255.0
    x = ((images - data.mean[0]) / data.std[0]).flatten(1)
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(dtype)
        weight, bias = (p.detach().double() for p in model.parameters())
        logits = x @ weight.T + bias
        label = logits.argmax(1, keepdim=True)
        apart = weight[label] - weight
        size = apart.norm(dim=2) if norm == "2" else apart.abs().sum(2)
        exact = ((logits.gather(1, label) - logits) / size).nan_to_num(torch.inf).amin(1)
        found = certified_accuracy(model, data, norm=norm)
        assert (found.radius <= exact * data.std[0]).all()
        assert found.radius.median() > 0.0
