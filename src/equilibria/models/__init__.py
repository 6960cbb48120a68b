"""Whole networks by name, baselines beside them; saved and loaded without unpickling anything."""

from .network import ModelCard, ModelConfig, Network, count_parameters
from .registry import create, describe, names
from .weights import ModelFileError, load, read_header, save

__all__ = [
    "ModelCard",
    "ModelConfig",
    "ModelFileError",
    "Network",
    "count_parameters",
    "create",
    "describe",
    "load",
    "names",
    "read_header",
    "save",
]
