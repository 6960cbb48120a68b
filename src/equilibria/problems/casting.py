"""The problem of a certificate: the same numbers in float64, without changes of variable."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from equilibria.problems.gaussian import Gaussian
from equilibria.problems.kernels import Coupling
from equilibria.problems.module_operator import in_double as callable_in_double
from equilibria.problems.norms import exact, metric_root
from equilibria.problems.operators import LinearOperator, ModuleOperator
from equilibria.problems.problem import HiddenProblem
from equilibria.problems.problem_transforms import AffineProblem, MoreauProblem

__all__ = ["Plain", "in_double", "unwrap"]

Part = TypeVar("Part", bound=HiddenProblem | Coupling)


def _module_in_double(w: ModuleOperator) -> ModuleOperator:
    """W evaluated with its module's parameters in float64, with the norm bound it has now."""
    upper = w.norm_upper()
    try:
        return ModuleOperator(
            callable_in_double(w._forward),
            callable_in_double(w._adjoint),
            w._in_shape,
            norm_bound=upper if math.isfinite(upper) else None,
            dtype=torch.float64,
            device=w.device,
        )
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            "certify evaluates in float64, and the callables of this ModuleOperator do not take "
            f"it ({error}). Give nn.Modules, or callables that follow the dtype of their input."
        ) from error


def _cast(value: Any) -> Any:
    if isinstance(value, Tensor):
        return exact(value) if value.is_floating_point() else value
    if isinstance(value, ModuleOperator):
        return value if value.dtype == torch.float64 else _module_in_double(value)
    if isinstance(value, LinearOperator):
        return value.cast(torch.float64)
    if isinstance(value, (HiddenProblem, Coupling)):
        return in_double(value)
    return value


def in_double(part: Part) -> Part:
    """The same problem or coupling on the same numbers, detached and in float64.

    Nothing is computed anew from x: the constrained weights, c and γ are those of the layer's own
    dtype, so this is the function that the layer computes, up to the rounding of its iterations.
    A metric M = W_hW_hᵀ that rounding in a lower precision left with negative eigenvalues is
    moved to the nearest positive semidefinite one.
    """
    twin = copy.copy(part)
    for name, value in vars(part).items():
        twin.__dict__[name] = _cast(value)
    if isinstance(part, Gaussian) and isinstance(twin, Gaussian) and part.metric is not None:
        root, upper = metric_root(part.metric)
        nearest = root @ root.mT
        allowed = 64 * torch.finfo(torch.float64).eps * len(nearest) * upper**2
        if float((nearest - exact(part.metric)).abs().max()) > allowed:
            twin.metric = 0.5 * (nearest + nearest.mT)
    return twin


@dataclass(frozen=True)
class Plain:
    """A problem at z = Ay + shift in place of the one at y: ‖y − y*‖ ≤ scale·(‖z − z*‖ + off)."""

    problem: HiddenProblem
    z: Tensor
    scale: float = 1.0
    off: float | Tensor = 0.0
    relaxation: float = 1.0
    """α of the skip connections αT + (1 − α)I around the layer's map."""
    notes: tuple[str, ...] = field(default=())


def unwrap(problem: HiddenProblem, z: Tensor) -> Plain:
    """Look through skip connections (same fixed points) and affine changes of variable."""
    if isinstance(problem, MoreauProblem):
        inner = unwrap(problem.problem, z)
        note = f"skip connection α = {problem.alpha:g}: bounds are those of the map T inside it"
        return Plain(
            inner.problem,
            inner.z,
            inner.scale,
            inner.off,
            inner.relaxation * problem.alpha,
            (*inner.notes, note),
        )
    if isinstance(problem, AffineProblem):
        moved = problem.to_state(z)
        inner = unwrap(problem.problem, moved)
        low, high = _singular_values(problem.matrix)
        size = z[0].numel() if isinstance(problem.matrix, Tensor) else 1
        scale = torch.linalg.vector_norm(z.flatten(1), dim=1) * high
        scale = scale + torch.linalg.vector_norm(moved.flatten(1), dim=1)
        off = inner.off + 4e-16 * (size + 4) * math.sqrt(size) * scale
        note = "change of variable z = Ay + shift: m, L, residual and stationarity are those of z"
        return Plain(
            inner.problem,
            inner.z,
            inner.scale / low,
            off,
            inner.relaxation,
            (*inner.notes, note),
        )
    return Plain(problem, z)


def _singular_values(matrix: float | Tensor) -> tuple[float, float]:
    """Bounds on the extreme singular values of A, in float64."""
    if not isinstance(matrix, Tensor):
        return abs(float(matrix)), abs(float(matrix))
    values = torch.linalg.svdvals(exact(matrix))
    slack = 16 * torch.finfo(torch.float64).eps * 2 * len(values) * float(values[0])
    return float(values[-1]) - slack, float(values[0]) + slack
