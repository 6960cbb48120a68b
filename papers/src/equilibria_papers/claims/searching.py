"""Adversaries: optimizers that push the ratio of a trial up.

Nelder–Mead and Powell from given starts, differential evolution in a box. Each yields the worst
trial that it saw, with the number of evaluations behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from scipy import optimize  # type: ignore[import-untyped]
from torch import Tensor

from .claim import Trial

Try = Callable[[Tensor], Trial | None]
METHODS = ("Nelder-Mead", "Powell")


class _Watched:
    """−ratio for a minimizer, remembering the worst trial."""

    def __init__(self, attempt: Try) -> None:
        self.attempt = attempt
        self.worst: Trial | None = None
        self.evaluations = 0

    def __call__(self, at: Sequence[float]) -> float:
        trial = self.attempt(torch.tensor([float(a) for a in at], dtype=torch.float64))
        self.evaluations += 1
        if trial is None:
            return 1e6
        ratio = math.inf if math.isnan(trial.ratio) else trial.ratio
        if self.worst is None or ratio > self.worst.ratio:
            self.worst = Trial(ratio, trial.case)
        return -min(ratio, 1e300)

    def report(self, method: str) -> Trial | None:
        if self.worst is None:
            return None
        found = {"found by": f"{method}, {self.evaluations} evaluations"}
        return Trial(self.worst.ratio, {**self.worst.case, **found})


def climb(
    attempt: Try,
    starts: Iterable[Tensor],
    *,
    methods: Sequence[str] = METHODS,
    evaluations: int = 300,
) -> Iterator[Trial | None]:
    """From every start, every method one after the other; one trial each."""
    for start in starts:
        for method in methods:
            watched = _Watched(attempt)
            optimize.minimize(
                watched,
                start.tolist(),
                method=method,
                options={"maxfev": evaluations, "xatol": 1e-10, "fatol": 1e-12}
                if method == "Nelder-Mead"
                else {"maxfev": evaluations, "xtol": 1e-10, "ftol": 1e-12},
            )
            yield watched.report(method)


def evolve(
    attempt: Try,
    bounds: Sequence[tuple[float, float]],
    draw: torch.Generator,
    *,
    generations: int = 20,
    population: int = 8,
) -> Iterator[Trial | None]:
    """Differential evolution in the box; one trial."""
    watched = _Watched(attempt)
    seed = int(torch.randint(2**31 - 1, (), generator=draw))
    optimize.differential_evolution(
        watched,
        list(bounds),
        maxiter=generations,
        popsize=population,
        seed=seed,
        polish=False,
        tol=0.0,
    )
    yield watched.report("differential evolution")
