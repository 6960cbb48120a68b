"""The radii that leave most slack: max over R of min over inequalities of left/right(R).

Every right side is a posynomial of R, so log right is convex in log R and the search is a geometric
program: the slack that it ends with is the best there is, up to the solver's tolerance. R_B stands
in one inequality alone, which any large R_B satisfies, and is chosen last.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from equilibria_papers.theory.extras import numpy_module, scipy_module

from .conditions import (
    ConditionReport,
    Ingredients,
    Radii,
    check_condition,
    find_condition,
)

__all__ = ["search_radii"]

_FREE = ("A", "U", "u")
_SPAN = 25.0  # each radius is searched for within e^±25 of its natural scale


def search_radii(name: str, given: Ingredients) -> ConditionReport:
    """The report of condition "1", "2", "2m" or "2'" at the radii with the largest smallest slack.

    Where ``holds`` is false no radii satisfy the condition: ``slack`` is the best that there is and
    ``binding`` names an inequality that stands in the way (those that bind are equal at the end).
    Where λ₀ = 0 or the loss is 0 all radii are alike and the natural scale is reported.
    """
    find_condition(name)
    scale = _natural_scale(given)
    radii = Radii(**scale)
    if given.lambda0 > 0 and given.misfit > 0:
        radii = _with_free_b(name, given, _search(name, given, scale))
    return replace(check_condition(name, given, radii), searched=True)


def _natural_scale(given: Ingredients) -> dict[str, float]:
    root = math.sqrt(given.m)
    move = given.misfit / given.lambda0 if given.lambda0 > 0 and given.misfit > 0 else 1.0
    return {"A": max(given.norm_A, root), "B": given.m, "U": given.norm_U or 1.0, "u": move}


def _search(name: str, given: Ingredients, scale: dict[str, float]) -> dict[str, float]:
    numpy, scipy = numpy_module(), scipy_module()
    condition = find_condition(name)

    def excess(x: Any) -> Any:
        """log(right/left) of every inequality but R_B's; x: log-radii beside the natural scale."""
        R = {key: scale[key] * numpy.exp(move) for key, move in zip(_FREE, x, strict=True)}
        rows = condition.rows(given, R | {"B": 1.0})
        kept = [right / left for tag, left, right in rows if not tag.endswith("R_B")]
        return numpy.log(numpy.array(kept))

    def values(x: Any) -> Any:
        return x[3] - excess(x[:3])

    def slopes(x: Any) -> Any:
        # Complex steps: right sides are polynomials of R and 1/R, so these are exact derivatives.
        steps = [excess(x[:3] + 1e-30j * unit).imag / 1e-30 for unit in numpy.eye(3)]
        return numpy.stack([*(-each for each in steps), numpy.ones_like(steps[0])], axis=1)

    best, least = None, math.inf
    for first in (0.0, -3.0, 3.0, -8.0):
        start = numpy.array([first, first, 0.0, 0.0])
        start[3] = float(excess(start[:3]).max())
        found = scipy.optimize.minimize(
            lambda x: x[3],
            start,
            jac=lambda x: numpy.array([0.0, 0.0, 0.0, 1.0]),
            bounds=[(-_SPAN, _SPAN)] * 3 + [(None, None)],
            constraints=[{"type": "ineq", "fun": values, "jac": slopes}],
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-13},
        )
        worst = float(excess(found.x[:3]).max())
        if worst < least:
            best, least = found.x[:3], worst
        if found.success:
            break  # the program is convex: other starts are for a solver that stumbled
    if best is None:
        raise ArithmeticError(f"no radii could be tried: the ingredients are {given}.")
    return {key: scale[key] * math.exp(move) for key, move in zip(_FREE, best, strict=True)}


def _with_free_b(name: str, given: Ingredients, radii: dict[str, float]) -> Radii:
    """R_B such that its inequality has twice the slack of the tightest other, or of 1."""
    report = check_condition(name, given, Radii(B=1.0, **radii))
    others = [i.slack for i in report.inequalities if not i.name.endswith("R_B")]
    own = next(i.slack for i in report.inequalities if i.name.endswith("R_B"))
    return Radii(B=2.0 * max(1.0, min(others)) / own, **radii)
