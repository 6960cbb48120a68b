"""Encoded images to tensors, by Pillow: one, all at once with a copy in the cache, or by the batch.

Only formats whose decoders run nothing are read, and no image that claims an absurd size.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any, Literal, cast

import torch
from torch import Tensor

from equilibria.engine.files import replacing
from equilibria.engine.optional import needs

from .sampling import as_index
from .sources import (
    CorruptImageError,
    DataError,
    Encoded,
    Found,
    Task,
    cache_dir,
    fingerprint,
    read_file,
    too_many,
)

OnCorrupt = Literal["raise", "skip"]

MEMORY_LIMIT = 4 * 2**30
"""Decoded bytes up to which a split is kept in memory; above, images are decoded by the batch."""
SMALLEST_COPY = 4 * 2**20
"""Sets of fewer bytes are decoded in less than a second: no copy of them is kept."""
MOST_PIXELS = 2**26
"""67 megapixels: an image that claims to be larger is more likely an attack than an image."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_COPY_FORMAT = 1  # a new number makes the old copies unused
_CHUNK = 128


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


def read_image(path: str | Encoded, channels: int = 3, size: int | None = None) -> Tensor:
    """The image file at ``path`` as ``load`` would read it, uint8 [channels, H, W]."""
    try:
        return decode_image(_read(Path(path) if isinstance(path, str) else path), channels, size)
    except (CorruptImageError, OSError) as error:
        raise CorruptImageError(f"{path}: not a readable image ({error}).") from error


def _read(source: Encoded) -> bytes:
    return (
        read_file(source, "MOST_IMAGE_BYTES") if isinstance(source, Path) else source.read_bytes()
    )


def reshape_pixels(image: Tensor, channels: int, size: int | None) -> Tensor:
    """Plain pixels [C, H, W] with other channels or size, as ``decode_image`` makes them."""
    values = image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)
    return _pixels(_pillow().fromarray(values.contiguous().numpy()), channels, size, True)


def _pillow() -> Any:
    with needs("pillow", "Decoding images"):
        import PIL.Image
    return PIL.Image


def _opened(data: bytes) -> Any:
    pillow = _pillow()
    try:
        image = pillow.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            claim = f"it claims {width} × {height} pixels"
            raise CorruptImageError(too_many(claim, MOST_PIXELS, "decoding.MOST_PIXELS"))
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
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        with needs("numpy", "Decoding images of 16 bits"):
            import numpy as np
        return _pillow().fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise CorruptImageError(
            f"pixels of mode {image.mode} have no fixed range; save it with 8 or 16 bits"
        )
    return image


def _pixels(image: Any, channels: int, size: int | None, square: bool) -> Tensor:
    mode = "L" if channels == 1 else "RGB"
    image.info.pop("transparency", None)  # not shown, and Pillow would warn of some palettes
    try:
        converted = image if image.mode == mode else image.convert(mode)
    except ValueError as error:
        raise CorruptImageError(f"pixels of mode {image.mode}: {error}") from None
    return _tensor(_resized(converted, size, square)).permute(2, 0, 1)


