"""What an augmentation is: a change of a batch on its device, random by a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

__all__ = ["Augmentation", "Transform"]


class Transform(ABC):
    """``transform(x, generator)`` for a batch x of floats from 0 to 1, [B, C, H, W].

    ``transform(x, y, generator)`` gives (x, y): masks [B, H, W] move with their images; labels [B]
    stay, unless the transform mixes samples. Every sample draws its own numbers, on the device of
    x, where ``generator`` must be too (None is torch's own); nothing waits for the device.
    """

    @abstractmethod
    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Change ``x`` and, if given, the targets ``y``."""

    @overload
    def __call__(self, x: Tensor, generator: torch.Generator | None = ..., /) -> Tensor: ...
    @overload
    def __call__(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None = ..., /
    ) -> tuple[Tensor, Tensor]: ...
    def __call__(self, x: Tensor, *rest: Any) -> Any:
        """See the class."""
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} takes a batch of floats [B, C, H, W], got {x.dtype} "
                f"{tuple(x.shape)}."
            )
        if rest and isinstance(rest[0], Tensor):
            return self.apply(x, rest[0], rest[1] if len(rest) > 1 else None)
        return self.apply(x, None, rest[0] if rest else None)[0]


class Augmentation(Transform):
    """T_k ∘ … ∘ T_1: one transform after the other."""

    def __init__(self, parts: Sequence[Transform]) -> None:
        for part in parts:
            if not isinstance(part, Transform):
                raise TypeError(f"Augmentation takes transforms, got {type(part).__name__}.")
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"Augmentation([{', '.join(repr(part) for part in self.parts)}])"

    def apply(
        self, x: Tensor, y: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """All parts in their order."""
        for part in self.parts:
            x, y = part.apply(x, y, generator)
        return x, y
