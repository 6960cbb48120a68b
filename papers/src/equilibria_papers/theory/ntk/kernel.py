"""The empirical neural tangent kernel K(x, x′) = (∂f(x)/∂θ)(∂f(x′)/∂θ)ᵀ of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations_with_replacement

import torch
from torch import Tensor, nn

from .jacobian import (
    Choice,
    Filter,
    Method,
    by_module,
    choose_outputs,
    choose_rows,
    evaluating,
    flat_outputs,
    select_parameters,
)

Tell = Callable[[int, int], None]  # (samples differentiated, of how many)
_Chunk = tuple[slice, dict[str, Tensor]]  # (rows of the kernel, group → their gradients)

_ROWS = 64  # gradients at a time: enough to fill the vector units
_HELD = 2**30  # bytes of gradients that are kept; the others are computed again


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """K = J Jᵀ for N samples (and M others) with k outputs each."""

    matrix: Tensor  # [N·k, M·k]; row i·k + a is output a of sample i
    width: int  # k; 1 for the trace, the sum and a single output
    outputs: str  # "all", "trace", "sum" or "index"
    parameters: int  # How many numbers the gradients are with respect to
    method: str  # "vmap" or "autograd"
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Layer → its kernel; they sum to ``matrix``. Empty where not asked for."""
    sizes: Mapping[str, int] = field(default_factory=dict)  # Layer → its number of parameters

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
    method: Method = "auto",
    batch_size: int | None = None,
    progress: Tell | None = None,
) -> TangentKernel:
    """K(x_i, x_j) = Σ_p ∂f(x_i)/∂θ_p ∂f(x_j)/∂θ_pᵀ, in eval mode.

    It is the kernel of the gradient that the model gives: an equilibrium layer with ``Implicit``
    gives that of the equilibrium, one with ``Phantom`` its approximation. Up to 1 GiB of gradients
    is kept; where they are more, samples are differentiated several times.

    Args:
        model: x [N, …] → f [N, …], flattened to K outputs; samples must not see each other.
        x: samples, [N, …], on the model's device.
        x2: other samples, [M, …]; None: x itself, and the kernel is symmetric.
        outputs: "all": [N·K, M·K]. "trace": tr K(x_i, x_j)/K, [N, M]. "sum": of Σf_a/√K, one
            gradient a sample in place of K (the pseudo-NTK); an index or several: these outputs.
        parameters: glob patterns of names; None: all that are trained.
        layers: also keep the kernel of each module.
        method: "vmap" (torch.func), "autograd" (one sample after the other), or "auto", which
            tries the first and falls back on the second.
        batch_size: samples to differentiate at once; None: about 64 gradients' worth.
        progress: called with (samples done, of how many).
    """
    _check(model, x, x2, layers, batch_size)
    with evaluating(model):
        chosen = choose_outputs(outputs, flat_outputs(model, x[:1]).shape[1])
        selected = select_parameters(model, parameters)
        groups = by_module(selected) if layers else {"": list(selected)}
        rows, name = choose_rows(model, chosen, x, list(selected), method)
        counts = {g: sum(selected[n].numel() for n in names) for g, names in groups.items()}
        chunk = batch_size or max(1, _ROWS // chosen.pulled)
        # Half precision is widened: small eigenvalues are differences of large numbers.
        dtype = torch.promote_types(next(iter(selected.values())).dtype, torch.float32)
        size = chunk * chosen.pulled * sum(counts.values()) * dtype.itemsize

        def gradients(batch: Tensor) -> dict[str, Tensor]:
            """Group → [c·k, entries]; with the trace [c, K·entries], to sum over the outputs."""
            found = rows(batch, list(selected))
            joined = {g: torch.cat([found.pop(n) for n in group], 2) for g, group in groups.items()}
            dims = (1, 2) if chosen.traced else (0, 1)
            return {g: part.flatten(*dims).detach().to(dtype) for g, part in joined.items()}

        work = _Work(gradients, chosen.width, chunk, max(1, _HELD // size), progress)
        like = torch.empty(0, dtype=dtype, device=x.device)
        kernels = work.products(x, x2, dict.fromkeys(groups, like))
    return TangentKernel(
        matrix=torch.stack(list(kernels.values())).sum(0) if layers else kernels[""],
        width=chosen.width,
        outputs=chosen.choice,
        parameters=sum(counts.values()),
        method=name,
        parts=kernels if layers else {},
        sizes=counts if layers else {},
    )


def _check(model: object, x: object, x2: object, layers: object, batch_size: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"empirical_ntk takes a torch.nn.Module, got {type(model).__name__}.")
    for name, value in {"x": x, **({} if x2 is None else {"x2": x2})}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor [N, …], got {type(value).__name__}.")
        if value.ndim < 1 or len(value) == 0:
            raise ValueError(f"{name} has the shape {list(value.shape)}: expected [N, …], N ≥ 1.")
    if isinstance(x, Tensor) and isinstance(x2, Tensor) and x.shape[1:] != x2.shape[1:]:
        raise ValueError(f"x and x2 differ: samples of {list(x.shape[1:])}, {list(x2.shape[1:])}.")
    if not isinstance(layers, bool):
        raise TypeError(f"layers={layers!r}: expected True or False.")
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r}: expected a positive integer.")


@dataclass
class _Work:
    """J Jᵀ by chunks of samples; ``held`` of them are kept and meet each other and all later."""

    gradients: Callable[[Tensor], dict[str, Tensor]]
    width: int
    chunk: int
    held: int
    tell: Tell | None
    done: int = 0
    total: int = 0

    def products(
        self, x: Tensor, x2: Tensor | None, like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Group → [N·k, M·k], entry (i·k + a, j·k + b) for outputs a of x_i and b of x2_j."""
        other, step = x if x2 is None else x2, self.chunk * self.held
        shape = (len(x) * self.width, len(other) * self.width)
        kernels = {g: empty.new_zeros(shape) for g, empty in like.items()}
        starts = range(0, len(x), step)
        self.total = sum(len(x) - first for first in starts)
        if x2 is not None:
            self.total = len(x) + len(other) * len(starts)
        for first in starts:
            kept = list(self._chunks(x, first, first + step))
            later = self._chunks(other, first + step if x2 is None else 0, len(other))
            among = combinations_with_replacement(kept, 2) if x2 is None else ()
            beyond = ((before, new) for new in later for before in kept)
            for (place, left), (where, right) in chain(among, beyond):
                for g, kernel in kernels.items():
                    block = left[g] @ right[g].mT
                    if x2 is None and place == where:
                        # Symmetric to the last digit, which the product need not be.
                        block = (block + block.mT) / 2
                    elif x2 is None:
                        kernel[where, place] = block.mT
                    kernel[place, where] = block
        return kernels

    def _chunks(self, data: Tensor, first: int, end: int) -> Iterator[_Chunk]:
        for start in range(first, min(end, len(data)), self.chunk):
            batch = data[start : start + self.chunk]
            yield (
                slice(start * self.width, (start + len(batch)) * self.width),
                self.gradients(batch),
            )
            self.done += len(batch)
            if self.tell is not None:
                self.tell(self.done, self.total)
