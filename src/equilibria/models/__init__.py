"""Whole networks by name, baselines beside them; saved and loaded without unpickling anything.

::

    model = models.create("geq_digits", num_classes=10)
    models.save(model, "digits.safetensors", extra={"classes": list("0123456789")})
    model = models.load("digits.safetensors")
"""

from .network import ModelConfig, Network, count_parameters
from .registry import ModelCard
from .table import create, describe, names
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
