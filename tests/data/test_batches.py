"""Batches: what comes out, in which order, the same again, from memory and from disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equilibria import data
from equilibria.data import Batches, ImageData, LazyImages
from tests.data.made_files import made, write_class_folders


def numbers(dataset: ImageData, x: torch.Tensor) -> list[int]:
    """Which samples a batch holds, by the pixel that holds the number."""
    pixel = x[:, 0, 0, 0].double() * dataset.std[0] + dataset.mean[0]
    return (pixel * 255).round().long().tolist()


SOURCES = pytest.mark.parametrize("lazy", [False, True], ids=["memory", "lazy"])


@SOURCES
def test_in_order_normalized(lazy: bool) -> None:
    dataset = made(23, lazy)
    batches = Batches(dataset, 5)
    got = list(batches)
    assert [len(x) for x, _ in got] == [5, 5, 5, 5, 3]
    x, y = torch.cat([x for x, _ in got]), torch.cat([y for _, y in got])
    pixels = made(23).images.numpy().astype(np.float64) / 255
    mean, std = np.array(dataset.mean).reshape(3, 1, 1), np.array(dataset.std).reshape(3, 1, 1)
    np.testing.assert_allclose(x, (pixels - mean) / std, atol=1e-5)
    assert y.tolist() == [k % 4 for k in range(23)]
    dropped = Batches(dataset, 4, drop_last=True)
    assert [len(x) for x, _ in dropped] == [4] * 5 == [4] * len(dropped)


@SOURCES
def test_an_epoch_holds_every_sample_once_with_its_label(lazy: bool) -> None:
    dataset = made(23, lazy)
    batches = Batches(dataset, 4, shuffle=True, seed=1)
    for epoch in range(3):
        got = epoch_of(batches, epoch)
        seen = [k for x, _ in got for k in numbers(dataset, x)]
        assert [int(k) for _, y in got for k in y] == [k % 4 for k in seen]
        assert sorted(seen) == list(range(23)) != seen


AUGMENT = data.Augmentation(
    [data.Crop(padding=2), data.Flip(), data.Cutout(size=2), data.ColorJitter()]
)


def epoch_of(batches: Batches, epoch: int, start: int = 0) -> list[tuple[torch.Tensor, Any]]:
    batches.set_epoch(epoch, start)
    return list(batches)


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(p, q)
        for one, two in zip(a, b, strict=True)
        for p, q in zip(one, two, strict=True)
    )


@SOURCES
def test_an_epoch_depends_on_seed_and_number_alone(lazy: bool) -> None:
    batches = Batches(made(23, lazy), 4, shuffle=True, seed=3, augment=AUGMENT)
    first, second = epoch_of(batches, 0), epoch_of(batches, 1)
    assert not same(first, second)
    torch.manual_seed(1234)
    fresh = Batches(made(23, lazy), 4, shuffle=True, seed=3, augment=AUGMENT)
    assert same(epoch_of(fresh, 1), second)
    assert same(epoch_of(batches, 0), first)
    assert same(list(batches), first)  # without set_epoch the epoch repeats
    other = Batches(made(23, lazy), 4, shuffle=True, seed=4, augment=AUGMENT)
    assert not same(epoch_of(other, 0), first)


def test_the_batches_of_a_seed_never_change() -> None:
    """Published results rest on these numbers; order, crop, flip and cutout are exact."""
    train = data.load("digits")
    recipe = data.build_augmentation(["crop", "flip", {"cutout": {"size": 3, "fill": 0.0}}])
    batches = Batches(train, 64, shuffle=True, seed=5, augment=recipe)
    x, y = epoch_of(batches, 2)[0]
    pixels = ((x * train.std[0] + train.mean[0]) * 255).round().long().flatten()
    assert y[:8].tolist() == [5, 1, 5, 9, 0, 0, 7, 5]
    assert int((pixels * torch.arange(1, len(pixels) + 1)).sum()) == 668_539_559


def test_lazy_and_memory_give_the_same_batches() -> None:
    one = Batches(made(23), 4, shuffle=True, augment=AUGMENT)
    two = Batches(made(23, True), 4, shuffle=True, augment=AUGMENT)
    three = Batches(made(23), 4, shuffle=True, augment=AUGMENT, resident=False)
    assert same(list(one), list(two))
    assert same(list(one), list(three))


@SOURCES
def test_going_on_in_the_middle_of_an_epoch(lazy: bool) -> None:
    batches = Batches(made(23, lazy), 4, shuffle=True, augment=AUGMENT)
    whole = epoch_of(batches, 5)
    assert same(epoch_of(batches, 5, start=2), whole[2:])
    assert same(list(batches), whole)  # the start counts once
    assert epoch_of(batches, 5, start=6) == []
    with pytest.raises(ValueError, match="start goes from 0 to 6"):
        batches.set_epoch(0, start=7)


def test_ranks_share_an_epoch() -> None:
    dataset, seen = made(23), []
    for rank in range(3):
        batches = Batches(dataset, 4, shuffle=True, seed=2, rank=rank, world=3)
        got = epoch_of(batches, 1)
        assert len(batches) == len(got) == 2
        seen += [k for x, _ in got for k in numbers(dataset, x)]
    assert sorted(seen) == list(range(23))


def test_every_batch_of_every_epoch_and_rank_draws_its_own_numbers() -> None:
    flat = made(16)
    flat.images.fill_(7)  # what differs is the augmentation alone
    hide = data.Cutout(size=2, fill=1.0)
    ranks = [Batches(flat, 4, augment=hide, rank=rank, world=2) for rank in (0, 1)]
    drawn = [x for rank in ranks for epoch in range(2) for x, _ in epoch_of(rank, epoch)]
    assert len(drawn) == 8
    assert all(not torch.equal(drawn[a], drawn[b]) for a in range(8) for b in range(a))


@SOURCES
def test_masks_come_along_and_move_with_their_images(lazy: bool) -> None:
    dataset = made(23, lazy, masks=True)
    plain = torch.cat([y for _, y in Batches(dataset, 4)])
    assert torch.equal(plain, dataset.targets)
    flip = Batches(dataset, 4, augment=data.Flip(p=1.0))
    assert torch.equal(torch.cat([y for _, y in flip]), dataset.targets.flip(-1))
    x = torch.cat([x for x, _ in flip])
    assert torch.equal(x, torch.cat([x for x, _ in Batches(dataset, 4)]).flip(-1))


def test_functions_are_augmentations_too() -> None:
    dataset, masked = made(23), made(23, masks=True)
    (x, _), (full, _) = (
        next(iter(Batches(dataset, 23, augment=augment)))
        for augment in (lambda x, generator: x / 2, None)
    )
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (dataset.mean, dataset.std))
    torch.testing.assert_close(x * std + mean, (full * std + mean) / 2)
    turned = Batches(masked, 23, augment=lambda x, y, generator: (x, 3 - y))
    assert torch.equal(next(iter(turned))[1], 3 - masked.targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("augment", [None, AUGMENT])
def test_dtype_and_memory_format(dtype: torch.dtype, augment: Any) -> None:
    for last in (False, True):
        batches = Batches(made(23), 6, dtype=dtype, channels_last=last, augment=augment)
        x, _ = next(iter(batches))
        assert x.dtype == dtype
        form = torch.channels_last if last else torch.contiguous_format
        assert x.is_contiguous(memory_format=form)
        assert not x.requires_grad


def test_lazy_batches_are_made_ahead_and_no_further() -> None:
    images = made(23).images
    assert isinstance(images, torch.Tensor)
    seen: set[int] = set()
    lock = threading.Lock()

    def read(i: int) -> torch.Tensor:
        with lock:
            seen.add(i)
        return images[i]

    lazy = made(23, images=LazyImages(read, torch.arange(23), (3, 6, 5)))
    stream = iter(Batches(lazy, 2, prefetch=3))
    assert seen == set()
    next(stream)
    until = time.monotonic() + 5
    while len(seen) < 6 and time.monotonic() < until:
        time.sleep(0.01)
    assert seen == set(range(6))  # the first batch and two more
    stream.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]


def test_an_error_while_reading_reaches_the_loop(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"a": 4, "b": 4})
    dataset = data.load(tmp_path, lazy=True)
    (tmp_path / "train" / "b" / "001.png").write_bytes(b"x")
    with pytest.raises(data.CorruptImageError, match=r"001\.png"):
        list(Batches(dataset, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int64}, "floating dtype"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"augment": "crop"}, "expected a Transform"),
        ({"batch_size": 30, "drop_last": True}, "fill no batch"),
        ({"resident": True}, "lazy=False"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    lazy = "resident" in options
    with pytest.raises((ValueError, TypeError), match=message):
        Batches(made(23, lazy), **{"batch_size": 4, **options})


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_order_is_the_same(
    forbid_waits: Callable[[bool], None],
) -> None:
    augment = data.Augmentation([AUGMENT, data.RandAugment()])
    dataset = made(23)
    batches = Batches(dataset, 4, shuffle=True, device="cuda", augment=augment)
    assert batches.resident
    list(batches)  # kernels are loaded now
    batches.set_epoch(1)
    stream = iter(batches)
    next(stream)  # the order goes over once an epoch
    forbid_waits(True)
    rest = list(stream)
    forbid_waits(False)
    assert len(rest) == 5
    plain = Batches(dataset, 4, shuffle=True, device="cuda")
    here = Batches(dataset, 4, shuffle=True)
    away = Batches(dataset, 4, shuffle=True, device="cuda", resident=False)
    for (x, y), (u, v), (p, q) in zip(plain, here, away, strict=True):
        torch.testing.assert_close(x.cpu(), u)
        torch.testing.assert_close(p.cpu(), u)
        assert torch.equal(y.cpu(), v)
        assert torch.equal(q.cpu(), v)
