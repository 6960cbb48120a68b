"""The empirical neural tangent kernel K(x, x′) = (∂f(x)/∂θ)(∂f(x′)/∂θ)ᵀ of any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .projection import Projection, gaussian_features, sparse_features, standard_error
from .rows import (
    Choice,
    Filter,
    Layers,
    Method,
    Outputs,
    Plan,
    Tell,
    choose_outputs,
    choose_rows,
    contract,
    evaluating,
    flat_outputs,
    group_names,
    make_plan,
    readable,
    select_parameters,
    work_type,
)

_SAMPLES = 64
"""Pushed forward at once along a random direction."""


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """K = J Jᵀ for N samples (and M others) with k outputs each."""

    matrix: Tensor
    """[N·k, M·k]; row i·k + a is output a of sample i."""
    width: int
    """k; 1 for the trace, the sum and a single output."""
    outputs: str
    """"all", "trace", "sum" or "index"."""
    parameters: int
    """How many numbers the gradients are with respect to."""
    method: str
    """"vmap", "autograd" or "jvp"."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Layer → its kernel; they sum to ``matrix``. Empty where not asked for."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Layer → its number of parameters."""
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
        if self.width == 1:
            return self.matrix
        return self.kernel.diagonal(dim1=2, dim2=3).mean(-1)

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
    layers: Layers = False,
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
        parameters: glob patterns of names, or a function of the name; None: all that are trained.
        layers: also keep the kernel of each module (True), of each part of so many names (a
            number), or of what a function of the parameter's name says.
        projection: estimate from random combinations of the gradient's entries; a number is the
            size of a sparse one. Needs r in place of P numbers a row.
        method: "vmap" (torch.func), "autograd" (one sample after the other), or "auto", which
            tries the first and falls back on the second.
        memory: bytes for rows of the Jacobian and for kernels. What the model itself needs to
            differentiate ``batch_size`` samples comes on top.
        batch_size: samples to differentiate at once; None: about 64 gradients' worth.
        progress: called with (samples done, of how many).
    """
    sketch = Projection(size=projection) if isinstance(projection, int) else projection
    _check(model, x, x2, sketch, memory, batch_size)
    with evaluating(model):
        chosen = choose_outputs(outputs, flat_outputs(model, x[:1]).shape[1])
        selected = select_parameters(model, parameters)
        sizes = {name: p.numel() for name, p in selected.items()}
        groups = group_names(selected, layers)
        kind = next(iter(selected.values())).dtype
        job = _Job(model, x, x2, chosen, groups, sizes, kind, sketch)
        plan = job.plan(memory, batch_size)
        if sketch is not None:
            return job.projected(plan, method, batch_size, memory, progress)
        rows, name = choose_rows(model, chosen, x, list(sizes), method)
        kernels = contract(rows, x, x2, groups, chosen, plan, kind, progress)
        return job.result(kernels, name)


def _check(
    model: object,
    x: object,
    x2: object,
    projection: object,
    memory: object,
    batch_size: object,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"empirical_ntk takes a torch.nn.Module, got {type(model).__name__}.")
    for name, value in (("x", x), ("x2", x2)):
        if value is None and name == "x2":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor [N, …], got {type(value).__name__}.")
        if value.ndim < 1 or len(value) == 0:
            raise ValueError(f"{name} has the shape {list(value.shape)}: expected [N, …], N ≥ 1.")
    if isinstance(x, Tensor) and isinstance(x2, Tensor) and x.shape[1:] != x2.shape[1:]:
        raise ValueError(f"x and x2 differ: samples of {list(x.shape[1:])}, {list(x2.shape[1:])}.")
    if projection is not None and not isinstance(projection, Projection):
        raise TypeError(f"projection={projection!r}: expected Projection(...), a size or None.")
    for name, count in (("memory", memory), ("batch_size", batch_size)):
        if count is None and name == "batch_size":
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r}: expected a positive integer.")


