"""evaluate against the model run by hand; flip against numpy; the report on paper."""

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
from matplotlib import pyplot
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import equilibria as eq
from equilibria.evaluation import (
    ClassificationMetrics,
    NonFiniteError,
    Report,
    SegmentationMetrics,
    classification_metrics,
    evaluate,
    segmentation_metrics,
)
from equilibria.evaluation.evaluation_report import _log_probabilities, _mean_log_probabilities
from tests.evaluation.standins import FromTable, dataset, random_data, tiny_geq
from tests.evaluation.test_metrics import softmax as numpy_softmax


def by_hand(model: nn.Module, data: Any, *, mirrored: bool = False) -> Tensor:
    x = (data.images.float() / 255 - 0.5) / 0.25
    with torch.no_grad():
        found: Tensor = model.eval()(torch.flip(x, dims=[3]) if mirrored else x)
    return found


@pytest.mark.parametrize("flip", [False, True])
def test_the_numbers_are_those_of_the_logits(flip: bool) -> None:
    """Also where mirror images are judged beside: by one more pass a batch, whose solves are not
    counted."""
    data, model = random_data(23), tiny_geq()
    ran: list[bool] = []
    with model.register_forward_hook(lambda module, inputs, out: ran.append(module.training)):
        report = evaluate(model, data, batch_size=5, certify=0, progress=False, flip=flip)
    assert ran == [False] * (10 if flip else 5)
    expected = classification_metrics(by_hand(model, data), data.targets)
    assert isinstance(report.metrics, ClassificationMetrics)
    assert report.accuracy == expected.accuracy
    assert report.metrics.nll == pytest.approx(expected.nll, rel=1e-5)
    assert torch.equal(report.metrics.confusion, expected.confusion)
    assert report.metrics.samples == 23
    assert report.model == "Sequential"
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert list(report.statistics) == ["1"]
    assert report.statistics["1"].histogram.tolist() == [0, 0, 0, 0, 23]
    assert report.certificate is None
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


