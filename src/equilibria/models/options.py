"""What a model lets its user change: a default, what is allowed, and a sentence about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equilibria.engine.adjoint import Adjoint
from equilibria.engine.solver import SolverOptions
from equilibria.nn import NormBounded, WeightNormalized
from equilibria.problems import GammaPolicy, Patches, Regularizer

from .values import from_json

__all__ = [
    "Option",
    "adjoint",
    "choice",
    "constraint",
    "flag",
    "fraction",
    "gamma",
    "integer",
    "integers",
    "linear_bound",
    "number",
    "numbers",
    "patch",
    "prefixed",
    "regularizer",
    "solver",
]


@dataclass(frozen=True)
class Option:
    """An option of a model. ``parse(value)`` returns the checked value or says what is allowed."""

    default: Any
    about: str
    allowed: str
    accepts: Callable[[Any], bool]

    def parse(self, name: str, value: Any) -> Any:
        """The value, objects built from their JSON form; ``name`` is for the error."""
        try:
            made = from_json(value)
        except (TypeError, ValueError) as error:
            raise prefixed(error, f"option {name}={value!r}") from error
        if not self.accepts(made):
            kind = type(value).__name__
            raise ValueError(f"option {name}={value!r} ({kind}): expected {self.allowed}.")
        return made


def integer(default: int, about: str, *, low: int = 1, high: int = 1 << 16) -> Option:
    """A whole number of [low, high]."""
    return Option(
        default, about, f"an integer in [{low}, {high}]", lambda v: _whole(v) and low <= v <= high
    )


def integers(default: tuple[int, ...], about: str, *, high: int = 1 << 16) -> Option:
    """A list of positive whole numbers; a list of other length is another network."""

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, tuple)
            and 1 <= len(value) <= 16
            and all(_whole(v) and 1 <= v <= high for v in value)
        )

    return Option(default, about, f"a list of 1 to 16 integers in [1, {high}]", accepts)


def number(default: float, about: str, *, low: float, high: float) -> Option:
    """A number in (low, high]."""

    def accepts(value: Any) -> bool:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        return numeric and math.isfinite(value) and low < value <= high

    return Option(default, about, f"a number in ({low:g}, {high:g}]", accepts)


def fraction(default: float, about: str) -> Option:
    """A number in [0, 1)."""

    def accepts(value: Any) -> bool:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        return numeric and 0.0 <= value < 1.0

    return Option(default, about, "a number in [0, 1)", accepts)


def numbers(default: tuple[float, ...] | float, about: str, *, low: float, high: float) -> Option:
    """A number in (low, high], or a list of them."""
    one = number(0.0, about, low=low, high=high)

    def accepts(value: Any) -> bool:
        if isinstance(value, tuple):
            return 1 <= len(value) <= 16 and all(one.accepts(v) for v in value)
        return one.accepts(value)

    return Option(default, about, f"{one.allowed} or a list of such", accepts)


def choice(default: str, about: str, allowed: tuple[str, ...]) -> Option:
    """One of a few words."""
    return Option(default, about, f"one of {', '.join(map(repr, allowed))}", lambda v: v in allowed)


def flag(default: bool, about: str) -> Option:
    """True or False."""
    return Option(default, about, "True or False", lambda v: isinstance(v, bool))


def solver(default: SolverOptions) -> Option:
    """How the equilibrium is found."""
    return _of(
        default,
        "how the equilibrium is found",
        (SolverOptions,),
        "a solver such as Picard(max_steps=4)",
    )


def adjoint(default: Adjoint) -> Option:
    """How gradients pass the equilibrium."""
    return _of(default, "how gradients pass it", (Adjoint,), "an adjoint such as Phantom(steps=5)")


def linear_bound(bound: float) -> NormBounded:
    """‖W‖ ≤ bound < 1 for kernels with one equilibrium below 1 (the Gaussian: below 1.4969)."""
    return NormBounded(bound=bound)


def constraint(default: NormBounded | WeightNormalized) -> Option:
    """What holds W where the equilibrium is unique."""
    return _of(
        default,
        "what bounds W",
        (NormBounded, WeightNormalized, type(None)),
        "NormBounded(bound=...), WeightNormalized() or None",
    )


def gamma(default: GammaPolicy) -> Option:
    """The policy for γ."""
    allowed = "a policy such as MeanPatchEnergy(0.2) or FixedGamma(0.5)"
    return _of(default, "γ of the Gaussian kernel", (GammaPolicy,), allowed)


def patch(default: Patches) -> Option:
    """How feature maps are cut."""
    return _of(default, "patches of the Gaussian kernel", (Patches,), "Patches(channels=, size=)")


def regularizer(default: Regularizer | None) -> Option:
    """A feature regularizer in front of the map (OptEq §5.1)."""
    return _of(
        default,
        "feature regularizer of OptEq §5.1",
        (Regularizer, type(None)),
        "a regularizer such as Decorrelation(weight=0.01), or None",
    )


def _of(default: Any, about: str, kinds: tuple[type[Any], ...], allowed: str) -> Option:
    return Option(
        default,
        about,
        f"{allowed}, or its JSON form {{'kind': ..., ...}}",
        lambda v: isinstance(v, kinds),
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def prefixed(error: TypeError | ValueError, where: str) -> TypeError | ValueError:
    """The same kind of error, with the place in front."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")
