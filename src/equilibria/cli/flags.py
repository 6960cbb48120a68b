"""A command's flags from the fields of an options class: one place for names, types and help."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from .console import fail

_SIMPLE = (bool, int, float, str)
# Whose options are the flags of a command.
_OWNERS = ("TrainConfig", "profile_model", "ServeOptions")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _written(name: str, value: Any) -> str:
    """The flag as it is given: ``--lr 0.1``, ``--no-nesterov``, ``--augment crop,flip``."""
    if isinstance(value, bool):
        return _flag(name if value else f"no_{name}")
    return f"{_flag(name)} {shlex.quote(_listed(value))}"


def _listed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def as_flags(error: BaseException) -> str:
    """The message; what is a flag of a command is written as one, ``--lr -1.0 is out of range``."""
    from equilibria.engine import OptionError

    if not isinstance(error, OptionError) or error.owner not in _OWNERS:
        return str(error)
    source = "" if error.source is None else f"{error.source}: "
    given = [
        _written(name, value) for name, value in error.given.items() if value not in (None, ())
    ]
    return f"{source}{' '.join(given)}{error.text}"


def _parameter(field: dataclasses.Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    """The parameter by which typer reads a field; one that is not given is None.

    What is neither a number nor a switch is given as text, and read as YAML.
    """
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    inner = [kind for kind in kinds if kind is not type(None)]
    simple = inner[0] if len(inner) == 1 and inner[0] in _SIMPLE else str
    flag, text = _flag(field.name), field.metadata["help"]
    if "not given:" not in text:
        shown = ("on" if default else "off") if isinstance(default, bool) else _listed(default)
        text += f" (default: {'none' if default in (None, (), {}) else shown})"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if simple is bool else flag,
        help=text,
        show_default=False,
        rich_help_panel=field.metadata["panel"],
    )
    annotation: Any = Annotated[simple | None, option]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=None, annotation=annotation)


def with_flags(kind: type, panels: Sequence[str]) -> Callable[[Any], Any]:
    """Decorate a command ``f(..., **given)``: every field of ``kind`` becomes a flag.

    The metadata of a field hold its ``help`` and its ``panel``; ``panels`` are in the order of the
    help. A flag that is not given is not in ``given``, so that a file can stand between the flags
    and the defaults.
    """
    hints, defaults = typing.get_type_hints(kind), kind()

    def decorate(command: Any) -> Any:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is not p.VAR_KEYWORD]
        taken = {p.name for p in parameters}
        fields = [field for field in dataclasses.fields(kind) if field.name not in taken]
        fields.sort(key=lambda field: panels.index(field.metadata["panel"]))
        parameters += [_parameter(f, hints[f.name], getattr(defaults, f.name)) for f in fields]

        def run(**given: Any) -> Any:
            return command(**{k: v for k, v in given.items() if k in taken or v is not None})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def from_flags(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags as values of the fields: lists and mappings are read from their text."""
    from equilibria.training.yaml_values import parse_yaml

    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, str) or hints[name] in (str, str | None):
            found[name] = value
            continue
        # "crop,flip" is a list as well as "[crop, flip]"; where one value will do, "0,1" is.
        kinds = [typing.get_origin(kind) for kind in typing.get_args(hints[name])]
        listed = typing.get_origin(hints[name]) is tuple or (tuple in kinds and "," in value)
        listed = listed and not value.lstrip().startswith("[")
        try:
            found[name] = parse_yaml(f"[{value}]" if listed else value)
        except ValueError as error:
            why = str(error).splitlines()[0].rstrip(".")
            said = f"{value!r} cannot be read: {why}."
            raise typer.BadParameter(said, param_hint=_flag(name)) from None
    return found


def numbers(
    flag: str, text: str, kind: Callable[[str], Any], fits: Callable[[Any], bool], wanted: str
) -> list[Any]:
    """The numbers of a text with commas between, if they are what the flag takes."""
    try:
        found = [kind(part.strip()) for part in text.split(",")]
    except (ValueError, ArithmeticError):
        found = []
    if not found or not fits(found):
        raise fail(f"{flag} {text}: expected {wanted}.")
    return found


def pairs(name: str, given: list[str]) -> dict[str, Any]:
    """``key=value`` texts as a mapping; values are read as YAML."""
    from equilibria.training.config import plain
    from equilibria.training.yaml_values import parse_yaml

    found = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise typer.BadParameter(
                f"{text!r}: expected key=value, such as depth=2.", param_hint=f"--{name}"
            )
        try:
            found[key.strip()] = plain(parse_yaml(value))
        except ValueError:
            found[key.strip()] = value
    return found
