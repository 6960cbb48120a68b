"""A trained network behind HTTP: images in, labels with steps and certificates out.

What belongs here answers requests and bounds what they cost. How images are judged is in ``models``
and ``evaluation``.
"""

from .batching import Batcher, Busy
from .server import ServeOptions, create_app

__all__ = ["Batcher", "Busy", "ServeOptions", "create_app"]
