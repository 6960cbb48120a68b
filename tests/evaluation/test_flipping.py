"""Test-time flip against numpy on torch.flip of the images; the plain numbers stay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation import NonFiniteError, evaluate, judging, running
from equilibria.evaluation.flipping import log_probabilities, mean_log_probabilities
from tests.evaluation.standins import FromTable, dataset, random_data, tiny_geq

Array = NDArray[np.float64]


def softmax(logits: Tensor) -> Array:
    weight = np.exp(logits.double().numpy() - logits.double().numpy().max(1, keepdims=True))
    return np.asarray(weight / weight.sum(1, keepdims=True))


def both(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """The logits of the images and of torch.flip of them."""
    model.eval()
    with torch.no_grad():
        x = (data.images.float() / 255 - 0.5) / 0.25
        return model(x), model(torch.flip(x, dims=[3]))


def scores(p: Array, y: Array) -> dict[str, float]:
    """Accuracy, NLL, Brier and ECE of probabilities [N, K], sample by sample."""
    hits, nll, brier = [], [], []
    bins: dict[int, list[tuple[float, float]]] = {}
    for row, own in zip(p, y.astype(int), strict=True):
        hit = float(int(np.argmax(row)) == own)
        hits.append(hit)
        nll.append(-math.log(row[own]))
        brier.append(sum((row[k] - (k == own)) ** 2 for k in range(len(row))))
        bins.setdefault(math.ceil(row.max() * 15), []).append((hit, row.max()))
    gaps = [abs(sum(h - c for h, c in found)) for found in bins.values()]
    return {
        "accuracy": float(np.mean(hits)),
        "nll": float(np.mean(nll)),
        "brier": float(np.mean(brier)),
        "ece": sum(gaps) / len(y),
    }


def sharp_linear() -> nn.Sequential:
    """Sure of itself, and it tells left from right."""
    torch.manual_seed(3)
    linear = nn.Linear(64, 3)
    with torch.no_grad():
        linear.weight *= 3
    return nn.Sequential(nn.Flatten(), linear)


@pytest.mark.parametrize("make", [sharp_linear, tiny_geq])
def test_the_mean_of_the_two_softmaxes(make: Any) -> None:
    data, model = random_data(23), make()
    if make is tiny_geq:
        with torch.no_grad():
            model[4].bias -= both(model, data)[0].mean(0)
            model[4].weight *= 60
    report = evaluate(model, data, batch_size=5, certify=0, progress=False, flip=True)
    one, other = both(model, data)
    y = np.asarray(data.targets)
    expected = scores((softmax(one) + softmax(other)) / 2, y)
    found: Any = report.flip
    assert {name: found.headline[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    plain: Any = report.metrics
    assert plain.headline["nll"] == pytest.approx(scores(softmax(one), y)["nll"], rel=1e-4)
    assert report.accuracy == scores(softmax(one), y)["accuracy"]
    # Neither of the two alone, nor the mean of the logits: the test would not tell otherwise.
    for wrong in (one, other, (one + other) / 2):
        assert abs(scores(softmax(wrong), y)["nll"] - expected["nll"]) > 1e-3


class Unsided(nn.Module):
    """f(x + x̃): bit for bit the same for an image and its mirror image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x + torch.flip(x, dims=[3]))
        return found


@pytest.mark.parametrize("inner", [sharp_linear(), tiny_geq()])
def test_a_network_that_cannot_tell_left_from_right_keeps_its_metrics(inner: nn.Module) -> None:
    data = random_data(40)
    one, other = both(Unsided(inner), data)
    assert torch.equal(one, other)
    report = evaluate(Unsided(inner), data, batch_size=16, certify=0, progress=False, flip=True)
    plain: Any = report.metrics
    found: Any = report.flip
    assert found is not plain
    assert found.accuracy == plain.accuracy
    assert found.top_k == plain.top_k
    assert torch.equal(found.confusion, plain.confusion)
    assert torch.equal(found.reliability.count, plain.reliability.count)
    assert found.headline == pytest.approx(plain.headline, rel=1e-14)


