"""The empirical neural tangent kernel K(x, x′) = (∂f(x)/∂θ)(∂f(x′)/∂θ)ᵀ of any model.

Exact, or by random projections K̂ = (JS)(JS)ᵀ with E[SSᵀ] = I, so E[K̂] = K; rows of r numbers.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from equilibria.engine import check_number, options

from .jacobian import (
    Choice,
    Filter,
    Method,
    Outputs,
    Rows,
    by_module,
    choose_outputs,
    choose_rows,
    evaluating,
    flat_outputs,
    functional,
    select_parameters,
)

Tell = Callable[[int, int], None]  # (samples differentiated, of how many)

_SAMPLES = 64  # pushed forward at once along random directions
_DIRECTIONS = 32  # pushed forward at once
_DRAWN = 4  # directions are drawn, stacked, moved and pushed: so many times their size at once
_SEEDS = 1 << 62


@options
class Projection:
    """Replace the P entries of a gradient by ``size`` random combinations of them.

        Var K̂_ij ≤ (K_ii K_jj + K_ij²)/r        for both kinds

    sparse: S has one ±1 in each row (CountSketch), so the gradient's entries fall into r buckets
    with random signs. One pass over the samples; costs a gradient each, whatever r.
    gaussian: S has entries N(0, 1/r), the bound is an equality. A column of JS is a derivative
    along a random direction (torch.func.jvp), of all samples and outputs at once: r forward passes
    and no gradient of a single sample, cheap where r is less than the number of outputs·N.
    """

    size: int = 1024  # r; the error falls as 1/√r
    kind: Literal["sparse", "gaussian"] = "sparse"
    seed: int = 0
    """Two kernels of one seed are projected alike, so that their difference is a projection too."""

    def __post_init__(self) -> None:
        check_number(self, "size", low=1, high=2**31 - 1, integer=True)
        check_number(self, "seed", low=0, integer=True)
        if self.kind not in ("sparse", "gaussian"):
            raise ValueError(f"Projection(kind={self.kind!r}): expected 'sparse' or 'gaussian'.")

    def _generator(self, *words: object) -> torch.Generator:
        """A stream of its own for each parameter and column; the same on every device."""
        mixed = zlib.crc32("\0".join(map(str, words)).encode())
        return torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + mixed) % _SEEDS)

    def buckets(self, name: str, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each entry of a parameter its bucket and its sign, [entries] each."""
        generator = self._generator(name)
        bucket = torch.randint(self.size, (size,), generator=generator)
        sign = torch.randint(2, (size,), generator=generator).mul_(2).sub_(1)
        return bucket.to(device), sign.to(device, torch.float32)

    def directions(self, name: str, like: Tensor, columns: range) -> Tensor:
        """Entries N(0, 1) for a parameter, [columns, *its shape]."""
        made = [torch.randn(like.shape, generator=self._generator(name, c)) for c in columns]
        return torch.stack(made).to(like)


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """K = J Jᵀ for N samples (and M others) with k outputs each."""

    matrix: Tensor  # [N·k, M·k]; row i·k + a is output a of sample i
    width: int  # k; 1 for the trace, the sum and a single output
    outputs: str  # "all", "trace", "sum" or "index"
    parameters: int  # How many numbers the gradients are with respect to
    method: str  # "vmap", "autograd" or "jvp"
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Layer → its kernel; they sum to ``matrix``. Empty where not asked for."""
    sizes: Mapping[str, int] = field(default_factory=dict)  # Layer → its number of parameters
    projection: Projection | None = None
    relative_error: float | None = None
    """Of a projection: √(Σ Var K̂_ij)/‖K̂‖, a bound estimated from K̂ itself; None where exact."""

    @property
    def kernel(self) -> Tensor:
        """[N, M, k, k], or [N, M] where k = 1."""
        n, m = self.matrix.shape[0] // self.width, self.matrix.shape[1] // self.width
        if self.width == 1:
            return self.matrix
        return self.matrix.view(n, self.width, m, self.width).permute(0, 2, 1, 3)

    @property
    def traced(self) -> Tensor:
        """tr K(x_i, x_j)/k, [N, M]."""
        return self.matrix if self.width == 1 else self.kernel.diagonal(dim1=2, dim2=3).mean(-1)

    def shares(self) -> dict[str, float]:
        """Layer → tr K_layer / tr K: how much of the movement of f comes from each layer."""
        if not self.parts:
            raise ValueError("shares() needs the layers: empirical_ntk(..., layers=True).")
        rows, columns = self.matrix.shape
        if rows != columns:
            raise ValueError("shares() are of a kernel of samples with themselves (x2=None).")
        total = float(self.matrix.diagonal().double().sum())
        return {
            name: float(part.diagonal().double().sum()) / total if total else 0.0
            for name, part in self.parts.items()
        }


@torch.no_grad()
def empirical_ntk(
    model: nn.Module,
    x: Tensor,
    x2: Tensor | None = None,
    *,
    outputs: Choice = "all",
    parameters: Filter = None,
    layers: bool = False,
    projection: Projection | int | None = None,
    method: Method = "auto",
    memory: int = 2**30,
    batch_size: int | None = None,
    progress: Tell | None = None,
) -> TangentKernel:
    """K(x_i, x_j) = Σ_p ∂f(x_i)/∂θ_p ∂f(x_j)/∂θ_pᵀ, in eval mode.

    It is the kernel of the gradient that the model gives: an equilibrium layer with ``Implicit``
    gives that of the equilibrium, one with ``Phantom`` its approximation.

    Args:
        model: x [N, …] → f [N, …], flattened to K outputs; samples must not see each other.
        x: samples, [N, …], on the model's device.
        x2: other samples, [M, …]; None: x itself, and the kernel is symmetric.
        outputs: "all": [N·K, M·K]. "trace": tr K(x_i, x_j)/K, [N, M]. "sum": of Σf_a/√K, one
            gradient a sample in place of K (the pseudo-NTK); an index or several: these outputs.
        parameters: glob patterns of names; None: all that are trained.
        layers: also keep the kernel of each module.
        projection: estimate from random combinations of the gradient's entries; a number is the
            size of a sparse one. Needs r in place of P numbers per row.
        method: "vmap" (torch.func), "autograd" (one sample after the other), or "auto", which
            tries the first and falls back on the second.
        memory: bytes for rows of the Jacobian and for kernels. What the model itself needs to
            differentiate ``batch_size`` samples comes on top.
        batch_size: samples to differentiate at once; None: about 64 gradients' worth.
        progress: called with (samples done, of how many).
    """
    sketch = Projection(size=projection) if isinstance(projection, int) else projection
    _check(model, x, x2, sketch, layers)
    for name, count in (("memory", memory), ("batch_size", batch_size)):
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"{name}={count!r}: expected a positive integer.")
    with evaluating(model):
        chosen = choose_outputs(outputs, flat_outputs(model, x[:1]).shape[1])
        selected = select_parameters(model, parameters)
        job = _Job(
            model=model,
            x=x,
            x2=x2,
            outputs=chosen,
            groups=by_module(selected) if layers else {"": list(selected)},
            sizes={name: p.numel() for name, p in selected.items()},
            dtype=_wide(next(iter(selected.values())).dtype),
            tell=progress or (lambda done, of: None),
        )
        plan = job.plan(memory, batch_size, sketch)
        if sketch is not None:
            return job.projected(plan, sketch, method, batch_size or _SAMPLES, memory)
        rows, name = choose_rows(model, chosen, x, list(selected), method)
        return job.result(job.exact(rows, plan), name)


def _check(model: object, x: object, x2: object, projection: object, layers: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"empirical_ntk takes a torch.nn.Module, got {type(model).__name__}.")
    for name, value in {"x": x, **({} if x2 is None else {"x2": x2})}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor [N, …], got {type(value).__name__}.")
        if value.ndim < 1 or len(value) == 0:
            raise ValueError(f"{name} has the shape {list(value.shape)}: expected [N, …], N ≥ 1.")
    if isinstance(x, Tensor) and isinstance(x2, Tensor) and x.shape[1:] != x2.shape[1:]:
        raise ValueError(f"x and x2 differ: samples of {list(x.shape[1:])}, {list(x2.shape[1:])}.")
    if projection is not None and not isinstance(projection, Projection):
        raise TypeError(f"projection={projection!r}: expected Projection(...), a size or None.")
    if not isinstance(layers, bool):
        raise TypeError(f"layers={layers!r}: expected True or False.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Half precision is widened: small eigenvalues are differences of large numbers."""
    return torch.promote_types(dtype, torch.float32)


