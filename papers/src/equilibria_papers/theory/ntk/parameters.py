"""Which parameters a tangent kernel is about, and how they are grouped into layers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from torch import Tensor, nn

__all__ = ["Filter", "Layers", "group_names", "select_parameters"]

Filter: TypeAlias = str | Sequence[str] | Callable[[str], bool] | None
"""A glob pattern such as ``"head.*"``, several, or a test of the name; None takes all."""
Layers: TypeAlias = bool | int | Callable[[str], str]
"""False: one group. True: by module. A number: by so many parts of the module's name."""

# torch.nn.utils.parametrize keeps W of layer.W as layer.W.parametrizations.weight.original0.
_PARAMETRIZED = re.compile(r"\.parametrizations\..*$")


def select_parameters(model: nn.Module, parameters: Filter = None) -> dict[str, Tensor]:
    """The parameters that need a gradient and pass the filter, by name; shared ones once."""
    trained: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no parameter that needs a gradient, so no tangent kernel; "
            "call model.requires_grad_(True) if it was frozen."
        )
    if parameters is None:
        return trained
    if callable(parameters):
        chosen = {n: p for n, p in trained.items() if parameters(n)}
    else:
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        if not all(isinstance(p, str) for p in patterns):
            raise TypeError(
                f"parameters={parameters!r}: expected a pattern such as 'head.*', a list of them, "
                "or a function of the name."
            )
        chosen = {
            n: p for n, p in trained.items() if any(fnmatch.fnmatchcase(n, q) for q in patterns)
        }
    if not chosen:
        some = ", ".join(list(trained)[:6])
        raise ValueError(
            f"parameters={parameters!r} fits none of {len(trained)} parameters; names are {some}"
            f"{', …' if len(trained) > 6 else ''}."
        )
    return chosen


def group_names(names: Iterable[str], layers: Layers) -> dict[str, list[str]]:
    """Group → names of its parameters, in the order of the model; ``{"": all}`` for False."""
    if not isinstance(layers, (bool, int)) and not callable(layers):
        raise TypeError(f"layers={layers!r}: expected True, False, a depth or a function.")
    if not isinstance(layers, bool) and isinstance(layers, int) and layers < 1:
        raise ValueError(f"layers={layers}: expected a depth of 1 or more, True or False.")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_group(name, layers), []).append(name)
    return groups


def _group(name: str, layers: Layers) -> str:
    if layers is False:
        return ""
    if callable(layers):
        return str(layers(name))
    module = _PARAMETRIZED.sub("", name)
    if module == name:  # not parametrized: the last part is the parameter itself
        module = name.rpartition(".")[0]
    if layers is True:
        return module or "(the module itself)"
    return ".".join(module.split(".")[:layers]) or "(the module itself)"
