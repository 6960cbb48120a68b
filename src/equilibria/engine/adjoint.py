"""What an adjoint is: how a solve is run and how gradients pass its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .iterate import Callback
from .maps import Map
from .options import options
from .result import Iterated
from .solver import Solver
from .tree import Leaves


@options
class Adjoint(ABC):
    """Final subclasses: Implicit, Phantom, OneStep, Reversible, Unrolled."""

    @abstractmethod
    def run(self, fn: Map, z0: Leaves, solver: Solver, callback: Callback) -> Iterated:
        """Solve, and return leaves through which gradients flow in this adjoint's way."""
