"""Conditions 1 and 2 of the NTK thesis on λ₀ = σ_min(Z(0)), as printed, restored, and repaired.

Each condition is a list of inequalities left ≥ right(R) in the radii R = (R_A, R_B, R_U, R_u) of
the balls around the initial parameters, with λ̄ = ‖·‖₂ + R. Every right side is a posynomial of R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy
import torch
from scipy import optimize  # type: ignore[import-untyped]
from torch import Tensor

from equilibria.engine import check_number, options

from .model import Equilibrium, ThesisModel, check_data, find_equilibrium, square_loss

_FREE = ("A", "U", "u")
_SPAN = 25.0  # each radius is searched for within e^±25 of its natural scale


@options
class Radii:
    """How far each parameter may move: ‖A − A(0)‖ ≤ R_A and so on; all above 0."""

    A: float
    B: float
    U: float
    u: float

    def __post_init__(self) -> None:
        for name in ("A", "B", "U", "u"):
            check_number(self, name, low=0.0, low_open=True)


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What the conditions are made of: λ₀, ‖X‖_F, √(2L(θ₀)), m, N, n and the initial norms ‖·‖₂."""

    lambda0: float
    norm_X: float
    misfit: float
    m: float
    samples: int
    width: int
    norm_A: float
    norm_B: float
    norm_U: float
    norm_u: float


def smallest_singular(Z: Tensor) -> float:
    """√λ_min(ZᵀZ): the N-th singular value of Z [n, N], which is 0 where N > n."""
    if Z.shape[1] > Z.shape[0]:
        return 0.0
    return float(torch.linalg.svdvals(Z)[-1])


def ingredients(
    model: ThesisModel, X: Tensor, y: Tensor, found: Equilibrium | None = None
) -> Ingredients:
    """The ingredients at the initial parameters ``model`` for X [d, N], y [N]."""
    X = check_data(model, X, y)
    found = find_equilibrium(model, X) if found is None else found
    loss, _ = square_loss(model, found, y)

    def norm(part: Tensor) -> float:
        return float(torch.linalg.svdvals(part)[0] if part.ndim == 2 else part.norm())

    return Ingredients(
        lambda0=smallest_singular(found.Z),
        norm_X=float(X.norm()),
        misfit=math.sqrt(2.0 * loss),
        m=float(model.m),
        samples=X.shape[1],
        width=model.width,
        **{f"norm_{name}": norm(getattr(model, name)) for name in model.names},
    )


@dataclass(frozen=True)
class Inequality:
    """``left`` ≥ ``right``; it holds iff ``slack`` = left/right ≥ 1."""

    name: str
    left: float
    right: float

    @property
    def slack(self) -> float:
        """left/right; infinite where right is 0."""
        return self.left / self.right if self.right > 0 else math.inf


# Numbers; complex ones where the search for radii wants derivatives.
Values = Mapping[str, Any]
Rows = list[tuple[str, float, Any]]


def _bars(given: Ingredients, R: Values) -> tuple[Any, Any, Any]:
    return given.norm_A + R["A"], given.norm_U + R["U"], given.norm_u + R["u"]


def _stay(given: Ingredients, R: Values, factor: float, tag: str) -> Rows:
    """(3.8) and (3.16): the gradients' path lengths fit into the balls."""
    a, U, u = _bars(given, R)
    m = given.m
    scale, left = factor * given.norm_X * given.misfit, given.lambda0**2
    return [
        (f"({tag}) R_A", left, scale * 2.0 * U * u * a / (m**2 * R["A"])),
        (f"({tag}) R_B", left, scale * 2.0 * U * u / (m**2 * R["B"])),
        (f"({tag}) R_U", left, scale * u / (m * R["U"])),
        (f"({tag}) R_u", left, scale * U / (m * R["u"])),
    ]


def _condition1(given: Ingredients, R: Values) -> Rows:
    a, U, u = _bars(given, R)
    m, square = given.m, given.norm_X**2
    drift = 8.0 * square * given.misfit * u / m**2 * (4.0 * (U * U * a * a + U * U) / m**2 + 1.0)
    return [*_stay(given, R, 4.0, "3.8"), ("(3.9)", given.lambda0**3, drift)]


def _condition2(given: Ingredients, R: Values) -> Rows:
    a, U, u = _bars(given, R)
    square, lam = given.norm_X**2, given.lambda0
    drift = 8.0 * square * given.misfit * u * (1.0 + 6.0 * U * U * a * a + 4.0 * U * U)
    return [
        *_stay(given, R, 8.0, "3.16"),
        ("(3.17)", lam**3, drift),
        ("(3.18)", lam**2, 20.0 * square * _printed_sum(a, U, u)),
    ]


