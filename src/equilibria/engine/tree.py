"""States are tensors or trees of tensors with the batch in dim 0 of each leaf.

Leaves are never concatenated. A leaf that must be seen as a matrix [B, N] (inner products,
histories) is *viewed* so through its ``Layout``, which follows the leaf's own memory order:
a channels_last leaf stays channels_last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Leaves = list[Tensor]
TreeSpec = pytree.TreeSpec


def flatten_state(tree: Any, what: str = "z0") -> tuple[Leaves, TreeSpec]:
    """Flatten and check a state: floating tensors, one batch size, at least one sample."""
    leaves, spec = pytree.tree_flatten(tree)
    if not leaves:
        raise ValueError(
            f"{what} holds no tensor; give a tensor or a tree (tuple, dict) of tensors."
        )
    for i, leaf in enumerate(leaves):
        name = what if len(leaves) == 1 else f"leaf {i} of {what}"
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}; every leaf must be a torch.Tensor."
            )
        if not leaf.is_floating_point():
            raise TypeError(
                f"{name} has dtype {leaf.dtype}; a fixed point needs a floating dtype "
                "(bfloat16, float16, float32, float64). Convert it with .float() or .double()."
            )
        if leaf.dim() == 0:
            raise ValueError(f"{name} is a scalar; the batch stands in dim 0, so write it as [1].")
    sizes = [leaf.shape[0] for leaf in leaves]
    if len(set(sizes)) != 1:
        raise ValueError(f"the leaves of {what} differ in batch size (dim 0): {sizes}.")
    if sizes[0] == 0:
        raise ValueError(f"{what} has batch size zero: there is nothing to solve.")
    if len({leaf.device for leaf in leaves}) != 1:
        raise ValueError(f"the leaves of {what} lie on different devices.")
    return leaves, spec


def unflatten(leaves: Sequence[Tensor], spec: TreeSpec) -> Any:
    return pytree.tree_unflatten(list(leaves), spec)


@dataclass(frozen=True)
class Layout:
    """How a leaf [B, ...] is viewed as [B, N] in its own memory order, and back."""

    permutation: tuple[int, ...] | None
    inverse: tuple[int, ...] | None
    permuted_shape: tuple[int, ...]

    @staticmethod
    def of(leaf: Tensor) -> Layout:
        order: list[int] = list(range(leaf.dim()))
        if leaf.dim() > 2 and not leaf.is_contiguous():
            strides = leaf.stride()
            order[1:] = sorted(order[1:], key=lambda d: -strides[d])
        if order == list(range(leaf.dim())):
            return Layout(None, None, tuple(leaf.shape))
        inverse = [order.index(d) for d in range(leaf.dim())]
        return Layout(tuple(order), tuple(inverse), tuple(leaf.shape[d] for d in order))

    def flat(self, leaf: Tensor) -> Tensor:
        """[B, ...] → [B, N], a view where the leaf has this layout."""
        moved = leaf if self.permutation is None else leaf.permute(self.permutation)
        return moved.reshape(moved.shape[0], -1)

    def leaf(self, flat: Tensor) -> Tensor:
        """[B, N] or [B, 1, N] → [B, ...], the inverse of :meth:`flat`; always a view."""
        moved = flat.view(flat.shape[0], *self.permuted_shape[1:])
        return moved if self.inverse is None else moved.permute(self.inverse)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, norms and small systems run in float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_ORDINARY = {torch.float32: (2.0**-30, 2.0**40), torch.float64: (2.0**-400, 2.0**400)}
"""Where squares of a norm, and of what rounding leaves of it, are ordinary numbers."""


def strange(norm: Tensor) -> Tensor:
    """[B] bool: whether ``quick_norm`` may be wrong here, and products of such vectors too."""
    low, high = _ORDINARY[norm.dtype]
    return norm.clamp(low, high) != norm


def quick_norm(leaves: Sequence[Tensor]) -> Tensor:
    """``sample_norm`` where that is not ``strange``: squares may under- or overflow there."""
    if len(leaves) == 1 and leaves[0].dim() == 2 and leaves[0].dtype in _ORDINARY:
        norm: Tensor = torch.linalg.vector_norm(leaves[0], dim=1)
        return norm
    norms: list[Tensor] = [
        torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=accumulation_dtype(x.dtype))
        if x.dim() > 1
        else x.to(accumulation_dtype(x.dtype)).abs()
        for x in leaves
    ]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return total


def sample_norm(leaves: Sequence[Tensor]) -> Tensor:
    """‖·‖₂ of each sample over all leaves, [B], in float32 or better, at any scale.

    Squares are summed in float64, which holds those of every float32. Float64 itself (and float32
    on a device without it) is divided by each sample's largest entry first.
    """
    norms = [_leaf_norm(x) for x in leaves]
    return norms[0] if len(norms) == 1 else _leaf_norm(torch.stack(norms, 1))


def _leaf_norm(x: Tensor) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    if x.dim() == 1:
        return x.to(wide).abs()
    dims = tuple(range(1, x.dim()))
    if wide != torch.float64 and x.device.type != "mps":
        wider: Tensor = torch.linalg.vector_norm(x, dim=dims, dtype=torch.float64)
        return wider.to(wide)
    largest = x.detach().to(wide).abs().amax(dims, keepdim=True)
    unit = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    norm: Tensor = torch.linalg.vector_norm(x / unit, dim=dims)
    return norm * unit.flatten()


def without_graph(leaves: Sequence[Tensor]) -> Leaves:
    """The leaves, detached where they carry a graph."""
    return [x.detach() if x.requires_grad else x for x in leaves]


def sample_dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """⟨a, b⟩ of each sample over all leaves, [B], in float32 or better."""
    total: Tensor | None = None
    for x, y in zip(a, b, strict=True):
        acc = accumulation_dtype(x.dtype)
        product = x.to(acc) * y.to(acc)
        part = product if x.dim() == 1 else product.flatten(1).sum(1)
        total = part if total is None else total + part
    assert total is not None
    return total


def scale_samples(scale: Tensor, leaves: Sequence[Tensor]) -> Leaves:
    """scale[b]·leaf[b]: computed in the wider of both dtypes, returned in the leaf's."""
    return [(x * scale.view(-1, *([1] * (x.dim() - 1)))).to(x.dtype) for x in leaves]


