"""How single values of a configuration are read: from Python, from YAML, from a command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equilibria.data import build_augmentation
from equilibria.models.values import to_json

from .extras import need

_PRECISIONS = (
    *("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"),
    *("transformer-engine", "transformer-engine-float16"),
)
_ALIASES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}


def where(owner: object, name: str) -> str:
    """``TrainConfig(lr=-1)``."""
    return f"{type(owner).__name__}({name}={getattr(owner, name)!r})"


def check_text(owner: object, name: str, *, optional: bool = False) -> str | None:
    """A non-empty string or path, as a string."""
    value = getattr(owner, name)
    if value is None and optional:
        return None
    if not isinstance(value, (str, Path)) or not str(value):
        allowed = "a non-empty text" + (" or None" if optional else "")
        raise TypeError(f"{where(owner, name)}: expected {allowed}, got {type(value).__name__}.")
    return str(value)


def check_flag(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise TypeError(
            f"{where(owner, name)}: expected True or False, got {type(value).__name__}."
        )


def check_choice(owner: object, name: str, allowed: Sequence[str]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ValueError(f"{where(owner, name)}:{hint(value, allowed)} one of {_list(allowed)}.")


def hint(given: object, allowed: Sequence[str]) -> str:
    """ " did you mean 'x'? Expected", or " expected"."""
    close = difflib.get_close_matches(str(given), allowed, n=1)
    return f" did you mean {close[0]!r}? Expected" if close else " expected"


def _list(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def parse_number(value: Any) -> Any:
    """An integer or the text of a number as a float: YAML reads ``1e-3`` as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def parse_options(value: Any) -> dict[str, Any]:
    """Options of a model in the types of JSON."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"TrainConfig(model_options={value!r}): expected a mapping from option to value, got "
            f"{type(value).__name__}."
        )
    return {str(name): _plain(item) for name, item in value.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return to_json(value)


def parse_augment(value: Any) -> tuple[Any, ...]:
    """("flip", {"crop": {"padding": 2}}): each a name, or a name with its options."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            f"TrainConfig(augment={value!r}): expected a list such as ['crop', 'flip'] or "
            "[{'crop': {'padding': 2}}, 'flip']."
        )
    plain = tuple(_plain(entry) for entry in value)
    try:
        build_augmentation(plain, num_classes=2)  # its errors know every name and option
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"TrainConfig(augment=...): {error}") from error
    return plain


def parse_milestones(value: Any) -> tuple[int, ...]:
    """Epochs, rising."""
    found = tuple(value) if isinstance(value, (list, tuple)) else None
    whole = found is not None and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in found
    )
    if found is None or not whole or list(found) != sorted(set(found)):
        raise ValueError(
            f"TrainConfig(milestones={value!r}): expected a list of rising epochs, such as "
            "[60, 120]."
        )
    return found


def parse_devices(value: Any) -> int | str | tuple[int, ...]:
    """A count, "auto", or the indices of the devices."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value  # type: ignore[no-any-return]
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    ):
        return tuple(value)
    raise ValueError(
        f"TrainConfig(devices={value!r}): expected a number of devices of at least 1, a list of "
        "their indices, or 'auto'."
    )


def parse_precision(value: Any) -> str:
    """Lightning's name of a precision; 32, 16, 64 and "bf16" are short for the usual ones."""
    given = str(value)
    name = _ALIASES.get(given, given)
    if name not in _PRECISIONS:
        raise ValueError(
            f"TrainConfig(precision={value!r}):{hint(given, _PRECISIONS)} one of "
            f"{_list(_PRECISIONS)}."
        )
    return name


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file of names and values, read by the safe loader."""
    yaml = need("yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no configuration file {path}; TrainConfig().to_yaml({str(path)!r}) writes "
            "one with the defaults."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(
            f"{path} must hold lines 'name: value', got {type(found).__name__} {str(found)[:60]!r}."
        )
    return found


def write_mapping(values: Mapping[str, Any]) -> str:
    """The same as YAML text, in the order of the options."""
    text: str = need("yaml").safe_dump(
        dict(values), sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    return text
