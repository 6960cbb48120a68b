"""States: tensors or trees of tensors with the batch in dim 0 of each leaf; and histories of them.

Leaves are never concatenated. Where one must be a matrix [B, N] it is *viewed* so through its
``Layout``, in its own memory order: a channels_last leaf stays channels_last.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .transforms import forward_mode_active, functorch_active, is_differentiated

Leaves = list[Tensor]
TreeSpec = pytree.TreeSpec


def flatten_state(tree: Any, what: str = "z0") -> tuple[Leaves, TreeSpec]:
    """Flatten and check a state: floating tensors, one batch size, at least one sample."""
    leaves, spec = pytree.tree_flatten(tree)
    if not leaves:
        text = "holds no tensor; give a tensor or a tree (tuple, dict) of tensors."
        raise ValueError(f"{what} {text}")
    for i, leaf in enumerate(leaves):
        name = what if len(leaves) == 1 else f"leaf {i} of {what}"
        if not isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            raise TypeError(f"{name} is a {kind}; every leaf must be a torch.Tensor.")
        if leaf.dim() == 0:
            raise ValueError(f"{name} is a scalar; the batch stands in dim 0, so write it as [1].")
        if not leaf.is_floating_point():
            raise TypeError(
                f"{name} has dtype {leaf.dtype}; a fixed point needs a floating dtype "
                "(bfloat16, float16, float32, float64). Convert it with .float() or .double()."
            )
    sizes = [leaf.shape[0] for leaf in leaves]
    if any(size != sizes[0] for size in sizes):  # a traced size has no hash
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
        dims, strides = list(range(leaf.dim())), leaf.stride()
        order = dims
        if leaf.dim() > 2 and not leaf.is_contiguous():
            order = [0, *sorted(dims[1:], key=lambda d: -strides[d])]
        if order == dims:
            return Layout(None, None, tuple(leaf.shape))
        inverse = tuple(order.index(d) for d in dims)
        return Layout(tuple(order), inverse, tuple(leaf.shape[d] for d in order))

    def flat(self, leaf: Tensor) -> Tensor:
        """[B, ...] → [B, N], a view where the leaf has this layout."""
        moved = leaf if self.permutation is None else leaf.permute(self.permutation)
        return rows(moved)

    def leaf(self, flat: Tensor) -> Tensor:
        """[B, N] or [B, 1, N] → [B, ...], the inverse of :meth:`flat`; always a view."""
        moved = flat.view(flat.shape[0], *self.permuted_shape[1:])
        return moved if self.inverse is None else moved.permute(self.inverse)


def rows(leaf: Tensor) -> Tensor:
    """[B, ...] → [B, N], also where N = 0."""
    return leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)


def largest_entry(leaf: Tensor) -> Tensor:
    """max |·| of each sample, [B]; 0 where it has no entries."""
    if leaf.dim() == 1:
        return leaf.abs()
    if leaf.shape[1:].numel() == 0:
        return leaf.new_zeros(len(leaf))
    return leaf.abs().amax(tuple(range(1, leaf.dim())))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, norms and small systems run in float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


ORDINARY = {torch.float32: (2.0**-30, 2.0**40), torch.float64: (2.0**-400, 2.0**400)}
"""Where squares of a norm, and of what rounding leaves of it, are ordinary numbers."""


def strange(norm: Tensor) -> Tensor:
    """[B] bool: whether ``quick_norm`` may be wrong here, and products of such vectors too."""
    low, high = ORDINARY[norm.dtype]
    return norm.clamp(low, high) != norm


def read_freely(x: Tensor) -> bool:
    """Whether the host may read x, [B], for less than a kernel costs: on a CPU nothing waits."""
    return x.device.type == "cpu" and len(x) <= 64


def quick_norm(leaves: Sequence[Tensor]) -> Tensor:
    """``sample_norm`` where that is not ``strange``: squares may under- or overflow there."""
    if len(leaves) == 1 and leaves[0].dim() == 2 and leaves[0].dtype in ORDINARY:
        norm: Tensor = torch.linalg.vector_norm(leaves[0], dim=1)
        return norm
    norms = [_plain_norm(x, accumulation_dtype(x.dtype)) for x in leaves]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return total


def _plain_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dim() == 1:
        return x.to(dtype).abs()
    norm: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), dtype=dtype)
    return norm


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
    if wide != torch.float64 and x.device.type != "mps":
        return _plain_norm(x, torch.float64).to(wide)
    largest = largest_entry(x.detach().to(wide))
    unit = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    return _plain_norm(x / per_sample(unit, x), wide) * unit


def without_graph(leaves: Sequence[Tensor]) -> Leaves:
    """The leaves, detached where they may carry a graph, or a tangent."""
    return [x.detach() if x.requires_grad or forward_mode_active() else x for x in leaves]


def sample_dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """⟨a, b⟩ of each sample over all leaves, [B], in float32 or better."""
    first, *others = (_leaf_dot(x, y) for x, y in zip(a, b, strict=True))
    for part in others:
        first = first + part
    return first


def _leaf_dot(x: Tensor, y: Tensor) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    if x.dtype == y.dtype == wide and x.dim() == 2:
        dot: Tensor = torch.linalg.vecdot(x, y)
        return dot
    product = x.to(wide) * y.to(wide)
    return rows(product).sum(1)


def power_of_two(size: Tensor) -> Tensor:
    """2^k of each sample with ``size`` [B] in [½, 1)·2^k, [B]; 1 where that is zero or not finite.

    k stops short of the ends of the dtype, where 2^k or 2^{−k} would not be a normal number.
    """
    end = 1000 if size.dtype == torch.float64 else 100
    scale = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent.clamp(-end, end))
    return torch.where((size > 0) & size.isfinite(), scale, 1.0)


def per_sample(x: Tensor, leaf: Tensor) -> Tensor:
    """x [B] shaped to broadcast over a leaf [B, ...]."""
    return x.view(-1, *([1] * (leaf.dim() - 1)))


def add(a: Sequence[Tensor], b: Sequence[Tensor]) -> Leaves:
    """a + b, leaf by leaf."""
    return [x + y for x, y in zip(a, b, strict=True)]


def subtract(a: Sequence[Tensor], b: Sequence[Tensor]) -> Leaves:
    """a − b, leaf by leaf."""
    return [x - y for x, y in zip(a, b, strict=True)]


def scale_samples(scale: Tensor, leaves: Sequence[Tensor]) -> Leaves:
    """scale[b]·leaf[b]: computed in the wider of both dtypes, returned in the leaf's."""
    found = [x * per_sample(scale, x) for x in leaves]
    return [y if y.dtype == x.dtype else y.to(x.dtype) for x, y in zip(leaves, found, strict=True)]