def where_sample(mask: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> Leaves:
    """Per sample: a where mask [B], else b."""
    return [
        torch.where(mask.view(-1, *([1] * (x.dim() - 1))), x, y) for x, y in zip(a, b, strict=True)
    ]


def join_samples(leaves: Sequence[Tensor], size: int) -> Leaves:
    """[G·size, ...] as [G, size, ...]: samples that depend on each other, seen as one sample."""
    return [x.unflatten(0, (-1, size)) for x in leaves]


def part_samples(leaves: Sequence[Tensor]) -> Leaves:
    """The inverse of :func:`join_samples`."""
    return [x.flatten(0, 1) for x in leaves]


def repeat_samples(x: Tensor, size: int) -> Tensor:
    """One entry a group, [G], as one entry a sample, [G·size]."""
    return x.unsqueeze(1).expand(-1, size).flatten()


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def select_samples(leaves: Sequence[Tensor], index: Tensor) -> Leaves:
    """Some samples of each leaf, in the leaf's own memory format."""
    picked = []
    for x in leaves:
        part = x.index_select(0, index)
        last = _CHANNELS_LAST.get(x.dim())
        if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
            part = part.contiguous(memory_format=last)
        picked.append(part)
    return picked


def place_samples(leaves: Sequence[Tensor], index: Tensor, parts: Sequence[Tensor]) -> Leaves:
    """The leaves with some samples replaced, in their own memory format."""
    return [x.clone().index_copy_(0, index, p) for x, p in zip(leaves, parts, strict=True)]


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply ``fn`` to the tensors of a tree, leaving other leaves as they are."""
    return pytree.tree_map(lambda t: fn(t) if isinstance(t, Tensor) else t, tree)
