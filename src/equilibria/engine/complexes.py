"""Complex states: [B, ...] is solved as the real state [B, ..., 2] of its parts.

A map of complex numbers need not be complex-differentiable (the shrinkage of magnitudes is not), so
its Jacobian is linear over the real numbers only. Norms, least squares and Krylov spaces are
therefore those of the parts: ⟨a, b⟩ = Re āᵀb. Gradients are PyTorch's, ∂L/∂Re z + i ∂L/∂Im z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class ComplexState:
    """Which leaves of a state are complex, and the way to its real form and back."""

    def __init__(self, z: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(z)
        # A scalar is left for the check of the state to refuse.
        known = [isinstance(x, Tensor) and x.is_complex() and x.dim() > 0 for x in leaves]
        self._dtypes = [x.dtype if c else None for x, c in zip(leaves, known, strict=True)]

    def __bool__(self) -> bool:
        return any(d is not None for d in self._dtypes)

    def real(self, tree: Any) -> Any:
        """The state with each complex leaf as a real one."""
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self._spec:
            return tree  # the check of the map says what is wrong with it
        pairs = zip(leaves, self._dtypes, strict=True)
        parts = [
            torch.view_as_real(x.to(d).resolve_conj()) if d and isinstance(x, Tensor) else x
            for x, d in pairs
        ]
        return pytree.tree_unflatten(parts, spec)

    def complex(self, tree: Any) -> Any:
        """The inverse of :meth:`real`."""
        leaves, spec = pytree.tree_flatten(tree)
        pairs = zip(leaves, self._dtypes, strict=True)
        return pytree.tree_unflatten([_joined(x) if d else x for x, d in pairs], spec)

    def on_parts(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The map as one of real states."""

        def mapped(z: Any, *args: Any) -> Any:
            return self.real(fn(self.complex(z), *args))

        return mapped


def _joined(x: Tensor) -> Tensor:
    whole = x.stride(-1) == 1 and all(s % 2 == 0 for s in x.stride()[:-1])
    return torch.view_as_complex(x if whole else x.contiguous())
