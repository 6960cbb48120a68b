"""The weights in results/weights: small, loadable, and as their card says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import equilibria as eq
from equilibria import models

FOLDER = Path(__file__).parents[2] / "results" / "weights"
FILES = sorted(FOLDER.glob("*.safetensors"))


def test_they_have_twelve_megabytes_in_all() -> None:
    assert FILES
    assert sum(path.stat().st_size for path in FILES) <= 12_000_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_the_network_of_its_card(path: Path) -> None:
    model = models.load(path)
    assert model.config.name == path.stem
    card = (FOLDER / "README.md").read_text("utf-8")
    assert f"{models.count_parameters(model):,}" in card.replace("\n", " ")
    assert f"{path.stat().st_size / 1e6:.1f} MB" in card.replace("\n", " ")
    assert len(model.extra["classes"]) == model.config.num_classes
    assert len(model.extra["mean"]) == len(model.extra["std"]) == model.in_channels
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_plain_pixels_work_through_preprocess(path: Path) -> None:
    """(pixels − mean)/std by hand, and what happens without it."""
    model = models.load(path)
    mean, std = (torch.tensor(model.extra[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    rough = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(rough, size=(32, 32), mode="bicubic").clamp(0, 1)
    with torch.no_grad():
        wanted = model((images - mean) / std).softmax(1)
        torch.testing.assert_close(model(model.preprocess(images)).softmax(1), wanted)
        for answer, p in zip(model.predict(images), wanted, strict=True):
            assert answer.label == model.classes[int(p.argmax())]
            assert answer.confidence == pytest.approx(float(p.max()), abs=1e-4)
        with pytest.warns(models.InputWarning, match=r"plain pixels \(from 0 to 1\)"):
            other = model(images).softmax(1)
    assert float((other - wanted).abs().max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_layer_has_one_equilibrium(path: Path) -> None:
    """μ < 1.4969 by a proven bound on the weights of the file, whatever the input is."""
    model = models.load(path)
    torch.manual_seed(0)
    for name, layer in eq.nn.equilibrium_layers(model).items():
        x = torch.randn(1, layer.in_channels, 8, 8)
        mu = float(layer.problem(x).coupling.mu_upper())
        assert 0.1 < mu < 1.4969, name
