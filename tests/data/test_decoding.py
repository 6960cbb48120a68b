"""One image against Pillow used by hand, many by the batch or at once, and kept copies."""

from __future__ import annotations

import io
import pickle
import struct
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from equilibria import data
from equilibria.data import CorruptImageError, LazyImages, decoding, read_image
from equilibria.data.decoding import Rows, decode_image, decode_mask, reshape_pixels
from equilibria.data.sampling import as_index
from tests.data.made_files import pictures, png, write_class_folders

COLOR, GRAY = pictures(1, 9, 14)[0], pictures(1, 9, 14, channels=1)[0]
WHOLE = torch.arange(20 * 2 * 3, dtype=torch.uint8).view(20, 1, 2, 3)


def saved(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF", "WEBP", "GIF", "JPEG"])
def test_every_format_decodes_as_pillow_does(kind: str) -> None:
    data = saved(Image.fromarray(COLOR), kind, **({"lossless": True} if kind == "WEBP" else {}))
    by_hand = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(decode_image(data, 3, None).numpy(), by_hand)
    if kind in ("PNG", "BMP", "PPM", "TIFF", "WEBP"):
        assert np.array_equal(by_hand, COLOR.transpose(2, 0, 1))


@pytest.mark.parametrize("size", [4, 9, 20])
def test_the_middle_square_is_resized(size: int) -> None:
    box = (2, 0, 11, 9)  # 14 wide, 9 high: (14 − 9)//2 = 2
    picture = Image.fromarray(COLOR).resize((size, size), Image.Resampling.BILINEAR, box=box)
    by_hand = np.asarray(picture)
    assert size != 9 or np.array_equal(by_hand, COLOR[:, 2:11])
    assert np.array_equal(decode_image(png(COLOR), 3, size).numpy(), by_hand.transpose(2, 0, 1))


def test_without_square_the_shorter_side_is_resized() -> None:
    by_hand = np.asarray(Image.fromarray(COLOR).resize((28, 18), Image.Resampling.BILINEAR))
    found = decode_image(png(COLOR), 3, 18, square=False)
    assert np.array_equal(found.numpy(), by_hand.transpose(2, 0, 1))


def test_gray_alpha_palettes_and_sixteen_bits_are_converted() -> None:
    assert np.array_equal(decode_image(png(GRAY), 1, None)[0], GRAY)
    assert np.array_equal(decode_image(png(GRAY), 3, None), np.stack([GRAY] * 3))
    by_hand = np.asarray(Image.fromarray(COLOR).convert("L"))
    assert np.array_equal(decode_image(png(COLOR), 1, None)[0], by_hand)
    alpha = np.dstack([COLOR, np.full((9, 14), 7, np.uint8)])
    assert np.array_equal(decode_image(png(alpha), 3, None), COLOR.transpose(2, 0, 1))
    flat = (COLOR // 128) * 255  # eight colors: a palette holds them exactly
    data = saved(Image.fromarray(flat).convert("P", palette=Image.Palette.ADAPTIVE), "PNG")
    assert np.array_equal(decode_image(data, 3, None), flat.transpose(2, 0, 1))
    values = np.random.default_rng(0).integers(0, 2**16, (9, 14), dtype=np.uint16)
    for kind in ("PNG", "TIFF", "PPM"):
        data = saved(Image.fromarray(values), kind)
        assert np.array_equal(decode_image(data, 1, None)[0], (values >> 8).astype(np.uint8))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_palette_with_transparent_colors_needs_no_warning(channels: int) -> None:
    image = Image.fromarray(COLOR).convert("P")
    plain = decode_image(saved(image, "PNG"), channels, None)
    image.info["transparency"] = bytes(range(256))
    assert torch.equal(decode_image(saved(image, "PNG"), channels, None), plain)


def test_colors_that_have_no_gray_are_refused_by_name() -> None:
    data = saved(Image.fromarray(COLOR, "LAB"), "TIFF")
    with pytest.raises(CorruptImageError, match=r"mode LAB.*not supported"):
        decode_image(data, 1, None)


def test_masks_keep_their_ids() -> None:
    ids = pictures(1, 8, 12, channels=1)[0] % 12
    assert np.array_equal(decode_mask(png(ids), None), ids)
    assert np.array_equal(decode_mask(png(ids), 4), ids[1::2, 1::2])  # nearest, no averages
    palette = Image.fromarray(ids)
    palette.putpalette([v for k in range(256) for v in (255 - k, k, 0)])
    assert np.array_equal(decode_mask(saved(palette, "PNG"), None), ids)
    assert set(decode_mask(png(ids * 20), 5).unique().tolist()) <= set((ids * 20).ravel().tolist())
    with pytest.raises(CorruptImageError, match="mode RGB"):
        decode_mask(png(COLOR), None)


def test_plain_pixels_are_resized_as_files_are() -> None:
    plain = torch.from_numpy(COLOR).permute(2, 0, 1)
    for size, channels in ((6, 3), (11, 1), (None, 1)):
        assert torch.equal(
            reshape_pixels(plain, channels, size), decode_image(png(COLOR), channels, size)
        )
    one = torch.from_numpy(GRAY).unsqueeze(0)
    assert torch.equal(reshape_pixels(one, 3, 7), decode_image(png(GRAY), 3, 7))


def test_read_image_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(COLOR))
    assert torch.equal(read_image(path, 3, 5), decode_image(png(COLOR), 3, 5))
    path.write_bytes(b"nothing")
    with pytest.raises(CorruptImageError, match=r"a\.png"):
        read_image(path)
    with pytest.raises(CorruptImageError, match=r"b\.png"):
        read_image(tmp_path / "b.png")


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is enormous."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("side", [8200, 10_000, 60_000])
def test_absurd_sizes_are_refused_before_decoding(side: int) -> None:
    with pytest.raises(CorruptImageError, match=r"pixels|DecompressionBomb"):
        decode_image(bomb(side, side), 3, 32)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        png(COLOR)[: len(png(COLOR)) // 2],
        png(COLOR)[:-20] + b"x" * 20,
        saved(Image.fromarray(np.repeat(np.repeat(COLOR, 9, 0), 9, 1)), "JPEG")[:400],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        saved(Image.fromarray(GRAY.astype(np.float32)), "TIFF"),
        saved(Image.fromarray(COLOR), "PCX"),
    ],
    ids=["empty", "text", "cut", "damaged", "cut-jpeg", "postscript", "floats", "other-format"],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptImageError):
        decode_image(data, 3, None)