def where_sample(mask: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> Leaves:
    """Per sample: a where mask [B], else b."""
    return [torch.where(per_sample(mask, x), x, y) for x, y in zip(a, b, strict=True)]


def keep_samples(mask: Tensor, leaves: Sequence[Tensor]) -> Leaves:
    """Per sample: the leaf where mask [B], else zero."""
    return [torch.where(per_sample(mask, x), x, 0.0) for x in leaves]


def join_samples(leaves: Sequence[Tensor], size: int) -> Leaves:
    """[G·size, ...] as [G, size, ...]: samples that depend on each other, seen as one sample."""
    return [x.unflatten(0, (-1, size)) for x in leaves]


def part_samples(leaves: Sequence[Tensor]) -> Leaves:
    """The inverse of :func:`join_samples`."""
    return [x.flatten(0, 1) for x in leaves]


def repeat_samples(x: Tensor, size: int) -> Tensor:
    """One entry per group, [G], as one entry per sample, [G·size]."""
    return x.unsqueeze(1).expand(-1, size).flatten()


def select_samples(leaves: Sequence[Tensor], index: Tensor) -> Leaves:
    """Some samples of each leaf, in the leaf's own memory format."""
    picked = []
    for x in leaves:
        part = x.index_select(0, index)
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
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


def take_samples(state: Any, index: Tensor) -> Any:
    """Some samples of a solver's state: of tensors with the batch in dim 0 and of histories, in
    trees and dataclasses (by their own ``take_samples`` if they have one); the rest stays as it
    is."""

    def taken(part: Any) -> Any:
        if isinstance(part, Tensor):
            return select_samples([part], index)[0]
        if isinstance(part, History):
            return part.take(index)
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            return part
        if hasattr(part, "take_samples"):
            return part.take_samples(index)
        twin = copy.copy(part)  # not made anew: its fields need not be those of its __init__
        for field in dataclasses.fields(part):
            kept = take_samples(getattr(part, field.name), index)
            object.__setattr__(twin, field.name, kept)
        return twin

    return pytree.tree_map(taken, state)


_BMM_WIDE_OUTPUT = torch.cuda.is_available() and "out_dtype" in (torch.bmm.__doc__ or "")


def must_be_functional() -> bool:
    """Whether buffers may not be written in place: derivatives are taken, or something traces."""
    return is_differentiated() or functorch_active() or torch.compiler.is_compiling()


class History:
    """The last m vectors of each leaf: slots 0 … m−1, a ring that the solver indexes.

    Products with all slots are one call: a leaf has one buffer [m, B, N], written in place. Where
    autograd or torch.func watches, slots are separate tensors, stacked for each product.
    """

    def __init__(self, z: Leaves, memory: int) -> None:
        self.layouts = [Layout.of(x) for x in z]
        self.memory = memory
        self.functional = must_be_functional()
        self.used = 0
        self.slots: list[list[Tensor]] = [[] for _ in z]
        self.buffers: list[Tensor] = []
        if not self.functional:
            self.buffers = [x.new_empty((memory, x.shape[0], x[0].numel())) for x in z]
        self._forget_views()

    def _forget_views(self) -> None:
        # Views cost microseconds each to make; a solve uses the same few over and over.
        self._leaf_views: dict[int, Leaves] = {}
        self._rows: dict[int, Leaves] = {}
        self._matrix_views: tuple[Leaves, Leaves] | None = None

    def slot(self, index: int) -> Leaves:
        """The slot's memory, shaped as the state, to be written with ``out=``."""
        if index not in self._leaf_views:
            pairs = zip(self.layouts, self.buffers, strict=True)
            self._leaf_views[index] = [lay.leaf(buffer[index]) for lay, buffer in pairs]
        return self._leaf_views[index]

    def filled(self, index: int) -> None:
        """Say that a slot has been written; slots fill in order."""
        if index >= self.used:
            self.used = index + 1
            self._matrix_views = None

    def write(self, index: int, leaves: Sequence[Tensor]) -> None:
        """Put one vector into a slot."""
        if self.functional:
            for held, lay, x in zip(self.slots, self.layouts, leaves, strict=True):
                held[index : index + 1] = [lay.flat(x)]
        else:
            for view, x in zip(self.slot(index), leaves, strict=True):
                if view is not x:
                    view.copy_(x)
        self.filled(index)

    def write_scaled(self, index: int, scale: Tensor, leaves: Sequence[Tensor]) -> Leaves:
        """Put scale[b]·leaf[b] into a slot, and return it."""
        if self.functional:
            scaled = scale_samples(scale, leaves)
            self.write(index, scaled)
            return scaled
        kept = self.slot(index)
        for view, x in zip(kept, leaves, strict=True):
            torch.mul(x, per_sample(scale, x), out=view)
        self.filled(index)
        return kept

    def _matrices(self) -> tuple[Leaves, Leaves]:
        """Each leaf's slots as [B, used, N], and transposed."""
        if self.functional:
            stacked = [torch.stack(held, dim=1) for held in self.slots]
            return stacked, [s.transpose(1, 2) for s in stacked]
        if self._matrix_views is None:
            filled = [buffer[: self.used] for buffer in self.buffers]
            across, down = [b.transpose(0, 1) for b in filled], [b.permute(1, 2, 0) for b in filled]
            self._matrix_views = across, down
        return self._matrix_views

    def dot(self, leaves: Sequence[Tensor]) -> Tensor:
        """⟨slot i, x⟩ of each sample, [B, 1, used], in float32 or better."""
        pairs = zip(self.layouts, leaves, strict=True)
        return self._dot([lay.flat(x).unsqueeze(1) for lay, x in pairs])

    def dot_slot(self, index: int) -> Tensor:
        """⟨slot i, slot index⟩ of each sample, [B, 1, used], in float32 or better."""
        if self.functional:
            return self._dot([held[index].unsqueeze(1) for held in self.slots])
        if index not in self._rows:
            self._rows[index] = [b[index].unsqueeze(1) for b in self.buffers]
        return self._dot(self._rows[index])

    def _dot(self, rows: Leaves) -> Tensor:
        # Row times matrix: as matrix times column the CPU's batched product is ten times slower.
        transposed = self._matrices()[1]
        total = _wide_bmm(rows[0], transposed[0])
        for row, matrix in zip(rows[1:], transposed[1:], strict=True):
            total = total + _wide_bmm(row, matrix)
        return total

    def combine(
        self,
        weights: Tensor,
        onto: Sequence[Tensor] | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> Leaves:
        """β·onto + α·Σᵢ weights[:, i]·slot i, shaped as the state; weights [B, used] or [B, 1,
        used]; without ``onto`` the sum alone."""
        row = weights if weights.dim() == 3 else weights.unsqueeze(1)
        found = []
        for i, (h, lay) in enumerate(zip(self._matrices()[0], self.layouts, strict=True)):
            cast = row if row.dtype == h.dtype else row.to(h.dtype)
            if onto is None:
                flat = torch.bmm(cast, h)
            else:
                start = lay.flat(onto[i]).unsqueeze(1)
                flat = torch.baddbmm(start, cast, h, beta=beta, alpha=alpha)
            found.append(lay.leaf(flat))
        return found

    def clear(self) -> None:
        self.used = 0
        self.slots = [[] for _ in self.layouts]
        self._matrix_views = None

    def take(self, index: Tensor) -> History:
        """The history of some samples only."""
        part = object.__new__(History)
        part.__dict__.update(self.__dict__)
        part.buffers = [b.index_select(1, index) for b in self.buffers]
        part.slots = [[x.index_select(0, index) for x in held] for held in self.slots]
        part._forget_views()
        return part


def _wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of half-precision tensors with float32 sums *and* result."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    wide = accumulation_dtype(a.dtype)
    if a.is_cuda and _BMM_WIDE_OUTPUT and not torch.is_grad_enabled():
        return torch.bmm(a, b, out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))
