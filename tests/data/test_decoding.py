"""Many images at once: the right rows, the right names of the wrong ones."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from equilibria.data import CorruptImageError, DataError
from equilibria.data.decoding import Rows, check_on_corrupt, decode_all, readable, report_skipped
from equilibria.data.encoded import Chosen, Files
from equilibria.data.pixels import decode_image
from tests.data.made_files import pictures, png

DECODE = partial(decode_image, channels=3, size=None)


def column(folder: Path, count: int, bad: tuple[int, ...] = ()) -> tuple[Rows, np.ndarray]:
    pixels = pictures(count)
    paths = [folder / f"{k:04d}.png" for k in range(count)]
    for k, path in enumerate(paths):
        path.write_bytes(b"broken" if k in bad else png(pixels[k]))
    return Rows(Files(paths), DECODE, (3, 6, 6)), pixels.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("bar", [None, "decoding"])
def test_all_rows_in_order(tmp_path: Path, bar: str | None) -> None:
    rows, pixels = column(tmp_path, 600)
    (found,), failures = decode_all([rows], stop=True, bar=bar)
    assert np.array_equal(found, pixels)
    assert failures == {}


def test_failures_are_named_and_the_rest_is_there(tmp_path: Path) -> None:
    rows, pixels = column(tmp_path, 30, bad=(4, 17))
    (found,), failures = decode_all([rows], stop=False, bar=None)
    assert sorted(failures) == [4, 17]
    assert "0004.png" in failures[4]
    assert "on_corrupt='skip'" in failures[17]
    good = [k for k in range(30) if k not in failures]
    assert np.array_equal(found[good], pixels[good])
    assert readable([rows], bar=None) == failures


def test_a_bad_mask_takes_its_image_with_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, _ = column(tmp_path / "a", 5)
    two, _ = column(tmp_path / "b", 5, bad=(2,))
    _, failures = decode_all([one, two], stop=False, bar=None)
    assert list(failures) == [2]


def test_stopping_stops(tmp_path: Path) -> None:
    rows, _ = column(tmp_path, 1300, bad=(0,))
    seen: list[int] = []

    class Counting(Files):
        def read(self, i: int) -> bytes:
            seen.append(i)
            return super().read(i)

    _, failures = decode_all(
        [Rows(Counting(rows.column.paths), DECODE, (3, 6, 6))], stop=True, bar=None
    )
    assert list(failures) == [0]
    assert len(seen) < 1300


def test_another_size_is_an_error_of_the_call(tmp_path: Path) -> None:
    rows, _ = column(tmp_path, 3)
    (tmp_path / "0001.png").write_bytes(png(pictures(1, 8, 7)[0]))
    with pytest.raises(DataError, match=r"0001\.png is 7 × 8 pixels.*6 × 6.*image_size"):
        decode_all([rows], stop=False, bar=None)


def test_the_warning_counts_and_names() -> None:
    failures = {k: f"p{k}.png: not a readable image (x)." for k in (1, 3, 5, 7)}
    with pytest.warns(UserWarning, match=r"skipped 4 of 9 .* p1\.png, p3\.png, p5\.png and others"):
        kept = report_skipped(failures, 9, "mine (train)")
    assert kept.nonzero().flatten().tolist() == [0, 2, 4, 6, 8]


def test_nothing_readable_is_an_error() -> None:
    with (
        pytest.raises(CorruptImageError, match=r"none of the 2 images.*p0"),
        warnings.catch_warnings(),
    ):
        report_skipped({0: "p0.png: not a readable image", 1: "b"}, 2, "mine")


def test_chosen_rows_keep_their_names(tmp_path: Path) -> None:
    rows, pixels = column(tmp_path, 5)
    some = Chosen(rows.column, [4, 0])
    assert len(some) == 2
    assert some.name(0).endswith("0004.png")
    assert np.array_equal(decode_image(some.read(1), 3, None), pixels[0])


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    rows, _ = column(tmp_path, 2)
    (tmp_path / "0001.png").unlink()
    with pytest.raises(CorruptImageError, match=r"0001\.png"):
        rows(1)
    assert torch.is_tensor(rows(0))


def test_on_corrupt_is_one_of_two() -> None:
    check_on_corrupt("skip")
    with pytest.raises(ValueError, match="'raise' or 'skip'"):
        check_on_corrupt("ignore")
