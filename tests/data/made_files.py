"""Small data sets, in memory and on disk in every layout, written by no code of ours."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from equilibria.data import ImageData, LazyImages


def made(count: int = 40, lazy: bool = False, masks: bool = False, **changes: Any) -> ImageData:
    """Random images [count, 3, 6, 5] of four classes in turn; the first pixel is the number."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 6, 5), dtype=torch.uint8, generator=generator)
    images[:, 0, 0, 0] = torch.arange(count, dtype=torch.uint8)
    given: dict[str, Any] = {"images": images, "targets": torch.arange(count) % 4}
    given |= {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "classes": ("a", "b", "c", "d")}
    if lazy:
        given["images"] = LazyImages(lambda i: images[i], torch.arange(count), (3, 6, 5))
    if masks:
        given["targets"] = torch.randint(0, 4, (count, 6, 5), generator=generator)
        given |= {"task": "segmentation", "ignore_index": 255}
    return ImageData(**{"name": "made", "split_name": "train", **given, **changes})


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