@dataclass(frozen=True, eq=False)
class _Job:
    """What was asked for, resolved."""

    model: nn.Module
    x: Tensor
    x2: Tensor | None
    outputs: Outputs
    groups: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    projection: Projection | None

    def plan(self, memory: int, batch_size: int | None) -> Plan:
        itemsize = work_type(self.dtype).itemsize
        n, k = len(self.x), self.outputs.width
        m = n if self.x2 is None else len(self.x2)
        # One kernel a layer, and their sum.
        kernels = len(self.groups) + (len(self.groups) > 1)
        held = n * k * m * k * itemsize * kernels
        if self.projection is not None:
            both = n if self.x2 is None else n + m
            features = both * self.outputs.pulled * self.projection.size * itemsize
            held += features * len(self.groups)
        if held > memory:
            what = "kernel" if kernels == 1 else f"{kernels} kernels (one a layer, and their sum)"
            raise MemoryError(
                f"the {what} of {n} × {m} samples with {k} output(s) each take {readable(held)}, "
                f"more than memory={readable(memory)}. Give more memory, fewer samples, or "
                "outputs='trace' or 'sum'."
            )
        return make_plan(
            self.sizes,
            samples=max(n, m),
            outputs=self.outputs.pulled,
            itemsize=itemsize,
            memory=memory,
            held=held,
            batch_size=batch_size,
        )

    def result(
        self, kernels: Mapping[str, Tensor], method: str, error: float | None = None
    ) -> TangentKernel:
        parts = dict(kernels)
        named = list(parts) != [""]
        matrix = parts[""] if not named else _sum(list(parts.values()))
        return TangentKernel(
            matrix=matrix,
            width=self.outputs.width,
            outputs=self.outputs.choice,
            parameters=sum(self.sizes.values()),
            method=method,
            parts=parts if named else {},
            sizes={
                g: sum(self.sizes[n] for n in names) for g, names in self.groups.items() if named
            },
            projection=self.projection,
            relative_error=error,
        )

    def projected(
        self, plan: Plan, method: Method, batch_size: int | None, memory: int, tell: Tell | None
    ) -> TangentKernel:
        assert self.projection is not None
        sides = [self.x] if self.x2 is None else [self.x, self.x2]
        total, before = sum(map(len, sides)), 0
        features, name = [], "jvp"
        for side in sides:
            told = None if tell is None else _shifted(tell, before, len(side), total)
            if self.projection.kind == "gaussian":
                found = gaussian_features(
                    self.model,
                    side,
                    self.groups,
                    self.outputs,
                    self.projection,
                    self.dtype,
                    batch_size or _SAMPLES,
                    memory,
                    told,
                )
            else:
                rows, name = choose_rows(self.model, self.outputs, self.x, list(self.sizes), method)
                found = sparse_features(
                    rows,
                    side,
                    self.groups,
                    self.sizes,
                    self.outputs,
                    plan,
                    self.projection,
                    self.dtype,
                    told,
                )
            flat = 1 if self.outputs.traced else 0
            features.append({g: f.flatten(flat, flat + 1) for g, f in found.items()})
            before += len(side)
        left, right = features[0], features[-1]
        kernels = {g: left[g] @ right[g].mT for g in self.groups}
        made = self.result(kernels, name)
        own = [
            torch.stack([f.square().sum(1) for f in side.values()]).sum(0) for side in (left, right)
        ]
        sums = self.outputs.traced or len(self.groups) > 1
        spread = standard_error(made.matrix, own[0], own[1], self.projection.size, sums=sums)
        error = float(spread.norm() / made.matrix.norm())
        return self.result(kernels, name, error)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, without a copy of all of them."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _shifted(tell: Tell, before: int, count: int, total: int) -> Tell:
    """Progress on one side as progress on both."""

    def told(done: int, of: int) -> None:
        tell(before + done * count // of, total)

    return told
