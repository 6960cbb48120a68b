"""Explanations: bounds around scipy's minimum, gates by hand, a page without empty parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize

import equilibria as eq
from equilibria import evaluation
from equilibria.data.parquet import ParquetFiles
from equilibria.evaluation import Explanation
from equilibria.models import Prediction
from tests.cli.running import Cli
from tests.data.made_files import write_parquet


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    digits = eq.data.load("digits", "test")
    found = [folder / "a <b>.png", folder / "plain.png"]
    Image.fromarray(digits.images[1, 0].numpy()).save(found[0])
    Image.new("L", (8, 8), 200).save(found[1])
    return found


def network(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = eq.models.create(name, **options).eval()
    model.extra = {"mean": [0.3], "std": [0.4]}
    return model


def explained(model: Any, files: list[Path], **options: Any) -> list[Explanation]:
    answers = evaluation.predict_files(model, files, top=3)
    return evaluation.explain(model, answers, **options)


@pytest.mark.filterwarnings("ignore::equilibria.models.InputWarning")
def test_a_row_of_a_parquet_file_is_explained_as_its_picture(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.parquet"
    write_parquet(rows, {"image": [files[1].read_bytes(), files[0].read_bytes()]})
    model = network("geq_digits", widths=[4], depth=1, hidden=8)
    (expected,) = explained(model, files[:1], certify=False)
    answers, reads, column = evaluation.predict_files(model, [rows]), [], ParquetFiles.column
    monkeypatch.setattr(ParquetFiles, "column", lambda *a: reads.append(a) or column(*a))
    found = evaluation.explain(model, answers, certify=False)
    assert len(reads) == 1  # of the file, not of each of its rows
    assert [each.prediction.file.name for each in found] == [
        f"rows.parquet row {i}" for i in (0, 1)
    ]
    assert torch.equal(found[1].pixels, expected.pixels)
    residuals = [one.layers[0].residual for one in (found[1], expected)]
    assert residuals[0] == pytest.approx(residuals[1], rel=1e-2, abs=1e-6)


@pytest.mark.filterwarnings("ignore::equilibria.models.InputWarning")
def test_the_minimum_that_scipy_finds_is_in_every_band(files: list[Path]) -> None:
    model = network("geq_digits", widths=[4, 8], hidden=8)
    found = explained(model, files[:1])[0]
    layer: Any = model.stages[0].layer
    given: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    x = model.preprocess(Image.open(files[0]))
    model(x)
    hook.remove()
    problem = layer.problem(given[0].detach()).in_double()

    def smooth(z: np.ndarray) -> tuple[float, np.ndarray]:
        state = torch.tensor(z).view(1, 4, 8, 8).requires_grad_()
        value = problem.objective(state).sum()
        (slope,) = torch.autograd.grad(value, state)
        return float(value.detach()), slope.flatten().numpy()

    size = 4 * 8 * 8
    best = minimize(smooth, np.ones(size), jac=True, bounds=[(0, None)] * size, tol=1e-14)
    story = found.layers[0]
    assert story.kind is not None
    assert story.kind.means_unique
    assert len(story.objective) == len(story.least) == len(story.bound) == len(story.residual)
    for low, high in zip(story.least, story.objective, strict=True):
        assert low - 1e-8 <= best.fun <= high + 1e-8
    assert story.objective[0] > best.fun + 1e-3
    assert story.objective[-1] - best.fun < 1e-6
    assert story.length == pytest.approx(float(np.linalg.norm(best.x)), rel=1e-3)
    assert story.residual[0] > 100 * story.residual[-1]


def test_the_gate_is_the_mean_over_groups_of_channels(files: list[Path]) -> None:
    model = network("geq_digits", widths=[8, 16], hidden=8)
    found = explained(model, files[:1], certify=False)[0]
    layer: Any = model.stages[0].layer
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = layer.register_forward_hook(lambda _, x, z: given.append((x[0], z)))
    with torch.no_grad():
        model(model.preprocess(Image.open(files[0])))
    hook.remove()
    x, z = given[0]
    with torch.no_grad():
        r = torch.nn.functional.unfold(layer.U(x) - layer.W(z), 2, stride=2)
        passed = r.view(2, 4 * layer.patch.channels, 16).mT @ layer.W_h.weight
        gamma = float(layer.problem(x).coupling.gamma)
        mean = torch.exp(-gamma * passed.square().sum(2)).mean(0).view(4, 4)
    gate = found.layers[0].gate
    assert gate is not None
    torch.testing.assert_close(gate, mean, rtol=1e-4, atol=1e-5)
    assert found.layers[0].bound == []
    assert found.layers[0].kind is None


@pytest.mark.filterwarnings("ignore::equilibria.models.InputWarning")
def test_the_page_is_self_contained_and_names_are_escaped(files: list[Path]) -> None:
    model = network("geq_digits", widths=[4, 8], hidden=8)
    found = explained(model, files)
    text = evaluation.explanation_page(found, model)
    assert not re.search(r"<script|<link|url\(|https?://", text)
    assert "a &lt;b&gt;.png" in text
    assert "a <b>.png" not in text
    assert text.count("<section") == 3
    assert "almost no contrast" in text
    assert re.search(r"<h2>[^<]*\? It is unlike the images of training", text)
    for words in ("What it did.", "How sure it is.", "Why to believe it."):
        assert text.count(words) == len(found)
    assert "exactly one answer" in text
    assert "there is one, and every start leads to it" in text
    for each in found:
        assert f"<strong>{each.prediction.label}</strong>" in text
    assert torch.equal(found[0].pixels[0], torch.from_numpy(np.array(Image.open(files[0]))))


@pytest.mark.filterwarnings("ignore::equilibria.models.InputWarning")
@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("explicit_digits", ()),
        ("opteq_digits", ("objective", "proof")),
        ("opteq_certified_digits", ("objective", "proof", "radius")),
    ],
)
def test_what_does_not_apply_is_left_out(
    files: list[Path], name: str, has: tuple[str, ...]
) -> None:
    model = network(name, **({"widths": [4, 8]} if name == "opteq_digits" else {}))
    answers = evaluation.predict_files(model, files[:1], certify="radius" in has)
    text = evaluation.explanation_page(evaluation.explain(model, answers), model)
    assert ("aria-label" in text and ">objective<" in text) is ("objective" in has)
    assert ('id="proof"' in text) is ("proof" in has)
    assert ("No picture within" in text) is ("radius" in has)
    assert "Gaussian gate" not in text


@pytest.mark.parametrize("channels", [1, 3])
def test_the_radius_in_words_is_not_more_than_the_proven_one(channels: int) -> None:
    said = Prediction(labels=(("cat", 0.9),), steps=None, converged=None, radius=0.2996)
    black = torch.zeros(channels, 8, 8, dtype=torch.uint8)
    found = Explanation(said, black, (), None)
    text = evaluation.explanation_page([found], torch.nn.Identity())
    within, share = re.search(
        r"within <strong>(.*?)</strong> .* changed by (.*?)% of the way", text
    ).groups()  # type: ignore[union-attr]
    changed = torch.zeros(channels, 8, 8)
    changed[:, 2, 3] = float(share) / 100.0
    for distance in (float(within), float(changed.norm())):
        assert 0.2976 < distance <= 0.2996


def test_a_monotone_layer_and_branches_are_followed(tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    Image.effect_noise((32, 32), 60).convert("RGB").save(picture)
    for name, options, count in (
        ("mondeq_single", {"channels": [4]}, 1),
        ("geq_cifar_5m", {"channels": 8, "mids": [8] * 6}, 6),
    ):
        torch.manual_seed(0)
        model: Any = eq.models.create(name, 10, **options).eval()
        found = explained(model, [picture], certify=name == "mondeq_single")[0]
        assert len(found.layers) == count
        assert all(len(layer.residual) >= layer.steps for layer in found.layers)
        assert found.saliency is not None
    assert all(layer.gate is not None for layer in found.layers)


def test_the_command_writes_the_page(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = tmp_path / "w.safetensors", tmp_path / "page.html"
    eq.models.save(network("opteq_digits", widths=[4, 8]), weights)
    cli = Cli(capsys, "explain", str(weights), str(files[0]))
    assert str(out) in cli.err("--out", out, "--no-certify", code=0)
    assert "What opteq_digits saw" in out.read_text(encoding="utf-8")
    assert "this is a folder" in cli.err("--out", tmp_path)
