"""A report on paper: table, JSON, pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from PIL import Image
from torch import nn

import equilibria as eq
from equilibria.evaluation import Report, evaluate
from equilibria.evaluation.pictures import save_confusion, save_per_class
from equilibria.evaluation.plain import plain, write_json
from equilibria.evaluation.tables import number, percent
from tests.evaluation.standins import dataset, random_data, tiny_geq


@pytest.fixture(scope="module")
def report() -> Report:
    return evaluate(
        tiny_geq(), random_data(30), certify=2, progress=False, solver=eq.Auto(rtol=1e-5)
    )


def all_numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in all_numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in all_numbers(item)]
    return [value] if isinstance(value, float) else []


def test_the_table_shows_the_numbers(report: Report) -> None:
    text = str(report)
    for part in (
        "Sequential on made up (test)",
        f"{100 * report.accuracy:.2f}%",
        f"{report.metrics.headline['nll']:.4f}",
        "as it is",
        "at equilibrium",
        "same prediction",
        "→ Anderson",
        "fixed steps",
        "contraction",
        "30 samples, 3 classes",
    ):
        assert part in text, part
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_layers_name_and_every_column_fit_into_80(report: Report) -> None:
    import dataclasses
    import io

    from rich.console import Console

    name = "stages.0.layer"
    only = dataclasses.replace(
        report,
        statistics={name: next(iter(report.statistics.values()))},
        converged=None,
        certificate={name: next(iter(dict(report.certificate or {}).values()))},
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(only.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(name) == 2
    for column in ("≤ 1e-3", "proven"):
        assert column in text
    assert "Sequential on made up (test)" in text


def test_no_guarantee_is_no_proof() -> None:
    from equilibria.evaluation.tables import _proven

    assert _proven({"kind": "none", "rigorous": True}) == "nothing"
    assert _proven({"kind": "contraction", "rigorous": True}) == "yes"
    assert _proven({"kind": "contraction", "rigorous": False}) == "partly"


def test_json_is_strict_and_complete(report: Report, tmp_path: Path) -> None:
    numbers = report.to_dict()
    text = json.dumps(numbers, allow_nan=False)
    assert json.loads(text) == numbers
    assert all(math.isfinite(n) for n in all_numbers(numbers))
    assert numbers["metrics"]["accuracy"] == report.accuracy
    assert numbers["metrics"]["reliability"]["count"] == report.metrics.reliability.count.tolist()  # type: ignore[union-attr]
    assert numbers["layers"]["1"]["mean_steps"] == 4.0
    assert numbers["converged"]["layers"]["1"]["converged"] == 1.0
    assert numbers["certificates"]["1"]["unique"] == 1.0
    assert numbers["classes"] == ["class 0", "class 1", "class 2"]


def test_everything_is_saved(report: Report, tmp_path: Path) -> None:
    before = pyplot.get_fignums()
    written = report.save(tmp_path / "new" / "folder")
    assert pyplot.get_fignums() == before  # the user's plots are left alone
    names = [path.name for path in written]
    assert names == [
        "report.json",
        "reliability.png",
        "confusion.png",
        "per_class.png",
        "solver.png",
        "certificate.txt",
    ]
    assert json.loads(written[0].read_text("utf-8")) == report.to_dict()
    assert "proven, in float64" in written[-1].read_text("utf-8")
    for path in written[1:-1]:
        with Image.open(path) as picture:
            assert min(picture.size) > 300
            colors = picture.convert("RGB").getcolors(1 << 24)
        assert colors is not None
        assert len(colors) > 20  # something was drawn


def test_a_plain_network_and_segmentation(tmp_path: Path) -> None:
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    data = dataset(images, torch.zeros(2, 4, 4, dtype=torch.long), 3)
    report = evaluate(nn.Conv2d(1, 3, 1), data, progress=False)
    names = [path.name for path in report.save(tmp_path)]
    assert names == ["report.json", "confusion.png", "per_class.png"]
    assert "mIoU" in str(report)
    assert None in report.to_dict()["metrics"]["iou"]  # a class that nowhere occurs


def test_many_classes(tmp_path: Path) -> None:
    classes = tuple(f"a class with a name {k}" for k in range(100))
    confusion = torch.eye(100, dtype=torch.long)
    save_confusion(confusion, classes, tmp_path / "c.png", "title")
    values = torch.linspace(0, 1, 100)
    values[3] = math.nan
    save_per_class(values, classes, "accuracy", tmp_path / "p.png", "title")
    for name in ("c.png", "p.png"):
        with Image.open(tmp_path / name) as picture:
            assert max(picture.size) < 4000


def test_plain_values(tmp_path: Path) -> None:
    found = plain({1: torch.tensor([1.0, math.nan]), "b": (math.inf, 2, None, True, Path("x"))})
    assert found == {"1": [1.0, None], "b": [None, 2, None, True, "x"]}
    assert write_json({"a": math.nan}, tmp_path / "a.json").read_text() == '{\n  "a": null\n}\n'


def test_numbers_in_cells() -> None:
    assert percent(0.5) == "50.00%"
    assert percent(math.nan) == "–"
    assert number(None) == "–"
    assert number({"min": 1.0, "median": 2.0, "max": 3.0}) == "3"
    assert number(0.123456) == "0.1235"
