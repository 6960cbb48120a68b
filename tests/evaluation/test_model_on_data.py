"""Modes, devices, checks, the bar, and packages that are missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from equilibria.evaluation import (
    classification_metrics,
    corrupt,
    model_on_data,
    save_corruption_sheet,
)
from equilibria.evaluation.rich_output import make_table, progress_bar
from tests.evaluation.standins import random_data


def with_config(**config: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(name="net", **config)  # type: ignore[assignment]
    return model


def test_modes_come_back_one_by_one() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm2d(1), nn.Dropout()))
    model[1][0].eval()
    before = [m.training for m in model.modules()]
    inside: list[bool] = []

    def fail() -> None:
        with model_on_data.evaluating(model):
            inside.extend(m.training for m in model.modules())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert inside == [False] * 5
    assert [m.training for m in model.modules()] == before


def test_a_model_is_copied_to_another_device_and_kept_on_its_own() -> None:
    model = nn.Linear(2, 2)
    assert model_on_data.on_device(model, None) is model
    assert model_on_data.on_device(model, "cpu") is model
    away = model_on_data.on_device(model, "meta")
    assert away is not model
    assert model_on_data.device_of(away).type == "meta"
    assert model_on_data.device_of(model).type == "cpu"
    assert model_on_data.device_of(nn.ReLU()).type == "cpu"
    with pytest.raises(TypeError, match="got str"):
        model_on_data.on_device("net", None)  # type: ignore[arg-type]


def test_channels_and_classes_must_fit() -> None:
    gray, color = random_data(channels=1), random_data(channels=3)
    model = with_config(in_channels=1, num_classes=3)
    assert model_on_data.check_pair(model, gray) == []
    with pytest.raises(
        ValueError, match=r"net takes images of 1 channel \(gray\).*3 channels \(RGB"
    ):
        model_on_data.check_pair(model, color)
    with pytest.raises(ValueError, match=r"net tells 10 classes apart and made up .* asks for 3"):
        model_on_data.check_pair(with_config(num_classes=10), gray)
    with pytest.raises(ValueError, match="is a data set for classification; this takes segm"):
        model_on_data.check_pair(model, gray, task="segmentation")
    with pytest.raises(TypeError, match="got list"):
        model_on_data.check_pair(model, [1, 2])  # type: ignore[arg-type]


def test_what_was_saved_with_the_weights_is_compared() -> None:
    data = random_data()
    model = with_config(in_channels=1, num_classes=3)
    model.extra = {"classes": list(data.classes), "mean": [0.5], "std": [0.25]}  # type: ignore[assignment]
    assert model_on_data.check_pair(model, data) == []
    model.extra = {"classes": ["a", "b", "c"], "mean": [0.3], "std": [0.25, 0.1]}  # type: ignore[assignment]
    notes = model_on_data.check_pair(model, data)
    assert len(notes) == 3
    assert "class names differ" in notes[0]
    assert "mean=(0.3), the data are normalized by (0.5)" in notes[1]


def test_logits_must_be_logits() -> None:
    data = random_data()
    good = torch.zeros(2, 3)
    assert model_on_data.check_logits(good, data, "net") is good
    with pytest.raises(TypeError, match="net returned tuple"):
        model_on_data.check_logits((good,), data, "net")
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4, 4\); classification .* \[B, K\]"):
        model_on_data.check_logits(torch.zeros(2, 3, 4, 4), data, "net")
    with pytest.raises(ValueError, match="net tells 4 classes apart"):
        model_on_data.check_logits(torch.zeros(2, 4), data, "net")


def test_the_bar_shows_its_text_and_silence_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for color, shown, said in (("", True, False), ("1", False, False), ("1", True, True)):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        if color:
            monkeypatch.setenv("FORCE_COLOR", color)  # what rich takes for a terminal
        with progress_bar(2, "first words", shown) as advance:
            advance("then others")
            advance()
        out, err = capsys.readouterr()
        assert out == ""
        assert ("then others" in err) == said


SMALL = torch.zeros(1, 1, 8, 8)


@pytest.mark.parametrize(
    ("module", "ask", "named"),
    [
        ("PIL", lambda: corrupt(SMALL.byte(), "jpeg_compression", 1), r"pillow.*\[train\]"),
        (
            "torchmetrics.classification",
            lambda: classification_metrics(torch.zeros(1, 2), torch.zeros(1).long()),
            r"torchmetrics.*\[train\]",
        ),
        ("rich.table", lambda: make_table("", ["a"], []), r"rich.*\[train\]"),
        (
            "matplotlib.figure",
            lambda: save_corruption_sheet(SMALL[0].byte(), "never.png", "fog"),
            r"matplotlib.*\[analysis\]",
        ),
    ],
)
def test_what_is_missing_is_named(
    module: str, ask: Callable[[], object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=named):
        ask()


def test_the_package_imports_without_extras() -> None:
    heavy = ["matplotlib", "rich", "scipy", "torchmetrics"]
    code = f"import sys\nfor n in {heavy}: sys.modules[n] = None\nimport equilibria.evaluation"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
