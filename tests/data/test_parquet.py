"""Splits from Parquet in the hub's layout; what is missing or wrong is named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equilibria import data
from equilibria.data import DataError, DataNotFoundError, parquet
from equilibria.data.parquet import ParquetFiles, parquet_files
from tests.data.made_files import pictures, png, write_parquet


def write_split(path: Path, count: int = 8, seed: int = 0, classes: int = 2, **more: object):
    pixels = pictures(count, 32, 32, seed=seed)
    columns = {"img": [png(p) for p in pixels], "label": [k % classes for k in range(count)]}
    write_parquet(path, {**columns, **more}, {"label": [f"c{k}" for k in range(classes)]})
    return pixels.transpose(0, 3, 1, 2)


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    one = write_split(tmp_path / "train-00000-of-00002.parquet", 5)
    two = write_split(tmp_path / "train-00001-of-00002.parquet", 4, seed=1)
    write_split(tmp_path / "test-00000-of-00001.parquet", 3, seed=2)
    found = data.load(tmp_path, progress=False)
    assert np.array_equal(found.images, np.concatenate([one, two]))
    assert found.targets.tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 1]
    assert found.classes == ("c0", "c1")
    assert len(data.load(tmp_path, "test")) == 3


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (("train.parquet", "validation.parquet"), "val"),
        (("train-00000-of-00001-0a1b2c.parquet", "valid-00000-of-00001-d4.parquet"), "val"),
        (("train/0000.parquet", "test/0000.parquet"), "test"),
        (("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"), "test"),
    ],
)
def test_the_hubs_ways_to_name_files(tmp_path: Path, names: tuple[str, str], split: str) -> None:
    write_split(tmp_path / names[0], 6)
    held = write_split(tmp_path / names[1], 4, seed=5)
    assert len(data.load(tmp_path)) == 6
    found = data.load(tmp_path, split)
    assert found.split_name == split
    assert np.array_equal(found.images, held)
    assert np.array_equal(data.load(tmp_path, "test").images, held)  # val stands in for test


def test_files_that_name_no_split_are_split(tmp_path: Path) -> None:
    write_split(tmp_path / "pictures.parquet", 20)
    assert parquet_files(tmp_path) == {"": [tmp_path / "pictures.parquet"]}
    train, test = data.load(tmp_path), data.load(tmp_path, "test")
    assert (len(train), len(test)) == (16, 4)
    assert np.bincount(test.targets).tolist() == [2, 2]
    with pytest.raises(DataNotFoundError, match="cifar10"):
        data.load("cifar10", root=tmp_path)  # it is not said to be that set


def test_every_split_has_the_classes_of_all(tmp_path: Path) -> None:
    """Labels without names: a small test split without the last class has it all the same."""
    for split, labels in (("train", [0, 1, 2]), ("test", [1, 0, 1])):
        columns = {"img": [png(p) for p in pictures(3)], "label": labels}
        write_parquet(tmp_path / f"{split}.parquet", columns)
    for split in ("train", "test"):
        assert data.load(tmp_path, split, progress=False).classes == ("0", "1", "2")
    (tmp_path / "train.parquet").write_bytes(b"damaged")
    assert data.load(tmp_path, "test", progress=False).classes == ("0", "1")


def test_superclasses_come_along(tmp_path: Path) -> None:
    pixels = pictures(4, 32, 32)
    labels = {"fine_label": [0, 99, 53, 0], "coarse_label": [4, 13, 4, 4]}
    columns = {"img": [png(p) for p in pixels], **labels}
    write_parquet(tmp_path / "train-00000-of-00001.parquet", columns)
    found = data.load("cifar100", root=tmp_path)
    assert found.mean == data.describe("cifar100").mean
    assert found.targets.tolist() == [0, 99, 53, 0]
    assert found.superclasses is not None
    assert found.superclasses.tolist() == [4, 13, 4, 4]
    assert [found.classes[k] for k in (0, 99, 53)] == ["apple", "worm", "orange"]
    names = found.superclass_names
    assert (names[4], names[13]) == ("fruit_and_vegetables", "non-insect_invertebrates")


def test_masks_of_camvid(tmp_path: Path) -> None:
    pixels = pictures(3, 6, 8)
    ids = pictures(3, 6, 8, channels=1) % 12
    columns = {"image": [png(p) for p in pixels], "mask": [png(i) for i in ids]}
    write_parquet(tmp_path / "train-00000-of-00001.parquet", columns)
    found = data.load("camvid", root=tmp_path)
    assert found.task == "segmentation"
    assert found.ignore_index == 255
    assert np.array_equal(found.targets, np.where(ids == 11, 255, ids))
    assert np.array_equal(found.images, pixels.transpose(0, 3, 1, 2))
    lazy = data.load("camvid", root=tmp_path, lazy=True)
    assert np.array_equal(lazy.targets[:], found.targets)
    small, pair = (data.load("camvid", root=tmp_path, image_size=size) for size in (3, (3, 4)))
    assert tuple(small.images.shape[2:]) == (3, 4) == tuple(small.targets.shape[1:])
    assert np.array_equal(pair.images, small.images)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_mask_value_of_no_class_is_named(tmp_path: Path, lazy: bool) -> None:
    ids = np.full((6, 8), 3, np.uint8)
    wrong = ids.copy()
    wrong[2, 2] = 40
    columns = {"image": [png(p) for p in pictures(2, 6, 8)], "mask": [png(ids), png(wrong)]}
    write_parquet(tmp_path / "train-00000-of-00001.parquet", columns)
    with pytest.raises(DataError, match=r"row 1: the mask has the value 40"):
        data.load("camvid", root=tmp_path, lazy=lazy).targets[:]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [0, 1]}, r"no image column: expected img or image .*its columns are label"),
        ({"img": [b"x", b"y"]}, r"no column of integer labels: .*its columns are img"),
        ({"a": [b"x", b"y"], "b": [b"x", b"y"], "label": [0, 1]}, r"which of a, b is an image"),
        ({"img": [b"x", b"y"], "label": [0, 7]}, r"row 1: label is 7, and there are 2 classes"),
        ({"img": [b"x", b"y"], "label": [-1, -1]}, r"label is -1.*has no labels"),
        ({"img": [b"x", b"y"], "labels": [0, 0]}, "one class only"),
        (
            {"img": [b"x", b"y"], "label": [0, 1], "coarse_label": [0, 3]},
            r"row 1: coarse_label is 3",
        ),
    ],
)
def test_wrong_columns_are_named(
    tmp_path: Path, columns: dict[str, list[int]], message: str
) -> None:
    names = {"label": ["c0", "c1"], "coarse_label": ["d0", "d1"]}
    write_parquet(tmp_path / "train-00000-of-00001.parquet", columns, names)
    with pytest.raises(DataError, match=message):
        data.load(tmp_path)


@pytest.mark.parametrize("twice", ["image", "label"])
def test_a_column_that_is_there_twice_is_named(tmp_path: Path, twice: str) -> None:
    columns = {"image": pa.array([b"x", b"y"]), "label": pa.array([0, 1])}
    names = [*columns, twice]
    table = pa.Table.from_arrays([columns[name] for name in names], names=names)
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(DataError, match=f"two columns '{twice}'"):
        data.load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_split(tmp_path / "train-00000-of-00003.parquet")
    write_split(tmp_path / "train-00002-of-00003.parquet")
    with pytest.raises(DataError, match=r"2 of 3 parts; missing: train-00001-of-00003\.parquet"):
        data.load(tmp_path)
    with pytest.raises(DataError, match=r"no split 'test'; it has: train"):
        data.load(tmp_path, "test")


def test_a_corrupt_image_in_a_row(tmp_path: Path) -> None:
    pixels = pictures(5, 32, 32)
    encoded = [png(p) for p in pixels]
    encoded[3] = encoded[3][:40]
    write_parquet(tmp_path / "train.parquet", {"img": encoded, "label": [0, 1, 0, 1, 0]})
    with pytest.raises(data.CorruptImageError, match=r"train\.parquet row 3: not a readable image"):
        data.load(tmp_path)
    for lazy in (False, True):
        with pytest.warns(UserWarning, match=r"skipped 1 of 5 .*train\.parquet row 3"):
            found = data.load(tmp_path, on_corrupt="skip", lazy=lazy)
        assert found.targets.tolist() == [0, 1, 0, 0]
        assert np.array_equal(found.images[:], pixels[[0, 1, 2, 4]].transpose(0, 3, 1, 2))
    with pytest.raises(data.CorruptImageError, match="row 3"):
        data.load(tmp_path, lazy=True).images[2:4]


BYTES = [png(p) for p in pictures(11)]
LIMITS = pytest.mark.parametrize("limit", [2**31, 0], ids=["in-memory", "mapped"])


def two_files(folder: Path) -> list[Path]:
    files = [folder / "a.parquet", folder / "b.parquet"]
    write_parquet(files[0], {"img": BYTES[:6], "label": [0, 1, 2, 0, 1, 2]}, {"label": "xyz"})
    write_parquet(files[1], {"img": BYTES[6:], "label": [2, 2, 2, 1, 0]}, {"label": "xyz"})
    return files


@LIMITS
def test_rows_across_files(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(parquet, "_IN_MEMORY", limit)
    files = ParquetFiles(two_files(tmp_path))
    rows = files.image_rows("img")
    assert [row.read_bytes() for row in rows] == BYTES
    assert str(rows[5]).endswith("a.parquet row 5")
    assert str(rows[6]).endswith("b.parquet row 0")
    assert len(list(own_cache.rglob("*.arrow"))) == (1 if limit == 0 else 0)
    again = ParquetFiles(files.paths).image_rows("img")  # reads the mapped file that is there
    assert again[9].read_bytes() == BYTES[9]
    assert pickle.loads(pickle.dumps(rows[3])).read_bytes() == BYTES[3]
    labels, classes = files.labels("label")
    assert labels.tolist() == [0, 1, 2, 0, 1, 2, 2, 2, 2, 1, 0]
    assert classes == ("x", "y", "z")
    assert (files.images(), files.integers()) == (["img"], ["label"])


@pytest.mark.parametrize("note", [None, "{", "[]", '{"info": {"features": 3}}'])
def test_plain_binary_columns_are_images_too(tmp_path: Path, note: str | None) -> None:
    """Without the hub's description of the columns, or with one that cannot be read."""
    path = tmp_path / "a.parquet"
    table = pa.table({"img": pa.array(BYTES), "label": list(range(11))})
    pq.write_table(table.replace_schema_metadata({"huggingface": note} if note else None), path)
    files = ParquetFiles([path])
    assert files.images() == ["img"]
    assert files.image_rows("img")[4].read_bytes() == BYTES[4]
    assert files.labels("label")[1] == tuple(str(k) for k in range(11))


