"""Numbers that are read off networks, against dense algebra and counting by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria.data import ImageData
from equilibria_papers.tables import measures, measures_thesis
from equilibria_papers.tables import measures as measures_time
from equilibria_papers.tables.measures import Scene
from equilibria_papers.tables.networks import ResidualNet

from .scenes import scene_of


class Shift(nn.Module):
    """(z, x) ↦ A z + x, ‖A‖ = ½."""

    def __init__(self) -> None:
        super().__init__()
        a = torch.randn(64, 64)
        self.a = nn.Parameter(0.5 * a / torch.linalg.matrix_norm(a, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.a.T + x


class Affine(nn.Module):
    """z* = A z* + x on the 64 pixels of a digit; z* = (I − A)⁻¹ x."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = Shift()
        self.a = block.a.detach()
        solver = eq.Picard(rtol=0.0, atol=0.0, max_steps=steps)
        self.layer = eq.nn.DEQ(block, solver=solver)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(x.flatten(1)))
        return logits


def _digits(count: int = 32) -> ImageData:
    return eq.data.load("digits", "test", progress=False).subset(range(count))


def _scene(model: nn.Module, folder: Path, data: ImageData | None = None) -> Scene:
    return scene_of(model, _digits() if data is None else data, folder, smoke=True)


def test_residual_is_table_8s(tmp_path: Path) -> None:
    model = Affine(steps=4)
    found = measures.residual(_scene(model, tmp_path))["residual"]
    data, a = _digits(), model.a.double()
    x = data.normalize(torch.as_tensor(data.images)).flatten(1).double()
    expected = []
    for rows in x.split(16):
        z = torch.zeros_like(rows)
        for _ in range(4):
            z = z @ a.T + rows
        expected.append(float((z - (z @ a.T + rows)).norm() / z.norm()))
    assert found == pytest.approx(sum(expected) / 2, rel=1e-4)


def test_features_are_means_over_the_equilibria(tmp_path: Path) -> None:
    model = Affine(steps=60)
    found = measures.features(_scene(model, tmp_path))
    data = _digits()
    x = data.normalize(torch.as_tensor(data.images)).flatten(1).double()
    z = torch.linalg.solve(torch.eye(64).double() - model.a.double(), x.T).T
    assert found["mean_absolute"] == pytest.approx(float(z.abs().mean()), rel=1e-5)
    assert found["mean_square"] == pytest.approx(float(z.square().mean()), rel=1e-5)


def test_quality_counts_right_predictions(tmp_path: Path) -> None:
    model = Affine(steps=60)
    found = measures.quality(_scene(model, tmp_path))
    data = _digits()
    with torch.no_grad():
        guess = model(data.normalize(torch.as_tensor(data.images))).argmax(1)
    right = int((guess == torch.as_tensor(data.targets)).sum())
    assert found["accuracy"] == pytest.approx(100 * right / 32)
    assert found["parameters_k"] == pytest.approx((64 * 64 + 64 * 10 + 10) / 1000)


def test_certificate_of_a_contraction(tmp_path: Path) -> None:
    torch.manual_seed(0)
    proven = eq.models.create("geq_digits", widths=[4], depth=1)
    assert measures.certificate(_scene(proven, tmp_path))["certified"] == 100.0
    assert measures.certificate(_scene(Affine(steps=60), tmp_path))["certified"] == 0.0


@settings(deadline=None)
@given(
    st.integers(3, 7).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 6), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
def test_local_minima_are_counted(rows: list[list[int]]) -> None:
    grid = torch.tensor(rows, dtype=torch.float64)
    n, expected = len(rows), 0
    for i in range(n):
        for j in range(n):
            around = [
                rows[a][b]
                for a in range(max(0, i - 1), min(n, i + 2))
                for b in range(max(0, j - 1), min(n, j + 2))
                if (a, b) != (i, j)
            ]
            expected += all(rows[i][j] < value for value in around)
    assert measures_thesis.local_minima(grid) == expected


def test_a_bowl_has_one_minimum_and_a_hole_is_none() -> None:
    axis = torch.linspace(-1, 1, 11, dtype=torch.float64)
    bowl = axis[:, None].square() + axis[None].square()
    assert measures_thesis.local_minima(bowl) == 1
    bowl[0, 0] = torch.nan
    assert measures_thesis.local_minima(bowl) == 1
    bowl[5, 5] = torch.nan
    assert measures_thesis.local_minima(bowl) == 0  # its four neighbors tie


def test_first_steps_share_of_a_path() -> None:
    # One sample goes 3, then 1; the other leaps once; the third blows up and is left out.
    points = torch.tensor([[0.0, 0.0, 0.0], [3.0, 2.0, 1.0], [4.0, 2.0, torch.inf]])
    assert measures_thesis._first_step(points[..., None]) == pytest.approx(100 * (0.75 + 1.0) / 2)


def test_separation_is_the_share_between_classes() -> None:
    points = torch.tensor([[0.0], [2.0], [10.0], [12.0]])
    classes = torch.tensor([0, 0, 1, 1])
    # Means 1 and 11 about 6: 4·25 of a whole of 36 + 16 + 16 + 36.
    assert measures_thesis._separation(points, classes) == pytest.approx(100 * 100 / 104)
    assert measures_thesis._separation(torch.zeros(4, 1), classes) == 0.0


def test_times_leave_the_network_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResidualNet(10, 1, channels=16, inner=16, repeats=2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    scene = _scene(model, tmp_path)
    found = measures_time.times(scene) | measures_time.throughput(scene)
    assert all(value > 0 for value in found.values())
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not model.training


def test_saliency_is_a_share(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResidualNet(10, 1, channels=16, inner=16, repeats=1)
    found = measures.saliency(_scene(model, tmp_path, _digits(8)))
    assert 20.0 <= found["focus"] <= 100.0
    assert (tmp_path / "gradcam.png").exists()


def test_segmentation_of_two_classes(tmp_path: Path) -> None:
    digits = _digits(8)
    images = torch.as_tensor(digits.images)
    ink = dataclasses.replace(
        digits, targets=(images[:, 0] > 127).long(), classes=("paper", "ink"), task="segmentation"
    )

    class Perfect(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dark = x[:, 0] * ink.std[0] + ink.mean[0] > 127.5 / 255
            return torch.stack([~dark, dark], 1).float()

    found = measures.segmentation(_scene(Perfect(), tmp_path, ink))
    assert (found["miou"], found["macc"], found["aacc"]) == (100.0, 100.0, 100.0)


def test_flip_is_the_mean_of_two_predictions(tmp_path: Path) -> None:
    scene = _scene(Affine(30), tmp_path)
    found = measures.flipped(scene)
    x = scene.test.normalize(torch.as_tensor(scene.test.images)).float()
    with torch.no_grad():
        both = [scene.model(image).double().softmax(1) for image in (x, x.flip(3))]
    mean = (both[0] + both[1]) / 2
    right = mean.argmax(1) == torch.as_tensor(scene.test.targets)
    assert found["flip.accuracy"] == pytest.approx(100 * float(right.double().mean()))
    chosen = mean[torch.arange(len(mean)), torch.as_tensor(scene.test.targets)]
    assert found["flip.nll"] == pytest.approx(float(-chosen.log().mean()), rel=1e-6)