def _tensor(image: Any) -> Tensor:
    """uint8 [H, W, C] of an image with one byte a channel."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, -1)


def _resized(image: Any, size: int | None, square: bool, nearest: bool = False) -> Any:
    if size is None:
        return image
    width, height = image.size
    side = min(width, height)
    target, box = (size, size), None
    if square:
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
    else:
        target = (max(1, round(width * size / side)), max(1, round(height * size / side)))
    if target == image.size:
        return image
    how = _pillow().Resampling
    return image.resize(target, how.NEAREST if nearest else how.BILINEAR, box=box)


class LazyImages:
    """A stack [N, …] whose rows are decoded when indexed, in threads.

    ``read(i)`` gives row i of the source as a tensor of ``row_shape``; ``index`` chooses and orders
    the rows. Indexing takes an integer, a slice, a sequence, a LongTensor or a mask, and gives a
    tensor on the CPU.
    """

    def __init__(
        self,
        read: Callable[[int], Tensor],
        index: Tensor,
        row_shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self._read, self._index = read, index
        self.shape, self.ndim = torch.Size((len(index), *row_shape)), 1 + len(row_shape)
        self.dtype, self.device = dtype, torch.device("cpu")
        self._seconds: float | None = None  # of one row

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0):
            return self._row(int(self._index[int(index)]))
        return self.decoded(index)

    def subset(self, index: Any) -> LazyImages:
        """The rows at ``index``, still encoded."""
        chosen = self._index[as_index(index, len(self))]
        return LazyImages(self._read, chosen, self.shape[1:], self.dtype)

    def decoded(
        self,
        index: Any,
        failures: dict[int, str] | None = None,
        bar: str | None = None,
        keep: bool = True,
    ) -> Tensor:
        """The rows at ``index``, with a progress bar if it has a name; none without ``keep``.

        With ``failures``, the reason why a row cannot be read is noted there instead of raised.
        """
        rows = self._index[as_index(index, len(self))].tolist()
        out = torch.empty((len(rows) if keep else 0, *self.shape[1:]), dtype=self.dtype)

        def fill(places: range) -> None:
            for k in places:
                try:
                    row = self._row(rows[k])
                    if keep:
                        out[k] = row
                except CorruptImageError as error:
                    if failures is None:
                        raise
                    failures[rows[k]] = str(error)

        tried = range(min(8, len(rows)) if self._seconds is None else 0)
        if tried:
            self._seconds = median(timeit(partial(fill, range(k, k + 1)), number=1) for k in tried)
        # The processors that this process may use, where the system says which. For 0.1 ms of each
        # image the interpreter is locked: for small images more threads would only wait for it.
        here = getattr(os, "sched_getaffinity", None)
        most = min(32, len(here(0)) if here else os.cpu_count() or 1)
        threads = max(1, min(most, int(1e4 * (self._seconds or 0.0))))
        step = max(1, min(_CHUNK, -(-len(rows) // (4 * threads))))
        spans = [range(k, min(k + step, len(rows))) for k in range(len(tried), len(rows), step)]
        pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        try:
            done: Iterable[None] = pool.map(fill, spans)
            if bar is not None and len(rows) > 4 * _CHUNK:
                with needs("rich", "The progress bar (progress=True)"):
                    from rich.console import Console
                    from rich.progress import track
                done = track(done, bar, len(spans), console=Console(stderr=True), transient=True)
            for _ in done:
                pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return out

    def _row(self, row: int) -> Tensor:
        found = self._read(row)
        if found.shape != self.shape[1:]:
            # Of the call, not of the image: the images of one set have one size.
            name = self._read.column[row] if isinstance(self._read, Rows) else f"row {row}"
            raise DataError(
                f"{name} is {found.shape[-1]} × {found.shape[-2]} pixels, the first image "
                f"{self.shape[-1]} × {self.shape[-2]}; images of one set need one size: give an "
                "image_size."
            )
        return found


@dataclass(frozen=True)
class Rows:
    """A column and how to decode a row; with ``ids`` [256], row i is ``ids`` of its values."""

    column: Sequence[Encoded]
    decode: Callable[[bytes], Tensor]
    ids: Tensor | None = None

    def __call__(self, i: int) -> Tensor:
        """Row ``i``, or CorruptImageError with its name."""
        try:
            row = self.decode(_read(self.column[i]))
        except (CorruptImageError, OSError) as error:
            raise CorruptImageError(
                f"{self.column[i]}: not a readable image ({error}). Repair or remove it, or pass "
                "on_corrupt='skip' (train --on-corrupt skip) to go on without it."
            ) from error
        return row if self.ids is None else _classes(row[None], self.ids, self.column[i : i + 1])[0]


def decode(
    found: Found,
    task: Task,
    name: str,
    channels: int,
    size: int | None,
    on_corrupt: OnCorrupt,
    lazy: bool | None,
    cache: bool,
    progress: bool,
) -> tuple[Tensor | LazyImages, Tensor | LazyImages, Found]:
    """Images, targets, and what was found without the samples that were skipped."""
    source, where = found.images, f"{name} ({found.split})"
    if isinstance(source, Tensor):
        wanted = source.shape[2:] if size is None else (size, size)
        if source.shape[1:] != (channels, *wanted):
            source = torch.stack([reshape_pixels(image, channels, size) for image in source])
        return source, cast(Tensor, found.targets), found
    square, index = task == "classification", torch.arange(len(source))
    read = Rows(source, partial(decode_image, channels=channels, size=size, square=square))
    if square and size is not None:
        shape = torch.Size((size, size))
    else:
        shape = _first_shape(read, on_corrupt == "raise", where)
    stacks = {"images": LazyImages(read, index, (channels, *shape))}
    if found.masks is not None:
        read = Rows(found.masks, partial(decode_mask, size=size))
        stacks["masks"] = LazyImages(read, index, shape)
    bar = f"decoding {where}" if progress else None
    failures: dict[int, str] | None = {} if on_corrupt == "skip" else None
    if lazy is None:  # masks are long in the end
        lazy = len(source) * shape[0] * shape[1] * (channels + 8 * len(stacks) - 8) > MEMORY_LIMIT
    if lazy:
        if failures is not None:  # the count has to be known before the first batch
            for stack in stacks.values():
                stack.decoded(slice(None), failures, bar, keep=False)
        kept = _readable(failures, len(source), where)
        rows, found = stacks["images"].subset(kept), found.chosen(kept)
        if found.mask_ids is None:
            return rows, cast(Tensor, found.targets), found
        return rows, LazyImages(replace(read, ids=found.mask_ids), kept, shape, torch.int64), found
    path = _copy_path(found, task, name, channels, size) if cache else None
    tensors = read_copy(path, {kind: stack.shape for kind, stack in stacks.items()})
    if tensors is None:
        tensors = {k: stack.decoded(slice(None), failures, bar) for k, stack in stacks.items()}
        if failures:
            kept = _readable(failures, len(source), where)
            tensors, found = {k: t[kept] for k, t in tensors.items()}, found.chosen(kept)
        else:
            write_copy(path, tensors)
    if found.masks is None or found.mask_ids is None:
        return tensors["images"], cast(Tensor, found.targets), found
    return tensors["images"], _classes(tensors["masks"], found.mask_ids, found.masks), found


def _readable(failures: dict[int, str] | None, count: int, where: str) -> Tensor:
    """The positions of the rows that are kept; one warning counts and names those that are not."""
    if not failures:
        return torch.arange(count)
    if len(failures) == count:
        raise CorruptImageError(
            f"{where}: none of the {count} images can be read; the first: {failures[min(failures)]}"
        )
    first = [failures[i].split(": not a readable", 1)[0] for i in sorted(failures)[:3]]
    more = " and others" if len(failures) > 3 else ""
    warnings.warn(
        f"{where}: skipped {len(failures)} of {count} images that cannot be read: "
        f"{', '.join(first)}{more}",
        stacklevel=4,
    )
    return torch.tensor([i for i in range(count) if i not in failures])


def _first_shape(read: Rows, stop: bool, where: str) -> torch.Size:
    """[height, width] of every image, by the first that can be read."""
    for i in range(len(read.column)):
        try:
            return read(i).shape[-2:]
        except CorruptImageError:
            if stop:
                raise
    raise CorruptImageError(f"{where}: none of the {len(read.column)} images can be read.")


def _classes(masks: Tensor, ids: Tensor, column: Sequence[Encoded]) -> Tensor:
    """Long [N, H, W]: ``ids`` of every value of uint8 masks; −1 in ``ids`` is refused, by name."""
    found = ids[masks.long()]
    wrong = found < 0
    if bool(wrong.any()):
        first = wrong.nonzero()[0]
        raise DataError(
            f"{column[int(first[0])]}: the mask has the value {int(masks[tuple(first)])}, which "
            "stands for no class."
        )
    return found


def _copy_path(found: Found, task: Task, name: str, channels: int, size: int | None) -> Path | None:
    if not all(file.exists() for file in found.files):
        return None
    words = (_COPY_FORMAT, found.split, len(found.images), channels, size, task)
    key = fingerprint(*words, files=found.files)
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)[-40:]
    return cache_dir() / "decoded" / f"{plain}-{found.split}-{key}.safetensors"


def read_copy(path: Path | None, shapes: dict[str, torch.Size]) -> dict[str, Tensor] | None:
    """The tensors in a decoded copy, if it is there, whole, and of these shapes."""
    with contextlib.suppress(Exception):  # nothing depends on copies: else the sources are decoded
        from safetensors.torch import load_file

        found: dict[str, Tensor] = load_file(path or "")
        if {kind: tensor.shape for kind, tensor in found.items()} == shapes:
            return found
    return None


def write_copy(path: Path | None, tensors: dict[str, Tensor]) -> None:
    """Keep a decoded copy where it is worth it and the folder can be written."""
    if path is not None and sum(t.nbytes for t in tensors.values()) >= SMALLEST_COPY:
        with contextlib.suppress(Exception), replacing(path) as temporary:
            from safetensors.torch import save_file

            save_file(tensors, temporary)