def test_plain_numbers_statistics_and_certificates_stay() -> None:
    data, model, tight = random_data(13), tiny_geq(), eq.Auto(rtol=1e-5)

    def numbers(flip: bool) -> dict[str, Any]:
        report = evaluate(
            model, data, batch_size=5, certify=3, progress=False, solver=tight, flip=flip
        )
        found = report.to_dict()
        del found["seconds"]
        return found

    without, with_flip = numbers(False), numbers(True)
    assert without.pop("flip") is None
    assert with_flip.pop("flip")["samples"] == 13
    assert with_flip == without
    assert with_flip["layers"]["1"]["solves"] == 13


@pytest.mark.parametrize(("flip", "passes"), [(False, 3), (True, 6)])
def test_one_more_pass_a_batch_and_no_more_reading(
    flip: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    ran: list[bool] = []

    def counting(*args: Any) -> Any:
        for images, y in running.batches(*args):
            read.append(len(y))
            yield images, y

    monkeypatch.setattr(judging, "batches", counting)
    model = sharp_linear()
    model.register_forward_hook(lambda module, inputs, out: ran.append(module.training))
    evaluate(model, random_data(11), batch_size=4, progress=False, flip=flip)
    assert read == [4, 4, 3]
    assert ran == [False] * passes


def test_the_mirror_image_of_a_map_is_mirrored_back() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 6, 8), generator=draw, dtype=torch.uint8)
    targets = torch.randint(0, 4, (5, 6, 8), generator=draw)
    targets[:, 0, :5] = 255
    data = dataset(images, targets, 4, ignore_index=255)
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3, padding=1)
    report = evaluate(model, data, batch_size=2, progress=False, flip=True)

    one, other = both(model, data)

    def confusion(p: Array) -> list[list[int]]:
        table = [[0] * 4 for _ in range(4)]
        for guess, own in zip(p.argmax(1).ravel(), targets.numpy().ravel(), strict=True):
            if own != 255:
                table[own][guess] += 1
        return table

    expected = confusion((softmax(one) + softmax(other)[..., ::-1]) / 2)
    assert report.flip is not None
    assert report.flip.confusion.tolist() == expected
    assert report.metrics.confusion.tolist() == confusion(softmax(one))
    assert expected not in (
        confusion(softmax(one)),
        confusion((softmax(one) + softmax(other)) / 2),
    )


