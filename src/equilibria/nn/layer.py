"""An equilibrium layer: parameters that make a problem from x, a solver, an adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equilibria.adjoints import Implicit
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.result import Solution
from equilibria.engine.solver import Solver
from equilibria.problems import HiddenProblem
from equilibria.problems.solving import minimize
from equilibria.solvers import Auto

from .inputs import contained, marked
from .observing import report


class EquilibriumLayer(nn.Module):
    """x ↦ z* = argmin_z G(z; x), a module whose forward is a solve and whose backward is exact.

    Give a function that writes down the problem, and by keyword the modules and parameters that it
    uses; they are registered here (so they train, move, copy and save) and handed to the function::

        layer = eq.nn.EquilibriumLayer(
            lambda x, W, U: eq.Problem(eq.NonNegative(), eq.Gaussian(W, U(x), gamma=0.5)),
            W=nn.Linear(8, 16, bias=False),
            U=nn.Linear(4, 16),
        )

    Or subclass it and write the method ``problem(x)``, as GEQ and OptEq do.
    """

    is_equilibrium: ClassVar[bool] = True

    def __init__(
        self,
        problem_fn: Callable[..., HiddenProblem] | None = None,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        **parts: nn.Module | nn.Parameter,
    ) -> None:
        super().__init__()
        self.solver: Solver = Auto() if solver is None else solver
        self.adjoint: Adjoint = Implicit() if adjoint is None else adjoint
        if not isinstance(self.solver, Solver):
            raise TypeError(f"solver must be a solver object such as Auto(), got {solver!r}.")
        if not isinstance(self.adjoint, Adjoint):
            raise TypeError(f"adjoint must be an object such as Implicit(), got {adjoint!r}.")
        self._problem_fn = problem_fn
        self._parts = tuple(parts)
        for name, part in parts.items():
            if not isinstance(part, (nn.Module, nn.Parameter)):
                raise TypeError(
                    f"EquilibriumLayer({name}=...): expected an nn.Module or nn.Parameter, got "
                    f"{type(part).__name__}."
                )
            setattr(self, name, part)
        if problem_fn is not None:
            _check_closure(problem_fn)

    def problem(self, x: Tensor) -> HiddenProblem:
        """The problem that this layer solves for the input x [B, ...]."""
        if self._problem_fn is None:
            raise TypeError(
                f"{type(self).__name__} has no problem: pass problem_fn or override problem(x)."
            )
        made = self._problem_fn(x, **{name: getattr(self, name) for name in self._parts})
        if not isinstance(made, HiddenProblem):
            raise TypeError(
                f"problem_fn must return a Problem, got {type(made).__name__} for an input of "
                f"shape {tuple(x.shape)}."
            )
        return made

    def start(self, problem: HiddenProblem, x: Tensor) -> Tensor:
        """Where the solver starts for the input x; zero for most problems."""
        return problem.default_start()

    def solve(self, x: Tensor, z0: Tensor | None = None, **options: Any) -> Solution[Tensor]:
        """Solve for x and tell all: value, result codes, stats, the solver's choice."""
        problem, start = self.posed(x, z0)
        chosen = {"solver": self.solver, "adjoint": self.adjoint, **options}
        return minimize(problem, start, **chosen)

    def posed(self, x: Tensor, z0: Tensor | None = None) -> tuple[HiddenProblem, Tensor]:
        """The problem of a solve and its start: ``problem(x)``, bad samples of x kept apart."""
        x, bad = contained(x)
        problem = self.problem(x)
        start = self.start(problem, x) if z0 is None else z0
        if bad is None:
            return problem, start
        if z0 is None:
            start = torch.where(bad.view(-1, *[1] * (start.ndim - 1)), 0.0, start)
        return problem.with_inputs(*marked(problem.inputs(), bad)), start

    def forward(self, x: Tensor, z0: Tensor | None = None) -> Tensor:
        """z*, [B, *state]; ``z0`` is a warm start."""
        solution = self.solve(x, z0)
        report(self, solution)
        return solution.value

    def extra_repr(self) -> str:
        return f"solver={self.solver!r}, adjoint={self.adjoint!r}"


def _check_closure(fn: Callable[..., Any]) -> None:
    """A captured parameter would neither train nor move with the layer: say how to pass it."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    cells = getattr(fn, "__closure__", None) or ()
    for name, cell in zip(names, cells, strict=True):
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, (nn.Module, nn.Parameter)) or (
            isinstance(held, torch.Tensor) and held.requires_grad
        ):
            raise ValueError(
                f"problem_fn captures '{name}', which would not be registered, copied or saved "
                f"with the layer. Pass it by keyword, EquilibriumLayer(problem_fn, {name}={name}), "
                f"and take it as an argument: lambda x, {name}: ..."
            )
