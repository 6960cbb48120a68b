"""Columns of Parquet files: rows across files, the mapped form, damaged files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equilibria.data import DataError, parquet_columns
from equilibria.data.parquet_columns import ImageColumn, label_column, read_schema
from tests.data.made_files import pictures, png, write_parquet

BYTES = [png(p) for p in pictures(11)]


def two_files(folder: Path) -> list[Path]:
    files = [folder / "a.parquet", folder / "b.parquet"]
    write_parquet(files[0], {"img": BYTES[:6], "label": [0, 1, 2, 0, 1, 2]}, {"label": "xyz"})
    write_parquet(files[1], {"img": BYTES[6:], "label": [2, 2, 2, 1, 0]}, {"label": "xyz"})
    return files


@pytest.mark.parametrize("limit", [2**31, 0], ids=["in-memory", "mapped"])
def test_rows_across_files(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(parquet_columns, "_IN_MEMORY", limit)
    schema = read_schema(two_files(tmp_path))
    column = ImageColumn(schema, "img")
    assert len(column) == 11
    assert [column.read(i) for i in range(11)] == BYTES
    assert column.name(5).endswith("a.parquet row 5")
    assert column.name(6).endswith("b.parquet row 0")
    assert [column.read(i) for i in (10, 0)] == [BYTES[10], BYTES[0]]
    assert len(list(own_cache.rglob("*.arrow"))) == (1 if limit == 0 else 0)
    again = ImageColumn(schema, "img")  # reads the mapped file that is there
    assert again.read(9) == BYTES[9]
    assert pickle.loads(pickle.dumps(column)).read(3) == BYTES[3]


def test_labels_and_names(tmp_path: Path) -> None:
    schema = read_schema(two_files(tmp_path))
    assert label_column(schema, "label").tolist() == [0, 1, 2, 0, 1, 2, 2, 2, 2, 1, 0]
    assert schema.class_names("label") == ("x", "y", "z")
    assert schema.class_names("img") == ()
    assert (schema.images(), schema.labels()) == (["img"], ["label"])


def test_plain_binary_columns_are_images_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"img": pa.array(BYTES), "label": list(range(11))}), path)
    schema = read_schema([path])
    assert schema.images() == ["img"]
    assert ImageColumn(schema, "img").read(4) == BYTES[4]
    assert schema.class_names("label") == ()


@pytest.mark.parametrize("limit", [2**31, 0], ids=["in-memory", "mapped"])
def test_a_row_without_bytes_is_an_error_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(parquet_columns, "_IN_MEMORY", limit)
    path = tmp_path / "a.parquet"
    write_parquet(path, {"img": [BYTES[0], None], "label": [0, 1]})
    column = ImageColumn(read_schema([path]), "img")
    assert column.read(0) == BYTES[0]
    with pytest.raises(OSError, match="no bytes"):
        column.read(1)


def test_an_empty_label_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"img": BYTES[:3], "label": [0, None, 1]})
    with pytest.raises(DataError, match=r"a\.parquet row 1: label is empty"):
        label_column(read_schema([path]), "label")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = two_files(tmp_path)[0]
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(
        DataError, match=r"a\.parquet is not a readable Parquet file.*fetch it again"
    ):
        read_schema([path])


def test_damage_inside_is_named(tmp_path: Path) -> None:
    path = two_files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[4:600] = bytes(596)  # the pages of the first column
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        ImageColumn(read_schema([path]), "img").read(0)


def test_files_of_different_sets_are_refused(tmp_path: Path) -> None:
    files = two_files(tmp_path)
    write_parquet(files[1], {"image": BYTES, "label": list(range(11))})
    with pytest.raises(DataError, match="not parts of one data set"):
        read_schema(files)


def test_a_note_that_is_no_json_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"img": pa.array(BYTES), "label": list(range(11))})
    pq.write_table(table.replace_schema_metadata({"huggingface": "{"}), path)
    assert read_schema([path]).class_names("label") == ()
