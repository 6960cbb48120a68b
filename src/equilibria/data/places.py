"""Where data lies: the cache folder, safe writing into it, keys of decoded copies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_dir", "fingerprint", "replacing"]

CACHE_VARIABLE = "EQUILIBRIA_DATA"


def cache_dir() -> Path:
    """The folder for downloads and decoded copies: $EQUILIBRIA_DATA, or the system's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "equilibria" / "data"


def fingerprint(*words: object, files: Sequence[Path]) -> str:
    """A key for what is made from ``files``: it changes with their names, sizes and times."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    seen = [(name, found.st_size, found.st_mtime_ns) for name, found in stats]
    text = json.dumps([[str(word) for word in words], seen])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of ``path`` at the end, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are for their owner alone, and a cache may be shared.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.open("xb").close()
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
