"""The page of a run: numbers of its files, counts by hand, nothing where there is nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import equilibria as eq
from equilibria.cli.train import _write_report
from equilibria.evaluation import write_training_report
from equilibria.training import TrainConfig
from tests.cli.running import run
from tests.data.made_files import write_class_folders


def folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    """What a run leaves behind, made up."""
    names = list(rows[0])
    lines = [",".join(names), *(",".join(str(row[n]) for n in names) for row in rows)]
    (path / "history.csv").write_text("\n".join(lines) + "\n")
    (path / "config.yaml").write_text("model: <small>\nlr: 0.1\n")
    result = {
        "epoch": 2,
        "epochs": 2,
        "parameters": 1234,
        "data": {"name": "digits", "train": 50, "validation": 5, "classes": 10},
        "command": "equilibria train",
        "version": "9",
        "torch": "2",
        "python": "3",
        "device": "cpu",
        "threads": 1,
        "seed": 7,
        "started": "today",
    }
    (path / "result.json").write_text(json.dumps(result))
    return path


ROWS = [
    {"epoch": k, "lr": 0.1 / k, "train_loss": 2.0 / k, "train_accuracy": 0.5, "val_loss": 1.5 / k}
    for k in (1, 2)
]
SOLVER = {"solver_steps": 6.5, "residual": 0.00042, "converged": 0.75, "failed": 0.0}


class Fixed(nn.Module):
    """Reads every digit right but the threes, which it takes for eights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        targets = self.targets[: len(x)]
        said = torch.where(targets == 3, 8, targets)
        return 9.0 * nn.functional.one_hot(said, 10).float()


def test_the_page_counts_mistakes_and_shows_the_history(tmp_path: Path) -> None:
    test = eq.data.load("digits", "test").subset(range(60))
    test = replace(test, classes=(*"012", "3&4", *"456789"))
    model = Fixed()
    model.targets = test.targets.long()
    threes = int((model.targets == 3).sum())
    assert threes > 1
    rows = [{**row, **SOLVER, "images_per_second": 100.0, "seconds": 3.0} for row in ROWS]
    page = write_training_report(folder(tmp_path, rows), model, test)
    text = page.read_text(encoding="utf-8")
    assert page == tmp_path / "report.html"
    assert re.findall(r'<section id="(\w+)"', text) == [
        *("curves", "solver", "confusion", "reliability", "mistakes", "repeat"),
    ]
    assert f"3&amp;4 read as 8 ({threes})" in text
    assert text.count('alt="A 3&amp;4, read as 8"') == min(threes, 16)
    assert f"{threes} of 60 answers are wrong" in text
    assert text.count('<span class="bad">is 3&amp;4</span>') == min(threes, 16)
    assert f"{100 * (1 - threes / 60):.2f}%" in text
    assert "6.5 steps" in text
    assert "75.0%" in text
    assert "0.00042" in text
    assert "reached the tolerance" in text
    assert "model: &lt;small&gt;" in text
    assert not re.search(r"<script|<link|url\(|https?://", text)


def test_images_are_judged_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equilibria.evaluation.training_report._SECONDS", 0.0)
    test = eq.data.load("digits", "test").subset(range(200))
    model = Fixed()
    model.targets = test.targets.long()
    threes = int((model.targets[:64] == 3).sum())
    rows = [{**row, "images_per_second": 1e6} for row in ROWS]  # however fast the training was
    text = write_training_report(folder(tmp_path, rows), model, test).read_text(encoding="utf-8")
    assert "of the first 64 of 200 images" in text
    assert "<code>equilibria evaluate</code>" in text
    assert f"{threes} of 64 answers are wrong" in text


@pytest.mark.parametrize("validation", [0.4, 0.0])
@pytest.mark.parametrize(("accelerator", "asked"), [("auto", None), ("gpu", None), ("cpu", "cpu")])
def test_the_command_judges_where_it_trained_and_normalizes_as_it_did(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    validation: float,
    accelerator: str,
    asked: str | None,
) -> None:
    write_class_folders(tmp_path, {"a": 8, "b": 8})
    settings = TrainConfig(data=str(tmp_path), validation=validation, accelerator=accelerator)
    model = nn.Linear(2, 2)
    model.one_scale = True
    seen: list[Any] = []

    def chosen(name: str | None) -> torch.device:
        seen.append(name)
        return torch.device("meta")

    monkeypatch.setattr("equilibria.cli.train.device_of", chosen)
    monkeypatch.setattr("equilibria.evaluation.write_training_report", lambda *a: seen.extend(a))
    _write_report(SimpleNamespace(model=model, folder=tmp_path), settings)
    name, _, judged, held = seen
    assert name == asked
    assert (model.weight.device.type, judged.weight.device.type) == ("cpu", "meta")
    std = eq.data.load(tmp_path).std
    assert len(set(std)) == 3  # of ImageNet
    assert held.std == pytest.approx((sum(std) / 3,) * 3)


def test_what_a_run_does_not_have_is_left_out(tmp_path: Path) -> None:
    text = write_training_report(folder(tmp_path, ROWS), nn.Flatten()).read_text(encoding="utf-8")
    assert re.findall(r'<section id="(\w+)"', text) == ["curves", "repeat"]


def test_the_command_writes_it_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("-o", "widths=[4, 8]", "-o", "hidden=4", "--epochs", "1", "--samples", "60")
    flags = ("train", *small, "--batch-size", "30", "--quiet", "--out")
    assert run(*flags, tmp_path / "a") == 0
    said = capsys.readouterr().err
    assert said.index("writing report.html") < said.index("report in")
    text = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "geq_digits on digits" in text
    assert 'id="mistakes"' in text

    def broken(*_: Any) -> Path:
        raise OSError("no pixels")

    monkeypatch.setattr("equilibria.evaluation.write_training_report", broken)
    assert run(*flags, tmp_path / "b") == 0
    assert "report.html was not written: no pixels" in capsys.readouterr().err
    assert (tmp_path / "b" / "model.safetensors").exists()
    assert run("train", "--resume", tmp_path / "b", "--quiet", "--no-report") == 0
    assert "report" not in capsys.readouterr().err