def map_data() -> Any:
    """Five images [3, 6, 8] with a class a pixel; some pixels are ignored."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 3, 6, 8), generator=draw, dtype=torch.uint8)
    targets = torch.randint(0, 4, (5, 6, 8), generator=draw)
    targets[:, 0, :5] = 255
    return dataset(images, targets, 4, ignore_index=255)


def test_segmentation() -> None:
    data, model = map_data(), nn.Conv2d(3, 4, 1)
    report = evaluate(model, data, batch_size=2, progress=False)
    expected = segmentation_metrics(by_hand(model, data), data.targets, ignore_index=255)
    assert isinstance(report.metrics, SegmentationMetrics)
    assert report.metrics.miou == pytest.approx(expected.miou)
    assert torch.equal(report.metrics.confusion, expected.confusion)
    assert report.metrics.pixels == 5 * (6 * 8 - 5)
    assert report.statistics == {}
    assert report.certificate is None


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"nonfinite": "skip"}, ValueError, "nonfinite='skip'"),
        ({"certify": -1}, ValueError, "certify=-1"),
        ({"certify": 2.5}, TypeError, "certify=2.5"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"solver": "auto"}, TypeError, "solver='auto'"),
        ({"flip": "no"}, TypeError, "flip='no': expected True or False"),
    ],
)
def test_wrong_arguments(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        evaluate(tiny_geq(), random_data(), **{"progress": False, **given})


def test_an_error_inside_the_model_says_where_it_came_from() -> None:
    with pytest.raises(RuntimeError) as caught:
        evaluate(tiny_geq(channels=3), random_data(channels=1), progress=False)
    assert "ran on a batch of made up, shape (20, 1, 8, 8)" in caught.value.__notes__[0]


def test_a_solver_for_a_network_without_layers_is_noted() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    report = evaluate(model, random_data(), progress=False, solver=eq.Auto())
    assert report.converged is None
    assert "has no equilibrium layers" in report.notes[0]


Array = NDArray[np.float64]


def softmax(logits: Tensor) -> Array:
    return numpy_softmax(logits.double().numpy())


def both(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """The logits of the images and of their mirror images."""
    return by_hand(model, data), by_hand(model, data, mirrored=True)


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
            model[4].bias -= by_hand(model, data).mean(0)
            model[4].weight *= 60
    report = evaluate(model, data, batch_size=5, certify=0, progress=False, flip=True)
    one, other = both(model, data)
    mean = torch.from_numpy(np.log((softmax(one) + softmax(other)) / 2))
    expected = classification_metrics(mean, data.targets).headline
    assert report.flip is not None
    assert report.flip.headline == pytest.approx(expected, rel=1e-4)
    plain = classification_metrics(one, data.targets).headline
    assert report.metrics.headline == pytest.approx(plain, rel=1e-4)
    # Neither of the two alone, nor the mean of the logits: the test would not tell otherwise.
    for wrong in (one, other, (one + other) / 2):
        assert abs(classification_metrics(wrong, data.targets).nll - expected["nll"]) > 1e-3


def test_the_mirror_image_of_a_map_is_mirrored_back() -> None:
    data = map_data()
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 3, padding=1)
    report = evaluate(model, data, batch_size=2, progress=False, flip=True)

    one, other = both(model, data)

    def confusion(p: Array) -> list[list[int]]:
        table = [[0] * 4 for _ in range(4)]
        for guess, own in zip(p.argmax(1).ravel(), data.targets.numpy().ravel(), strict=True):
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


def sided(left: Tensor, right: Tensor, targets: Tensor, classes: int) -> Any:
    """Images whose first pixel is ``left``, and in the mirror ``right``: rows for FromTable."""
    images = torch.zeros(len(left), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = left, right
    return dataset(images, targets, classes)


@pytest.mark.parametrize("bad", [[math.nan] * 2, [2.0, -math.inf], [math.inf, 0.0]])
@pytest.mark.parametrize("mirrored", [True, False])
def test_logits_that_are_not_finite_are_named(bad: list[float], mirrored: bool) -> None:
    """Of the image or of its mirror image: the other does not mend them."""
    targets = torch.tensor([0, 1, 0, 1, 0])
    model = FromTable(torch.tensor([[3.0, 0.0], [0.0, 3.0], bad]))
    spoiled = torch.tensor([0, 1, 2, 1, 0])
    sides = (targets, spoiled) if mirrored else (spoiled, targets)
    data = sided(*sides, targets, 2)
    what = "FromTable on mirror images" if mirrored else "FromTable"
    with pytest.raises(NonFiniteError, match=rf"{what}: 1 of 5 samples .* numbers 2\..*'report'"):
        evaluate(model, data, batch_size=2, progress=False, flip=True)
    options: dict[str, Any] = {"batch_size": 2, "progress": False, "nonfinite": "report"}
    plain = evaluate(model, data, **options)
    report = evaluate(model, data, **options, flip=True)
    assert plain.metrics.nonfinite == report.metrics.nonfinite == (() if mirrored else (2,))
    assert plain.accuracy == report.accuracy == (1.0 if mirrored else 0.8)
    found: Any = report.flip
    assert found.nonfinite == (2,)
    assert found.accuracy == 0.8
    assert found.nll == pytest.approx(math.log1p(math.exp(-3.0)))  # the others alone
    assert f"{0 if mirrored else 1} samples" in str(report)
    assert "1 samples" in str(report)
    assert report.to_dict()["flip"]["nonfinite"] == [2]


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


rows = st.lists(st.floats(-300, 300, width=32), min_size=4, max_size=4)


@given(rows, rows, st.floats(-1e4, 1e4))
def test_laws_of_the_mean(first: list[float], second: list[float], shift: float) -> None:
    a, b = torch.tensor([first]), torch.tensor([second])
    one, other = _log_probabilities(a), _log_probabilities(b)
    found = _mean_log_probabilities(one, other)
    assert torch.equal(found, _mean_log_probabilities(other, one))
    assert torch.equal(_mean_log_probabilities(one, one), one)
    np.testing.assert_allclose(
        found.numpy(), np.logaddexp(one.numpy(), other.numpy()) - math.log(2), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(found.exp().numpy(), (softmax(a) + softmax(b)) / 2, atol=1e-13)
    # −log is convex: with flip, no NLL is above the mean of the two.
    assert bool((-found <= -(one + other) / 2 + 1e-12).all())
    shifted = _mean_log_probabilities(one, _log_probabilities(b.double() + shift))
    np.testing.assert_allclose(shifted.numpy(), found.numpy(), rtol=0, atol=1e-8)


@pytest.fixture(scope="module")
def report() -> Report:
    options: dict[str, Any] = {"certify": 2, "flip": True, "solver": eq.Auto(rtol=1e-5)}
    return evaluate(tiny_geq(), random_data(30), progress=False, **options)


def test_the_table_shows_the_numbers(report: Report) -> None:
    text = str(report)
    columns: list[Any] = [
        report.metrics,
        report.converged and report.converged.metrics,
        report.flip,
    ]
    for name, line in (("nll", "{:.4f}"), ("brier", "{:.4f}")):
        (row,) = (row for row in text.splitlines() if f"│ {name} " in row)
        cells = [cell.strip() for cell in row.split("│")]
        assert cells[2:5] == [line.format(part.headline[name]) for part in columns]
    parts = ("Sequential on made up (test)", f"{100 * report.accuracy:.2f}%", "as it is")
    parts += ("at equilibrium", "with flip", "same prediction", "→ Anderson", "fixed steps")
    for part in (*parts, "contraction", "30 samples, 3 classes"):
        assert part in text, part
    assert max(len(line) for line in text.splitlines()) <= 100


def test_json_is_strict_and_complete(report: Report, tmp_path: Path) -> None:
    numbers = report.to_dict()
    text = json.dumps(numbers, allow_nan=False)
    assert json.loads(text) == numbers
    assert numbers["flip"]["nll"] == report.flip.headline["nll"]  # type: ignore[union-attr]
    assert numbers["metrics"]["accuracy"] == report.accuracy
    assert numbers["metrics"]["reliability"]["count"] == report.metrics.reliability.count.tolist()  # type: ignore[union-attr]
    assert numbers["layers"]["1"]["mean_steps"] == 4.0
    assert numbers["converged"]["layers"]["1"]["converged"] == 1.0
    assert numbers["certificates"]["1"]["unique"] == 1.0
    assert numbers["certificates"]["1"]["samples"] == 2
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
