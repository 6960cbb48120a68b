"""Numbers that are read off networks, against dense algebra and counting by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import equilibria as eq
from equilibria import evaluation
from equilibria.data import ImageData
from equilibria_papers.tables import images as supplying
from equilibria_papers.tables import measures
from equilibria_papers.tables.geq import KINDS
from equilibria_papers.tables.plan import plan_of
from equilibria_papers.tables.thesis import ResidualNet
from tests.evaluation.test_metrics import numpy_ece, softmax

from . import tiny
from .scenes import Array, Linear, TwoLayers, contraction, digits, iterates, numbered, scene_of


@settings(deadline=None)
@given(
    st.integers(3, 7).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 6) | st.just(math.nan), min_size=n, max_size=n),
            min_size=n,
            max_size=n,
        )
    )
)
def test_local_minima_are_counted(rows: list[list[float]]) -> None:
    """Strictly below all their neighbors, holes aside."""
    grid = torch.tensor(rows, dtype=torch.float64)
    n, expected = len(rows), 0
    for i in range(n):
        for j in range(n):
            around = [
                rows[a][b]
                for a in range(max(0, i - 1), min(n, i + 2))
                for b in range(max(0, j - 1), min(n, j + 2))
                if (a, b) != (i, j) and not math.isnan(rows[a][b])
            ]
            hole = math.isnan(rows[i][j])
            expected += not hole and all(rows[i][j] < value for value in around)
    assert measures.local_minima(grid) == expected


def test_times_leave_the_network_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResidualNet(10, 1, channels=16, inner=16, repeats=2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    scene = scene_of(model, digits(32)[0], tmp_path, smoke=True)
    found = measures.times(scene) | measures.throughput(scene)
    assert all(value > 0 for value in found.values())
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not model.training


class LookUp(nn.Module):
    """Image number i ↦ row i of a table of logits; a mirror image ↦ row i of a second one."""

    def __init__(self, table: Array, mirrored: Array | None = None) -> None:
        super().__init__()
        self.table = torch.from_numpy(table)
        self.mirrored = None if mirrored is None else torch.from_numpy(mirrored)

    def forward(self, x: Tensor) -> Tensor:
        pixels = (255 * x[:, 0, 0]).round().long()
        number = 256 * pixels[:, 0] + pixels[:, -1]
        if self.mirrored is None:
            return self.table[number]
        # All numbers are below 256: the first pixel of an image is 0, of its mirror image not.
        other = pixels[:, 0] > 0
        return torch.where(other[:, None], self.mirrored[pixels[:, 0]], self.table[pixels[:, 1]])


def _logits(count: int, classes: int, seed: int, scale: float = 2.0) -> Array:
    drawn: Array = scale * np.random.default_rng(seed).standard_normal((count, classes))
    return drawn


def test_what_is_judged_and_in_which_unit(tmp_path: Path) -> None:
    """Percent, of the test images, the held-out ones and the mirror images; metrics have their own
    tests."""
    right, wrong = np.r_[9.0, np.zeros(5)], np.r_[-9.0, np.zeros(4), 4.0]
    table = np.stack([right] * 6 + [wrong, np.full(6, np.nan), wrong, wrong, right])
    table[8, 0] = 3.0  # the second best
    images = numbered([0] * 11, 6)
    scene = scene_of(LookUp(table, table[::-1].copy()), images.subset(range(1, 9)), tmp_path)
    found = measures.quality(scene)
    assert [found[k] for k in ("accuracy", "top5", "nonfinite")] == [62.5, 75.0, 1.0]
    p = softmax(table[[1, 2, 3, 4, 5, 6, 8]])
    assert found["nll"] == pytest.approx(-np.log(p[:, 0]).mean())
    assert found["ece"] == pytest.approx(100 * numpy_ece(p, np.zeros(7), 15))
    with pytest.raises(ValueError, match="nothing was held out"):
        measures.held_out(scene)
    scene = dataclasses.replace(scene, held_out=images.subset([9, 10]))
    assert measures.held_out(scene) == {"held_out.accuracy": 50.0}
    assert measures.flipped(scene)["flip.accuracy"] == 75.0


def test_segmentation_counts_classes_that_occur(tmp_path: Path) -> None:
    """Of the classes of the truth one is right in half of its pixels, one in all: macc 75."""
    truth = torch.tensor([[0, 0, 0, 0], [1, 1, 255, 255]]).repeat(3, 2, 1)
    guess = torch.tensor([[0, 0, 2, 2], [1, 1, 3, 3]]).repeat(3, 2, 1)

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(guess[: len(x)], 4).movedim(3, 1).float()

    images = numbered(truth, 4, pixels=4, task="segmentation", ignore_index=255)
    found = measures.segmentation(scene_of(Fixed(), images, tmp_path))
    assert found["macc"] == pytest.approx(75.0)
    assert found["aacc"] == pytest.approx(100 * 2 / 3)
    assert found["miou"] == pytest.approx(100 * (0.5 + 1.0 + 0.0) / 3)


def _supplied(
    job: Any, images: ImageData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> supplying.Supplied:
    monkeypatch.setattr(supplying, "_read", lambda *given: images)
    (one,) = plan_of(job, tiny.choices(tmp_path, **changes))
    return supplying.supply(one, progress=False)


def _numbers(images: ImageData) -> npt.NDArray[np.int64]:
    pixels = torch.as_tensor(images.images)[:, 0, 0].numpy().astype(np.int64)
    found: npt.NDArray[np.int64] = 256 * pixels[:, 0] + pixels[:, -1]
    return found


def test_known_and_unknown_by_equation_13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KerDEQ §4.3: KL(p, q) = Σ p log p − p log q, to the prediction and to uniform."""
    targets = np.random.default_rng(8).permutation(np.arange(300) % 10)
    images = numbered(targets, 10)
    job = tiny.job(data="cifar10", classes="first half")
    given = _supplied(job, images, tmp_path, monkeypatch)
    assert given.held_out is not None
    learned = np.r_[_numbers(given.train), _numbers(given.held_out)]
    assert sorted(learned) == sorted(np.flatnonzero(targets < 5))
    assert torch.as_tensor(given.train.targets).tolist() == targets[_numbers(given.train)].tolist()

    logits = _logits(300, 5, seed=9)
    found = measures.known_and_unknown(scene_of(LookUp(logits), given.test, tmp_path))

    def kl(p: Array, q: Array) -> Array:
        terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0) - p * np.log(q)
        total: Array = terms.sum(1)
        return total

    q, known = softmax(logits), targets < 5
    one_hot = np.eye(5)[targets[known]]
    assert found["known.kl"] == pytest.approx(kl(one_hot, q[known]).mean())
    uniform = np.full((150, 5), 0.2)
    assert found["unknown.kl"] == pytest.approx(kl(q[~known], uniform).mean())
    assert found["unknown.kl"] != pytest.approx(kl(uniform, q[~known]).mean(), rel=1e-2)
    right = logits[known].argmax(1) == targets[known]
    assert found["known.accuracy"] == pytest.approx(100 * right.mean())


