"""Frozen, keyword-only options whose errors say what was given, what is allowed, what to do."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
_LONG = 200  # characters of a value in a message
_LARGEST = 2**63 - 1  # what a tensor's size or a count can be


class OptionError(ValueError):
    """A value that a class of options refuses, or values that do not go together.

    ``owner`` is the name of the class, ``given`` the options with their values, ``text`` what is
    wrong: the command line writes them as flags. ``source`` is the file that held the values.
    """

    source: str | None = None

    def __init__(self, owner: str, given: Mapping[str, Any], text: str) -> None:
        super().__init__(owner, given, text)  # as the arguments, so that it can be pickled
        self.owner, self.given, self.text = owner, given, text

    def __str__(self) -> str:
        options = ", ".join(f"{name}={shown(value)}" for name, value in self.given.items())
        source = "" if self.source is None else f"{self.source}: "
        return f"{source}{self.owner}({options}){self.text}"


def shown(value: Any) -> str:
    """``repr``, cut where it is long; Python refuses that of an integer of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "an integer of thousands of digits"
    return text if len(text) <= _LONG else f"{text[: _LONG - 4]} ..."


def hint(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest name, after a space; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


class OptionTypeError(OptionError, TypeError):
    """The same where the value is of a wrong type."""


def _helpful_init(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    allowed = [f.name for f in dataclasses.fields(cls) if f.init]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        if args:
            raise TypeError(
                f"{name} takes keyword options only, got {len(args)} positional value(s) "
                f"{args!r}; write {name}({', '.join(f'{a}=...' for a in allowed[: len(args)])})"
            )
        unknown = [key for key in kwargs if key not in allowed]
        if unknown:
            given = f"{unknown[0]}={shown(kwargs[unknown[0]])}"
            raise TypeError(
                f"{name} has no option '{unknown[0]}' (got {given}).{hint(unknown[0], allowed)}"
                f" It takes: {', '.join(allowed) or 'no options'}."
            )
        init(self, **kwargs)

    return __init__


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only dataclass whose constructor rejects typos helpfully."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    made.__init__ = _helpful_init(made, made.__init__)  # type: ignore[method-assign]
    return made


def check_number(
    owner: object,
    name: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    integer: bool = False,
    optional: bool = False,
) -> None:
    """Raise unless ``owner.name`` is a finite number inside the interval (or None if optional)."""
    value = getattr(owner, name)
    if optional and value is None:
        return
    kind = "an integer" if integer else "a number"
    ends = [str(end) if isinstance(end, int) else f"{end:g}" for end in (low, high)]
    allowed = f"{kind} in {'(' if low_open or low == -math.inf else '['}{', '.join(ends)}" + (
        ")" if high_open or high == math.inf else "]"
    )
    if optional:
        allowed += " or None"
    who = type(owner).__name__
    if isinstance(value, bool) or not isinstance(value, (int,) if integer else (int, float)):
        wrong = f": expected {allowed}, got {type(value).__name__}."
        raise OptionTypeError(who, {name: value}, wrong)
    inside = (value > low if low_open else value >= low) and (
        value < high if high_open else value <= high
    )
    if integer and abs(value) > _LARGEST:
        inside, allowed = False, f"{allowed}, of at most 64 bits"
    elif not integer and isinstance(value, int):
        try:
            float(value)
        except OverflowError:
            inside, allowed = False, f"{allowed}, of at most 1.8e308"
    if not (inside and -math.inf < value < math.inf):  # math.isfinite takes no symbol of compilers
        raise OptionError(who, {name: value}, f" is out of range: expected {allowed}.")
