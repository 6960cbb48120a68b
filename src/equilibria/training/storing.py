"""Files that are whole or not there: written beside, flushed to the disk, then moved into place."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SaveError", "write_bytes", "write_json", "write_text"]


class SaveError(OSError):
    """A file could not be written. What stood there before is unchanged."""


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that ``path`` holds the old content or the new, never a part of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        old = "the earlier one is unchanged" if path.exists() else "nothing was there before"
        raise SaveError(
            error.errno,
            f"could not write {path} ({len(content):,} bytes): {error.strerror or error}; {old}. "
            "Free some space or check the folder's permissions",
        ) from error
    except BaseException:  # Ctrl-C: nothing half-written stays behind
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Numbers that JSON does not know, NaN and infinity, are written as text."""
    write_text(path, json.dumps(_known(value), indent=1, ensure_ascii=False) + "\n")


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _known(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
