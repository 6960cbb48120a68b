"""``equilibria info``: versions and devices, to put into a bug report."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from equilibria._version import __version__

from .console import print_json, print_table
from .loading import Json

_PACKAGES = (
    *("lightning", "torchmetrics", "pyarrow", "pillow", "safetensors", "scikit-learn"),
    *("huggingface_hub", "tensorboard", "matplotlib", "onnx"),
)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def info(as_json: Json = False) -> None:
    """Versions of everything and the devices at hand."""
    found: dict[str, Any] = {
        "equilibria": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    found |= {package: _version(package) for package in _PACKAGES}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "available"
    if as_json:
        print_json(found)
        return
    if not torch.cuda.device_count():
        found["cuda"] = "no device: training runs on the CPU"
    rows = [(name, str(value)) for name, value in found.items()]
    print_table("what", "is", rows=rows, title="equilibria", title_justify="left")
