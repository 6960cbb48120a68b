"""Results as JSON: numbers that are finite, lists and names; NaN and infinity become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["plain", "write_json"]


def plain(value: Any) -> Any:
    """The same in types that JSON has; a number that is not finite is None."""
    if isinstance(value, Tensor):
        return plain(value.detach().cpu().tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def write_json(value: Any, path: Path) -> Path:
    """Write ``plain(value)``, strictly: no NaN gets through."""
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path
