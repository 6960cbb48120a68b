"""evaluate: against the model run by hand, on made-up data and on digits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria import models
from equilibria.data import load
from equilibria.evaluation import (
    ClassificationMetrics,
    NonFiniteError,
    SegmentationMetrics,
    classification_metrics,
    evaluate,
    segmentation_metrics,
)
from tests.evaluation.standins import FromTable, dataset, random_data, table_data, tiny_geq


def by_hand(model: nn.Module, data: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(data.normalize(data.images))
    return found


def test_the_numbers_are_those_of_the_logits() -> None:
    data, model = random_data(23), tiny_geq()
    report = evaluate(model, data, batch_size=5, certify=3, progress=False)
    expected = classification_metrics(by_hand(model, data), data.targets)
    assert isinstance(report.metrics, ClassificationMetrics)
    assert report.accuracy == expected.accuracy
    assert report.metrics.nll == pytest.approx(expected.nll, rel=1e-5)
    assert torch.equal(report.metrics.confusion, expected.confusion)
    assert report.metrics.samples == 23
    assert report.model == "Sequential"
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert list(report.statistics) == ["1"]
    assert report.statistics["1"].solves == 23
    assert report.statistics["1"].histogram.tolist() == [0, 0, 0, 0, 23]
    assert report.certificate is not None
    assert len(report.certificate["1"].kinds) == 3
    assert report.converged is None
    assert report.notes == ()


def test_at_the_equilibrium_beside_as_it_is() -> None:
    data = random_data(12)
    model = tiny_geq()
    with torch.no_grad():  # so that four steps and the equilibrium differ in their predictions
        model[4].bias -= by_hand(model, data).mean(0)
        model[4].weight *= 40
    tight = eq.Auto(rtol=1e-6, max_steps=300)
    report = evaluate(model, data, batch_size=5, certify=0, progress=False, solver=tight)
    exact = tiny_geq(solver=tight)
    exact.load_state_dict(model.state_dict())
    assert report.converged is not None
    logits, other = by_hand(model, data), by_hand(exact, data)
    assert report.metrics.nll == pytest.approx(
        classification_metrics(logits, data.targets).nll, rel=1e-4
    )
    assert report.converged.metrics.nll == pytest.approx(
        classification_metrics(other, data.targets).nll, rel=1e-3
    )
    assert report.converged.metrics.nll != report.metrics.nll
    agree = (logits.argmax(1) == other.argmax(1)).double().mean()
    assert report.converged.agreement == pytest.approx(float(agree))
    assert report.converged.statistics["1"].converged == 1.0
    assert report.statistics["1"].converged == 0.0
    assert report.converged.solver == repr(tight)
    assert report.certificate is None


def test_the_model_is_left_as_it_is() -> None:
    model = tiny_geq().train()
    model[3].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    evaluate(model, random_data(), certify=2, progress=False, solver=eq.Auto())
    assert model.training
    assert not model[3].training
    assert isinstance(model[1].solver, eq.Picard)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_images_come_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    data, model = random_data(6), tiny_geq().to(dtype)
    report = evaluate(model, data, certify=2, progress=False)
    assert report.accuracy == evaluate(tiny_geq(), data, certify=0, progress=False).accuracy


def test_segmentation() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 6, 8), generator=draw, dtype=torch.uint8)
    targets = torch.randint(0, 4, (5, 6, 8), generator=draw)
    targets[:, 0] = 255
    data = dataset(images, targets, 4, ignore_index=255)
    model = nn.Conv2d(3, 4, 1)
    report = evaluate(model, data, batch_size=2, progress=False)
    expected = segmentation_metrics(by_hand(model, data), targets, ignore_index=255)
    assert isinstance(report.metrics, SegmentationMetrics)
    assert report.metrics.miou == pytest.approx(expected.miou)
    assert torch.equal(report.metrics.confusion, expected.confusion)
    assert report.metrics.pixels == 5 * 5 * 8
    assert report.statistics == {}
    assert report.certificate is None


def test_logits_that_are_not_finite_are_named() -> None:
    targets = torch.tensor([0, 1, 0, 1, 1])
    table = torch.eye(2)[targets] * 3
    table[3] = math.nan
    data = table_data(targets, 2)
    with pytest.raises(NonFiniteError, match=r"FromTable: 1 of 5 samples .* numbers 3.*'report'"):
        evaluate(FromTable(table), data, batch_size=2, progress=False)
    report = evaluate(FromTable(table), data, batch_size=2, progress=False, nonfinite="report")
    assert report.metrics.nonfinite == (3,)
    assert report.accuracy == 0.8
    assert "not finite" in str(report)
    assert report.to_dict()["metrics"]["nonfinite"] == [3]


def test_a_class_count_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"Sequential tells 4 classes apart .* asks for 3"):
        evaluate(tiny_geq(4), random_data(classes=3), progress=False)
    with pytest.raises(ValueError, match="geq_digits tells 7 classes apart"):
        evaluate(models.create("geq_digits", 7), random_data(classes=3), progress=False)


def test_gray_against_color() -> None:
    with pytest.raises(ValueError, match=r"geq_digits takes images of 1 channel \(gray\)"):
        evaluate(models.create("geq_digits", 3), random_data(channels=3), progress=False)
    with pytest.raises(RuntimeError) as caught:  # no config: torch's error, and where it came from
        evaluate(tiny_geq(channels=3), random_data(channels=1), progress=False)
    assert "ran on a batch of made up, shape (20, 1, 8, 8)" in caught.value.__notes__[0]


def test_wrong_arguments() -> None:
    data, model = random_data(), tiny_geq()
    with pytest.raises(ValueError, match="nonfinite='skip'"):
        evaluate(model, data, nonfinite="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="certify=-1"):
        evaluate(model, data, certify=-1)
    with pytest.raises(ValueError, match="batch_size=0"):
        evaluate(model, data, batch_size=0)
    with pytest.raises(TypeError, match="solver='auto'"):
        evaluate(model, data, solver="auto", progress=False)  # type: ignore[arg-type]


def test_a_solver_for_a_network_without_layers_is_noted() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    report = evaluate(model, random_data(), progress=False, solver=eq.Auto())
    assert report.converged is None
    assert "has no equilibrium layers" in report.notes[0]


def test_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    evaluate(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), random_data(), batch_size=10)
    out, err = capsys.readouterr()
    assert out == ""
    assert "evaluating Sequential" in err


def test_a_network_of_ours_on_digits() -> None:
    """Trained for a moment: far better than chance, and the report says how its solves went."""
    torch.manual_seed(0)
    train, test = load("digits", "train", progress=False), load("digits", "test", progress=False)
    model = models.create("geq_digits")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    order = torch.randperm(len(train))[:768]
    for index in order.split(64):
        x, y = train.normalize(train.images[index]), train.targets[index]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    report = evaluate(model, test, certify=0, progress=False, solver=eq.Auto(rtol=1e-5))
    assert report.accuracy > 0.6
    assert report.metrics.samples == len(test)
    assert report.converged is not None
    assert report.converged.agreement > 0.99
    assert all(part.settled > 0.99 for part in report.converged.statistics.values())
