"""The study of corruptions: every cell is an evaluation of corrupted images."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from equilibria.evaluation import (
    CORRUPTIONS,
    CorruptionReport,
    classification_metrics,
    corrupt,
    corruption_study,
    save_corruption_sheet,
)
from tests.evaluation.standins import Wired, dataset, picture_tensor, random_data, tiny_geq

DATA = dataset(picture_tensor(12, 8), torch.arange(12) % 3, 3)


def test_every_cell_by_hand() -> None:
    model = tiny_geq(channels=3)
    assert corruption_study(model, DATA.subset([0]), progress=False).accuracy.shape == (19, 5)
    kinds, severities = ("fog", "jpeg_compression"), (1, 4)
    found = corruption_study(model, DATA, kinds, severities, batch_size=5, seed=3, progress=False)
    with torch.no_grad():
        clean = classification_metrics(model(DATA.normalize(DATA.images)), DATA.targets)
        for i, kind in enumerate(kinds):
            for j, severity in enumerate(severities):
                x = DATA.normalize(corrupt(DATA.images, kind, severity, seed=3))
                expected = classification_metrics(model(x), DATA.targets)
                assert float(found.accuracy[i, j]) == pytest.approx(expected.accuracy)
                assert float(found.ece[i, j]) == pytest.approx(expected.ece, abs=1e-5)
    assert found.clean == clean.accuracy
    assert found.mean_accuracy == pytest.approx(float(found.accuracy.mean()))
    assert found.by_kind["fog"] == pytest.approx(float(found.accuracy[0].mean()))


@pytest.fixture
def report() -> CorruptionReport:
    draw = torch.Generator().manual_seed(0)
    return CorruptionReport(
        model="net",
        dataset="data",
        split="test",
        samples=9,
        seed=0,
        kinds=CORRUPTIONS,
        severities=(1, 2, 3, 4, 5),
        clean=0.9,
        accuracy=torch.rand(19, 5, generator=draw, dtype=torch.float64),
        ece=torch.full((19, 5), math.nan, dtype=torch.float64),
        nonfinite=torch.zeros(19, 5, dtype=torch.long),
    )


def test_written(report: CorruptionReport, tmp_path: Path) -> None:
    numbers, picture = report.save(tmp_path / "new")
    found = json.loads(numbers.read_text("utf-8"))
    assert found["mean_accuracy"] == report.mean_accuracy
    assert found["kinds"]["fog"]["ece"] == [None] * 5
    assert found["kinds"]["fog"]["accuracy"] == report.accuracy[9].tolist()
    with Image.open(picture) as image:
        assert min(image.size) > 500


def test_table(report: CorruptionReport) -> None:
    table = dataclasses.replace(report, nonfinite=torch.eye(19, 5, dtype=torch.long)).table()
    cells = list(table.columns[0].cells)
    assert cells[0] == "gaussian_noise (1 not finite)"
    assert cells[-1] == "saturate"
    assert next(iter(table.columns[3].cells)) == f"{100 * float(report.accuracy[0, 2]):.1f}"


def test_what_is_not_finite_is_counted() -> None:
    def fragile(x: Tensor) -> Tensor:
        bright = x.mean((1, 2, 3))
        value = torch.where(bright > 0.5, math.nan, bright)
        return torch.stack([value, -value, 0 * value], 1)

    dark = dataset(torch.full((4, 1, 8, 8), 100, dtype=torch.uint8), torch.zeros(4).long(), 3)
    found = corruption_study(Wired(fragile), dark, ["brightness"], (1, 5), progress=False)
    assert found.nonfinite.tolist() == [[0, 4]]
    assert float(found.accuracy[0, 1]) == 0.0


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"kinds": ["snwo"]}, "Did you mean 'snow'"),
        ({"kinds": []}, "kinds is empty"),
        ({"severities": [7]}, "severity 7 is out of range"),
        ({"severities": []}, "severities is empty"),
        ({"dataset": random_data(classes=4)}, "tells 3 classes apart"),
    ],
)
def test_wrong_input(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        corruption_study(tiny_geq(), **{"dataset": random_data(), "progress": False, **given})


def test_sheet(tmp_path: Path) -> None:
    image = picture_tensor(1, 16)[0]
    path = save_corruption_sheet(image, tmp_path / "new" / "sheet.png", ["fog", "snow"], (1, 5))
    with Image.open(path) as picture:
        assert min(picture.size) > 200
    save_corruption_sheet(image[:1], tmp_path / "gray.png", "pixelate", 3)
    with pytest.raises(ValueError, match="one image"):
        save_corruption_sheet(image[None], tmp_path / "x.png")
