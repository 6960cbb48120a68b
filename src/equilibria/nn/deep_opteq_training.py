"""The three ways of Algorithm 1 (paper 003) to train an equilibrium layer, as its two options."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from equilibria.adjoints import Implicit, Unrolled
from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.problems import Regularizer
from equilibria.solvers import Picard
from equilibria.solvers.sequential_averaging import SequentialAveraging

__all__ = ["TrainingWay", "training_way"]


class TrainingWay(TypedDict):
    """The two options of a layer that make a way to train it; None: the layer's own default."""

    solver: SolverOptions | None
    adjoint: Adjoint


def training_way(
    way: Literal["implicit", "sam", "unrolled"],
    *,
    steps: int = 20,
    regularizer: Regularizer | None = None,
    **options: Any,
) -> TrainingWay:
    """Algorithm 1 of paper 003: the solver and the adjoint of one of its three ways, for any layer.

    ::

        layer = eq.nn.DeepOptEq(30, (16, 32, 64), **training_way("sam", steps=20))

    - ``"implicit"``: solve the fixed point by the layer's own solver, differentiate by the implicit
      function theorem. Memory does not grow with the steps.
    - ``"sam"``: K = ``steps`` steps of ``SequentialAveraging`` (Eq 11), differentiated step by
      step; ``regularizer`` is its R (None: ½‖z‖²), ``options`` are the solver's (rho, c, …).
    - ``"unrolled"``: K plain steps z ← T(z), differentiated step by step.

    The way of a layer that exists is changed by setting ``layer.solver`` and ``layer.adjoint``.
    """
    if way == "sam":
        averaging = SequentialAveraging(
            regularizer=regularizer, rtol=0.0, atol=0.0, max_steps=steps, **options
        )
        return {"solver": averaging, "adjoint": Unrolled()}
    if regularizer is not None or options:
        given = sorted([*options, *(["regularizer"] if regularizer is not None else [])])
        raise TypeError(
            f"training_way({way!r}) takes no {', '.join(given)}: those belong to 'sam'. The "
            "regularizer of §5.1 is an option of the layer."
        )
    if way == "unrolled":
        plain = Picard(rtol=0.0, atol=0.0, max_steps=steps)
        return {"solver": plain, "adjoint": Unrolled()}
    if way == "implicit":
        return {"solver": None, "adjoint": Implicit()}
    raise ValueError(f"training_way({way!r}): expected 'implicit', 'sam' or 'unrolled'.")
