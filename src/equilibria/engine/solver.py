"""What a fixed-point solver is: options, a state, and one step. The loop is not its business.

To add a solver, subclass :class:`Solver` with ``@options``, and write ``init`` and ``step``
(docs/write-your-own-solver.md). The driver in ``iterate.py`` does the rest, for every solver alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .options import check_number, options
from .transforms import convolutions_take_tf32, products_take_tf32
from .tree import Leaves, quick_norm, sample_norm, subtract, take_samples, without_graph

_RTOL = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_TF32_RTOL = 1e-3
"""TF32 keeps ten bits: on an H200 float32 GEQ layers stagnate at 1e-4 to 5e-4 with it and at 1e-7
without (benchmarks/tf32_floor.py)."""


class Point:
    """An iterate z with f = T(z); the residual f − z and its norm are computed when asked, once."""

    __slots__ = ("_memory", "_norm", "_quick", "_residual", "f", "z")

    def __init__(self, z: Leaves, f: Leaves, memory: Leaves | None = None) -> None:
        self.z = z
        self.f = f
        self._memory = memory
        self._residual: Leaves | None = None
        self._norm: Tensor | None = None
        self._quick: Tensor | None = None

    @property
    def residual(self) -> Leaves:
        if self._residual is None:
            if self._memory is None:
                self._residual = subtract(self.f, self.z)
            else:
                for a, b, out in zip(self.f, self.z, self._memory, strict=True):
                    torch.sub(a, b, out=out)
                self._residual = self._memory
        return self._residual

    @property
    def residual_norm(self) -> Tensor:
        """‖T(z) − z‖, [B], without a graph."""
        if self._norm is None:
            self._norm = sample_norm(without_graph(self.residual))
        return self._norm

    @property
    def quick_norm(self) -> Tensor:
        """The same where that is an ordinary number (``tree.quick_norm``)."""
        if self._quick is None:
            self._quick = quick_norm(without_graph(self.residual))
        return self._quick

    @property
    def settled(self) -> Tensor:
        """Whether only rounding is left of the residual, [B].

        A combination of earlier iterates then differs from T(z) by rounding, but its derivative
        divides by the residual: where a graph is recorded, take T(z) itself.
        """
        eps = max(torch.finfo(x.dtype).eps for x in self.z)
        return self.residual_norm <= 16 * eps * sample_norm(without_graph(self.f))


Reached = tuple[Leaves, Tensor, Tensor]
"""An iterate (z, ‖T(z) − z‖, ‖T(z)‖)."""

Bounds = Callable[[], tuple[float | Tensor, float | Tensor]]
"""Gives (m, L) with m·I ⪯ ∇²(smooth part of G) ⪯ L·I, a number or one per sample; may be slow."""


@dataclass(frozen=True)
class Choice:
    """What a problem will be solved with, and why."""

    solver: Solver
    tau: float | Tensor
    reason: str


@options
class SolverOptions(ABC):
    """Options that every solver shares, and ``Auto``: what may be given as ``solver=...``.

    A sample has converged when ‖T(z) − z‖ ≤ atol + rtol·‖T(z)‖. With ``rtol=0, atol=0`` the solve
    runs exactly ``max_steps`` steps and never waits for the device.
    """

    rtol: float | None = None
    """Relative tolerance; None takes one that the dtype can reach: 1e-8 in float64, 1e-4 in float32
    (1e-3 on a GPU where convolutions may use TF32), 4e-3 in float16, 2e-2 in bfloat16."""
    atol: float = 0.0
    """Absolute tolerance."""
    max_steps: int = 100
    """Evaluations of the map, at most."""
    block: int | None = None
    """Steps between two tests of convergence; None takes 4 on a GPU and where a sample's state is
    so small (512 numbers) that a test costs a good part of a step (never of Broyden's), else 1."""
    compact: bool = False
    """Drop finished samples from the batch once they are more than half of it."""
    divergence: float = 1e4
    """A residual this many times the start's ‖T(z0)‖ + ‖T(z0) − z0‖ ends a sample as diverged."""
    patience: int = 48
    """Steps without any progress that end a sample as stagnated; a quarter of the steps that it
    took so far, if those are more. A slow fall of the residual is progress."""

    while_loop: bool = False
    """Inside torch.compile: run a solve with a tolerance as a ``torch.while_loop``, which
    ``fullgraph=True`` allows; else the host reads each test, and the graph breaks there."""

    heavy: ClassVar[bool] = False
    """Whether a step costs much more than a test, however small the state."""

    def __post_init__(self) -> None:
        check_number(self, "rtol", low=0.0, optional=True)
        check_number(self, "atol", low=0.0)
        check_number(self, "max_steps", low=1, integer=True)
        check_number(self, "block", low=1, integer=True, optional=True)
        check_number(self, "divergence", low=1.0, low_open=True)
        check_number(self, "patience", low=1, integer=True)

    @abstractmethod
    def for_map(self) -> Solver:
        """The solver to use on a plain map, of which no bounds are known."""

    @abstractmethod
    def for_problem(self, bounds: Bounds) -> Choice:
        """The solver and the step τ of the map T_τ to use on a problem with these bounds."""

    @property
    def fixed_steps(self) -> bool:
        """Whether this is a fixed-step solve: no tolerance, no test, no synchronization."""
        return self.rtol == 0.0 and self.atol == 0.0

    def relative_tolerance(self, dtype: torch.dtype, device: str = "cpu") -> float:
        if self.rtol is not None:
            return self.rtol
        coarse = device == "cuda" and dtype == torch.float32
        if coarse and (convolutions_take_tf32() or products_take_tf32()):
            return _TF32_RTOL
        return _RTOL[dtype]

    def block_length(self, z: Leaves) -> int:
        if self.block is not None:
            return self.block
        small = sum(x[0].numel() for x in z) <= (0 if self.heavy else 512)
        return 4 if small or z[0].device.type != "cpu" else 1


@options
class Solver(SolverOptions):
    """One step of an iteration: ``init`` and ``step`` are what a solver adds to the options."""

    fall: ClassVar[float] = 0.99
    """A sample is restarted unless its residual is below this times the least one so far."""
    accelerated: ClassVar[bool] = False
    """Whether there is no faster solver to recommend."""
    joins: ClassVar[bool] = True
    """Whether samples that the map couples may be handed to ``step`` as one sample [1, B, ...].
    False where a step looks at the shape of a state."""

    @abstractmethod
    def init(self, z: Leaves) -> Any:
        """The solver's state before the first step: tensors with the batch in dim 0, in a tree or a
        dataclass (``take_samples``)."""

    @abstractmethod
    def step(self, point: Point, state: Any) -> tuple[Leaves, Any]:
        """From z and f = T(z) to the next iterate. Samples must not mix; no host sync."""

    @property
    def stride(self) -> float | None:
        """β where a step is z ← (1 − β)z + βT(z); None where it is another one."""
        return None

    def residual_memory(self, state: Any) -> Leaves | None:
        """Where the next residual T(z) − z should be written, if the solver keeps it anyway."""
        return None

    def doubts(self, point: Point, state: Any) -> Tensor | None:
        """Which samples, [B], may not be called converged here, whatever their residual."""
        return None

    def restart(self, state: Any, stalled: Tensor) -> Any:
        """Called with the samples [B] that made no progress lately; may forget their history."""
        return state

    def take(self, state: Any, index: Tensor) -> Any:
        """The state of some samples only (compaction)."""
        return take_samples(state, index)

    def loop_state(self, z: Leaves) -> list[Tensor]:
        """The state before the first step as tensors that keep their shapes: of a solve that is
        compiled as a loop (``while_loop=True``)."""
        if self.init(z) is not None:
            raise TypeError(
                f"{type(self).__name__} cannot run as a torch.while_loop, which while_loop=True "
                "and torch.export need for a solve with a tolerance. Use Anderson(...) or "
                "Picard(...), or a fixed number of steps (rtol=0, atol=0)."
            )
        return []

    def loop_step(self, point: Point, held: list[Tensor]) -> tuple[Leaves, list[Tensor]]:
        """``step``, from these tensors to those of the next turn; none may be returned as it is."""
        return self.step(point, None)[0], []

    def fallback(self, point: Point, state: Any) -> Reached | None:
        """What to return for samples that did not converge, if any."""
        return None

    def for_map(self) -> Solver:
        return self

    def for_problem(self, bounds: Bounds) -> Choice:
        """The layer's own map (τ = 1); the bounds are not looked at."""
        return Choice(self, 1.0, f"{type(self).__name__} was asked for")
