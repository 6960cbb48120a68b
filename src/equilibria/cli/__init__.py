"""The command line: parse, call, print. What is exported is for commands of other distributions."""

from equilibria.engine import write_json

from .console import complain, error_console, fail, make_folder, output, print_json, stop
from .flags import as_flags, pairs
from .loading import Batch, Device, Root, device_of, load, prepared

__all__ = [
    "Batch",
    "Device",
    "Root",
    "as_flags",
    "complain",
    "device_of",
    "error_console",
    "fail",
    "load",
    "make_folder",
    "output",
    "pairs",
    "prepared",
    "print_json",
    "stop",
    "write_json",
]
