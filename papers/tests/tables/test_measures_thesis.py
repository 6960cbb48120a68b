"""The figures of the thesis by closed forms: paths of solvers, and landscapes."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria_papers.tables import measures

from .scenes import Array, TwoLayers, contraction, digits, iterates, numbered, scene_of


class Scaled(nn.Module):
    """z = a z + x: Anderson goes 0, x, x/(1 − a) and stays there."""

    def __init__(self, a: float) -> None:
        super().__init__()

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Parameter(torch.tensor(a))

            def forward(self, z: Tensor, x: Tensor) -> Tensor:
                return self.a * z + x

        self.layer = eq.nn.DEQ(Block())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x.flatten(1)))
        return logits


def _between(points: Array, classes: npt.NDArray[np.int64]) -> float:
    """1 − the variance within classes over the whole variance."""
    within = sum(
        ((points[classes == k] - points[classes == k].mean(0)) ** 2).sum() for k in set(classes)
    )
    return float(1.0 - within / ((points - points.mean(0)) ** 2).sum())


def test_training_paths_of_scalar_maps(tmp_path: Path) -> None:
    """Figure 4.3. The first step is x of x/(1 − a): the share 1 − a of the way.

    Relative residuals are 1 at 0, a/(1 + a) at x, then 0: two or three evaluations to 1e-2.
    """
    data, x = digits(300)
    stages = {"start": 0, "after 1 epoch": 1, "after a quarter": 2, "after half": 4}
    slopes = dict(zip((*stages.values(), 8), (0.005, 0.1, 0.3, 0.5, 0.7), strict=True))
    # The paths are those of training images; the test images are others.
    scene = scene_of(Scaled(0.9), data.subset(range(260, 300)), tmp_path, train=data, epochs=8)
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        measures.training_paths(scene)
    folder = tmp_path / "epochs"
    folder.mkdir()
    for epoch, a in slopes.items():
        weights = dict(Scaled(a).state_dict())
        safetensors.torch.save_file(weights, folder / f"epoch_{epoch:04d}.safetensors")
    found = measures.training_paths(scene)
    classes = torch.as_tensor(data.targets).numpy()[:256]  # 256 samples are looked at
    for stage, epoch in {**stages, "at the end": 8}.items():
        a = slopes[epoch]
        assert found[f"stage.{stage}.first_step"] == pytest.approx(100 * (1 - a), rel=1e-3)
        assert found[f"stage.{stage}.steps"] == (3.0 if a / (1 + a) > 1e-2 else 2.0)
        expected = 100 * _between(x[:256], classes)
        assert found[f"stage.{stage}.separation"] == pytest.approx(expected, rel=1e-3)
    assert (tmp_path / "training_paths.png").exists()
    own = scene.model.state_dict()["layer.block.a"]
    assert float(own) == pytest.approx(0.9)


def test_a_path_by_its_powers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures 4.1 and 4.2 with plain steps: z^[k] = Σ_{i<k} Aⁱ x, Eq 4.2, the plane by an SVD."""
    monkeypatch.setattr(
        measures,
        "Anderson",
        lambda rtol, max_steps: eq.Picard(rtol=rtol, max_steps=max_steps),
    )
    a = 0.9 * np.linalg.qr(contraction(3, 1.0))[0]
    data, x = digits(40)
    model = TwoLayers(a, a, (1, 1)).float()
    model.two = nn.Identity()
    found = measures.path_measure(scene_of(model, data, tmp_path))
    path = iterates(a, x, 50)
    relative = np.linalg.norm(np.diff(path, axis=0), axis=2) / np.linalg.norm(path[1:], axis=2)
    for k in (5, 20, 50):
        expected = relative[k - 1].mean()
        assert found[f"path.residual.{k}"] == pytest.approx(expected, rel=1e-4)
    assert found["path.settled"] == pytest.approx(100 * (relative <= 1e-2).any(0).mean())
    lengths = np.linalg.norm(np.diff(path[:50], axis=0), axis=2)
    shares = lengths[0] / lengths.sum(0)
    assert found["path.first_step"] == pytest.approx(100 * shares.mean(), rel=1e-4)
    points = path[:50, :32].reshape(-1, 64)
    values = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
    assert found["path.plane"] == pytest.approx(100 * values[:2].sum() / values.sum(), rel=1e-4)
    assert {path.suffix for path in tmp_path.glob("paths.*")} >= {".png", ".svg"}