def row(i: int) -> torch.Tensor:
    return WHOLE[i]


def lazy(read: Callable[[int], torch.Tensor] = row) -> LazyImages:
    return LazyImages(read, torch.arange(20), (1, 2, 3))


@given(st.lists(st.integers(-20, 19), max_size=30))
def test_indexing_by_numbers(index: list[int]) -> None:
    chosen = torch.tensor(index, dtype=torch.long)
    assert torch.equal(lazy()[chosen], WHOLE[chosen])
    assert torch.equal(lazy()[index], WHOLE[chosen])


@given(st.slices(20).filter(lambda s: s.step is None or s.step > 0))  # torch has no others either
def test_indexing_by_a_slice(index: slice) -> None:
    assert torch.equal(lazy()[index], WHOLE[index])


def test_lazy_images_look_like_a_tensor() -> None:
    images = lazy()
    assert (images.shape, images.ndim, images.dtype) == (WHOLE.shape, 4, torch.uint8)
    assert torch.equal(images[3], WHOLE[3])
    assert torch.equal(images[torch.tensor(-1)], WHOLE[-1])
    mask = torch.arange(20) % 3 == 0
    assert torch.equal(images[mask], WHOLE[mask])
    part = images.subset(torch.tensor([5, 3, 9, 9])).subset(range(1, 4))
    assert torch.equal(part[:], WHOLE[[3, 9, 9]])
    assert torch.equal(pickle.loads(pickle.dumps(images))[:], WHOLE)


