"""The version, in one place: the build reads it from here, and so does ``equilibria``."""

__version__ = "0.8.0"
