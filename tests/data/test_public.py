"""The names of the room: sorted, there, documented."""

from __future__ import annotations

import inspect

from equilibria import data


def test_names_are_there_and_documented() -> None:
    assert sorted(set(data.__all__)) == sorted(data.__all__)
    for name in data.__all__:
        item = getattr(data, name)
        if isinstance(item, int):
            continue
        text = item.__dict__.get("__doc__") if inspect.isclass(item) else item.__doc__
        assert text, name
        assert not text.startswith(f"{name}("), name
        if inspect.isclass(item):
            for key, member in vars(item).items():
                if not key.startswith("_") and inspect.isfunction(member):
                    assert inspect.getdoc(getattr(item, key)), f"{name}.{key}"
