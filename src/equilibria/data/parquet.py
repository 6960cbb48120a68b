"""A split from Parquet files in the hub's layout: ``train-00000-of-00002.parquet`` and so on."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equilibria.engine.files import replacing
from equilibria.engine.optional import needs

from .catalog import DataCard, camvid_ids, resolve_split
from .sources import (
    DataError,
    Found,
    PartMissingError,
    cache_dir,
    check_expansion,
    check_regular,
    fingerprint,
    too_many,
)

_STEMS = {"train": "train", "val": "val|valid|validation", "test": "test"}
_IMAGES = ("img", "image", "images")
_LABELS = ("label", "fine_label", "labels", "target")
_MASKS = ("mask", "label", "annotation", "segmentation")
_COARSE = "coarse_label"
MOST_CLASSES = 2**16
"""The most classes that labels without names may stand for: each gets a name."""
MOST_ROWS = 2**24
"""The most rows of a split: each is an object in memory before its image is read."""
_AT_ONCE = 16  # rows: a value that is stored once may stand in every row
_IN_MEMORY = 2**31
"""Encoded bytes up to this many are kept in memory; above, an Arrow file is mapped instead."""


def read_parquet(folder: Path, asked: str, card: DataCard | None) -> Found | None:
    """The split of the Parquet files in ``folder``; None where there are none.

    Files of the user's own that name no split are one set ("all"); ``load`` splits it.
    """
    groups = parquet_files(folder)
    named = {split: files for split, files in groups.items() if split}
    if not named and (card is not None or not groups):
        return None
    split = resolve_split(asked, tuple(named), str(folder)) if named else "all"
    parts = named[split] if named else groups[""]
    _check_parts(parts)
    files = ParquetFiles(parts)
    if sum(files.rows) == 0:
        raise DataError(f"{files.paths[0]}: the {split} split has no rows.")
    image = files.choose(files.images(), _IMAGES, "an image column")
    column = files.image_rows(image)
    if card is not None and card.task == "segmentation":
        others = [name for name in files.images() if name != image]
        mask = files.choose(others, _MASKS, "a second image column with the masks")
        masks = files.image_rows(mask)
        return Found(column, None, card.classes, split, files.paths, masks, camvid_ids())
    label = files.choose(files.integers(), _LABELS, "a column of integer labels")
    known = (card.classes, card.num_classes) if card is not None else ((), _count(named, label))
    labels, classes = files.labels(label, *known)
    if len(classes) < 2:
        raise DataError(f"{files.paths[0]}: one class only; to tell classes apart, two are needed.")
    found = Found(column, labels, classes, split, files.paths)
    if _COARSE not in files.integers():
        return found
    above, names = files.labels(_COARSE, card.superclasses if card is not None else ())
    return replace(found, superclasses=above, superclass_names=names)


def _count(named: Mapping[str, Sequence[Path]], label: str) -> int:
    """How many classes labels without names have in all splits: a small one may lack the last."""
    import pyarrow.compute as pc  # type: ignore[import-untyped, unused-ignore]

    count = 0
    for parts in named.values():
        with contextlib.suppress(DataError):  # of another split: it is said where that is read
            files = ParquetFiles(parts)
            if label in files.integers():
                top = pc.max(files.column(label)).as_py() or 0
                count = max(count, top + 1 if top < MOST_CLASSES else 0)
    return count


def parquet_images(file: Path) -> list[ImageRow]:
    """The encoded images of one Parquet file, whatever else it holds."""
    files = ParquetFiles([file])
    return files.image_rows(files.choose(files.images(), _IMAGES, "an image column"))


def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split; under "" those that name no split."""
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]):
        inside = file.parent != folder
        text = file.parent.name if inside else file.name
        end = r"$" if inside else r"([-_.]\d.*)?\.parquet$"
        fits = [split for split, stems in _STEMS.items() if re.match(rf"({stems}){end}", text)]
        if fits or not inside:
            found.setdefault(fits[0] if fits else "", []).append(file)
    return found


