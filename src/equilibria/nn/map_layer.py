"""A layer that is the fixed point of a map: z* = T(z*; x). The base of DEQ and its relatives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from equilibria.adjoints import Implicit
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import Solution
from equilibria.engine.solver import Solver
from equilibria.entry import fixed_point
from equilibria.solvers import Anderson

from .inputs import contained, marked
from .observing import report

__all__ = ["MapLayer"]


class MapLayer(nn.Module, ABC):
    """z* = T(z*; x). Write ``inject``, ``step`` and ``start``; the rest is here.

    The state is a tensor [B, ...] or a tree of them. What depends on x alone is computed once, in
    ``inject``, not at every evaluation.
    """

    is_equilibrium: ClassVar[bool] = True

    def __init__(self, solver: Solver | None = None, adjoint: Adjoint | None = None) -> None:
        super().__init__()
        self.solver: Solver = Anderson() if solver is None else solver
        self.adjoint: Adjoint = Implicit() if adjoint is None else adjoint
        if not isinstance(self.solver, Solver):
            raise TypeError(f"solver must be a solver object such as Anderson(), got {solver!r}.")
        if not isinstance(self.adjoint, Adjoint):
            raise TypeError(f"adjoint must be an object such as Implicit(), got {adjoint!r}.")

    @abstractmethod
    def inject(self, x: Tensor) -> tuple[Any, ...]:
        """Check x; what the map needs of it: tensors (or trees) with the batch in dim 0."""

    @abstractmethod
    def step(self, z: Any, *injected: Any) -> Any:
        """T(z; x), shaped as z."""

    @abstractmethod
    def start(self, x: Tensor, *injected: Any) -> Any:
        """Where the solver starts, [B, ...]."""

    def injected(self, x: Tensor) -> tuple[Any, ...]:
        """``inject(x)`` for a solve, bad samples of x kept from the weights that it applies."""
        x, bad = contained(x)
        found: tuple[Any, ...] = marked(self.inject(x), bad)
        return found

    def solve(self, x: Tensor, z0: Any = None, **options: Any) -> Solution[Any]:
        """Solve for x and tell all: value, result codes, stats. Options as ``fixed_point``."""
        injected = self.injected(x)
        start = self.start(x, *injected) if z0 is None else z0
        chosen = {"solver": self.solver, "adjoint": self.adjoint, **options}
        return fixed_point(self.step, start, injected, **chosen)

    def forward(self, x: Tensor, z0: Any = None) -> Any:
        """z*; ``z0`` is a warm start."""
        solution = self.solve(x, z0)
        report(self, solution)
        return solution.value

    def extra_repr(self) -> str:
        return f"solver={self.solver!r}, adjoint={self.adjoint!r}"
