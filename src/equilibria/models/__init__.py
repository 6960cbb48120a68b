"""Whole networks by name, baselines beside them; saved and loaded without unpickling anything."""

from .export import Exported, ExportError, OnnxNetwork, export, load_onnx
from .hub import register_timm
from .network import ModelCard, ModelConfig, Network, count_parameters
from .prediction import Prediction
from .preprocessing import InputWarning
from .registry import create, describe, names
from .weights import ModelFileError, load, read_header, save

__all__ = [
    "ExportError",
    "Exported",
    "InputWarning",
    "ModelCard",
    "ModelConfig",
    "ModelFileError",
    "Network",
    "OnnxNetwork",
    "Prediction",
    "count_parameters",
    "create",
    "describe",
    "export",
    "load",
    "load_onnx",
    "names",
    "read_header",
    "register_timm",
    "save",
]
