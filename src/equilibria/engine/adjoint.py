"""What an adjoint is: how a solve is run and how gradients pass its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from .iterate import Callback, Iterated
from .maps import Map
from .options import options
from .result import BackwardStats
from .solver import Solver
from .tree import Leaves


class Watch:
    """Receives the number of evaluations of a fused solve and of terms of its backward pass.

    Does nothing; a profiler passes one of its own (``Adjoint.watch``).
    """

    def solving(self, evaluations: int) -> AbstractContextManager[object]:
        return nullcontext()

    def pulling(self, terms: int) -> AbstractContextManager[object]:
        return nullcontext()


@options
class Adjoint(ABC):
    """Final subclasses: Implicit, Phantom, OneStep, Reversible, Unrolled."""

    @property
    def plain(self) -> Adjoint:
        """The adjoint itself, without what may have been put around it to watch it."""
        return self

    @property
    def watch(self) -> Watch:
        """The observer of solves that do not go through ``run``."""
        return Watch()

    @abstractmethod
    def run(
        self,
        fn: Map,
        z0: Leaves,
        solver: Solver,
        callback: Callback,
        backward: BackwardStats,
    ) -> Iterated:
        """Solve, and return leaves through which gradients flow in this adjoint's way."""
