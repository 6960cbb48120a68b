"""A column of encoded images to one tensor, in threads, with a progress bar."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .encoded import Encoded
from .errors import CorruptImageError, DataError
from .extras import progress_bar
from .lazy import decoding_threads

__all__ = ["OnCorrupt", "Rows", "check_on_corrupt", "decode_all", "readable", "report_skipped"]

OnCorrupt = Literal["raise", "skip"]
_CHUNK = 128
_NAMED = 3


@dataclass(frozen=True)
class Rows:
    """A column, how to make a row of it, and the shape that every row must have (if known)."""

    column: Encoded
    decode: Callable[[bytes], Tensor]
    shape: tuple[int, ...] | None = None

    def __call__(self, i: int) -> Tensor:
        """Row ``i``, or CorruptImageError with its name.

        Another shape is an error of the call, not of the image: images of one set have one size.
        """
        try:
            row = self.decode(self.column.read(i))
        except (CorruptImageError, OSError) as error:
            raise CorruptImageError(
                f"{self.column.name(i)}: not a readable image ({error}). Repair or remove it, or "
                "pass on_corrupt='skip' to go on without it."
            ) from error
        if self.shape is not None and tuple(row.shape) != self.shape:
            raise DataError(
                f"{self.column.name(i)} is {row.shape[-1]} × {row.shape[-2]} pixels, the first "
                f"image {self.shape[-1]} × {self.shape[-2]}; images of one set need one size: pass "
                "image_size=…"
            )
        return row


def check_on_corrupt(value: str) -> None:
    """Raise unless ``value`` is "raise" or "skip"."""
    if value not in ("raise", "skip"):
        raise ValueError(f"on_corrupt={value!r}: expected 'raise' or 'skip'.")


def decode_all(
    columns: list[Rows], *, stop: bool, bar: str | None
) -> tuple[list[Tensor], dict[int, str]]:
    """Every row of every column, uint8 [N, *shape] each, and why the rows that failed did.

    With ``stop`` nothing more is decoded after a failure. A row fails as a whole: where a mask
    cannot be read, its image is of no use.
    """
    count = len(columns[0].column)
    outs = [torch.empty((count, *(c.shape or ())), dtype=torch.uint8) for c in columns]

    def fill(i: int) -> None:
        for column, out in zip(columns, outs, strict=True):
            out[i] = column(i)

    return outs, _failures(count, fill, stop, bar)


def readable(columns: list[Rows], *, bar: str | None) -> dict[int, str]:
    """Why the rows that cannot be decoded cannot, keeping none of them in memory."""

    def look(i: int) -> None:
        for column in columns:
            column(i)

    return _failures(len(columns[0].column), look, False, bar)


def report_skipped(failures: dict[int, str], count: int, where: str) -> Tensor:
    """A mask [count] of the rows that are kept; one warning says how many are not, and which."""
    if len(failures) == count:
        raise CorruptImageError(
            f"{where}: none of the {count} images can be read; the first: {failures[min(failures)]}"
        )
    first = [failures[i].split(": not a readable", 1)[0] for i in sorted(failures)[:_NAMED]]
    more = " and others" if len(failures) > _NAMED else ""
    warnings.warn(
        f"{where}: skipped {len(failures)} of {count} images that cannot be read: "
        f"{', '.join(first)}{more}",
        stacklevel=3,
    )
    kept = torch.ones(count, dtype=torch.bool)
    kept[sorted(failures)] = False
    return kept


def _failures(
    count: int, work: Callable[[int], None], stop: bool, bar: str | None
) -> dict[int, str]:
    """Do ``work(0 … count − 1)`` in threads; the messages of CorruptImageErrors by number."""

    def chunk(places: Iterable[int]) -> dict[int, str]:
        failed = {}
        for i in places:
            try:
                work(i)
            except CorruptImageError as error:
                failed[i] = str(error)
        return failed

    chunks = [range(k, min(k + _CHUNK, count)) for k in range(0, count, _CHUNK)]
    failures: dict[int, str] = {}
    pool = ThreadPoolExecutor(decoding_threads(), thread_name_prefix="decode")
    try:
        results = pool.map(chunk, chunks)
        with nullcontext() if bar is None or len(chunks) < 4 else progress_bar(True) as progress:
            task = None if progress is None else progress.add_task(bar or "", total=count)
            for places, failed in zip(chunks, results, strict=True):
                failures.update(failed)
                if progress is not None and task is not None:
                    progress.advance(task, len(places))
                if stop and failures:
                    break
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return failures
