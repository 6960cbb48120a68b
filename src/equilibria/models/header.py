"""The head of a safetensors file, read and checked without loading a tensor.

    8 bytes: length n of the header, little endian | n bytes: JSON | the tensors' bytes, no gaps

The JSON maps each name to {"dtype", "shape", "data_offsets"}, and "__metadata__" to texts. All
numbers are checked against each other and against the size of the file before anything is believed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .quantized import FIELD, QuantizationError, check_note

__all__ = ["FORMAT", "ModelFileError", "read_header"]

FORMAT = "equilibria-model/1"
_LARGEST_HEADER = 16 << 20
_ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}


class ModelFileError(ValueError):
    """A file that is not a model of this library, is damaged, or does not fit its own model."""


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file says of itself; no tensor is loaded and nothing is ever unpickled.

    Returns a dictionary with ``config`` (name, num_classes, in_channels, image_size, options),
    ``library`` (the version that wrote it), ``extra``, ``quantization`` (which tensors are in eight
    bits, and how; None where none is), ``tensors`` (name → dtype and shape) and ``bytes`` (the size
    of the file).

    Raises:
        FileNotFoundError: no such file.
        ModelFileError: truncated, damaged, a pickle, or not written by ``models.save``.
    """
    place = Path(path)
    if not place.is_file():
        what = "is a folder" if place.is_dir() else "does not exist"
        raise FileNotFoundError(f"{place} {what}: expected a file written by models.save.")
    with place.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = _header_length(place, start, total)
        text = file.read(length)
    if len(text) != length:
        _refuse(place, f"its header ends after {len(text):,} of {length:,} bytes")
    entries = _json(place, "its header", text)
    metadata = entries.pop("__metadata__", {})
    tensors = _check_tensors(place, entries, total - 8 - length)
    said = _check_metadata(place, metadata)
    try:
        check_note(said[FIELD], tensors)
    except QuantizationError as error:
        _refuse(place, str(error))
    return {**said, "tensors": tensors, "bytes": total}


def _refuse(path: Path, why: str) -> NoReturn:
    raise ModelFileError(f"{path} is not a usable model file: {why}.")


def _header_length(path: Path, start: bytes, total: int) -> int:
    length = int.from_bytes(start, "little")
    plausible = len(start) == 8 and 2 <= length <= _LARGEST_HEADER
    # Only then: a good header may by chance be 640 bytes long, which reads like a pickle's start.
    if not plausible and (start[:4] == b"PK\x03\x04" or start[:1] == b"\x80"):
        _refuse(
            path,
            "it looks like a pickle (torch.save), which is never opened here because reading one "
            "can run any code; load it where it was made and write it with models.save",
        )
    if len(start) < 8:
        _refuse(path, f"it holds {len(start)} bytes, and a model file begins with a length of 8")
    if not plausible:
        _refuse(
            path,
            f"its first 8 bytes give a header of {length:,} bytes, where 2 to {_LARGEST_HEADER:,} "
            "are allowed; it is no safetensors file, or damaged",
        )
    if length > total - 8:
        _refuse(
            path,
            f"it is truncated: the header needs {length:,} bytes and the file has {total - 8:,} "
            "after its first 8",
        )
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def _json(path: Path, what: str, text: str | bytes) -> dict[str, Any]:
    try:
        made = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 and bad JSON
        raise ModelFileError(
            f"{path} is not a usable model file: {what} is not valid JSON ({error})."
        ) from error
    if not isinstance(made, dict):
        _refuse(path, f"{what} is a JSON {type(made).__name__}, not an object")
    return made


def _check_tensors(
    path: Path, entries: Mapping[str, Any], available: int
) -> dict[str, dict[str, Any]]:
    """Names with dtype and shape, once sizes and offsets agree and fill the file exactly."""
    spans: list[tuple[int, int, str]] = []
    found: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            _refuse(path, f"the entry of tensor {name!r} is no object")
        dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if dtype not in _ITEM_SIZES:
            _refuse(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
        if not (_sizes(shape) and _sizes(span) and len(span) == 2):  # type: ignore[arg-type]
            _refuse(path, f"tensor {name!r} has shape {shape!r} and data_offsets {span!r}")
        begin, end = span  # type: ignore[misc]
        needed = math.prod(shape) * _ITEM_SIZES[dtype]  # type: ignore[arg-type]
        if end - begin != needed:
            _refuse(
                path,
                f"tensor {name!r} of {dtype} {shape} needs {needed:,} bytes and is given "
                f"{end - begin:,}",
            )
        spans.append((begin, end, name))
        found[name] = {"dtype": dtype, "shape": tuple(shape)}  # type: ignore[arg-type]
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            _refuse(path, f"tensor {name!r} begins at byte {begin:,}, expected {position:,}")
        position = end
    if position > available:
        _refuse(
            path,
            f"it is truncated: its tensors need {position:,} bytes and the file has {available:,}",
        )
    if position < available:
        _refuse(path, f"{available - position:,} bytes follow the last tensor")
    return found


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )


def _check_metadata(path: Path, metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        given = metadata.get("format") if isinstance(metadata, dict) else metadata
        _refuse(
            path,
            f"it is a safetensors file without the mark of models.save (format={given!r}, expected "
            f"{FORMAT!r})",
        )
    for key in ("config", "extra", "library"):
        if not isinstance(metadata.get(key), str):
            _refuse(path, f"its metadata has no {key!r}")
    config = _json(path, "its config", metadata["config"])
    wanted = {"name": str, "num_classes": int, "in_channels": int, "image_size": int}
    for key, kind in {**wanted, "options": dict}.items():
        if not isinstance(config.get(key), kind):
            _refuse(path, f"its config has {key}={config.get(key)!r}, expected {kind.__name__}")
    note = metadata.get(FIELD)
    if FIELD in metadata and not isinstance(note, str):
        _refuse(path, f"its metadata has {FIELD}={note!r}, expected a text of JSON")
    return {
        "config": config,
        "library": metadata["library"],
        "extra": _json(path, "its extra", metadata["extra"]),
        FIELD: None if note is None else _json(path, f"its {FIELD}", note),
    }
