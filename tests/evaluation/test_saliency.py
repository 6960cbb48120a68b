"""GradCAM: the gradient is the implicit one, checked against dense algebra by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation import gradcam, save_gradcam
from equilibria.evaluation.saliency import gradcam_layer
from equilibria.nn.monotone import MonotoneDEQ
from tests.evaluation.standins import Wired, random_data, tiny_geq

TIGHT = eq.Auto(rtol=1e-13, max_steps=2000)


def by_hand(model: nn.Sequential, x: Tensor, classes: Tensor) -> Tensor:
    """GradCAM at the stem: ∂logit/∂A by ∂z*/∂A = (I − ∂T/∂z)⁻¹ ∂T/∂A, dense, image by image."""
    stem, layer, head = model[0], model[1], model[2:]
    maps = []
    for image, chosen in zip(x, classes, strict=True):
        features = stem(image[None]).detach()
        z = layer.solve(features, solver=TIGHT).value.detach()

        def step(z: Tensor, a: Tensor) -> Tensor:
            out: Tensor = layer.problem(a).step(z)
            return out

        in_z, in_a = torch.autograd.functional.jacobian(step, (z, features))
        size = z.numel()
        in_z, in_a = in_z.reshape(size, size), in_a.reshape(size, features.numel())
        leaf = z.clone().requires_grad_()
        (outer,) = torch.autograd.grad(head(leaf)[0, chosen], leaf)
        through = torch.linalg.solve(torch.eye(size).double() - in_z, in_a)
        slope = (outer.flatten() @ through).reshape(features.shape)
        weight = slope.mean((2, 3), keepdim=True)
        maps.append(torch.relu((weight * features).sum(1)))
    return torch.cat(maps).detach()


def scaled(maps: Tensor) -> Tensor:
    largest = maps.amax((1, 2), keepdim=True)
    assert float(largest.min()) > 0
    return maps / largest


def test_the_gradient_is_the_implicit_one() -> None:
    model = tiny_geq(solver=TIGHT).double()
    with torch.no_grad():
        model[1].U.weight *= 3  # so that the equilibrium matters
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    classes = torch.tensor([0, 2, 1])
    found = gradcam(model, x, classes, "0", adjoint=eq.Implicit(solver=eq.GMRES(rtol=1e-12)))
    expected = scaled(by_hand(model, x, classes))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    # And it differs from the gradient of one step, which an adjoint of training might give.
    rough = gradcam(model, x, classes, "0", adjoint=eq.OneStep())
    assert float((rough - expected).abs().max()) > 1e-2


def test_at_the_equilibrium_layer_itself() -> None:
    model = tiny_geq(solver=TIGHT).double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    z = model[:2](x).detach().requires_grad_()
    logits = model[2:](z)
    classes = logits.argmax(1)
    (slope,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), z)
    expected = torch.relu((slope.mean((2, 3), keepdim=True) * z).sum(1)).detach()
    for layer in (None, "1", model[1]):
        found = gradcam(model, x, layer=layer)
        torch.testing.assert_close(found, scaled(expected), rtol=1e-8, atol=1e-12)


def test_a_layer_whose_output_is_changed_in_place() -> None:
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    x, classes = torch.randn(2, 3, 8, 8), torch.tensor([1, 3])
    maps = parts[0](x).detach().requires_grad_()
    logits = parts[3](maps.relu().mean((2, 3)))
    (slope,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), maps)
    expected = torch.relu((slope.mean((2, 3), keepdim=True) * maps).sum(1, keepdim=True)).detach()
    expected = nn.functional.interpolate(expected, (8, 8), mode="bilinear").squeeze(1)
    model = nn.Sequential(parts[0], nn.ReLU(inplace=True), *parts[1:])
    torch.testing.assert_close(gradcam(model, x, classes), scaled(expected))


def test_the_layer_that_is_taken() -> None:
    x = torch.randn(1, 1, 8, 8)
    assert gradcam_layer(tiny_geq(), x) == "1"
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten())
    assert gradcam_layer(plain, x) == "2"
    with pytest.raises(ValueError, match="name a layer"):
        gradcam_layer(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), x)


def test_a_layer_that_does_not_see_the_image() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(1, 2, 3, padding=1), torch.randn(2, 1, 8, 8)
    nn.init.uniform_(conv.weight, 0.1, 1.0)
    model = Wired(lambda x, conv: conv(torch.ones_like(x)).sum((2, 3)) + x.mean(), conv)
    expected = conv(torch.ones_like(x))[:, 1].relu().detach()
    torch.testing.assert_close(gradcam(model, x, 1), scaled(expected))


@pytest.mark.parametrize("read", [(1,), (0, 1)])
def test_tiers_are_added(read: tuple[int, ...]) -> None:
    """A layer with two maps, of which the head reads the second alone, or both."""
    torch.manual_seed(0)
    layer, x = MonotoneDEQ((2, 3), in_channels=1, kernel_size=3), torch.randn(2, 1, 8, 8)
    head = nn.Linear(sum(layer(x)[k].shape[1] for k in read), 4)
    nn.init.uniform_(head.weight, 0.1, 1.0)

    def forward(x: Tensor, layer: nn.Module, head: nn.Module) -> Tensor:
        tiers = layer(x)
        out: Tensor = head(torch.cat([tiers[k].mean((2, 3)) for k in read], 1))
        return out

    found = gradcam(Wired(forward, layer, head), x, 1)
    tiers = [layer(x)[k].detach() for k in read]
    weights = head.weight[1].detach().split([z.shape[1] for z in tiers])
    expected = torch.zeros(2, 8, 8)
    for weight, z in zip(weights, tiers, strict=True):
        part = torch.relu((weight[:, None, None] / z[0, 0].numel() * z).sum(1, keepdim=True))
        expected += nn.functional.interpolate(part, (8, 8), mode="bilinear")[:, 0]
    torch.testing.assert_close(found, scaled(expected), rtol=1e-3, atol=1e-6)


def test_the_model_is_left_as_it_is() -> None:
    model = tiny_geq().train()
    gradcam(model, torch.randn(2, 1, 8, 8))
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert isinstance(model[1].adjoint, eq.Implicit)
    assert not any(m._forward_hooks for m in model.modules())


MODEL, X = tiny_geq(), torch.randn(2, 1, 8, 8)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"layer": "nowhere"}, r"layer='nowhere' is no module .* there are: 0, 1"),
        ({"layer": nn.Conv2d(1, 1, 1)}, "layer=Conv2d is no module of Sequential"),
        ({"layer": MODEL[1].U}, "lies inside an equilibrium"),
        ({"layer": "3"}, "'3' gives no maps"),
        ({"target": 3}, "the classes 0 to 2"),
        ({"target": torch.tensor([0, 1, 2])}, "one for each of the 2 images"),
        ({"x": X[0]}, r"\[B, C, H, W\], got shape \(1, 8, 8\)"),
        ({"model": nn.Conv2d(1, 2, 1)}, r"logits \[B, K\]"),
    ],
)
def test_wrong_input(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        gradcam(**{"model": MODEL, "x": X, **given})


def test_the_picture(tmp_path: Path) -> None:
    path = save_gradcam(tiny_geq(), random_data(5), tmp_path / "new" / "cam.png", index=range(9))
    with Image.open(path) as picture:
        assert picture.size[0] > picture.size[1] > 300
    with pytest.raises(ValueError, match="names no image"):
        save_gradcam(tiny_geq(), random_data(5), tmp_path / "cam.png", index=[7])
