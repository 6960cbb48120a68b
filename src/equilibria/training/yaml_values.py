"""YAML as plain values, within limits: a small file cannot make much of little by its aliases, and
cannot give a name twice, of which PyYAML would silently take the last."""

from __future__ import annotations

from typing import Any

from equilibria.engine.optional import needs

MOST_CHARACTERS = 2**18
"""Of a file."""
MOST_VALUES = 10_000
"""Of a file, with every alias written out."""
MOST_DEPTH = 50
"""Of lists and mappings inside each other."""
MOST_LETTERS = 4096
"""Of one value; a longer text of digits would be a number that takes its time."""


def parse_yaml(text: str) -> Any:
    """The values in ``text``: mappings, lists, text, numbers, dates; None where there is nothing.

    Raises ValueError with the line and the limit, and yaml.YAMLError for what is not YAML.
    """
    with needs("yaml", "a configuration file"):
        import yaml  # type: ignore[import-untyped, unused-ignore]
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS:,} characters{_limit('MOST_CHARACTERS')}")
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        _check(root)
        return None if root is None else loader.construct_document(root)
    except RecursionError:
        deep = f"lists and mappings are nested deeper than {MOST_DEPTH}"
        raise ValueError(f"{deep}{_limit('MOST_DEPTH')}") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # as PyYAML lets through
        raise ValueError(f"a value is not of the type that its tag (!!) names ({error})") from None
    finally:
        loader.dispose()


def _limit(name: str) -> str:
    return f"; the limit is equilibria.training.yaml_values.{name}."


def _check(root: Any) -> None:
    """Raise for more values, deeper or longer ones than allowed, and for names given twice."""
    count = 0
    waiting: list[tuple[Any, tuple[int, ...]]] = [] if root is None else [(root, ())]
    while waiting:
        node, above = waiting.pop()
        count, line = count + 1, f"line {node.start_mark.line + 1}"
        if id(node) in above:
            raise ValueError(f"{line}: a value that contains itself by an alias; write it out.")
        if len(above) > MOST_DEPTH:
            raise RecursionError
        if count > MOST_VALUES:
            raise ValueError(
                f"{line}: more than {MOST_VALUES:,} values with all aliases written out"
                f"{_limit('MOST_VALUES')}"
            )
        inner: list[Any] = []
        if isinstance(node.value, str):
            if len(node.value) > MOST_LETTERS:
                raise ValueError(
                    f"{line}: a value of {len(node.value):,} characters, more than "
                    f"{MOST_LETTERS:,}{_limit('MOST_LETTERS')}"
                )
        elif node.id == "mapping":
            names: set[str] = set()
            for key, value in node.value:
                if isinstance(key.value, str):
                    if key.value in names:
                        where = f"line {key.start_mark.line + 1}"
                        raise ValueError(f"{where}: {key.value[:60]!r} is given twice; keep one.")
                    names.add(key.value)
                inner += [key, value]
        else:
            inner = node.value
        waiting += [(child, (*above, id(node))) for child in inner]
