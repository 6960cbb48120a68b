"""Within the limits YAML means what PyYAML says it means."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibria.training import yaml_values
from equilibria.training.yaml_values import MOST_DEPTH, parse_yaml

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab:#é\n")
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("xyz"), inner, max_size=4),
    max_leaves=30,
)


@given(values)
@settings(deadline=None, max_examples=50)
def test_what_was_written_is_read(value: Any) -> None:
    """Also with the aliases that PyYAML writes for an object that occurs twice."""
    for given_value in (value, [value, value], {"a": value, "b": [value]}):
        text = yaml.safe_dump(given_value, allow_unicode=True)
        assert parse_yaml(text) == given_value


def test_the_limits_themselves_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_values, "MOST_VALUES", 100)
    assert len(parse_yaml(f"[{'1, ' * 99}]")) == 99
    with pytest.raises(ValueError, match=r"more than 100 values.*MOST_VALUES"):
        parse_yaml(f"[{'1, ' * 100}]")
    assert parse_yaml("[" * MOST_DEPTH + "1" + "]" * MOST_DEPTH)
    with pytest.raises(ValueError, match="MOST_DEPTH"):
        parse_yaml("[" * (MOST_DEPTH + 1) + "1" + "]" * (MOST_DEPTH + 1))
    assert parse_yaml("") is None


@pytest.mark.parametrize("text", ["a: !!int ''", "a: !!timestamp x", "a: !!bool x", "!!int _"])
def test_a_value_that_is_not_what_its_tag_says(text: str) -> None:
    with pytest.raises(ValueError, match="its tag"):
        parse_yaml(text)


@given(st.text("ab01:-[]{}&*<,!|>'\" \n#", max_size=60))
@settings(deadline=None, max_examples=150)
def test_any_text_is_read_as_before_or_refused(text: str) -> None:
    try:
        found = parse_yaml(text)
    except (ValueError, yaml.YAMLError):
        return
    expected = yaml.safe_load(text)
    assert found == expected or found != found
