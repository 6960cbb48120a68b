"""A command's flags from the fields of an options class: one place for names, types and help."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from equilibria.engine import OptionError

__all__ = ["as_flags", "existing", "from_flags", "pairs", "with_flags"]

_SIMPLE = (bool, int, float, str)
_OWNERS = ("TrainConfig", "profile_model")  # whose options are the flags of a command


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
    if not isinstance(error, OptionError) or error.owner not in _OWNERS:
        return str(error)
    source = "" if error.source is None else f"{error.source}: "
    given = [
        _written(name, value) for name, value in error.given.items() if value not in (None, ())
    ]
    return f"{source}{' '.join(given)}{error.text}"


def _flag_type(annotation: Any) -> type:
    """int, float, bool or str; what is none of them is given as text and read as YAML."""
    if annotation in _SIMPLE:
        return typing.cast(type, annotation)
    if isinstance(annotation, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(inner) == 1 and inner[0] in _SIMPLE:
            return typing.cast(type, inner[0])
    return str


def _default_text(value: Any) -> str:
    if value is None or value == () or value == {}:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else _listed(value)


def _help(text: str, default: Any) -> str:
    """The field's description, with its default where that says something."""
    return text if "not given:" in text else f"{text} (default: {_default_text(default)})"


def with_flags(kind: type, panels: Sequence[str]) -> Callable[[Any], Any]:
    """Decorate a command ``f(..., **given)``: every field of ``kind`` becomes a flag.

    The metadata of a field hold its ``help`` and its ``panel``; ``panels`` are in the order of the
    help. A flag that is not given is not in ``given``, so that a file can stand between the flags
    and the defaults.
    """
    hints = typing.get_type_hints(kind)

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        simple = _flag_type(hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        flag = _flag(field.name)
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if simple is bool else flag,
            help=_help(field.metadata["help"], default),
            show_default=False,
            rich_help_panel=field.metadata["panel"],
        )
        annotation: Any = Annotated[simple | None, option]
        return inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )

    def decorate(command: Any) -> Any:
        own = inspect.signature(command, eval_str=True)
        first = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {p.name for p in first}
        fields = [f for f in dataclasses.fields(kind) if f.name not in taken]
        fields.sort(key=lambda f: panels.index(f.metadata["panel"]))

        def run(**given: Any) -> Any:
            mine = {name: given.pop(name) for name in list(given) if name in taken}
            return command(**mine, **{k: v for k, v in given.items() if v is not None})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in first]
        parameters += [parameter(field) for field in fields]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def from_flags(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given flags as values of the fields: lists and mappings are read from their text."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    hints = typing.get_type_hints(kind)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, str) or _flag_type(hints[name]) is not str:
            found[name] = value
            continue
        plain_text = hints[name] is str or hints[name] == (str | None)
        if plain_text:
            found[name] = value
            continue
        # "crop,flip" is a list as well as "[crop, flip]".
        listed = typing.get_origin(hints[name]) is tuple and not value.lstrip().startswith("[")
        try:
            found[name] = yaml.safe_load(f"[{value}]" if listed else value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(
                f"{value!r} cannot be read: {str(error).splitlines()[0]}.", param_hint=_flag(name)
            ) from None
    return found


def pairs(name: str, given: list[str]) -> dict[str, Any]:
    """``key=value`` texts as a mapping; values are read as YAML."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    found = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise typer.BadParameter(
                f"{text!r}: expected key=value, such as depth=2.", param_hint=f"--{name}"
            )
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            found[key.strip()] = value
    return found


def existing(path: Path | None) -> Path | None:
    """The path, if it is there; wrong usage if it is not."""
    if path is not None and not path.exists():
        raise typer.BadParameter(f"there is no {path}.")
    return path