@pytest.mark.parametrize("index", [[20], [-21], torch.tensor([0.5]), torch.zeros(2, 2).long()])
def test_wrong_indices(index: object) -> None:
    with pytest.raises(IndexError):
        lazy()[index]
    with pytest.raises(IndexError):
        as_index(torch.tensor([True, False, True]), 4)  # a mask of another length


def test_an_error_in_a_thread_comes_out() -> None:
    def read(i: int) -> torch.Tensor:
        if i == 7:
            raise ValueError("image seven")
        return WHOLE[i]

    with pytest.raises(ValueError, match="image seven"):
        lazy(read)[:]
    with pytest.raises(ValueError, match="row 1 is 4 × 2 pixels"):
        lazy(lambda i: torch.zeros(1, 2, 4))[torch.tensor([1])]


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 1), (0.0025, 4)])
def test_quick_images_are_decoded_in_one_thread(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """The interpreter runs one thread at a time: for a small image, which is mostly Python, more
    threads take longer. Errors name the first bad image, however many threads there are."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4), raising=False)
    names, bad = set[str](), set[int]()

    def read(i: int) -> torch.Tensor:
        time.sleep(seconds)
        names.add(threading.current_thread().name)
        if i in bad:
            raise CorruptImageError(f"image {i}")
        return WHOLE[i]

    images = lazy(read)
    for _ in range(2):
        names.clear()
        assert torch.equal(images[:], WHOLE)
        workers = {name for name in names if name.startswith("decode")}
        assert len(workers) == 1 if most == 1 else 1 < len(workers) <= most
    bad |= {1, 9}
    with pytest.raises(CorruptImageError, match="image 1"):
        lazy(read)[:]
    failures: dict[int, str] = {}
    lazy(read).decoded(slice(None), failures)
    assert failures == {1: "image 1", 9: "image 9"}


def column(folder: Path, count: int, bad: tuple[int, ...] = ()) -> tuple[LazyImages, np.ndarray]:
    pixels = pictures(count)
    paths = [folder / f"{k:04d}.png" for k in range(count)]
    for k, path in enumerate(paths):
        path.write_bytes(b"broken" if k in bad else png(pixels[k]))
    rows = Rows(paths, partial(decode_image, channels=3, size=None))
    return LazyImages(rows, torch.arange(count), (3, 6, 6)), pixels.transpose(0, 3, 1, 2)


def test_failures_are_named_and_the_rest_is_there(tmp_path: Path) -> None:
    images, pixels = column(tmp_path, 600, bad=(4, 17))
    failures: dict[int, str] = {}
    found = images.decoded(slice(None), failures, "decoding")
    assert sorted(failures) == [4, 17]
    assert "0004.png" in failures[4]
    assert "on_corrupt='skip'" in failures[17]
    good = [k for k in range(600) if k not in failures]
    assert np.array_equal(found[good], pixels[good])
    with pytest.raises(CorruptImageError, match=r"0004\.png"):
        images[:]
    (tmp_path / "0001.png").unlink()
    with pytest.raises(CorruptImageError, match=r"0001\.png"):
        images[1]


@pytest.mark.parametrize("size", [None, 6])
def test_the_warning_counts_and_names(tmp_path: Path, size: int | None) -> None:
    written = write_class_folders(tmp_path / "train", {"a": 5, "b": 5})
    for k in range(4):
        path = tmp_path / "train" / "a" / f"{k:03d}.png"
        path.write_bytes(path.read_bytes()[: 50 * k])
        del written[path]
    with pytest.raises(CorruptImageError, match=r"000\.png: not a readable image"):
        data.load(tmp_path, image_size=size)
    text = r"skipped 4 of 10 .*000\.png, .*001\.png, .*002\.png and others"
    with pytest.warns(UserWarning, match=text) as seen:
        found = data.load(tmp_path, image_size=size, on_corrupt="skip")
    assert len(seen) == 1
    assert Path(seen[0].filename).name == Path(__file__).name
    assert found.targets.tolist() == [0, 1, 1, 1, 1, 1]
    assert np.array_equal(found.images, np.stack(list(written.values())).transpose(0, 3, 1, 2))


def test_large_sets_are_lazy_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_class_folders(tmp_path / "train", {"a": 4, "b": 4})
    size = 8 * 3 * 6 * 6
    monkeypatch.setattr(decoding, "MEMORY_LIMIT", size)
    now = data.load(tmp_path)
    assert not now.is_lazy
    monkeypatch.setattr(decoding, "MEMORY_LIMIT", size - 1)
    assert not data.load(tmp_path, lazy=False).is_lazy
    later = data.load(tmp_path)
    assert later.is_lazy
    assert torch.equal(later.images[:], now.images)
    assert torch.equal(later.targets, now.targets)
    assert torch.equal(pickle.loads(pickle.dumps(later.images))[:], now.images)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Copies of any size are kept; every image that is decoded is noted."""
    monkeypatch.setattr(decoding, "SMALLEST_COPY", 0)
    seen: list[str] = []
    original = Rows.__call__

    def noted(self: Rows, i: int) -> torch.Tensor:
        seen.append(str(self.column[i]))
        return original(self, i)

    monkeypatch.setattr(Rows, "__call__", noted)
    return seen


def test_the_second_load_decodes_nothing(
    tmp_path: Path, own_cache: Path, counted: list[str]
) -> None:
    write_class_folders(tmp_path, {"a": 5, "b": 5})
    data.load(tmp_path, image_size=4, cache=False)
    assert (len(counted), (own_cache / "decoded").exists()) == (8, False)
    first = data.load(tmp_path, image_size=4)
    assert len(counted) == 16
    second = data.load(tmp_path, image_size=4)
    assert len(counted) == 16
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.targets, second.targets)
    assert len(data.load(tmp_path, "test", image_size=4)) == 2  # the other part of the same files
    data.load(tmp_path, image_size=4, cache=False)
    assert len(counted) == 26
    data.load(tmp_path, image_size=5)
    data.load(tmp_path, image_size=4, channels=1)
    assert len(counted) == 42
    assert len(list((own_cache / "decoded").iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut off", "another shape"])
def test_a_damaged_copy_is_passed_over(
    tmp_path: Path, own_cache: Path, counted: list[str], damage: str
) -> None:
    from safetensors.torch import save_file

    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    first = data.load(tmp_path, image_size=6)
    (copy,) = (own_cache / "decoded").iterdir()
    if damage == "cut off":
        copy.write_bytes(copy.read_bytes()[:100])
    else:
        save_file({"images": first.images[:3]}, copy)
    assert torch.equal(data.load(tmp_path, image_size=6).images, first.images)
    assert len(counted) == 8


def test_nothing_is_kept_of_small_sets_or_with_corrupt_images(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class_folders(tmp_path / "train", {"a": 2, "b": 2})
    data.load(tmp_path, image_size=6)
    assert not (own_cache / "decoded").exists()
    monkeypatch.setattr(decoding, "SMALLEST_COPY", 0)
    (tmp_path / "train" / "a" / "000.png").write_bytes(b"x")
    for _ in range(2):
        with pytest.warns(UserWarning, match="skipped 1 of 4"):
            data.load(tmp_path, image_size=6, on_corrupt="skip")
    assert not (own_cache / "decoded").exists()


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, counted: list[str]
) -> None:
    import safetensors.torch

    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    write_class_folders(tmp_path / "set" / "train", {"a": 2, "b": 2})
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        assert len(data.load(tmp_path / "set", image_size=6)) == 4
    assert list((own_cache / "decoded").iterdir()) == []
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder would be")
    monkeypatch.setenv("EQUILIBRIA_DATA", str(blocked))
    assert len(data.load(tmp_path / "set", image_size=6)) == 4