class ParquetFiles:
    """The parts of one split: columns and their types, rows, labels, encoded images.

    Up to 2 GiB of encoded images stay in memory. More is written once to an Arrow file in the cache
    and mapped, since Parquet has to unpack a whole group of rows for one of them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        with needs("pyarrow", "Reading Parquet files"):
            import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
        self.paths, self.rows, self.bytes = tuple(paths), list[int](), 0
        self.schema: Any = None
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()
        for path in paths:
            with _reading(path):
                check_regular(path)
                with pq.ParquetFile(path) as file:
                    meta, schema = file.metadata, file.schema_arrow
            self.rows.append(meta.num_rows)
            if sum(self.rows) > MOST_ROWS:
                found = f"{path}: {sum(self.rows):,} rows"
                raise DataError(too_many(found, MOST_ROWS, "parquet.MOST_ROWS"))
            size = sum(meta.row_group(k).total_byte_size for k in range(meta.num_row_groups))
            check_expansion(path, size)
            self.bytes += size
            self.schema = self.schema or schema
            if not schema.equals(self.schema):
                raise DataError(
                    f"{path} has other columns or types than {paths[0].name}: they are not parts "
                    "of one data set."
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetFiles, (self.paths,)

    def images(self) -> list[str]:
        """The columns that hold encoded images: structs with bytes, or plain binary."""
        import pyarrow.types as kinds  # type: ignore[import-untyped, unused-ignore]

        return [
            field.name
            for field in self.schema
            if kinds.is_binary(field.type)
            or kinds.is_large_binary(field.type)
            or (kinds.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)
        ]

    def integers(self) -> list[str]:
        import pyarrow.types as kinds

        return [field.name for field in self.schema if kinds.is_integer(field.type)]

    def choose(self, fitting: Sequence[str], usual: Sequence[str], wanted: str) -> str:
        """The column with a usual name, or the only one that fits."""
        named = [name for name in usual if name in fitting]
        if named or len(set(fitting)) == 1:
            name = [*named, *fitting][0]
            if self.schema.names.count(name) > 1:
                raise DataError(f"{self.paths[0]} has two columns {name!r}: rename one of them.")
            return name
        if fitting:
            what = f": which of {', '.join(fitting)} is {wanted}? Rename it to {usual[0]}."
        else:
            what = (
                f" has no {wanted.split(' ', 1)[1]}: expected {' or '.join(usual)}; its columns "
                f"are {', '.join(self.schema.names)}."
            )
        raise DataError(f"{self.paths[0]}{what}")

    def labels(
        self, column: str, classes: tuple[str, ...] = (), count: int = 0
    ) -> tuple[Tensor, tuple[str, ...]]:
        """A column of labels, long [N], and the names of its classes: the file's, or ``classes``,
        or numbers. An empty or impossible label is an error that names its row.
        """
        values = self.column(column)
        if values.null_count:
            empty = self.row_name(values.is_null().to_pylist().index(True))
            raise DataError(f"{empty}: {column} is empty; every image needs a label.")
        labels = torch.from_numpy(values.to_numpy().astype("int64"))
        names = self._names(column)
        classes = tuple(str(name) for name in names) if isinstance(names, list) else classes
        if not classes:
            count = count or int(labels.max()) + 1
            if count > MOST_CLASSES:
                raise DataError(
                    f"{self.row_name(int(labels.argmax()))}: {column} is {count - 1:,}, and labels "
                    f"without names must be below {MOST_CLASSES:,}. Number the classes from 0, or "
                    "raise equilibria.data.parquet.MOST_CLASSES."
                )
            classes = tuple(str(k) for k in range(count))
        wrong = (labels < 0) | (labels >= len(classes))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            why = " The split has no labels." if bool((labels == -1).all()) else ""
            raise DataError(
                f"{self.row_name(row)}: {column} is {int(labels[row])}, and there are "
                f"{len(classes)} classes: labels go from 0 to {len(classes) - 1}.{why}"
            )
        return labels, classes

    def _names(self, column: str) -> Any:
        """The names of classes in the hub's description of the columns, where there is one."""
        try:
            note = json.loads((self.schema.metadata or {})[b"huggingface"])
            return note["info"]["features"][column]["names"]
        except (ValueError, KeyError, TypeError):
            return None  # a note for people: data without it is as good

    def batches(self, column: str) -> Iterator[Any]:
        """A column in pieces of some rows, file after file. A file whose values take far more
        memory than it has bytes is refused on the way: one stored value can be that of every row.
        """
        import pyarrow.parquet as pq

        rows = _AT_ONCE if column in self.images() else 2**16
        for path, stated in zip(self.paths, self.rows, strict=True):
            size = found = 0
            with _reading(path), pq.ParquetFile(path) as file:
                for batch in file.iter_batches(rows, columns=[column]):
                    size, found = size + batch.nbytes, found + len(batch)
                    check_expansion(path, size)
                    yield batch
                if found != stated:
                    raise OSError(f"it states {stated} rows, and column {column} has {found}")

    def column(self, column: str) -> Any:
        import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

        schema = pa.schema([self.schema.field(column)])
        return pa.Table.from_batches(self.batches(column), schema).column(0)

    def image_rows(self, column: str) -> list[ImageRow]:
        """Every image of a column; the first that is read opens it."""
        return [ImageRow(self, column, i) for i in range(sum(self.rows))]

    def opened(self, column: str) -> Any:
        """The bytes of every image of a column."""
        with self._lock:  # rows are read in threads
            if column not in self._opened:
                self._opened[column] = self._open(column)
            return self._opened[column]

    def _open(self, column: str) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc  # type: ignore[import-untyped, unused-ignore]

        values = self.column(column) if self.bytes <= _IN_MEMORY else self._mapped(column)
        # A missing struct has no bytes either: struct_field carries the nulls down.
        return pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values

    def _mapped(self, column: str) -> Any:
        import pyarrow as pa

        key = fingerprint("arrow", column, files=self.paths)
        path = cache_dir() / "arrow" / f"{key}.arrow"
        if not path.exists():
            schema = pa.schema([self.schema.field(column)])
            with replacing(path) as made, pa.ipc.new_file(str(made), schema) as writer:
                for batch in self.batches(column):
                    writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all().column(0)

    def row_name(self, i: int) -> str:
        """The file of row ``i``, and the row in it."""
        ends = list(itertools.accumulate(self.rows))
        k = bisect.bisect_right(ends, i)
        return f"{self.paths[k]} row {i - (ends[k - 1] if k else 0)}"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """One image of a column, named by its file and row."""

    files: ParquetFiles
    column: str
    i: int

    def __str__(self) -> str:
        return self.files.row_name(self.i)

    def read_bytes(self) -> bytes:
        value: bytes | None = self.files.opened(self.column)[self.i].as_py()
        if value is None:
            raise OSError("the row holds no bytes")
        return value


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{file} is not a readable Parquet file ({reason}). It may have been cut off while it "
            "was copied: fetch it again."
        ) from error


def _check_parts(files: Sequence[Path]) -> None:
    """Raise where the names of the files say that there are more parts."""
    parts = [m for file in files if (m := re.search(r"-(\d{5})-of-(\d{5})", file.name))]
    there = {int(part[1]) for part in parts}
    for part in parts:
        missing = sorted(set(range(int(part[2]))) - there)
        if missing:
            name = part.string.replace(f"-{part[1]}-of", f"-{missing[0]:05d}-of")
            raise PartMissingError(
                f"{files[0].parent} holds {len(there)} of {int(part[2])} parts; missing: {name}. "
                "Fetch it again."
            )