def test_superclasses_as_in_cifar_100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEQ §4.3: of twenty superclasses of five, the first four classes of each are learned."""
    generator = np.random.default_rng(10)
    above = generator.permutation(np.arange(100) % 20)
    targets = generator.permutation(np.repeat(np.arange(100), 10))
    images = numbered(
        targets,
        100,
        superclasses=torch.from_numpy(above[targets]),
        superclass_names=tuple(f"superclass {k}" for k in range(20)),
    )
    unseen = [max(k for k in range(100) if above[k] == s) for s in range(20)]
    job = tiny.job(data="cifar100", classes="superclass")
    given = _supplied(job, images, tmp_path, monkeypatch)
    assert given.held_out is not None
    learned = np.r_[_numbers(given.train), _numbers(given.held_out)]
    assert sorted(learned) == sorted(np.flatnonzero(~np.isin(targets, unseen)))
    assert torch.as_tensor(given.train.targets).tolist() == (
        above[targets[_numbers(given.train)]].tolist()
    )
    assert given.train.num_classes == 20

    # Right for nearly all of the known classes, and for half of the unseen ones.
    logits = _logits(1000, 20, seed=11)
    sure = generator.random(1000) < np.where(np.isin(targets, unseen), 0.5, 0.9)
    logits[np.flatnonzero(sure), above[targets[sure]]] += 20.0
    found = measures.superclass(scene_of(LookUp(logits), given.test, tmp_path))
    right, new = logits.argmax(1) == above[targets], np.isin(targets, unseen)
    assert found["known_accuracy"] == pytest.approx(100 * right[~new].mean())
    assert found["unknown_accuracy"] == pytest.approx(100 * right[new].mean())
    assert found["known_accuracy"] > found["unknown_accuracy"] + 20


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_what_is_held_out_is_the_same_for_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    targets = np.random.default_rng(12).permutation(np.arange(400) % 10)
    images = numbered(targets, 10)
    job = tiny.job(data="cifar10", recipe={**tiny.RECIPE, "validation": share})
    parts = []
    for seed in (0, 5):
        given = _supplied(job, images, tmp_path, monkeypatch, seeds=(seed,))
        assert given.held_out is not None
        train, kept = _numbers(given.train), _numbers(given.held_out)
        assert sorted(np.r_[train, kept]) == list(range(400))
        assert np.bincount(targets[kept], minlength=10).tolist() == [round(40 * share)] * 10
        parts.append(kept.tolist())
    assert parts[0] == parts[1]


def test_layers_of_a_network_are_all_looked_at(tmp_path: Path) -> None:
    """OptEq Tables 3 and 8: features and residuals over all equilibria, batch by batch."""
    a, b = contraction(0, 0.8), contraction(1, 0.6)
    data, x = digits(40)  # batches of 16, 16 and 8
    model = TwoLayers(a, b, (3, 5))
    scene = scene_of(model, data, tmp_path)
    first = iterates(a, x, 4)
    second = iterates(b, first[3], 6)
    ratios = []
    for rows in (slice(0, 16), slice(16, 32), slice(32, 40)):
        for path, k in ((first, 3), (second, 5)):
            z, after = path[k, rows], path[k + 1, rows]
            ratios.append(np.linalg.norm(z - after) / np.linalg.norm(z))
    # Images are normalized in float32.
    assert measures.residual(scene)["residual"] == pytest.approx(np.mean(ratios), rel=1e-5)
    both = np.stack([first[3], second[5]])
    found = measures.features(scene)
    assert found["mean_absolute"] == pytest.approx(np.abs(both).mean(), rel=1e-6)
    assert found["mean_square"] == pytest.approx((both**2).mean(), rel=1e-6)

    # Steps and residual of the worst layer; a fixed-step solve knows its last iterate but one.
    quality = measures.quality(scene)
    assert quality["steps"] == 5.0
    middle = []
    for path, k in ((first, 3), (second, 5)):
        gap = np.linalg.norm(path[k] - path[k - 1], axis=1) / np.linalg.norm(path[k], axis=1)
        middle.append(np.sort(gap)[round(0.5 * 39)])
    assert quality["median_residual"] == pytest.approx(max(middle), rel=1e-5)


def test_the_worst_layer_is_certified(tmp_path: Path) -> None:
    data, _ = digits(16)

    class Both(nn.Module):
        def __init__(self, second: nn.Module) -> None:
            super().__init__()
            bound = eq.nn.NormBounded(bound=0.5)
            self.one = eq.nn.OptEq(64, 32, constraint=bound)
            self.two = second
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.two(self.one(x.flatten(1))))
            return logits

    torch.manual_seed(0)
    proven = scene_of(Both(nn.Identity()), data, tmp_path)
    assert measures.certificate(proven) == {"certified": 100.0}
    block = Linear(contraction(0, 0.5)).float()
    unproven = scene_of(Both(eq.nn.DEQ(block)), data, tmp_path)
    assert measures.certificate(unproven) == {"certified": 0.0}


def test_focus_is_the_share_of_the_top_fifth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = np.random.default_rng(13).random((70, 7, 7)) ** 3
    maps[5] = 0.0
    maps[6] = 1.0

    def gradcam(model: nn.Module, x: Tensor) -> Tensor:
        return torch.from_numpy(maps)[(255 * x[:, 0, 0, -1]).round().long()]

    monkeypatch.setattr(evaluation, "gradcam", gradcam)
    monkeypatch.setattr(evaluation, "save_gradcam", lambda *given: None)
    found = measures.saliency(scene_of(nn.Identity(), numbered([0] * 70, 2), tmp_path))
    shares = [
        np.sort(one)[-9:].sum() / one.sum() if one.any() else 0.2
        for one in maps[:64].reshape(64, 49)
    ]
    assert found == {"focus": pytest.approx(100 * np.mean(shares))}


@pytest.mark.parametrize("smoke", [False, True])
def test_corruptions_are_of_the_first_2000_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smoke: bool
) -> None:
    """GEQ Figure 2: means over five severities; the study itself is held by its own tests."""
    seen: dict[str, Any] = {}

    def study(model: nn.Module, images: ImageData, **given: Any) -> Any:
        seen.update(given, images=_numbers(images))
        by_kind = {kind: k / 100 for k, kind in enumerate(KINDS)}
        save = seen.setdefault("saved", []).append
        return SimpleNamespace(by_kind=by_kind, mean_accuracy=0.5, clean=0.75, save=save)

    monkeypatch.setattr(evaluation, "corruption_study", study)
    scene = scene_of(nn.Identity(), numbered([0] * 2100, 2), tmp_path, smoke=smoke)
    found = measures.corruptions(scene)
    assert seen["images"].tolist() == list(range(2000))
    assert seen["severities"] == ((3,) if smoke else (1, 2, 3, 4, 5))
    assert seen["saved"] == [tmp_path]
    expected = {f"corruption.{kind}": pytest.approx(float(k)) for k, kind in enumerate(KINDS)}
    assert found == expected | {"corruption.mean": 50.0, "corruption.clean": 75.0}


def test_times_are_of_eighty_batches_of_125(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OptEq §7.4, by a clock that the network moves: 2 s forward, 3 s backward a call."""
    now = [0.0]
    seen: list[int] = []

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            now[0] += 2.0
            seen.append(len(x))
            logits = self.scale * torch.stack([x.flatten(1).sum(1), x[:, 0, 0, 0]], 1)
            logits.register_hook(lambda g: now.__setitem__(0, now[0] + 3.0))
            return logits

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(measures, "time", clock)
    scene = scene_of(Slow(), numbered([0, 1] * 15, 2), tmp_path)
    assert measures.times(scene) == {
        "seconds.forward": pytest.approx(160.0),
        "seconds.backward": pytest.approx(240.0),
    }
    assert seen == [125] * 81
    # A smoke test: two batches of 16 stand for 10,000 images.
    small = dataclasses.replace(scene, smoke=True)
    assert measures.times(small)["seconds.forward"] == pytest.approx(4.0 * 10_000 / 32)
    seen.clear()
    found = measures.throughput(dataclasses.replace(scene, train_batch=96))
    assert found["images_per_second"] == pytest.approx(96 / 5.0)
    assert set(seen) == {96}
    assert found["parameters_m"] == pytest.approx(1e-6)
