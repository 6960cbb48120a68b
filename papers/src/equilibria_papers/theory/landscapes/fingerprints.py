"""Short names for tensors: equal content, equal fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["fingerprint", "text_fingerprint"]


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """16 hexadecimal digits of the SHA-256 of names, dtypes, shapes and bytes, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def text_fingerprint(text: str) -> str:
    """16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
