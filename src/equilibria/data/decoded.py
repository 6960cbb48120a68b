"""Decoded copies in the cache: a set is decoded once, then read back in a moment.

A copy is a safetensors file named by the sources' sizes and times, so a changed source is decoded
anew. Nothing depends on copies: where one cannot be written or read, the sources are decoded.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .places import cache_dir, replacing

__all__ = ["SMALLEST", "copy_path", "read_copy", "write_copy"]

SMALLEST = 4 * 2**20
"""Sets of fewer bytes are decoded in less than a second: no copy of them is kept."""


def copy_path(name: str, split: str, key: str) -> Path:
    """Where the decoded copy of a split lies."""
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)[-40:]
    return cache_dir() / "decoded" / f"{plain}-{split}-{key}.safetensors"


def read_copy(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor] | None:
    """The tensors in a copy, if it is there, whole, and of these shapes."""
    if not path.is_file():
        return None
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        return None
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError):
        return None
    if {name: tuple(t.shape) for name, t in tensors.items()} != shapes:
        return None
    return tensors


def write_copy(path: Path, tensors: dict[str, Tensor]) -> bool:
    """Keep a copy; false where the folder cannot be written or the disk is full."""
    if sum(t.numel() * t.element_size() for t in tensors.values()) < SMALLEST:
        return False
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        return False
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary)
    except (OSError, SafetensorError):
        return False
    return True
