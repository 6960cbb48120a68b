"""What a problem is made of: immutable parts that can be put on other tensors.

Some tensors of a part differ from sample to sample (c, γ, a weight per sample). A solve takes them
as arguments, so that gradients reach them and finished samples can be dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from equilibria.problems.norms import exact

P = TypeVar("P")


def replaced(part: P, **changes: object) -> P:
    """A copy with other attributes, not checked anew."""
    twin = object.__new__(type(part))  # copy.copy is not traced by every torch.compile
    twin.__dict__.update(part.__dict__)
    twin.__dict__.update(changes)
    return twin


def times(factor: float, t: Tensor) -> Tensor:
    """``factor t``, without a pass for 1."""
    return t if factor == 1.0 else factor * t


def in_double(value: Any) -> Any:
    """The same numbers, detached and in float64: of tensors, of parts and operators, of tuples."""
    if isinstance(value, Tensor):
        return exact(value) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(in_double, value))
    if isinstance(value, int | float):  # a compiler asks no symbol for attributes
        return value
    return value.in_double() if hasattr(value, "in_double") else value


class Part:
    """Of a problem, or the problem itself."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """The attributes that hold tensors which may differ from sample to sample, or parts (or tuples
    of parts) that do."""

    def _differs(self, value: object) -> bool:
        """Whether what a parameter holds differs from sample to sample."""
        return isinstance(value, Tensor)

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors ``[B, ...]`` through which it depends on the sample."""
        return tuple(self._found(tuple(getattr(self, name) for name in self.parameters)))

    def _found(self, value: Any) -> Sequence[Tensor]:
        if isinstance(value, Part):
            return value.inputs()
        if isinstance(value, tuple):
            return [t for part in value for t in self._found(part)]
        return [value] if self._differs(value) else []

    def with_inputs(self, *inputs: Tensor) -> Self:
        """The same on other tensors in place of ``inputs()``, not checked anew."""
        if not self.parameters:
            return self
        given = iter(inputs)
        changes = {name: self._put(getattr(self, name), given) for name in self.parameters}
        return replaced(self, **changes)

    def _put(self, value: Any, given: Iterator[Tensor]) -> Any:
        if isinstance(value, Part):
            return value.with_inputs(*islice(given, len(value.inputs())))
        if isinstance(value, tuple):
            return tuple(self._put(part, given) for part in value)
        return next(given) if self._differs(value) else value

    def in_double(self) -> Self:
        """The same on the same numbers, detached and in float64, and so its parts."""
        return replaced(self, **{name: in_double(value) for name, value in vars(self).items()})