def _printed_sum(a: Any, U: Any, u: Any) -> Any:
    """C₁₁/‖X‖_F² of Lemma 3.3.8 as printed, without the powers of m."""
    return u * u + 4.0 * (u * U * a) ** 2 + 4.0 * (u * U) ** 2 + U * U


def _condition2_restored(given: Ingredients, R: Values) -> Rows:
    a, U, u = _bars(given, R)
    m, square, lam = given.m, given.norm_X**2, given.lambda0
    full = (u * u + U * U) / m**2 + 4.0 * (u * U) ** 2 * (a * a + 1.0) / m**4
    return [
        *_stay(given, R, 8.0, "3.16"),
        ("(3.17) with m", lam**3, _drift(given, a, U, u)),
        ("(3.18) with m", lam**2, 20.0 * square * full),
    ]


def _drift(given: Ingredients, a: Any, U: Any, u: Any) -> Any:
    """What Proposition 6's proof gives for (3.17): 16 for 8, and the powers of m."""
    m = given.m
    inner = 1.0 / m**2 + 2.0 * (3.0 * a * a + 2.0) * U * U / m**4
    return 16.0 * given.norm_X**2 * given.misfit * u * inner


def _moving_features(given: Ingredients, a: Any, U: Any, u: Any) -> Any:
    """C₂ with |(ŷ₊ − Z₊₀ᵀu₊)ᵀr| ≤ 2ηC₂L: the features' share of one step.

    ΔW has a term of order η², at most ηλ₀²λ̄_A²/16 beside λ̄_A²; with η ≤ λ₀²/(8C²) and
    C ≥ ‖X‖²λ̄_U²/m² ≥ λ₀² it is at most λ̄_A²/128.
    """
    m = given.m
    return given.norm_X**2 * u * u * (1.0 / m**2 + 4.0 * U * U * (a * a * 129 / 128 + 1.0) / m**4)


def _condition2_repaired(given: Ingredients, R: Values) -> Rows:
    a, U, u = _bars(given, R)
    return [
        *_stay(given, R, 8.0, "3.16"),
        ("(3.17′)", given.lambda0**3, _drift(given, a, U, u)),
        ("(3.18′)", given.lambda0**2, 16.0 * _moving_features(given, a, U, u)),
    ]


def _printed_step(given: Ingredients, R: Values) -> float:
    """η of Theorem 3.3.5 as printed."""
    a, U, u = (float(v) for v in _bars(given, R))
    X, lam = given.norm_X, given.lambda0
    whole = float(_printed_sum(a, U, u))
    return min(
        4.0 / lam**2,
        1.0 / (X * X * whole),
        0.5 / (X * lam * U * u * a),
        1.0 / (6.0 * lam**2 * (u * a) ** 2),
    )


def _repaired_step(given: Ingredients, R: Values) -> float:
    """η ≤ λ₀²/(8C²), C = C₂ + ‖X‖²λ̄_U²/m²."""
    a, U, u = (float(v) for v in _bars(given, R))
    whole = _moving_features(given, a, U, u) + given.norm_X**2 * U * U / given.m**2
    return float(given.lambda0**2 / (8.0 * whole**2))


