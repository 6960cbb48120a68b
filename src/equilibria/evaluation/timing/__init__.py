"""Where the time of a model goes: map, solver, adjoint, rest; and what would help."""

from .measuring import Memory, Spread
from .profiling import profile_model
from .report import LayerProfile, PassProfile, Profile, Suggestion

__all__ = [
    "LayerProfile",
    "Memory",
    "PassProfile",
    "Profile",
    "Spread",
    "Suggestion",
    "profile_model",
]