class Bands(nn.Module):
    """Logits [B, 3, H, W] of each pixel by itself: mirroring the image mirrors them, exactly."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.square(), 0.5 - x], dim=1)


def test_a_map_that_moves_with_the_image_keeps_its_metrics() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 1, 4, 7), generator=draw, dtype=torch.uint8)
    data = dataset(images, torch.randint(0, 3, (3, 4, 7), generator=draw), 3)
    report = evaluate(Bands(), data, progress=False, flip=True)
    assert report.flip is not None
    assert torch.equal(report.flip.confusion, report.metrics.confusion)
    assert report.flip.headline == report.metrics.headline


def sided(left: Tensor, right: Tensor, targets: Tensor, classes: int) -> Any:
    """Images whose first pixel is ``left``, and in the mirror ``right``: rows for FromTable."""
    images = torch.zeros(len(left), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = left, right
    return dataset(images, targets, classes)


@pytest.mark.parametrize("bad", [[math.nan] * 2, [2.0, -math.inf], [math.inf, 0.0]])
def test_mirror_images_with_logits_that_are_not_finite(bad: list[float]) -> None:
    targets = torch.tensor([0, 1, 0, 1, 0])
    table = torch.tensor([[3.0, 0.0], [0.0, 3.0], bad])
    data = sided(targets, torch.tensor([0, 1, 2, 1, 0]), targets, 2)
    plain = evaluate(FromTable(table), data, batch_size=2, progress=False)
    assert plain.metrics.nonfinite == ()
    with pytest.raises(NonFiniteError, match=r"FromTable on mirror images: 1 of 5 .* numbers 2\."):
        evaluate(FromTable(table), data, batch_size=2, progress=False, flip=True)
    report = evaluate(
        FromTable(table), data, batch_size=2, progress=False, flip=True, nonfinite="report"
    )
    found: Any = report.flip
    assert report.accuracy == 1.0
    assert report.metrics.nonfinite == ()
    assert found.nonfinite == (2,)
    assert found.accuracy == 0.8
    assert found.nll == pytest.approx(math.log1p(math.exp(-3.0)))  # the others alone
    assert "0 samples" in str(report)
    assert "1 samples" in str(report)
    assert report.to_dict()["flip"]["nonfinite"] == [2]


def test_a_finite_mirror_image_does_not_mend_logits_that_are_not() -> None:
    """The plain path speaks first, as without flip."""
    targets = torch.tensor([0, 1, 0])
    table = torch.tensor([[3.0, 0.0], [0.0, 3.0], [-math.inf, 0.0]])
    data = sided(torch.tensor([0, 1, 2]), targets, targets, 2)
    with pytest.raises(NonFiniteError, match=r"FromTable: 1 of 3 samples"):
        evaluate(FromTable(table), data, progress=False, flip=True)
    report = evaluate(FromTable(table), data, progress=False, flip=True, nonfinite="report")
    assert report.flip is not None
    assert report.metrics.nonfinite == report.flip.nonfinite == (2,)
    assert report.flip.accuracy == pytest.approx(2 / 3)


class Reusing(nn.Module):
    """Writes every answer into the same memory, as a CUDA graph does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.memory = inner, torch.empty(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.memory.copy_(self.inner(x))


def test_answers_that_the_next_pass_writes_over() -> None:
    data = random_data(20)
    report = evaluate(Reusing(sharp_linear()), data, progress=False, flip=True)
    expected = evaluate(sharp_linear(), data, progress=False, flip=True)
    for one, other in ((report.metrics, expected.metrics), (report.flip, expected.flip)):
        assert one is not None
        assert other is not None
        assert one.headline == other.headline


def test_in_the_table_and_in_the_saved_report(tmp_path: Path) -> None:
    report = evaluate(sharp_linear(), random_data(30), progress=False, flip=True)
    assert report.flip is not None
    lines = {line.split("│")[1].strip(): line for line in str(report).splitlines() if "│" in line}
    assert "as it is" in str(report)
    assert "with flip" in str(report)
    cells = [part.strip() for part in lines["accuracy"].split("│")]
    assert cells[2:4] == [f"{100 * m.accuracy:.2f}%" for m in (report.metrics, report.flip)]
    cells = [part.strip() for part in lines["nll"].split("│")]
    assert cells[2:4] == [f"{m.headline['nll']:.4f}" for m in (report.metrics, report.flip)]
    saved = json.loads(report.save(tmp_path)[0].read_text("utf-8"))
    for name in ("accuracy", "nll", "brier", "ece"):
        assert saved["flip"][name] == report.flip.headline[name]
        assert saved["metrics"][name] == report.metrics.headline[name]
        assert saved["flip"][name] != saved["metrics"][name]
    assert "with flip" not in str(evaluate(sharp_linear(), random_data(4), progress=False))


def test_flip_is_yes_or_no() -> None:
    with pytest.raises(TypeError, match="flip='no': expected True or False"):
        evaluate(sharp_linear(), random_data(), flip="no")  # type: ignore[arg-type]


rows = st.lists(st.floats(-300, 300, width=32), min_size=4, max_size=4)


@given(rows, rows, st.floats(-1e4, 1e4))
def test_laws_of_the_mean(first: list[float], second: list[float], shift: float) -> None:
    a, b = torch.tensor([first]), torch.tensor([second])
    one, other = log_probabilities(a), log_probabilities(b)
    found = mean_log_probabilities(one, other)
    assert torch.equal(found, mean_log_probabilities(other, one))
    assert torch.equal(mean_log_probabilities(one, one), one)
    np.testing.assert_allclose(
        found.numpy(), np.logaddexp(one.numpy(), other.numpy()) - math.log(2), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(found.exp().numpy(), (softmax(a) + softmax(b)) / 2, atol=1e-13)
    # −log is convex: with flip, no NLL is above the mean of the two.
    assert bool((-found <= -(one + other) / 2 + 1e-12).all())
    shifted = mean_log_probabilities(one, log_probabilities(b.double() + shift))
    np.testing.assert_allclose(shifted.numpy(), found.numpy(), rtol=0, atol=1e-8)
