"""What a solve returns: the value, one result code a sample, and the numbers behind them."""

from __future__ import annotations

import enum
import os
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .tree import Leaves, map_tensors, part_samples, repeat_samples

V = TypeVar("V")


class Result(enum.IntEnum):
    """How the solve of one sample ended. Only ``converged`` means that the test was passed;
    ``fixed_steps`` is the end of a solve that has none (rtol = atol = 0)."""

    converged = 0
    max_steps = 1
    diverged = 2
    nonfinite = 3
    stagnated = 4
    fixed_steps = 5

    @property
    def message(self) -> str:
        """What happened, in one sentence."""
        return _MESSAGES[self]


_MESSAGES = {
    Result.converged: "the residual passed the tolerance",
    Result.max_steps: "the step limit came first",
    Result.diverged: "the residual grew without bound",
    Result.nonfinite: "NaN or infinity appeared",
    Result.stagnated: "the residual stopped falling",
    Result.fixed_steps: "the fixed steps were taken, without a test",
}


def _advice(code: Result, what: str, options: object, dtype: torch.dtype | None) -> str:
    """What helps, leaving out what these options (of a solver) have or cannot have."""
    damping = getattr(options, "damping", None)
    damp = [] if damping is None else ["damp the solver" if damping == 1.0 else "lower damping"]
    if code is Result.max_steps:
        found = ["raise max_steps", "loosen rtol"]
        if not getattr(options, "accelerated", True):
            found.append("use Anderson")
    elif code is Result.diverged:
        found = [*damp, "bound the norm of the map"]
    elif code is Result.nonfinite:
        found = ["check this sample's input and the map's scale"]
    else:
        found = ["loosen rtol (the dtype may not resolve it)", *damp]
        if what == "root":
            found.append("start elsewhere (multistart), as it may be a local minimum of ‖f‖")
        if dtype is not torch.float64:
            found.append("use float64")
    return found[0] if len(found) == 1 else ", ".join(found[:-1]) + " or " + found[-1]


class ConvergenceWarning(UserWarning):
    """Some samples did not converge, forward or backward."""


class NotConvergedError(RuntimeError):
    """Raised with ``throw=True``; carries the Solution as ``.solution``."""

    def __init__(self, message: str, solution: object) -> None:
        super().__init__(message)
        self.solution = solution


@dataclass
class BackwardStats:
    """What the adjoint's linear solves did; filled in when gradients are computed."""

    solves: int = 0
    unconverged: int = 0
    """Number of (sample, backward solve) pairs that missed the tolerance."""
    masked: int = 0
    """Number of samples whose gradient was set to zero: their forward solve blew up."""
    steps: Tensor | None = None
    """Steps per sample of the latest backward solve, [B]."""
    residual: Tensor | None = None
    """‖u − g − Jᵀu‖/‖g‖ of the latest backward solve's u, [B]; of the batch where J couples it."""


@dataclass
class Iterated:
    """The raw outcome of a solve, on leaves: of z = T(z), or of Ax = b with b − Ax as residual."""

    value: Leaves
    result: Tensor
    steps: Tensor
    residual: Tensor
    relative: Tensor
    evaluations: int
    syncs: int
    counts: dict[Result, int] | None = None
    """How many samples ended in which way, where the host knows it without waiting."""
    coupled: bool = False
    """Whether samples are known to depend on each other."""
    # By a lambda: torch.compile does not trace a class as a factory.
    backward: BackwardStats = field(default_factory=lambda: BackwardStats())

    def spread(self, size: int) -> Iterated:
        """The outcome of ``size`` joined samples for each: its numbers are those of its group."""
        names = "result", "steps", "residual", "relative"
        each: dict[str, Any] = {n: repeat_samples(getattr(self, n), size) for n in names}
        counts = None if self.counts is None else {c: n * size for c, n in self.counts.items()}
        return replace(self, value=part_samples(self.value), counts=counts, coupled=True, **each)


@dataclass(frozen=True)
class Stats:
    """One entry per sample, [B]."""

    steps: Tensor
    """Evaluations of the map until this sample stopped."""
    residual: Tensor
    """‖T(z) − z‖ of the returned z, T the layer's own map. After a fixed-step solve: of the iterate
    before it. Of ``root``: ‖f(z)‖."""
    relative: Tensor
    """The same over ‖T(z)‖, which the tolerance rtol is compared with."""
    evaluations: int
    """Calls of the map in the forward solve (of the whole batch or what was left of it)."""
    syncs: int
    """How often the host waited for the device."""
    backward: BackwardStats = field(default_factory=BackwardStats)


@dataclass(frozen=True)
class Solution(Generic[V]):
    """A solved fixed point: ``value`` (shaped as z0), ``result`` codes [B], ``stats``."""

    value: V
    result: Tensor
    stats: Stats
    choice: str = ""
    """Which solver ran and why, where it was chosen for the problem (``Auto``)."""
    aux: Any = None
    """What the map returned beside T(z) for this value, with ``fixed_point(..., aux=True)``."""

    @property
    def converged(self) -> Tensor:
        """[B] bool: which samples passed the tolerance."""
        return self.result == int(Result.converged)

    def detach(self) -> Solution[V]:
        """The same without a graph."""
        value, aux = map_tensors(lambda t: t.detach(), (self.value, self.aux))
        return replace(self, value=value, aux=aux)

    def counts(self) -> dict[Result, int]:
        """How many samples ended in which way (synchronizes)."""
        found = torch.bincount(self.result.long().flatten(), minlength=len(Result)).tolist()
        return {code: found[code] for code in Result if found[code]}

    def summary(self) -> str:
        """A line a person can read (synchronizes)."""
        parts = ", ".join(f"{n} {code.name}" for code, n in self.counts().items())
        steps, relative = self.stats.steps, float(self.stats.relative.max())
        return (
            f"{parts}; steps {int(steps.min())} to {int(steps.max())}, "
            f"relative residual up to {relative:.2e}"
        )


def describe_failures(
    counts: dict[Result, int],
    what: str = "fixed_point",
    options: object = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    """What to tell a user about samples that did not converge, or None if all did.

    ``options`` is the solver and ``dtype`` that of the state: nothing is advised that is in use.
    """
    fine = (Result.converged, Result.fixed_steps)
    failed = {code: n for code, n in counts.items() if code not in fine and n}
    if not failed:
        return None
    total = sum(counts.values())
    parts = []
    for code, n in failed.items():
        advice = _advice(code, what, options, dtype)
        parts.append(f"{n} of {total} samples {code.name} ({code.message}: {advice})")
    return f"{what} did not converge for all samples: " + "; ".join(parts) + "."


# The folders of this package and of torch: what stands there is not the user's.
_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


def warn_user(message: str, kind: type[Warning] = ConvergenceWarning) -> None:
    """A warning at the line of the user's code that led here.

    Layers, adjoints and torch's own modules stand in between, so no fixed ``stacklevel`` fits.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)


def report_failures(
    counts: dict[Result, int],
    what: str,
    options: object,
    dtype: torch.dtype,
    *,
    raise_with: Solution[Any] | None = None,
) -> None:
    """Warn at the user's line, or raise, if samples did not converge."""
    message = describe_failures(counts, what, options, dtype)
    if message is None:
        return
    if raise_with is not None:
        raise NotConvergedError(message, raise_with)
    warn_user(message)
