"""One encoded image to pixels, by Pillow: the formats and sizes allowed, the middle square."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.optional import needs

from .sources import CorruptImageError

MOST_PIXELS = 2**26
"""67 megapixels: an image that claims to be larger is more likely an attack than an image."""

# EPS and the like run programs; these formats are decoded and nothing else happens.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


def decode_image(data: bytes, channels: int, size: int | None, *, square: bool = True) -> Tensor:
    """The pixels of an encoded image, uint8 [channels, H, W].

    ``size`` with ``square``: the middle square, resized to size × size. Without ``square``: the
    whole image, the shorter side resized to ``size``. None keeps the image as it is. Resizing is
    bilinear with antialiasing. Raises CorruptImageError for what is not an image.
    """
    return _pixels(_eight_bits(_opened(data)), channels, size, square)


def decode_mask(data: bytes, size: int | None) -> Tensor:
    """The values of a mask of class ids, uint8 [H, W], the shorter side resized to ``size``.

    Palettes count by index. Resizing takes the nearest pixel: ids cannot be averaged.
    """
    image = _opened(data)
    if image.mode not in ("L", "P", "1"):
        raise CorruptImageError(
            f"a mask of mode {image.mode}; expected one channel of class ids (mode L or P)"
        )
    image = _resized(image, size, square=False, nearest=True)
    if image.mode == "1":
        image = image.point(lambda value: 1 if value else 0, "L")
    return _tensor(image)[..., 0]


def image_shape(data: bytes, size: int | None, *, square: bool = True) -> tuple[int, int]:
    """(height, width) that the decoded image will have, from its header alone."""
    image = _opened(data, load=False)
    if size is None:
        return image.height, image.width
    (width, height), _ = _target(image.width, image.height, size, square)
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
    values = image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)
    return _pixels(_pillow().fromarray(values.contiguous().numpy()), channels, size, True)


def _pillow() -> Any:
    with needs("pillow", "Decoding images"):
        import PIL.Image
    return PIL.Image


def _opened(data: bytes, *, load: bool = True) -> Any:
    pillow = _pillow()
    try:
        image = pillow.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise CorruptImageError(
                f"it claims {width} × {height} pixels; more than {MOST_PIXELS:,} are refused"
            )
        if load:
            image.load()
    except CorruptImageError:
        raise
    except pillow.UnidentifiedImageError:
        kinds = ", ".join(_FORMATS)
        raise CorruptImageError(f"{len(data)} bytes that are no image ({kinds})") from None
    # A decoder that is fed arbitrary bytes may raise anything: struct.error, SyntaxError, …
    except Exception as error:
        raise CorruptImageError(f"{type(error).__name__}: {error}") from error
    return image


def _eight_bits(image: Any) -> Any:
    """Sixteen bits of gray as eight; Pillow would clip them instead."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        with needs("numpy", "Decoding images of 16 bits"):
            import numpy as np
        return _pillow().fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise CorruptImageError(
            f"pixels of mode {image.mode} have no fixed range; save it with 8 or 16 bits"
        )
    return image


def _pixels(image: Any, channels: int, size: int | None, square: bool) -> Tensor:
    image = _resized(image.convert("L" if channels == 1 else "RGB"), size, square)
    return _tensor(image).permute(2, 0, 1)


def _tensor(image: Any) -> Tensor:
    """uint8 [H, W, C] of an image with one byte a channel."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, -1)


def _resized(image: Any, size: int | None, square: bool, nearest: bool = False) -> Any:
    if size is None:
        return image
    target, box = _target(image.width, image.height, size, square)
    if target == image.size:
        return image
    how = _pillow().Resampling
    return image.resize(target, how.NEAREST if nearest else how.BILINEAR, box=box)


def _target(
    width: int, height: int, size: int, square: bool
) -> tuple[tuple[int, int], tuple[int, int, int, int] | None]:
    """(width, height) after resizing, and the box that is resized."""
    side = min(width, height)
    if square:
        left, top = (width - side) // 2, (height - side) // 2
        return (size, size), (left, top, left + side, top + side)
    return (max(1, round(width * size / side)), max(1, round(height * size / side))), None
