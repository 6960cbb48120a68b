"""Numbers that are read off networks, against dense algebra and counting by hand."""

from __future__ import annotations

import dataclasses
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
    assert measures.local_minima(grid) == expected


def test_first_steps_share_of_a_path() -> None:
    # One sample goes 3, then 1; the other leaps once; the third blows up and is left out.
    points = torch.tensor([[0.0, 0.0, 0.0], [3.0, 2.0, 1.0], [4.0, 2.0, torch.inf]])
    assert measures._first_step(points[..., None]) == pytest.approx(100 * (0.75 + 1.0) / 2)


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


def test_quality_by_numpy(tmp_path: Path) -> None:
    targets = np.random.default_rng(1).integers(0, 12, 200)
    logits = _logits(200, 12, seed=0)
    logits[7, 3] = np.nan  # counts as wrong, and is in no mean of the others
    found = measures.quality(scene_of(LookUp(logits), numbered(targets, 12), tmp_path))
    kept = np.arange(200) != 7
    p = softmax(logits[kept])
    order = np.argsort(-logits[kept], axis=1)
    near = (order[:, :5] == targets[kept, None]).any(1)
    assert found["accuracy"] == pytest.approx(100 * (order[:, 0] == targets[kept]).sum() / 200)
    assert found["top5"] == pytest.approx(100 * near.sum() / 200)
    assert found["nll"] == pytest.approx(-np.log(p[np.arange(199), targets[kept]]).mean())
    assert found["ece"] == pytest.approx(100 * numpy_ece(p, targets[kept], 15))
    assert found["nonfinite"] == 1.0
    assert found["parameters_m"] == found["parameters_k"] == 0.0


def test_held_out_judges_the_part_for_choices(tmp_path: Path) -> None:
    logits = _logits(60, 4, seed=2)
    targets = np.random.default_rng(3).integers(0, 4, 60)
    whole = numbered(targets, 4)
    scene = scene_of(LookUp(logits), whole.subset(range(20)), tmp_path)
    with pytest.raises(ValueError, match="nothing was held out"):
        measures.held_out(scene)
    scene = dataclasses.replace(scene, held_out=whole.subset(range(20, 60)))
    expected = (logits[20:].argmax(1) == targets[20:]).mean()
    assert (logits[:20].argmax(1) == targets[:20]).mean() != expected
    assert measures.held_out(scene) == {"held_out.accuracy": pytest.approx(100 * expected)}


def test_flip_is_the_mean_of_probabilities(tmp_path: Path) -> None:
    targets = np.random.default_rng(4).integers(0, 6, 150)
    one, other = _logits(151, 6, seed=5), _logits(151, 6, seed=6)
    # Number 0 is its own mirror image, so the images are numbered from 1.
    images = numbered(np.r_[0, targets], 6).subset(range(1, 151))
    found = measures.flipped(scene_of(LookUp(one, other), images, tmp_path))
    p = (softmax(one[1:]) + softmax(other[1:])) / 2
    assert found["flip.accuracy"] == pytest.approx(100 * (p.argmax(1) == targets).mean())
    assert found["flip.nll"] == pytest.approx(-np.log(p[np.arange(150), targets]).mean())
    assert found["flip.ece"] == pytest.approx(100 * numpy_ece(p, targets, 15))
    of_logits = ((one[1:] + other[1:]) / 2).argmax(1)
    assert (of_logits == targets).mean() != (p.argmax(1) == targets).mean()


def test_segmentation_by_numpy(tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    guess = generator.integers(0, 4, (20, 5, 5))
    truth = np.where(
        generator.random((20, 5, 5)) < 0.6, guess, generator.integers(0, 4, (20, 5, 5))
    )
    truth = np.where(truth == 3, 0, truth)  # class 3 is guessed and does not occur
    guess = np.where(generator.random(guess.shape) < 0.1, 4, guess)
    truth[:, 0] = 255  # a row of no class
    guess[:, 0] = 5  # guessed there alone: it does not count as having been

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            number = (255 * x[:, 0, 0, -1]).round().long()
            return nn.functional.one_hot(torch.from_numpy(guess)[number], 7).movedim(3, 1).float()

    images = numbered(
        truth, 7, pixels=5, task="segmentation", ignore_index=255
    )  # class 6: neither guessed nor there
    found = measures.segmentation(scene_of(Fixed(), images, tmp_path))
    counted = truth != 255
    t, g = truth[counted], guess[counted]
    both = [((t == k) & (g == k)).sum() for k in range(7)]
    either = [((t == k) | (g == k)).sum() for k in range(7)]
    iou = [a / b for a, b in zip(both, either, strict=True) if b]
    share = [both[k] / (t == k).sum() for k in range(7) if (t == k).any()]
    assert (len(iou), len(share)) == (5, 3)
    assert found["miou"] == pytest.approx(100 * np.mean(iou))
    assert found["macc"] == pytest.approx(100 * np.mean(share))
    assert found["aacc"] == pytest.approx(100 * (t == g).mean())


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
