"""Whole networks by name, baselines beside them; saved and loaded without unpickling anything."""

from .network import ModelCard, ModelConfig, Network, count_parameters
from .prediction import Prediction
from .preprocessing import InputWarning
from .registry import create, describe, names
from .weights import ModelFileError, load, read_header, save

__all__ = [
    "InputWarning",
    "ModelCard",
    "ModelConfig",
    "ModelFileError",
    "Network",
    "Prediction",
    "count_parameters",
    "create",
    "describe",
    "load",
    "names",
    "read_header",
    "save",
]
