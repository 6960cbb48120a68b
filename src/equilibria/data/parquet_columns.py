"""Parquet files as columns: encoded images by row, labels as tensors, names of classes."""

from __future__ import annotations

import bisect
import itertools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DataError
from .extras import arrow, numpy, parquet
from .places import cache_dir, fingerprint, replacing

__all__ = ["ImageColumn", "Schema", "label_column", "read_schema"]

_IN_MEMORY = 2**31
"""Encoded bytes up to this many are kept in memory; above, an Arrow file is mapped instead."""


class Schema:
    """What the files say of themselves: columns, their types, names of classes, rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self.rows: list[int] = []
        first: Any = None
        self.bytes = 0
        for file in self.files:
            opened = _guarded(file, lambda file=file: parquet().ParquetFile(file))
            with opened:
                self.rows.append(opened.metadata.num_rows)
                meta = opened.metadata
                self.bytes += sum(
                    meta.row_group(g).total_byte_size for g in range(meta.num_row_groups)
                )
                schema = opened.schema_arrow
            if first is None:
                first = schema
            elif schema.names != first.names:
                raise DataError(
                    f"{file} has columns {', '.join(schema.names)}, {self.files[0].name} "
                    f"{', '.join(first.names)}: they are not parts of one data set."
                )
        self.columns: tuple[str, ...] = tuple(first.names)
        self._types = {name: first.field(name).type for name in first.names}
        self._features = _features(first.metadata)

    def images(self) -> list[str]:
        """The columns that hold encoded images: structs with bytes, or plain binary."""
        pa = arrow()
        found = []
        for name, kind in self._types.items():
            if pa.types.is_struct(kind):
                if any(kind.field(k).name == "bytes" for k in range(kind.num_fields)):
                    found.append(name)
            elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                found.append(name)
        return found

    def labels(self) -> list[str]:
        """The columns of integers."""
        pa = arrow()
        return [name for name, kind in self._types.items() if pa.types.is_integer(kind)]

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of the classes of a label column, if the file has them."""
        names = self._features.get(column, {}).get("names")
        return tuple(str(name) for name in names) if isinstance(names, list) else ()

    def is_struct(self, column: str) -> bool:
        """Whether a column of images is a struct with the field ``bytes``."""
        return bool(arrow().types.is_struct(self._types[column]))


def read_schema(files: Sequence[Path]) -> Schema:
    """The schema of the files, checked to be one."""
    return Schema(files)


def label_column(schema: Schema, column: str) -> Tensor:
    """The labels of a column, long [N]; an empty entry is an error that names its row."""
    parts = []
    for file in schema.files:
        table = _guarded(file, lambda file=file: parquet().read_table(file, columns=[column]))
        values = table.column(column)
        if values.null_count:
            row = values.is_null().to_pylist().index(True)
            raise DataError(f"{file} row {row}: {column} is empty; every image needs a label.")
        parts.append(torch.from_numpy(values.to_numpy().astype(numpy().int64)))
    return torch.cat(parts)


class ImageColumn:
    """The encoded images of a column over several files; the first read opens them.

    Up to 2 GiB stay in memory. More is written once to an Arrow file in the cache and mapped, since
    Parquet has to unpack a whole group of rows for one of them.
    """

    def __init__(self, schema: Schema, column: str) -> None:
        self._schema = schema
        self._column = column
        self._ends = list(itertools.accumulate(schema.rows))
        self._chunks: list[Any] | None = None
        self._chunk_ends: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def name(self, i: int) -> str:
        """The file and the row in it."""
        k = bisect.bisect_right(self._ends, i)
        return f"{self._schema.files[k]} row {i - (self._ends[k - 1] if k else 0)}"

    def read(self, i: int) -> bytes:
        """The bytes of row ``i``."""
        chunks = self._chunks if self._chunks is not None else self._open()
        k = bisect.bisect_right(self._chunk_ends, i)
        value = chunks[k][i - (self._chunk_ends[k - 1] if k else 0)].as_py()
        if value is None:
            raise OSError("the row holds no bytes")
        return bytes(value)

    def _open(self) -> list[Any]:
        with self._lock:
            if self._chunks is None:
                chunks = self._mapped() if self._schema.bytes > _IN_MEMORY else self._in_memory()
                self._chunk_ends = list(itertools.accumulate(len(chunk) for chunk in chunks))
                self._chunks = chunks  # last: other threads look at it without the lock
            return self._chunks

    def _in_memory(self) -> list[Any]:
        chunks = []
        for file in self._schema.files:
            table = _guarded(
                file, lambda file=file: parquet().read_table(file, columns=[self._column])
            )
            chunks += [self._bytes(chunk) for chunk in table.column(self._column).chunks]
        return [chunk for chunk in chunks if len(chunk)]

    def _mapped(self) -> list[Any]:
        pa = arrow()
        key = fingerprint("arrow", self._column, files=self._schema.files)
        path = cache_dir() / "arrow" / f"{key}.arrow"
        if not path.exists():
            with replacing(path) as temporary:
                self._write(temporary)
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return [chunk for chunk in table.column("bytes").chunks if len(chunk)]

    def _write(self, path: Path) -> None:
        pa = arrow()
        schema = pa.schema([("bytes", pa.large_binary())])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for file in self._schema.files:
                opened = _guarded(file, lambda file=file: parquet().ParquetFile(file))
                with opened:
                    batches = opened.iter_batches(batch_size=1024, columns=[self._column])
                    while (batch := _guarded(file, lambda it=batches: next(it, None))) is not None:
                        column = self._bytes(batch.column(0)).cast(pa.large_binary())
                        writer.write_batch(pa.record_batch([column], schema=schema))

    def _bytes(self, chunk: Any) -> Any:
        if not self._schema.is_struct(self._column):
            return chunk
        # A missing struct has no bytes either: struct_field carries the nulls down.
        return arrow().compute.struct_field(chunk, "bytes")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_chunks": None, "_chunk_ends": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def _features(metadata: Any) -> dict[str, Any]:
    """The hub's description of the columns, {} where there is none."""
    raw = (metadata or {}).get(b"huggingface")
    if raw is None:
        return {}
    try:
        features = json.loads(raw)["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}  # a note for people: data without it is as good
    return {k: v for k, v in features.items() if isinstance(v, dict)}


def _guarded(file: Path, read: Any) -> Any:
    pa = arrow()
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{file} is not a readable Parquet file ({reason}). It may have been cut off while it "
            "was copied: fetch it again."
        ) from error
