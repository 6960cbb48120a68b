"""The command line: parse, call, print. What is exported is for commands of other distributions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equilibria.engine import write_json

    from .console import complain, error_console, fail, make_folder, output, print_json, stop
    from .flags import as_flags, pairs
    from .loading import Batch, Device, Root, device_of, load, prepared

# fmt: off
__all__ = [
    "Batch", "Device", "Root", "as_flags", "complain", "device_of", "error_console", "fail", "load",
    "make_folder", "output", "pairs", "prepared", "print_json", "stop", "write_json",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """On first use: `equilibria --help` needs no torch."""
    if name in __all__:
        import equilibria.engine as engine

        from . import console, flags, loading

        return next(vars(m)[name] for m in (console, flags, loading, engine) if name in vars(m))
    raise AttributeError(f"module 'equilibria.cli' has no attribute {name!r}")
