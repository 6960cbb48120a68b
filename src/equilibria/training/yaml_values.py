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

    Raises ValueError, where a limit is passed with the line and the limit.
    """
    with needs("yaml", "a configuration file"):
        import yaml  # type: ignore[import-untyped, unused-ignore]
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS:,} characters{_limit('MOST_CHARACTERS')}")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root)
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"nested too deep{_limit('MOST_DEPTH')}") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # as PyYAML lets through
        raise ValueError(f"a value is not of the type that its tag (!!) names ({error})") from None


def _limit(name: str) -> str:
    return f"; the limit is equilibria.training.yaml_values.{name}."


def _check(root: Any) -> None:
    """Raise for more values, deeper or longer ones than allowed, and for names given twice."""
    count, waiting = 0, [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        count, line = count + 1, f"line {node.start_mark.line + 1}"
        if depth > MOST_DEPTH:
            what = f"a value that contains itself by an alias, or is deeper than {MOST_DEPTH}"
            raise ValueError(f"{line}: {what}{_limit('MOST_DEPTH')}")
        if count > MOST_VALUES:
            what = f"more than {MOST_VALUES:,} values with all aliases written out"
            raise ValueError(f"{line}: {what}{_limit('MOST_VALUES')}")
        if node.id == "scalar":
            if len(node.value) > MOST_LETTERS:
                what = f"a value of {len(node.value):,} characters, more than {MOST_LETTERS:,}"
                raise ValueError(f"{line}: {what}{_limit('MOST_LETTERS')}")
        elif node.id == "sequence":
            waiting += [(child, depth + 1) for child in node.value]
        else:
            names: set[str] = set()
            for key, value in node.value:
                waiting += [(key, depth + 1), (value, depth + 1)]
                if key.id == "scalar" and key.value in names:
                    line = f"line {key.start_mark.line + 1}"
                    raise ValueError(f"{line}: {key.value[:60]!r} is given twice; keep one.")
                if key.id == "scalar":
                    names.add(key.value)