@LIMITS
def test_a_row_without_bytes_is_an_error_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(parquet, "_IN_MEMORY", limit)
    path = tmp_path / "a.parquet"
    write_parquet(path, {"img": [BYTES[0], None], "label": [0, 1]})
    first, second = ParquetFiles([path]).image_rows("img")
    assert first.read_bytes() == BYTES[0]
    with pytest.raises(OSError, match="no bytes"):
        second.read_bytes()


def test_an_empty_label_and_an_empty_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"img": BYTES[:3], "label": [0, None, 1]})
    with pytest.raises(DataError, match=r"a\.parquet row 1: label is empty"):
        ParquetFiles([path]).labels("label")
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(DataError, match="no rows"):
        data.load(tmp_path)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "cifar10" / "train-00000-of-00001.parquet"
    write_split(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(DataError, match=r"1\.parquet is not a readable Parquet.*fetch it again"):
        data.load("cifar10", root=tmp_path)


def test_a_name_of_a_column_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = two_files(tmp_path)[0]
    path.write_bytes(path.read_bytes().replace(b"label", b"l\xe6bel"))
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        ParquetFiles([path])


def test_fewer_rows_than_stated_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a damaged footer: rows that are not there are not read."""
    files = ParquetFiles(two_files(tmp_path)[:1])
    monkeypatch.setattr(files, "rows", [files.rows[0] + 1])
    with pytest.raises(DataError, match=r"states \d+ rows, and column \w+ has \d+"):
        files.image_rows(files.images()[0])[-1].read_bytes()


def test_damage_inside_is_named(tmp_path: Path) -> None:
    path = two_files(tmp_path)[0]
    whole = bytearray(path.read_bytes())
    whole[4:600] = bytes(596)  # the pages of the first column
    path.write_bytes(bytes(whole))
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        ParquetFiles([path]).image_rows("img")[0].read_bytes()


@pytest.mark.parametrize("column", [{"image": BYTES}, {"img": list(range(11))}])
def test_files_of_different_sets_are_refused(tmp_path: Path, column: dict[str, list[Any]]) -> None:
    files = two_files(tmp_path)
    write_parquet(files[1], {**column, "label": list(range(11))})
    with pytest.raises(DataError, match="not parts of one data set"):
        ParquetFiles(files)


def test_a_huge_label_is_refused_before_classes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"img": [png(p) for p in pictures(3)], "label": [0, 2**40, 1]}
    write_parquet(tmp_path / "train.parquet", columns)
    said = r"row 1: label is 1,099,511,627,776, .* below 65,536.*parquet\.MOST_CLASSES"
    with pytest.raises(DataError, match=said):
        data.load(tmp_path)
    write_parquet(tmp_path / "train.parquet", {**columns, "label": [0, 2**16, 1]})
    monkeypatch.setattr(parquet, "MOST_CLASSES", 2**17)
    assert data.load(tmp_path).num_classes == 2**16 + 1


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("how", ["repeated", "compressed"])
def test_a_small_file_that_expands_to_gigabytes_is_refused(
    tmp_path: Path, how: str, plain: bool
) -> None:
    """One image that every row refers to, or pages of zeros: 512 MiB in a few kilobytes."""
    path, column = tmp_path / "train.parquet", pa.array([bytes(2**20)] * 64, pa.binary())
    if not plain:
        column = pa.StructArray.from_arrays([column], ["bytes"])
    group = pa.table({"img": column, "label": [0, 1] * 32})
    options: Any = {"compression": "zstd", "use_dictionary": how == "repeated"}
    with pq.ParquetWriter(path, group.schema, dictionary_pagesize_limit=2**30, **options) as writer:
        for _ in range(8):
            writer.write_table(group)
    assert path.stat().st_size < 2**16
    del column, group
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(DataError, match=r"train\.parquet: .* bytes expand to .*MOST_EXPANSION"):
        data.load(tmp_path, image_size=8, progress=False)
    assert pa.default_memory_pool().max_memory() < before + 2**26


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion rows of one value take a few bytes in the file."""
    write_split(tmp_path / "train.parquet", 8)
    monkeypatch.setattr(parquet, "MOST_ROWS", 7)
    with pytest.raises(DataError, match=r"8 rows, and more than 7 are refused.*MOST_ROWS"):
        data.load(tmp_path)