def _obstruction(given: Ingredients, *, restored: bool) -> str:
    """Why no radii can satisfy (3.18): λ₀ is bounded by what it is asked to exceed."""
    need = 20.0 * given.samples * (1.0 if restored else given.m**2)
    if need <= 1.0:
        return ""
    whom, of_m, over, rest = (
        ("no radii for any model", " with the powers of m", "/m²", "20N ≤ 1")
        if restored
        else ("no radii", "", "", "20Nm² ≤ 1")
    )
    return (
        f"{whom}: λ₀² ≤ ‖Z‖_F²/N ≤ ‖X‖_F²‖U‖²/(m²N) by Lemma 3.3.3, and (3.18){of_m} asks for "
        f"λ₀² ≥ 20‖X‖_F²‖U‖²{over}, so {rest} is needed; here it is {need:g}"
    )


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition: its inequalities, the step size it allows (None: gradient flow), why not."""

    name: str
    theorem: str
    rows: Callable[[Ingredients, Values], Rows]
    step: Callable[[Ingredients, Values], float] | None = None
    obstruction: Callable[[Ingredients], str] = lambda given: ""


CONDITIONS: Mapping[str, Condition] = MappingProxyType(
    {
        "1": Condition(name="Condition 1", theorem="Theorem 3.3.1", rows=_condition1),
        "2": Condition(
            name="Condition 2 as printed",
            theorem="Theorem 3.3.5",
            rows=_condition2,
            step=_printed_step,
            obstruction=partial(_obstruction, restored=False),
        ),
        "2m": Condition(
            name="Condition 2 with the powers of m",
            theorem="Theorem 3.3.5",
            rows=_condition2_restored,
            step=_printed_step,
            obstruction=partial(_obstruction, restored=True),
        ),
        "2'": Condition(
            name="Condition 2′ (repaired)",
            theorem="Theorem 3.3.5, repaired",
            rows=_condition2_repaired,
            step=_repaired_step,
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class ConditionReport:
    """One condition at given radii: every inequality with its slack, and what it then allows."""

    condition: str
    theorem: str
    given: Ingredients
    radii: Radii
    inequalities: tuple[Inequality, ...]
    step: float | None
    obstruction: str = ""
    searched: bool = False

    @property
    def slack(self) -> float:
        """The smallest slack; the condition holds iff it is at least 1."""
        return min(each.slack for each in self.inequalities)

    @property
    def binding(self) -> Inequality:
        """The inequality with the smallest slack."""
        return min(self.inequalities, key=lambda each: each.slack)

    @property
    def holds(self) -> bool:
        """Whether every inequality holds, and there are neurons enough (n ≥ N)."""
        return self.slack >= 1.0 and self.given.width >= self.given.samples

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "condition": self.condition,
            "theorem": self.theorem,
            "holds": self.holds,
            "slack": self.slack,
            "binding": self.binding.name,
            "radii": asdict(self.radii),
            "radii_searched": self.searched,
            "inequalities": [asdict(each) | {"slack": each.slack} for each in self.inequalities],
            "ingredients": asdict(self.given),
            "step": self.step,
            "obstruction": self.obstruction,
        }

    def __str__(self) -> str:
        best = "best radii" if self.searched else "radii"
        R = self.radii
        lines = [
            f"{self.condition}: {'holds' if self.holds else 'does not hold'}, smallest slack "
            f"{self.slack:.4g} at {self.binding.name}",
            f"  λ₀ = {self.given.lambda0:.4g}; {best} A {R.A:.3g}, B {R.B:.3g}, U {R.U:.3g}, "
            f"u {R.u:.3g}",
        ]
        lines += [f"  {i.name}: {i.left:.4g} ≥ {i.right:.4g}?" for i in self.inequalities]
        if self.obstruction:
            lines.append(f"  {self.obstruction}")
        return "\n".join(lines)


def check_condition(name: str, given: Ingredients, radii: Radii | None = None) -> ConditionReport:
    """The condition "1", "2", "2m" or "2'" at these radii; None: at those of ``search_radii``."""
    if radii is None:
        return search_radii(name, given)
    condition = _find(name)
    values = asdict(radii)
    rows = condition.rows(given, values)
    step = None
    if condition.step is not None and given.lambda0 > 0:
        step = condition.step(given, values)
    return ConditionReport(
        condition=condition.name,
        theorem=condition.theorem,
        given=given,
        radii=radii,
        inequalities=tuple(Inequality(tag, left, float(right)) for tag, left, right in rows),
        step=step,
        obstruction=condition.obstruction(given),
    )


def _find(name: str) -> Condition:
    if name not in CONDITIONS:
        known = ", ".join(f"{key!r} ({each.name})" for key, each in CONDITIONS.items())
        raise ValueError(f"no condition {name!r}; there are {known}.")
    return CONDITIONS[name]


def search_radii(name: str, given: Ingredients) -> ConditionReport:
    """The report of condition "1", "2", "2m" or "2'" at the radii with the largest smallest slack.

    max over R of min over inequalities of left/right(R). Every right side is a posynomial of R, so
    log right is convex in log R and the search is a geometric program: the slack that it ends with
    is the best there is, up to the solver's tolerance.

    Where ``holds`` is false no radii satisfy the condition: ``slack`` is the best that there is and
    ``binding`` names an inequality that stands in the way (those that bind are equal at the end).
    Where λ₀ = 0 or the loss is 0 all radii are alike and the natural scale is reported.
    """
    condition = _find(name)
    moves = given.lambda0 > 0 and given.misfit > 0
    scale = {"A": max(given.norm_A, math.sqrt(given.m)), "B": given.m, "U": given.norm_U or 1.0}
    scale["u"] = given.misfit / given.lambda0 if moves else 1.0
    radii = Radii(**scale)
    if moves:
        best = _search(condition, given, scale)
        # R_B stands in one inequality alone, which any large R_B satisfies: it gets twice the slack
        # of the tightest other, or of 1.
        report = check_condition(name, given, Radii(B=1.0, **best))
        others = [i.slack for i in report.inequalities if not i.name.endswith("R_B")]
        own = next(i.slack for i in report.inequalities if i.name.endswith("R_B"))
        radii = Radii(B=2.0 * max(1.0, min(others)) / own, **best)
    return replace(check_condition(name, given, radii), searched=True)


def _search(condition: Condition, given: Ingredients, scale: dict[str, float]) -> dict[str, float]:
    """The best R_A, R_U and R_u."""

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
        found = optimize.minimize(
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
