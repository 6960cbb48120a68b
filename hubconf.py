"""Networks for torch.hub: ``torch.hub.load(".", "equilibria_model", "geq_digits", source="local")``

makes one with fresh weights, and "equilibria_pretrained" loads a trained one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

dependencies = ["torch"]

try:
    import equilibria as _eq
except ImportError:  # a checkout that torch.hub fetched
    sys.path.append(str(Path(__file__).parent / "src"))
    import equilibria as _eq


def equilibria_model(name: str, num_classes: int = 10, **options: Any) -> Any:
    """A network by its name, with fresh weights: ``eq.models.create``."""
    return _eq.models.create(name, num_classes, **options)


def equilibria_pretrained(name_or_folder: str, **options: Any) -> Any:
    """A trained network, of a folder or of the hub: ``eq.models.Network.from_pretrained``."""
    return _eq.models.Network.from_pretrained(name_or_folder, **options)
