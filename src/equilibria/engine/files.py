"""Files that are whole or not there, and values as JSON: the one place that writes either.

A file is written beside its place, flushed to the disk, then moved there: after a crash or Ctrl-C
``path`` holds the old content or the new, never a part of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 1 << 24  # bytes at a time, so that Ctrl-C is heard in between
_ABANDONED = 3600.0  # seconds after which nobody writes to a part any more


class SaveError(OSError):
    """A file could not be written. What stood there before is unchanged."""


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A file beside ``path`` that takes its place at the end of the block, whole or not at all."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_parts(path, older=_ABANDONED)
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
        if os.name != "nt":  # where folders can be opened, make the new name itself durable
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def remove_parts(path: Path | str, *, older: float = 0.0) -> None:
    """Remove what writes of ``path`` that were killed left beside it.

    Without a lock only what nobody has written to for a while: its writer may be on another host.
    """
    path = Path(path)
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime >= older:
                part.unlink()


def write_bytes(path: Path | str, content: bytes | memoryview) -> Path:
    """Write ``path`` in one step; its folder is made if missing."""
    path = Path(path)
    try:
        with replacing(path) as beside, beside.open("wb") as file:
            for begin in range(0, len(content), _CHUNK):
                file.write(content[begin : begin + _CHUNK])
    except OSError as error:
        old = "the earlier one is unchanged" if path.exists() else "nothing was there before"
        raise SaveError(
            error.errno,
            f"could not write {path} ({len(content):,} bytes): {error.strerror or error}; {old}. "
            "Free some space or check the folder's permissions",
        ) from error
    return path


def write_text(path: Path | str, text: str) -> Path:
    """``write_bytes`` in UTF-8."""
    return write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> Path:
    """``json_text(value)`` and a line's end, in one step."""
    return write_text(path, json_text(value) + "\n")


def json_text(value: Any) -> str:
    """JSON, strictly: NaN and infinities are null."""
    return json.dumps(json_value(value), indent=1, allow_nan=False, ensure_ascii=False)


def json_value(value: Any) -> Any:
    """The same in types that JSON has: NaN and infinities as None, tensors and arrays as lists.

    An object that has ``to_dict()`` is what that gives; another dataclass, its fields.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [json_value(item) for item in value]
    if hasattr(value, "to_dict"):
        return json_value(value.to_dict())
    if dataclasses.is_dataclass(value):
        return json_value({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if hasattr(value, "tolist"):  # tensors, and numpy's arrays and numbers
        return json_value(value.tolist())
    return str(value)
