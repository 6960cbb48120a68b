"""The state of a solve as real leaves: complex [B, ...] is solved as [B, ..., 2], its parts.

A map of complex numbers need not be complex-differentiable (the shrinkage of magnitudes is not), so
its Jacobian is linear over the real numbers only. Norms, least squares and Krylov spaces are
therefore those of the parts: ⟨a, b⟩ = Re āᵀb. Gradients are PyTorch's, ∂L/∂Re z + i ∂L/∂Im z.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .tree import flatten_state, unflatten


class RealForm:
    """The leaves of a state z, checked and real, and the way back; ``what`` names z in errors."""

    def __init__(self, z: Any, what: str = "z0") -> None:
        leaves, self._tree = pytree.tree_flatten(z)
        # A scalar is left for the check of the state to refuse.
        known = [isinstance(x, Tensor) and x.is_complex() and x.dim() > 0 for x in leaves]
        self._dtypes = [x.dtype if c else None for x, c in zip(leaves, known, strict=True)]
        self._plain = not any(known)
        self.leaves, self.spec = flatten_state(self.real(z), what)

    def real(self, tree: Any) -> Any:
        """A state with each complex leaf as a real one."""
        if self._plain:
            return tree
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self._tree:
            return tree  # the check of the map says what is wrong with it
        pairs = zip(leaves, self._dtypes, strict=True)
        parts = [
            torch.view_as_real(x.to(d).resolve_conj()) if d and isinstance(x, Tensor) else x
            for x, d in pairs
        ]
        return pytree.tree_unflatten(parts, spec)

    def restored(self, leaves: Sequence[Tensor]) -> Any:
        """The state as the caller writes it, from real leaves."""
        if self._plain:
            return unflatten(leaves, self.spec)
        pairs = zip(leaves, self._dtypes, strict=True)
        return unflatten([_joined(x) if d else x for x, d in pairs], self.spec)

    def on_parts(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The map as one of real states."""
        if self._plain:
            return fn

        def mapped(z: Any, *args: Any) -> Any:
            return self.real(fn(self.restored(pytree.tree_leaves(z)), *args))

        return mapped


def _joined(x: Tensor) -> Tensor:
    whole = x.stride(-1) == 1 and all(s % 2 == 0 for s in x.stride()[:-1])
    return torch.view_as_complex(x if whole else x.contiguous())
