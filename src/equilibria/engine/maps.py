"""The map T of a solve: the user's function on leaves, checked once, counted, sliced by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .transforms import for_any_mode, version
from .tree import (
    Leaves,
    TreeSpec,
    join_samples,
    map_tensors,
    part_samples,
    sample_norm,
    select_samples,
    subtract,
    unflatten,
    where_sample,
    without_graph,
)


@dataclass(frozen=True, eq=False)
class Surrogate:
    """A map S that is iterated in place of T: ``fixed_point(Surrogate(...), u0, args)``.

    Convergence is judged by ‖T(z) − z‖ of the z that u stands for.
    """

    step: Callable[..., Any]
    """(u, *args) ↦ S(u)."""
    own: Callable[..., tuple[Any, Any]]
    """(u, *args) ↦ (z, T(z)), two states."""
    near: Callable[..., float | Tensor]
    """args ↦ about ‖S(u) − u‖ / ‖T(z) − z‖ near the solution, a number or [B]. It says when ``own``
    is evaluated, and decides nothing."""
    dtype: torch.dtype | None
    """The precision that T(z) has, where it is not that of u: tolerances are those of this."""

    def __call__(self, u: Any, *args: Any) -> Any:
        return self.step(u, *args)


class Map:
    """z ↦ T(z, *args) on lists of leaves; ``args`` a tuple, or one argument.

    Where T answers in another floating dtype (autocast), leaves are brought back to the dtype of z.
    ``coupled`` says that samples are known to depend on each other; ``group`` is how many: the
    batch, or less where vmap stacked several.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Any,
        spec: TreeSpec,
        like: Sequence[Tensor],
        surrogate: Surrogate | None = None,
        *,
        coupled: bool = False,
        group: int | None = None,
    ) -> None:
        self.surrogate = fn if isinstance(fn, Surrogate) else surrogate
        self.fn = fn.step if isinstance(fn, Surrogate) else fn
        self.args: tuple[Any, ...] = args if isinstance(args, tuple) else (args,)
        self.spec = spec
        self.batch = like[0].shape[0] if like else 0
        self.coupled = coupled
        self.group = self.batch if group is None else group
        self.evaluations = 0
        self._single = spec.is_leaf()
        self._checked = False

    def __call__(self, z: Leaves) -> Leaves:
        self.evaluations += 1
        counts = not (self._checked or torch.compiler.is_compiling())
        if counts and torch.is_inference_mode_enabled():
            with for_any_mode():  # of tensors of inference mode changes in place are not counted
                z = [x.clone() for x in z]
        before = [version(x) for x in z] if counts else []
        if self._single:
            out = self.fn(z[0], *self.args)
            if self._checked and out.dtype == z[0].dtype:
                return [out]
            found: list[Any] = [out]
        else:
            out = self.fn(unflatten(z, self.spec), *self.args)
            found, spec = pytree.tree_flatten(out)
            if spec != self.spec:
                raise ValueError(
                    f"the map must return the structure of z0, {self.spec}, but returned {spec}."
                )
        if not self._checked:
            if counts and [version(x) for x in z] != before:
                raise RuntimeError(
                    "the map changes its argument z in place, which the solver still needs: write "
                    "z = z + x for z += x, and take nn.ReLU() without inplace=True."
                )
            self._check(z, found)
        return [f if f.dtype == x.dtype else f.to(x.dtype) for f, x in zip(found, z, strict=True)]

    def bare(self, z: Leaves) -> Leaves:
        """T(z) without a check and without counting, for a compiler that allows no side effect."""
        found = pytree.tree_leaves(self.fn(unflatten(z, self.spec), *self.args))
        return [f.to(x.dtype) for f, x in zip(found, z, strict=True)]

    def judged(self, surrogate: Surrogate, z: Leaves) -> tuple[Leaves, Leaves]:
        """What z stands for, and its image under the map that is meant."""
        with torch.no_grad():
            pair = surrogate.own(unflatten([x.detach() for x in z], self.spec), *self.args)
        return pytree.tree_leaves(pair[0]), pytree.tree_leaves(pair[1])

    def dtypes(self, z: Leaves) -> list[torch.dtype]:
        """The precision of each leaf of T(z)."""
        of_all = None if self.surrogate is None else self.surrogate.dtype
        return [of_all or x.dtype for x in z]

    def _check(self, z: Leaves, found: list[Any]) -> None:
        for i, (x, f) in enumerate(zip(z, found, strict=True)):
            name = "the map" if len(z) == 1 else f"leaf {i} of the map's output"
            if not isinstance(f, Tensor):
                raise TypeError(
                    f"{name} returned a {type(f).__name__}; it must return a tensor shaped as z0, "
                    f"{tuple(x.shape)}."
                )
            if f.shape != x.shape:
                raise ValueError(
                    f"{name} returned shape {tuple(f.shape)} for a state of shape "
                    f"{tuple(x.shape)}; T(z) and z must have one shape."
                )
            if not f.is_floating_point():
                raise TypeError(f"{name} returned dtype {f.dtype} for a state of {x.dtype}.")
            if f.device != x.device:
                raise ValueError(f"{name} returned device {f.device} for a state on {x.device}.")
        self._checked = True

    def with_args(self, args: tuple[Any, ...]) -> Map:
        """The same function on other arguments."""
        other = self._like(self.fn, args, self.surrogate)
        other._checked = self._checked
        return other

    def wrapped(self, around: Callable[..., Any], args: tuple[Any, ...] | None = None) -> Map:
        """The map as ``around(inner, z, *args)``, inner the function of this map, or of its
        surrogate's; ``args`` may have more in front of the map's own."""

        def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
            return lambda z, *given: around(inner, z, *given)

        own, surrogate = self.surrogate, None
        args = self.args if args is None else args
        if own is not None:
            ahead = len(args) - len(self.args)
            surrogate = Surrogate(
                self.fn, wrap(own.own), lambda *both: own.near(*both[ahead:]), own.dtype
            )
        return self._like(wrap(self.fn), args, surrogate)

    def _like(self, fn: Callable[..., Any], args: Any, surrogate: Surrogate | None) -> Map:
        other = Map(fn, args, self.spec, (), surrogate, coupled=self.coupled)
        other.batch, other.group = self.batch, self.group
        return other

    def joined(self) -> Map:
        """The same map with each group of samples as one sample (``join_samples``)."""
        given, size = self.surrogate, self.group

        def whole(z: Any) -> Any:
            found = self(part_samples(pytree.tree_leaves(z)))
            return unflatten(join_samples(found, size), self.spec)

        def own(z: Any) -> tuple[Any, Any]:
            assert given is not None
            pair = self.judged(given, part_samples(pytree.tree_leaves(z)))
            return tuple(join_samples(pair[0], size)), tuple(join_samples(pair[1], size))

        surrogate = None if given is None else Surrogate(whole, own, lambda: 1.0, given.dtype)
        return Map(whole, (), self.spec, (), surrogate)

    def couples(self, z: Leaves, f: Leaves) -> bool:
        """Whether T mixes samples, at z with f = T(z). One evaluation and one read; two if so.

        Every second sample is moved to its T(z): do the rows of the others change? Coupling among
        the moved samples alone, or among the others alone, is not seen.
        """
        if self.group < 2:
            return False
        z, f = without_graph(z), without_graph(f)
        still = torch.arange(self.batch, device=z[0].device) % 2 == 1
        eps = max(torch.finfo(x.dtype).eps for x in z)
        with torch.no_grad():
            moved = self(where_sample(still, z, f))
            gap = sample_norm(subtract(moved, f))
            changed = still & (gap > 4 * eps * sample_norm(f))
            if not bool(changed.any()):
                return False
            # A map that answers differently each time (dropout, a power iteration) says nothing.
            drift = sample_norm(subtract(self(z), f))
            return bool((changed & (gap > 4 * drift)).any())

    def take(self, index: Tensor) -> Map:
        """The same map on some samples only: each tensor in args is indexed in dim 0."""
        for t in pytree.tree_leaves(self.args):
            if isinstance(t, Tensor) and (t.dim() == 0 or t.shape[0] != self.batch):
                raise ValueError(
                    f"compact=True needs every tensor in args to carry the batch of {self.batch}"
                    f" in dim 0, but one has shape {tuple(t.shape)}. Let the function capture "
                    "weights and other shared tensors (a closure or a module) instead of passing "
                    "them in args."
                )
        args = map_tensors(lambda t: select_samples([t], index)[0], self.args)
        return Map(self.fn, args, self.spec, [index], self.surrogate)

    def check_take(self, index: Tensor, z: Leaves, f: Leaves, part: Map) -> None:
        """Raise unless ``part`` answers as the whole map, f = T(z), does."""
        whole = select_samples(f, index)
        try:
            alone = part(select_samples(z, index))
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"{_NOT_SEPARABLE} Evaluating a part failed with: {error}") from error
        for a, b in zip(whole, alone, strict=True):
            finite = torch.isfinite(a) & torch.isfinite(b)
            gap = sample_norm([torch.where(finite, a - b, 0)])
            size = sample_norm([torch.where(finite, a, 0)])
            if bool((gap > 100 * torch.finfo(a.dtype).eps ** 0.75 * size).any()):
                raise ValueError(_NOT_SEPARABLE)


_NOT_SEPARABLE = (
    "compact=True cannot slice this map: on part of the batch it answers differently. Pass every "
    "per-sample tensor (such as the layer's input) in args, not through a closure, and keep "
    "samples independent (no batch statistics)."
)