_COPIES = 3  # a fresh chunk exists as gradients, inside autograd, and as the matrix made of them
_ROWS = 64  # gradients at a time where nothing else limits them: enough to fill the vector units


@dataclass(frozen=True)
class Plan:
    """What is held at a time."""

    chunk: int  # Samples that are differentiated at once
    resident: int  # Chunks whose rows are kept
    passes: tuple[tuple[str, ...], ...]  # Names of the parameters of each pass


def _readable(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def make_plan(
    sizes: Mapping[str, int],
    *,
    samples: int,
    outputs: int,
    itemsize: int,
    memory: int,
    held: int,
    batch_size: int | None,
) -> Plan:
    """Split the work so that rows and kernels take at most ``memory`` bytes.

    The rows of as many chunks of samples as fit stay in memory, and those of all later samples pass
    by them; then the next chunks stay. So samples are differentiated once where all rows fit, and
    about N/(2·resident) times where they do not. Parameters are split into passes only where the
    rows of a single sample are too many.

    ``sizes`` are the entries of each parameter, ``outputs`` the gradients a sample, ``held`` the
    bytes that are needed all the time (the kernels, or the projected rows).
    """
    left = memory - held
    least = outputs * itemsize * max(sizes.values())
    if left < (_COPIES + 1) * least:
        largest = max(sizes, key=lambda n: sizes[n])
        raise MemoryError(
            f"memory={_readable(memory)} is too little: {_readable(held)} for the kernel and "
            f"{_readable((_COPIES + 1) * least)} for gradients of {outputs} output(s) in "
            f"{largest!r}. Give more memory, fewer samples or outputs ('trace', 'sum', an index), "
            "or a projection."
        )
    limit = left // ((_COPIES + 1) * outputs * itemsize)
    passes: list[list[str]] = [[]]
    for name, size in sizes.items():
        if passes[-1] and sum(sizes[n] for n in passes[-1]) + size > limit:
            passes.append([])
        passes[-1].append(name)
    row = outputs * itemsize * max(sum(sizes[n] for n in names) for names in passes)
    wanted = max(1, _ROWS // outputs) if batch_size is None else batch_size
    chunk = max(1, min(wanted, samples, left // ((_COPIES + 1) * row)))
    return Plan(chunk, max(1, left // (chunk * row) - _COPIES), tuple(map(tuple, passes)))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Job:
    """What was asked for, resolved."""

    model: nn.Module
    x: Tensor
    x2: Tensor | None
    outputs: Outputs
    groups: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    tell: Tell

    def plan(self, memory: int, batch_size: int | None, projection: Projection | None) -> Plan:
        n, k = len(self.x), self.outputs.width
        m = n if self.x2 is None else len(self.x2)
        # One kernel a layer, and their sum.
        kernels = len(self.groups) + (len(self.groups) > 1)
        held = n * k * m * k * self.dtype.itemsize * kernels
        if projection is not None:
            both = n if self.x2 is None else n + m
            features = both * self.outputs.pulled * projection.size * self.dtype.itemsize
            held += features * len(self.groups)
        if held > memory:
            what = "kernel" if kernels == 1 else f"{kernels} kernels (one per layer, and their sum)"
            raise MemoryError(
                f"the {what} of {n} × {m} samples with {k} output(s) each take {_readable(held)}, "
                f"more than memory={_readable(memory)}. Give more memory, fewer samples, or "
                "outputs='trace' or 'sum'."
            )
        return make_plan(
            self.sizes,
            samples=max(n, m),
            outputs=self.outputs.pulled,
            itemsize=self.dtype.itemsize,
            memory=memory,
            held=held,
            batch_size=batch_size,
        )

    def result(
        self,
        kernels: dict[str, Tensor],
        method: str,
        projection: Projection | None = None,
        relative_error: float | None = None,
    ) -> TangentKernel:
        named = list(kernels) != [""]
        return TangentKernel(
            matrix=_sum(kernels),
            width=self.outputs.width,
            outputs=self.outputs.choice,
            parameters=sum(self.sizes.values()),
            method=method,
            parts=kernels if named else {},
            sizes={g: sum(self.sizes[n] for n in self.groups[g]) for g in kernels if named},
            projection=projection,
            relative_error=relative_error,
        )

    def exact(self, rows: Rows, plan: Plan) -> dict[str, Tensor]:
        """Group → its kernel [N·k, M·k], entry (i·k + a, j·k + b) for outputs a of x_i, b of x2_j.

        The first chunks are kept, and each meets all later ones (of x2 where it is given).
        """
        x, other, k = self.x, self.x if self.x2 is None else self.x2, self.outputs.width
        shape = (len(x) * k, len(other) * k)
        kernels = {g: torch.zeros(shape, dtype=self.dtype, device=x.device) for g in self.groups}
        step = plan.chunk * plan.resident
        starts = range(0, len(x), step)
        each = sum(len(x) - first for first in starts)
        if self.x2 is not None:
            each = len(x) + len(other) * len(starts)
        done, total = 0, each * len(plan.passes)

        def chunks(
            names: tuple[str, ...], data: Tensor, first: int
        ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
            nonlocal done
            for start in range(first, len(data), plan.chunk):
                batch = data[start : start + plan.chunk]
                place = slice(start * k, (start + len(batch)) * k)
                yield place, self._matrices(rows, batch, names)
                done += len(batch)
                self.tell(done, total)

        for names in plan.passes:
            for first in starts:
                own = self.x2 is None
                kept = [] if own else list(chunks(names, x[: first + step], first))
                for where, found in chunks(names, other, first if own else 0):
                    if own and len(kept) < plan.resident:
                        kept.append((where, found))
                    for place, before in kept:
                        for g, matrix in found.items():
                            block = matrix @ before[g].mT
                            if own and place == where:
                                # Symmetric to the last digit, which the product need not be.
                                block = (block + block.mT) / 2
                            elif own:
                                kernels[g][where, place] += block
                            kernels[g][place, where] += block.mT
        return kernels

    def _matrices(self, rows: Rows, x: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Group → [c·k, entries]; with the trace [c, K·entries], to sum over the outputs."""
        found = rows(x, names)
        made = {}
        for g, group in self.groups.items():
            parts = [found.pop(name) for name in group if name in found]
            if parts:
                joined = torch.cat(parts, dim=2)
                flat = joined.flatten(1) if self.outputs.traced else joined.flatten(0, 1)
                made[g] = flat.to(_wide(flat.dtype)).detach()
        return made

    def projected(
        self, plan: Plan, projection: Projection, method: Method, batch_size: int, memory: int
    ) -> TangentKernel:
        sides = [self.x] if self.x2 is None else [self.x, self.x2]
        total, before = sum(map(len, sides)), 0
        features, name = [], "jvp"
        for side in sides:

            def tell(done: int, of: int, before: int = before, count: int = len(side)) -> None:
                self.tell(before + done * count // of, total)

            if projection.kind == "gaussian":
                found = self._gaussian(side, projection, batch_size, memory, tell)
            else:
                rows, name = choose_rows(self.model, self.outputs, self.x, list(self.sizes), method)
                found = self._sparse(side, projection, rows, plan, tell)
            flat = 1 if self.outputs.traced else 0
            features.append({g: f.flatten(flat, flat + 1) for g, f in found.items()})
            before += len(side)
        left, right = features[0], features[-1]
        kernels = {g: left[g] @ right[g].mT for g in self.groups}
        own = [
            torch.stack([f.square().sum(1) for f in side.values()]).sum(0) for side in (left, right)
        ]
        matrix = _sum(kernels)
        sums = self.outputs.traced or len(self.groups) > 1
        spread = standard_error(matrix, own[0], own[1], projection.size, sums=sums)
        return self.result(kernels, name, projection, float(spread.norm() / matrix.norm()))

    def _empty(self, x: Tensor, size: int) -> dict[str, Tensor]:
        """Group → JS, [N, pulled, r], still zero."""
        shape = (len(x), self.outputs.pulled, size)
        return {g: torch.zeros(shape, dtype=self.dtype, device=x.device) for g in self.groups}

    def _sparse(
        self, x: Tensor, projection: Projection, rows: Rows, plan: Plan, tell: Tell
    ) -> dict[str, Tensor]:
        made = self._empty(x, projection.size)
        group_of = {name: g for g, names in self.groups.items() for name in names}
        done, total = 0, len(x) * len(plan.passes)
        for names in plan.passes:
            tables = {q: projection.buckets(q, self.sizes[q], x.device) for q in names}
            for start in range(0, len(x), plan.chunk):
                batch = x[start : start + plan.chunk]
                for name, found in rows(batch, names).items():
                    bucket, sign = tables[name]
                    signed = found.detach().to(self.dtype) * sign
                    made[group_of[name]][start : start + len(batch)].index_add_(2, bucket, signed)
                done += len(batch)
                tell(done, total)
        return made

    def _gaussian(
        self, x: Tensor, projection: Projection, batch_size: int, memory: int, tell: Tell
    ) -> dict[str, Tensor]:
        made = self._empty(x, projection.size)
        scale = 1.0 / math.sqrt(projection.size)
        held = dict(self.model.named_parameters())
        done, total = 0, projection.size * len(self.groups)
        for g, names in self.groups.items():
            entries = sum(held[n].numel() * held[n].element_size() for n in names)
            together = max(1, min(_DIRECTIONS, memory // (_DRAWN * entries)))
            for first in range(0, projection.size, together):
                columns = range(first, min(first + together, projection.size))
                directions = {n: projection.directions(n, held[n], columns) for n in names}
                for start in range(0, len(x), batch_size):
                    batch = x[start : start + batch_size]
                    along = self._derivatives(batch, directions).detach() * scale
                    place = slice(start, start + len(batch))
                    made[g][place, :, columns] = along.movedim(0, -1).to(made[g])
                done += len(columns)
                tell(done * len(x) // total, len(x))
        return made

    def _derivatives(self, x: Tensor, directions: dict[str, Tensor]) -> Tensor:
        """Σ_p (∂f/∂θ_p)·v_p for all samples and each direction, [directions, c, pulled]."""
        value, chosen = functional(self.model, list(directions), self.outputs)

        def along(direction: dict[str, Tensor]) -> Tensor:
            found: Tensor = jvp(lambda p: value(p, x), (chosen,), (direction,))[1]
            return found

        # The equilibrium is solved once for all directions under vmap, and once for each without.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            together: Tensor = vmap(along)(directions)
            return together
        try:
            count = len(next(iter(directions.values())))
            each = [along({n: v[i] for n, v in directions.items()}) for i in range(count)]
            return torch.stack(each)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                "Projection(kind='gaussian') needs forward-mode derivatives, which this model does "
                f"not have ({str(error).splitlines()[0]}). Use Projection(kind='sparse')."
            ) from error


def _sum(kernels: Mapping[str, Tensor]) -> Tensor:
    """Their sum, without a copy of all of them; one alone is not copied."""
    first, *others = kernels.values()
    total = first.clone() if others else first
    for part in others:
        total += part
    return total


def standard_error(kernel: Tensor, left: Tensor, right: Tensor, size: int, *, sums: bool) -> Tensor:
    """√((K_ii K_jj + K_ij²)/r): a bound on each entry's standard deviation, [n, m].

    ``left`` [n] and ``right`` [m] are K_ii of each side; the estimate stands for K where K is not
    known. ``sums``: an entry is a sum over outputs or layers, whose terms may cancel in K_ij and do
    not in its variance; then K_ij² is replaced by its bound K_ii K_jj.
    """
    product = left[:, None] * right[None, :]
    return ((product + (product if sums else kernel.square())) / size).sqrt()
