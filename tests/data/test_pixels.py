"""Decoding against Pillow used by hand, and what is refused."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from equilibria.data import CorruptImageError, read_image
from equilibria.data.pixels import decode_image, decode_mask, image_shape, reshape_pixels
from tests.data.made_files import pictures, png

COLOR = pictures(1, 9, 14)[0]


GRAY = pictures(1, 9, 14, channels=1)[0]


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
    assert image_shape(png(COLOR), size) == (size, size)


def test_without_square_the_shorter_side_is_resized() -> None:
    by_hand = np.asarray(Image.fromarray(COLOR).resize((28, 18), Image.Resampling.BILINEAR))
    found = decode_image(png(COLOR), 3, 18, square=False)
    assert np.array_equal(found.numpy(), by_hand.transpose(2, 0, 1))
    assert image_shape(png(COLOR), 18, square=False) == (18, 28)
    assert image_shape(png(COLOR), None) == (9, 14)


def test_gray_and_color_are_converted() -> None:
    assert np.array_equal(decode_image(png(GRAY), 1, None)[0], GRAY)
    assert np.array_equal(decode_image(png(GRAY), 3, None), np.stack([GRAY] * 3))
    by_hand = np.asarray(Image.fromarray(COLOR).convert("L"))
    assert np.array_equal(decode_image(png(COLOR), 1, None)[0], by_hand)


def test_alpha_and_palettes_become_color() -> None:
    alpha = np.dstack([COLOR, np.full((9, 14), 7, np.uint8)])
    assert np.array_equal(decode_image(png(alpha), 3, None), COLOR.transpose(2, 0, 1))
    flat = (COLOR // 128) * 255  # eight colors: a palette holds them exactly
    data = saved(Image.fromarray(flat).convert("P", palette=Image.Palette.ADAPTIVE), "PNG")
    assert np.array_equal(decode_image(data, 3, None), flat.transpose(2, 0, 1))


def test_sixteen_bits_keep_their_upper_half() -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (9, 14), dtype=np.uint16)
    data = saved(Image.fromarray(values), "PNG")
    assert np.array_equal(decode_image(data, 1, None)[0], (values >> 8).astype(np.uint8))


def test_masks_keep_their_ids() -> None:
    ids = pictures(1, 8, 12, channels=1)[0] % 12
    assert np.array_equal(decode_mask(png(ids), None), ids)
    assert np.array_equal(decode_mask(png(ids), 4), ids[1::2, 1::2])  # nearest, no averages
    palette = Image.fromarray(ids)
    palette.putpalette([v for k in range(256) for v in (255 - k, k, 0)])
    assert np.array_equal(decode_mask(saved(palette, "PNG"), None), ids)
    assert set(decode_mask(png(ids * 20), 5).unique().tolist()) <= set((ids * 20).ravel().tolist())


def test_a_colored_mask_is_refused() -> None:
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
    assert reshape_pixels(one, 1, None) is one


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