class Rows(nn.Module):
    """Logits w_k·t, k = 1, 2, 3, of one number t an image: a filter of a direction is ±w_k."""

    def __init__(self, w: tuple[float, float, float], root: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64)[:, None])
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        w = (self.w + 0.05).sqrt() if self.root else self.w  # no number for a weight below −0.05
        return x[:, 0, 0, -1, None].double() @ w.T


def _surface(w: Array, root: bool, signs: Array, t: Array, y: Any, points: int) -> Array:
    """Φ(a, b) = mean cross-entropy at w_k(1 + s_k a + s'_k b), [points, points]."""
    axis = np.linspace(-1, 1, points)
    moved = 1 + axis[:, None, None] * signs[0] + axis[None, :, None] * signs[1]
    with np.errstate(invalid="ignore"):
        weights = np.sqrt(w * moved + 0.05) if root else w * moved
    logits = weights[:, :, None] * t[:, None]  # [points, points, N, 3]
    peak = logits.max(3, keepdims=True)
    spread = np.log(np.exp(logits - peak).sum(3)) + peak[..., 0]
    loss: Array = (spread - np.take_along_axis(logits, y[None, None, :, None], 3)[..., 0]).mean(2)
    return loss


@pytest.mark.parametrize(("root", "smoke"), [(False, False), (True, False), (False, True)])
def test_landscape_in_closed_form(tmp_path: Path, root: bool, smoke: bool) -> None:
    """Figures 4.4 and 4.5: with one number a filter its normalized step is the number itself."""
    targets = np.random.default_rng(14).integers(0, 3, 1100)
    deviation = 0.02 if smoke else 0.2
    data = numbered(targets, 3, std=(deviation,))
    w = np.array([2.0, 0.5, 1.3])
    model = Rows((2.0, 0.5, 1.3), root)
    # Of seed 0 both directions have the same signs: a plane in which all lies on one line.
    scene = scene_of(model, data, tmp_path, smoke=smoke, seed=3, batch_size=512)
    found = measures.MEASURES["landscape"](scene)
    count, points, step, coarse = (32, 5, 1, 5) if smoke else (1024, 51, 10, 6)
    t = np.arange(1100) % 256 / 255.0 / deviation
    kept = safetensors.torch.load_file(tmp_path / "landscape.safetensors")["values.loss"].numpy()
    fits = []
    for drawn in itertools.product((-1.0, 1.0), repeat=6):  # which of the signs were drawn
        made = _surface(w, root, np.reshape(drawn, (2, 3)), t[:count], targets[:count], coarse)
        if np.allclose(made, kept[::step, ::step], rtol=1e-5, equal_nan=True):
            fits.append(np.reshape(drawn, (2, 3)))
    assert len(fits) == 1
    loss = _surface(w, root, fits[0], t[:count], targets[:count], points)
    assert np.allclose(loss, kept, rtol=1e-5, equal_nan=True)
    center = loss[points // 2, points // 2]
    assert found["landscape.center"] == pytest.approx(center, rel=1e-6)
    with np.errstate(invalid="ignore"):
        assert found["landscape.flat"] == pytest.approx(100 * (loss <= center + 1.0).mean())
    assert found["landscape.minima"] == measures.local_minima(torch.from_numpy(loss))
    assert found["landscape.holes"] == np.isnan(loss).sum()
    assert bool(found["landscape.holes"]) == root
    assert 0.0 < found["landscape.flat"] < 100.0
    # Figure 4.5: of the test images.
    part = slice(500, 532)
    other = dataclasses.replace(scene, test=data.subset(range(500, 532)), smoke=True)
    seen = measures.MEASURES["landscape of test images"](other)["test_landscape.center"]
    center = _surface(w, root, np.zeros((2, 3)), t[part], targets[part], 1)[0, 0]
    assert seen == pytest.approx(center, rel=1e-6)


@pytest.mark.parametrize(
    ("end", "epochs"), [(1, [0, 1, 1, 1, 1]), (3, [0, 1, 1, 1, 3]), (6, [0, 1, 1, 3, 6])]
)
def test_stages_of_a_short_run_are_the_epochs_they_name(
    end: int, epochs: list[int], tmp_path: Path
) -> None:
    """Half of three epochs is one, not the end."""
    for epoch in set(epochs):
        (tmp_path / f"epoch_{epoch:04d}.safetensors").touch()
    found = measures._snapshots(tmp_path, end)
    assert [epoch for epoch, _ in found] == epochs
    assert [file.name for _, file in found] == [f"epoch_{e:04d}.safetensors" for e in epochs]
    (tmp_path / f"epoch_{end:04d}.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds the weights of epochs \[0.* alone"):
        measures._snapshots(tmp_path, end)
