"""One encoded image to pixels: the formats allowed, the sizes allowed, the middle square."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CorruptImageError
from .extras import numpy, pillow

__all__ = [
    "MOST_PIXELS",
    "decode_image",
    "decode_mask",
    "image_shape",
    "read_image",
    "reshape_pixels",
]

MOST_PIXELS = 2**26
"""67 megapixels: a picture that says it is larger is more likely an attack than a picture."""

# EPS and the like run programs; these formats are decoded and nothing else happens.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


def decode_image(data: bytes, channels: int, size: int | None, *, square: bool = True) -> Tensor:
    """The pixels of an encoded image, uint8 [channels, H, W].

    ``size`` with ``square``: the middle square, resized to size × size. Without ``square``: the
    whole picture, the shorter side resized to ``size``. None keeps the picture as it is. Resizing
    is bilinear with antialiasing. Raises CorruptImageError for what is not an image.
    """
    return _resized(_eight_bits(_opened(data)), channels, size, square=square)


def decode_mask(data: bytes, size: int | None) -> Tensor:
    """The values of a mask of class ids, uint8 [H, W], the shorter side resized to ``size``.

    Palettes count by index. Resizing takes the nearest pixel: ids cannot be averaged.
    """
    picture = _opened(data)
    if picture.mode not in ("L", "P", "1"):
        raise CorruptImageError(
            f"a mask of mode {picture.mode}; expected one channel of class ids (mode L or P)"
        )
    width, height = picture.size
    if size is not None:
        target, box = _target(width, height, size, square=False)
        if target != (width, height):
            picture = picture.resize(target, pillow().Resampling.NEAREST, box=box)
    if picture.mode == "1":
        picture = picture.point(lambda value: 1 if value else 0, "L")
    np = numpy()
    return torch.from_numpy(np.array(picture, dtype=np.uint8))


def image_shape(data: bytes, size: int | None, *, square: bool = True) -> tuple[int, int]:
    """(height, width) that the decoded image will have, from its header alone."""
    picture = _opened(data, load=False)
    if size is None:
        return picture.height, picture.width
    (width, height), _ = _target(picture.width, picture.height, size, square)
    return height, width


def read_image(path: str | Path, channels: int = 3, size: int | None = None) -> Tensor:
    """The image file at ``path`` as ``load`` would read it, uint8 [channels, H, W]."""
    try:
        return decode_image(Path(path).read_bytes(), channels, size)
    except (CorruptImageError, OSError) as error:
        raise CorruptImageError(f"{path}: not a readable image ({error}).") from error


def reshape_pixels(image: Tensor, channels: int, size: int | None) -> Tensor:
    """Plain pixels [C, H, W] with other channels or size, as ``decode_image`` makes them."""
    if image.shape[0] == channels and (size is None or image.shape[1:] == (size, size)):
        return image
    np = numpy()
    values = image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()
    picture = pillow("Resizing images").fromarray(np.ascontiguousarray(values))
    return _resized(picture, channels, size, square=True)


def _resized(picture: Any, channels: int, size: int | None, *, square: bool) -> Tensor:
    picture = picture.convert("L" if channels == 1 else "RGB")
    width, height = picture.size
    if size is not None:
        target, box = _target(width, height, size, square)
        if target != (width, height):
            picture = picture.resize(target, pillow().Resampling.BILINEAR, box=box)
    np = numpy()
    values = torch.from_numpy(np.array(picture, dtype=np.uint8))
    return values.unsqueeze(0) if channels == 1 else values.permute(2, 0, 1)


def _opened(data: bytes, *, load: bool = True) -> Any:
    Image = pillow()
    try:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise CorruptImageError(
                f"it says it has {width} × {height} pixels; more than {MOST_PIXELS:,} are refused"
            )
        if load:
            picture.load()
    except CorruptImageError:
        raise
    except Image.UnidentifiedImageError:
        kinds = ", ".join(_FORMATS)
        raise CorruptImageError(f"{len(data)} bytes that are no image ({kinds})") from None
    # A decoder that is fed arbitrary bytes may raise anything: struct.error, SyntaxError, …
    except Exception as error:
        raise CorruptImageError(f"{type(error).__name__}: {error}") from error
    return picture


def _eight_bits(picture: Any) -> Any:
    """Sixteen bits of gray as eight; Pillow would clip them instead."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        np = numpy()
        values = np.asarray(picture).astype(np.uint32) >> 8
        return pillow().fromarray(values.astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise CorruptImageError(
            f"pixels of mode {picture.mode} have no fixed range; save it with 8 or 16 bits"
        )
    return picture


def _target(
    width: int, height: int, size: int, square: bool
) -> tuple[tuple[int, int], tuple[int, int, int, int] | None]:
    """(width, height) after resizing, and the box that is resized."""
    side = min(width, height)
    if square:
        left, top = (width - side) // 2, (height - side) // 2
        return (size, size), (left, top, left + side, top + side)
    return (max(1, round(width * size / side)), max(1, round(height * size / side))), None
