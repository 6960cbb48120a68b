"""A command's flags from the fields of an options class: one place for names, types and help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .wording import help_text

__all__ = ["described", "existing", "from_flags", "pairs", "with_flags"]

_SIMPLE = (bool, int, float, str)


def described(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, by name; read from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            plain = re.sub(r"``?", "'", " ".join(after.value.value.split()))
            found[field.target.id] = plain
    return found


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
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _help(text: str, default: Any) -> str:
    """The field's description for the command line, with its default where that says something."""
    said = help_text(text)
    return said if "not given:" in said else f"{said} (default: {_default_text(default)})"


def with_flags(
    kind: type,
    panels: Mapping[str, tuple[str, ...]],
    texts: Mapping[str, str] = types.MappingProxyType({}),
) -> Callable[[Any], Any]:
    """Decorate a command ``f(..., **given)``: every field of ``kind`` becomes a flag.

    A flag that is not given is not in ``given``, so that a file can stand between the flags and the
    defaults. ``panels`` groups the flags in the help; fields in no panel come under "Other".
    ``texts`` replaces the description of a field whose flag is written otherwise than in Python.
    """
    hints = typing.get_type_hints(kind)
    helps = {**described(kind), **texts}
    places = {name: panel for panel, names in panels.items() for name in names}

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        simple = _flag_type(hints[field.name])
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        flag = f"--{field.name.replace('_', '-')}"
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if simple is bool else flag,
            help=_help(helps.get(field.name, ""), default),
            show_default=False,
            rich_help_panel=places.get(field.name, "Other"),
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
        order = [name for names in panels.values() for name in names]
        fields.sort(key=lambda f: order.index(f.name) if f.name in order else len(order))

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
            flag = name.replace("_", "-")
            raise typer.BadParameter(
                f"{value!r} cannot be read: {str(error).splitlines()[0]}.", param_hint=f"--{flag}"
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
