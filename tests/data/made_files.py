"""Small data sets on disk in every layout, written by Pillow, pyarrow, pickle and struct alone."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def pictures(count: int, height: int = 6, width: int = 6, channels: int = 3, seed: int = 0):
    """Random pixels, uint8 [count, height, width, channels] (no last axis for gray)."""
    shape = (count, height, width) if channels == 1 else (count, height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(pixels: np.ndarray, mode: str | None = None) -> bytes:
    """A lossless file of the pixels."""
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(buffer, "PNG")
    return buffer.getvalue()


def write_class_folders(root: Path, counts: Mapping[str, int], seed: int = 0, size: int = 6):
    """root/<class>/<k>.png; the pixels by file."""
    written = {}
    for number, (name, count) in enumerate(sorted(counts.items())):
        (root / name).mkdir(parents=True, exist_ok=True)
        for k, pixels in enumerate(pictures(count, size, size, seed=seed + number)):
            path = root / name / f"{k:03d}.png"
            path.write_bytes(png(pixels))
            written[path] = pixels
    return written


def write_parquet(
    path: Path,
    columns: Mapping[str, Sequence[bytes | None] | Sequence[int | None]],
    names: Mapping[str, Sequence[str]] | None = None,
    row_group_size: int = 4,
) -> None:
    """Columns of bytes become image structs as on the hub, integers labels with names."""
    arrays, features = [], {}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for name, values in columns.items():
        if any(isinstance(v, bytes) for v in values):
            rows = [None if v is None else {"bytes": v, "path": None} for v in values]
            arrays.append(pa.array(rows, image))
            features[name] = {"_type": "Image"}
        else:
            arrays.append(pa.array(values, pa.int64()))
            features[name] = {"_type": "ClassLabel", "names": list((names or {}).get(name, ()))}
            if not features[name]["names"]:
                features[name] = {"_type": "Value", "dtype": "int64"}
    table = pa.table(arrays, names=list(columns))
    note = json.dumps({"info": {"features": features}})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table.replace_schema_metadata({"huggingface": note}), path, row_group_size=row_group_size
    )


def write_cifar10_pickles(root: Path, count: int = 4, protocol: int = 2) -> np.ndarray:
    """Six batches with keys as bytes, as the published files have; all training rows."""
    root.mkdir(parents=True, exist_ok=True)
    rows = []
    for k, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data = np.random.default_rng(k).integers(0, 256, (count, 3072), dtype=np.uint8)
        batch = {
            b"data": data,
            b"labels": [(k + i) % 10 for i in range(count)],
            b"batch_label": b"",
        }
        (root / name).write_bytes(pickle.dumps(batch, protocol=protocol))
        rows.append(data)
    return np.concatenate(rows[:5])


def write_idx(path: Path, values: np.ndarray, packed: bool = False) -> None:
    """The idx format: magic, big-endian sizes, bytes."""
    head = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(
        f">{values.ndim}I", *values.shape
    )
    body = head + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if packed else body)
