"""Many starts at once: all distinct equilibria that they reach, and the best."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.options import OptionError
from equilibria.engine.result import ConvergenceWarning, Result, Solution
from equilibria.engine.solver import SolverOptions
from equilibria.engine.tree import flatten_state, map_tensors, sample_norm, unflatten
from equilibria.entry import fixed_point, root
from equilibria.solvers import NewtonKrylov

from .problem import HiddenProblem
from .solving import minimize

_DISTINCT = {torch.float64: 1e-4, torch.float32: 1e-2}


@dataclass(frozen=True)
class Equilibria:
    """What S starts of each of B samples reached."""

    value: Any
    """The answers, as the starts: [S, B, ...], with gradients."""
    result: Tensor
    """``Result`` codes, [S, B]."""
    residual: Tensor
    """[S, B], as in ``Stats``."""
    objective: Tensor | None
    """G of each answer, [S, B], where a problem was given."""
    label: Tensor
    """Which equilibrium of its sample a start reached, [S, B]: 0 is the best one, by objective or,
    without one, by residual; −1 where the solve did not converge."""
    count: Tensor
    """How many distinct equilibria of each sample were found, [B]."""

    @property
    def best(self) -> Any:
        """The best equilibrium of each sample, [B, ...]; of a sample that no start solved, the
        answer with the least residual."""
        by = self.residual if self.objective is None else self.objective
        by = torch.where((self.label >= 0).any(0), by.double(), self.residual.double())
        lowest = torch.where((self.label == 0) | (self.count == 0), by, torch.inf)
        index = lowest.nan_to_num(torch.inf).argmin(0)
        return map_tensors(
            lambda t: t[index, torch.arange(len(index), device=t.device)], self.value
        )

    def of_sample(self, sample: int) -> Any:
        """The distinct equilibria of one sample, [K, ...], the best one first."""
        column = self.label[:, sample].tolist()
        first = [column.index(k) for k in range(int(self.count[sample]))]
        return map_tensors(lambda t: t[first, sample], self.value)


def multistart(
    fn: Callable[..., Any] | HiddenProblem,
    starts: Any,
    args: Any = (),
    *,
    solver: SolverOptions | NewtonKrylov | None = None,
    adjoint: Adjoint | None = None,
    distinct: float | None = None,
) -> Equilibria:
    """Solve z = fn(z, *args) from many starts of each sample, in one batch.

    Args:
        fn: A map, or a problem (``minimize`` is used, and the best is that of least objective).
        starts: A tensor [S, B, ...] or a tree of such tensors: S starts of B samples.
        args: Further arguments of a map. Every tensor among them must carry the batch in dim 0; it
            is repeated for the starts. Let the map capture what samples share.
        solver: ``NewtonKrylov()`` if not given and fn is a map: it solves fn(z) − z = 0, and so
            finds equilibria that no iteration of fn is attracted to. Otherwise as in
            ``fixed_point`` and ``minimize``.
        adjoint: ``Implicit()`` if not given.
        distinct: Two answers of a sample are one equilibrium if their distance is at most this
            times the largest norm among its starts and answers. None takes 1e-4 in float64, 1e-2
            else.

    Starts that do not converge are marked in ``label`` and ``result``, without a warning.
    """
    if distinct is not None and not 0 < distinct < 1:
        raise OptionError("multistart", {"distinct": distinct}, ": expected a number in (0, 1).")
    leaves, spec = flatten_state(starts, "starts")
    if any(x.dim() < 2 or x.shape[1] != leaves[0].shape[1] for x in leaves):
        raise ValueError(
            f"starts must be shaped [S, B, ...], with one S and one B, but is "
            f"{[tuple(x.shape) for x in leaves]}."
        )
    count, batch = leaves[0].shape[:2]
    z0 = unflatten([x.flatten(0, 1) for x in leaves], spec)
    given = args if isinstance(args, tuple) else (args,)
    problem = None
    if isinstance(fn, HiddenProblem):
        if given:
            raise TypeError("multistart(problem, starts) takes no args: they are in the problem.")
        if fn.couples_batch:
            raise ValueError(
                "multistart cannot solve a problem whose samples depend on each other: its starts "
                "would be coupled too. Solve it from each start by minimize(problem, z0)."
            )
        problem = fn.with_inputs(*_repeated(fn.inputs(), count, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        solution = _solve(fn, problem, z0, _repeated(given, count, batch), solver, adjoint)

    def split(t: Tensor) -> Tensor:
        parted: Tensor = t.unflatten(0, (count, batch))
        return parted

    objective = None
    if problem is not None:
        with torch.no_grad():
            objective = split(problem.objective(solution.value.detach()))
    value = map_tensors(split, solution.value)
    result, residual = split(solution.result), split(solution.stats.residual)
    order = residual if objective is None else objective
    if distinct is None:
        distinct = max(_DISTINCT.get(x.dtype, 1e-2) for x in leaves)
    found = [x.detach() for x in pytree.tree_leaves(value)]
    label = _labels(found, leaves, order, result == int(Result.converged), distinct)
    return Equilibria(value, result, residual, objective, label, label.amax(0) + 1)


def _solve(
    fn: Any, problem: Any, z0: Any, args: tuple[Any, ...], solver: Any, adjoint: Any
) -> Solution[Any]:
    newton = isinstance(solver, NewtonKrylov) or (solver is None and problem is None)
    if problem is not None and not newton:
        return minimize(problem, z0, solver=solver, adjoint=adjoint)
    step = fn if problem is None else problem.step
    if not newton:
        return fixed_point(step, z0, args, solver=solver, adjoint=adjoint)

    def off(z: Any, *given: Any) -> Any:
        return pytree.tree_map(torch.sub, step(z, *given), z)

    return root(off, z0, args, solver=solver, adjoint=adjoint)


def _repeated(args: Any, count: int, batch: int) -> tuple[Any, ...]:
    """Each tensor [B, ...] as [S·B, ...]."""

    def repeat(t: Tensor) -> Tensor:
        if t.dim() == 0 or t.shape[0] != batch:
            raise ValueError(
                f"multistart needs every tensor in args to carry the batch of {batch} in dim 0, "
                f"but one has shape {tuple(t.shape)}. Let the function capture weights and other "
                "shared tensors instead of passing them in args."
            )
        return t.unsqueeze(0).expand(count, *t.shape).flatten(0, 1)

    return tuple(map_tensors(repeat, args))


def _labels(
    value: list[Tensor], starts: list[Tensor], order: Tensor, converged: Tensor, distinct: float
) -> Tensor:
    """[S, B]: each answer's equilibrium, numbered from the least ``order`` up."""
    count, batch = converged.shape

    def norms(leaves: list[Tensor]) -> Tensor:
        return sample_norm([x.flatten(0, 1) for x in leaves]).view(count, batch)

    size = torch.where(converged, torch.maximum(norms(value), norms(starts)), 0.0)
    near = distinct * size.amax(0)
    label = torch.full_like(order, -1, dtype=torch.int64)
    kinds = torch.zeros_like(label[0])
    places = torch.where(converged, order, torch.inf).argsort(stable=True, dim=0)
    samples = torch.arange(batch, device=label.device)
    for place in places:
        new = converged[place, samples] & (label[place, samples] < 0)
        gap = norms([x - x[place, samples].unsqueeze(0) for x in value])
        same = converged & (label < 0) & (gap <= near) & new
        label = torch.where(same, kinds, label)
        kinds = kinds + new
    return label
