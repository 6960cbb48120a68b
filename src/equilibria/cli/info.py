"""``equilibria info``: versions and devices, to put into a bug report."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from equilibria._version import __version__

from .console import output, print_json

_PACKAGES = (
    "lightning",
    "torchmetrics",
    "pyarrow",
    "pillow",
    "safetensors",
    "scikit-learn",
    "huggingface_hub",
    "tensorboard",
    "matplotlib",
    "onnx",
)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def facts() -> dict[str, Any]:
    """What runs here, by name."""
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
        memory = about.total_memory / 2**30
        found[f"cuda:{index}"] = f"{about.name}, {memory:.0f} GiB"
    if torch.backends.mps.is_available():
        found["mps"] = "available"
    return found


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions of everything and the devices at hand."""
    found = facts()
    if as_json:
        print_json(found)
        return
    table = Table("what", "is", title="equilibria", title_justify="left")
    for name, value in found.items():
        table.add_row(name, str(value))
    if not torch.cuda.device_count():
        table.add_row("cuda", "no device: training runs on the CPU")
    output().print(table)
